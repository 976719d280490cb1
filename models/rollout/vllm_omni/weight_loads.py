# SPDX-License-Identifier: Apache-2.0
"""The trainer's weights on their way into vLLM-Omni, piece by piece; see `WeightLoad`."""

from collections.abc import Callable, Mapping

from torch import Tensor

from models.weights.trainable import WeightSyncError


class FullLoad:
    """All of the transformer: every piece goes into vLLM-Omni's own weights as it comes.

    Args:
        architecture: for the message.
        put: copies some weights, each of its whole shape; the names of the engine's own that none of them was for.
    """

    def __init__(self, architecture: str, put: Callable[[dict[str, Tensor]], list[str]]):
        self._architecture, self._put = architecture, put
        self._kept: list[str] | None = None
        self._taken = 0

    def take(self, weights: Mapping[str, Tensor]) -> None:
        """Copy some of the weights, each of its whole shape."""
        kept = self._put(dict(weights))
        self._kept = kept if self._kept is None else sorted({*kept} & {*self._kept})
        self._taken += len(weights)

    def finish(self) -> None:
        """Raise WeightSyncError where some of the engine's own weights got nothing."""
        if self._kept or not self._taken:
            kept = self._kept or []
            raise WeightSyncError(
                f"none of the {self._taken} weights is for {len(kept)} of those of vLLM-Omni's {self._architecture}: "
                f"{kept[:3]}"
            )


class LoraLoad:
    """LoRA weights, which vLLM-Omni takes only together; they are few.

    Args:
        put: gives them to the engine, each of its whole shape.
    """

    def __init__(self, put: Callable[[dict[str, Tensor]], None]):
        self._put = put
        self._weights: dict[str, Tensor] = {}

    def take(self, weights: Mapping[str, Tensor]) -> None:
        """Keep a copy of some of the weights, each of its whole shape."""
        self._weights |= {name: tensor.detach().cpu().clone() for name, tensor in weights.items()}

    def finish(self) -> None:
        """Give them all to the engine; raise WeightSyncError where none has come."""
        if not self._weights:
            raise WeightSyncError("the trainer sent none of its LoRA weights")
        self._put(self._weights)
