# SPDX-License-Identifier: Apache-2.0
"""What rewards by transformers share: loading a model from the hub or a folder, and small heads on top of it."""

import hashlib
import inspect
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict

import numpy as np
from pydantic import PositiveInt

from tasks.rewards.base import Reward
from tasks.rewards.errors import RewardError
from tasks.rewards.scored_prompt import ScoredPrompt

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

WEIGHTS = ("*.safetensors", "*.bin")
COMMIT = re.compile(r"[0-9a-f]{40}")
USUAL_FORMATS = ("float32", "bfloat16", "float16")
LONGEST_SOURCE = 1024
"""Characters of a hub id or a folder's path."""
REVISIONS = {"model": "revision", "processor": "processor_revision"}
"""Option that names a hub id -> the option with its commit."""


class LoadingOptions(TypedDict, total=False):
    """Options of a `PretrainedReward` that its subclasses hand on beside the names; it says what they are."""

    revision: str | None
    processor_revision: str | None
    device: str
    dtype: str
    threads: int


class PretrainedOptions(LoadingOptions, total=False):
    """Those, and the processor's name."""

    processor: str | None


class PretrainedReward(Reward):
    """A model of transformers with its processor. Subclasses name its class in `architecture`, and write `score`."""

    architecture: str
    unused: ClassVar[tuple[str, ...]] = ()
    """What the names of weights begin with that no score depends on: the files may lack them."""
    kept_in_fp32: ClassVar[tuple[str, ...]] = ()
    """Names of weights that stay as the files have them, whatever the forward's number format is."""
    revisions: ClassVar[Mapping[str, str]] = REVISIONS

    def __init__(
        self,
        *,
        model: str,
        revision: str | None = None,
        processor: str | None = None,
        processor_revision: str | None = None,
        device: str = "cpu",
        dtype: str = "float32",
        threads: PositiveInt = 1,
    ) -> None:
        """Load both.

        Args:
            model: hub id or local folder.
            revision: commit of a hub id, 40 hex digits; a local folder needs none.
            processor: hub id or folder of the processor, if it is not with the model.
            processor_revision: commit of the processor's hub id.
            device: "cpu" or "cuda"; with "cuda" give the reward `num_gpus`.
            dtype: number format of the model's forward.
            threads: torch's CPU threads, of the whole worker.

        Raises:
            RewardError: the model, its processor or its number format is not there, or its files lack weights.
        """
        import torch
        import transformers

        number_format = _number_format(self.name, dtype)
        torch.set_num_threads(threads)
        self.device = device
        kind = getattr(transformers, self.architecture)
        if self.kept_in_fp32:
            kind = type(kind.__name__, (kind,), {"_keep_in_fp32_modules_strict": set(self.kept_in_fp32)})
        with self._refusing(model):
            network, found = kind.from_pretrained(
                model, revision=revision, dtype=number_format, output_loading_info=True
            )
        self._check_whole(model, network, found)
        with self._refusing(processor or model):
            commit = processor_revision if processor else revision
            self.processor = self.load_processor(processor or model, commit)
        self.model = network.to(device).eval().requires_grad_(False)
        self.version = f"1 {model}@{_content(model, network)} {self.arithmetic(dtype)} "
        self.version += f"transformers=={transformers.__version__}"

    def _check_whole(self, model: str, network: "nn.Module", found: Mapping[str, Any]) -> None:
        """Every weight is the files': transformers draws what they lack, in each worker otherwise, and only warns."""
        from models.families.loading import lacking

        missing = [name for name in sorted(lacking(network, found)) if not name.startswith(self.unused)]
        if missing:
            unread = sorted(found["unexpected_keys"])
            besides = f"; they have {len(unread)} that it does not know, as {unread[0]}" if unread else ""
            raise RewardError(
                f"{self.name}: {model} lacks {len(missing)} of the weights of {type(network).__name__}, the first of "
                f"them {', '.join(missing[:3])}{besides}: give files that belong to it, renamed as it names them"
            )

    def arithmetic(self, dtype: str) -> str:
        """Number formats that a score is computed in, for `version`."""
        return dtype

    def load_processor(self, source: str, revision: str | None) -> Any:
        """What makes the model's inputs of pictures and texts."""
        import transformers

        return transformers.AutoProcessor.from_pretrained(source, revision=revision)

    @classmethod
    def check_options(cls, name: str, options: Mapping[str, Any]) -> None:
        """A hub id wants a commit: what its branch or tag leads to may change, and the scores with it. torch has the
        number format."""
        if options.get("dtype", "float32") not in USUAL_FORMATS:  # else without torch, which takes seconds to import
            _number_format(name, options["dtype"])
        for source, field in cls.revisions.items():
            where, commit = options.get(source, _default(cls, source)), options.get(field)
            if source == "model" or where is not None:
                _check_source(name, source, where)
            if where is None or Path(where).is_dir() or (commit and COMMIT.fullmatch(str(commit))):
                continue
            given = f"{field} is {commit!r}" if commit else f"{field} is missing"
            raise RewardError(
                f"reward {name!r}: {source} {where} is no folder here, so it is a hub id, and {given}: give the commit "
                f"as {field}, 40 hex digits, or a local folder as {source}"
            )

    @classmethod
    def gpu_models(cls, options: Mapping[str, Any]) -> tuple[list[Path], str]:
        """Those that are in folders; what the hub has is not known. See `Reward`."""
        given = {name: options.get(name, _default(cls, name)) for name in ("device", "dtype", *cls.revisions)}
        if not str(given["device"]).startswith("cuda"):
            return [], ""
        named = [Path(given[source]) for source in cls.revisions if source != "processor" and given[source]]
        return [folder for folder in named if folder.is_dir()], str(given["dtype"])

    def pixels(self, images: np.ndarray | Sequence[np.ndarray]) -> "Tensor":
        """Images [B, H, W, 3], or B of any sizes, as the model's `pixel_values` [B, 3, h, w]."""
        values = self.processor(images=list(images), return_tensors="pt")["pixel_values"]
        return values.to(self.device, next(self.model.parameters()).dtype)

    def tokens(
        self, prompts: Sequence[ScoredPrompt], longest: int | None = None
    ) -> tuple[dict[str, "Tensor"], list[int]]:
        """(input_ids and attention_mask [P, L] of the P different prompts, which of them each sample has).

        A prompt that is too long for the model, or has more than `longest` tokens, is cut off, as these models were
        trained.
        """
        texts = list(dict.fromkeys(prompt.prompt for prompt in prompts))
        limit = min(self.model.config.text_config.max_position_embeddings, longest or math.inf)
        found = self.processor(text=texts, padding=True, truncation=True, max_length=limit, return_tensors="pt")
        inputs = {name: found[name].to(self.device) for name in ("input_ids", "attention_mask")}
        return inputs, [texts.index(prompt.prompt) for prompt in prompts]

    def load_head(
        self, path: str, inputs: int, outputs: int = 1, activation: "type[nn.Module] | None" = None
    ) -> "nn.Module":
        """A head of linear layers from a safetensors file, on the model's device, and its digest in `version`.

        Layers are the tensors `<anything>.weight` [out, in] and `.bias` in the order of the numbers in their names, or
        one layer `weight` and `bias`, with `activation` in between, if any: the published aesthetic and ImageReward
        heads have none.

        Args:
            path: of the file.
            inputs: values that go in.
            outputs: values that come out.
            activation: of which one stands between two layers.

        Raises:
            RewardError: there is no such file, it has no layers, or they do not lead from `inputs` values to `outputs`.
        """
        from safetensors.torch import load_file
        from torch import nn

        if not Path(path).is_file():
            raise RewardError(f"{self.name}: head {path} does not exist: it must be a safetensors file")
        # A bare nn.Linear, as LAION's first head, has `weight` and `bias` alone.
        tensors = {name if "." in name else f"0.{name}": tensor for name, tensor in load_file(path).items()}
        names = sorted((n.removesuffix(".weight") for n in tensors if n.endswith(".weight")), key=_numbers)
        without = [name for name in names if f"{name}.bias" not in tensors]
        if not names or without:
            raise RewardError(
                f"{self.name}: {path} has {', '.join(sorted(tensors)[:6]) or 'no tensors'}; of each layer it must have "
                "`<name>.weight` and `<name>.bias`"
            )
        widths = [inputs, *(tensors[f"{name}.weight"].shape[0] for name in names)]
        taken = [tensors[f"{name}.weight"].shape[1] for name in names]
        if taken != widths[:-1] or widths[-1] != outputs:
            raise RewardError(
                f"{self.name}: the layers of {path} take {taken} and give {widths[1:]} values; they must lead from the "
                f"model's {inputs} to {outputs}"
            )
        layers = [nn.Linear(into, out) for into, out in zip(taken, widths[1:], strict=True)]
        for layer, name in zip(layers, names, strict=True):
            layer.weight.data = tensors[f"{name}.weight"].float()
            layer.bias.data = tensors[f"{name}.bias"].float()
        self.version += f" head={_digest([Path(path)])}"
        between = [] if activation is None else [activation()]
        parts = [part for layer in layers for part in (layer, *between)]
        return nn.Sequential(*parts[: len(parts) - len(between)]).to(self.device).eval().requires_grad_(False)

    @contextmanager
    def _refusing(self, source: str) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            raise RewardError(f"{self.name}: {source} cannot be loaded as {self.architecture}: {error}") from error


def _number_format(name: str, dtype: str) -> "torch.dtype":
    """torch's format of this name, of a model's numbers. Raises RewardError of the reward where there is none."""
    import torch

    found = getattr(torch, str(dtype), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise RewardError(
            f"reward {name!r}: dtype {dtype!r} is no floating-point format of torch: give one, as float32 or bfloat16"
        )
    return found


def _check_source(name: str, source: str, where: Any) -> None:
    """Raise RewardError for what can be neither a folder nor a hub id."""
    if not isinstance(where, str) or not where.strip() or len(where) > LONGEST_SOURCE:
        raise RewardError(f"reward {name!r}: {source} is {where!r:.60}: give a folder, or a hub id and its commit")


def _default(cls: type, option: str) -> str | None:
    """Of the class's own __init__ or the nearest parent's that names the option."""
    for parent in cls.__mro__:
        found = (
            inspect.signature(vars(parent)["__init__"]).parameters.get(option) if "__init__" in vars(parent) else None
        )
        if found is not None:
            return None if found.default is found.empty else found.default
    return None


def to_scores(values: "torch.Tensor") -> np.ndarray:
    """A tensor [B] or [B, 1] as scores."""
    return values.float().reshape(len(values)).cpu().numpy()


def _content(model: str, network: Any) -> str:
    """What identifies the weights: a digest of a local folder's files, the commit of a hub id."""
    folder = Path(model)
    return content_digest(folder) if folder.is_dir() else str(getattr(network.config, "_commit_hash", None))


def content_digest(folder: Path) -> str:
    """16 hex digits over a folder's weights."""
    return _digest(sorted(file for pattern in WEIGHTS for file in folder.glob(pattern)))


def _digest(files: Sequence[Path]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for file in files:
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "blake2b").digest())
    return digest.hexdigest()


def _numbers(name: str) -> list[int]:
    return [int(part) for part in name.split(".") if part.isdigit()]
