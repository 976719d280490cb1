# SPDX-License-Identifier: Apache-2.0
"""What a mask of the text [B, L] says, read once for each tensor: to read it is to wait for all that the GPU was asked
for, and the same texts come with every step of a rollout, and with every pass of a micro-batch's update."""

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_FULL, _PLACES = WeakIdKeyDictionary(), WeakIdKeyDictionary()


def is_full(mask: Tensor) -> bool:
    """Is no token of the mask [B, L] padding?"""
    if mask not in _FULL:
        _FULL[mask] = bool(mask.all())
    return bool(_FULL[mask])


def rows_without_padding(embeds: Tensor, mask: Tensor) -> list[Tensor]:
    """The real tokens of each row of embeds [B, L, D] by its mask [B, L]: B tensors [L_i, D]."""
    if mask not in _PLACES:
        _PLACES[mask] = [kept.nonzero().flatten() for kept in mask]
    return [row[places] for row, places in zip(embeds, _PLACES[mask], strict=True)]
