# SPDX-License-Identifier: Apache-2.0
"""Digests of weights: whether two processes hold the same bits, without a copy from one to the other.

The digest of a tensor is a sum modulo 2^64 over its 8-byte words,

    D = sum_i mix(word_i + i G),  mix of MurmurHash3's 64-bit finaliser, G = 2^64 / golden ratio,

in integer arithmetic on the tensor's own device. A sum of integers does not hang on its order, so any device and any
division into pieces gives the same number. mix is a bijection: one changed word always shows. Of two tensors that
differ in several words about 1 pair in 2^64 has one digest (as of random functions; it is no proof against somebody
who looks for such a pair).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from models.weights.trainable import WeightSyncError

Digests = Mapping[str, Mapping[str, int]]
"""Name of a tensor -> number format -> digest of the tensor in that format."""
GOLDEN = 0x9E3779B97F4A7C15 - 2**64
MIX = (0xFF51AFD7ED558CCD - 2**64, 0xC4CEB9FE1A85EC53 - 2**64)
SHIFT, LOW_BITS = 33, (1 << 31) - 1
"""torch shifts the sign of an int64 in from the left; the mask takes it off again."""
PIECE = {"cpu": 1 << 15, "cuda": 1 << 24}
"""Words that are mixed at once: of a CPU's cache, and enough for a GPU."""
LARGE = {"cpu": 1 << 15, "cuda": 1 << 17}
"""Words from which on a tensor is not digested beside others of any size, of which a GPU gives each to few of its
threads; beside others of its own size it is."""
NAMED = 3
"""Tensors that a message names."""


@torch.no_grad()
def digest(tensor: Tensor) -> Tensor:
    """D of a tensor's bytes, those of the last word filled up with zeros; a scalar int64 on the tensor's device."""
    content = _bytes_of(tensor)
    if content.storage_offset() % 8:  # such bytes cannot be looked at as words
        content = content.clone()
    whole = len(content) // 8 * 8
    tail = content.new_zeros(8)
    tail[: len(content) - whole] = content[whole:]
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    pieces = content[:whole].view(torch.int64).split(PIECE[tensor.device.type])
    start = 0
    for words in (*pieces, tail.view(torch.int64)):
        places = torch.arange(start, start + len(words), device=tensor.device)
        total += _mixed(places.mul_(GOLDEN).add_(words)).sum()
        start += len(words)
    return total


@torch.no_grad()
def digests_at_once(tensors: Sequence[Tensor]) -> Tensor:
    """`digest` of each of several small tensors on one device, int64 [n]: as many calls of kernels as one takes."""
    contents = [_bytes_of(tensor) for tensor in tensors]
    device, counts = contents[0].device, torch.tensor([_words(content) for content in contents])
    filling = contents[0].new_zeros(8)
    parts = [part for content in contents for part in (content, filling[: 8 - len(content) % 8])]
    words, ends = torch.cat(parts).view(torch.int64), counts.cumsum(0)
    starts = torch.repeat_interleave((ends - counts).to(device), counts.to(device), output_size=len(words))
    places = torch.arange(len(words), device=device).sub_(starts)
    # Sums modulo 2^64 up to each tensor's end, whose differences are exact.
    until = _mixed(places.mul_(GOLDEN).add_(words)).cumsum(0)[(ends - 1).to(device)]
    return torch.diff(until, prepend=until.new_zeros(1))


@torch.no_grad()
def digests_of_equal_sizes(tensors: Sequence[Tensor]) -> Tensor:
    """`digest` of each of several tensors of as many whole words, on one device, int64 [n]: as many calls of kernels as
    one takes, and no word is looked for."""
    words = torch.stack([_bytes_of(tensor) for tensor in tensors]).view(torch.int64)
    places = torch.arange(words.shape[1] + 1, device=words.device).mul_(GOLDEN)
    of_filling = _mixed(places[-1:].clone())
    return _mixed(words.add_(places[:-1])).sum(1).add_(of_filling)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _words(content: Tensor) -> int:
    """Of bytes [n]: the whole ones, and the last one, which may be empty."""
    return len(content) // 8 + 1


def _mixed(words: Tensor) -> Tensor:
    """In place: x ^= x >> 33, x *= c, for both constants, and x ^= x >> 33."""
    for factor in MIX:
        words.bitwise_xor_((words >> SHIFT).bitwise_and_(LOW_BITS)).mul_(factor)
    return words.bitwise_xor_((words >> SHIFT).bitwise_and_(LOW_BITS))


class DigestBook:
    """Digests of weights that come one by one.

    Args:
        formats: that each tensor is digested in, beside its own.
        device: where; None leaves each tensor where it is.
    """

    def __init__(self, *formats: torch.dtype, device: str | None = None):
        self._formats, self._device = formats, device
        self._found: dict[tuple[str, str], Tensor | None] = {}
        self._waiting: dict[tuple[str, str], Tensor] = {}
        self._bytes = 0

    def add(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take some of the weights in: names and tensors of any shape, which may change afterwards."""
        for _ in self.passing(weights):
            pass

    def passing(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same weights, of any shape, each taken in and handed on. They must not change until all have passed."""
        try:
            for name, tensor in weights:
                self._take(name, tensor)
                yield name, tensor
        finally:
            self._digest_waiting()

    def _take(self, name: str, tensor: Tensor) -> None:
        there = tensor.detach() if self._device is None else tensor.detach().to(self._device)
        for dtype in dict.fromkeys((there.dtype, *self._formats)):
            self._found[name, str(dtype)] = None
            given = self._waiting[name, str(dtype)] = there.to(dtype)
            self._bytes += given.nbytes
        if self._bytes >= 8 * PIECE[there.device.type]:
            self._digest_waiting()

    def _digest_waiting(self) -> None:
        """Tensors that are small go together, and larger ones of one size: most of a digest's time on them is that of
        calling kernels."""
        small: dict[torch.device, list[tuple[str, str]]] = {}
        large: dict[tuple[torch.device, int], list[tuple[str, str]]] = {}
        for key, tensor in self._waiting.items():
            if tensor.nbytes < 8 * LARGE[tensor.device.type]:
                small.setdefault(tensor.device, []).append(key)
            else:
                large.setdefault((tensor.device, tensor.nbytes), []).append(key)
        for keys in small.values():
            self._enter(keys, digests_at_once([self._waiting[key] for key in keys]))
        for (_, size), keys in large.items():
            tensors = [self._waiting[key] for key in keys]
            together = len(keys) > 1 and size % 8 == 0
            self._enter(keys, digests_of_equal_sizes(tensors) if together else map(digest, tensors))
        self._waiting, self._bytes = {}, 0

    def _enter(self, keys: Sequence[tuple[str, str]], found: Iterable[Tensor]) -> None:
        self._found.update(zip(keys, found, strict=True))

    def digests(self) -> Digests:
        """The digests of all that was taken in; waits for the device once."""
        if not self._found:
            return {}
        result: dict[str, dict[str, int]] = {}
        found = [value for value in self._found.values() if value is not None]
        for (name, dtype), value in zip(self._found, torch.stack(found).tolist(), strict=True):
            result.setdefault(name, {})[dtype] = value
        return result


def digests_of(weights: Mapping[str, Tensor], *formats: torch.dtype, device: str | None = None) -> Digests:
    """Digests of weights of any shape that are all there; arguments as `DigestBook`."""
    book = DigestBook(*formats, device=device)
    book.add(weights.items())
    return book.digests()


def check_digests(sent: Digests, held: Digests, version: int) -> None:
    """Compare what the trainer sent with what a rollout worker has.

    Args:
        sent: each tensor in its own format and in the model's.
        held: each tensor in the format in which the worker has it.
        version: policy version, for the message.

    Raises:
        WeightSyncError: a tensor is missing on one side, or differs.
    """
    different = [name for name in dict.fromkeys((*sent, *held)) if not _agree(sent.get(name, {}), held.get(name, {}))]
    if different:
        raise WeightSyncError(
            f"after the weight sync of policy version {version} a rollout worker holds something else than the trainer "
            f"sent: {len(different)} of {len({*sent, *held})} tensors differ in their digests, the first of them "
            f"{different[:NAMED]}"
        )


def _agree(sent: Mapping[str, int], held: Mapping[str, int]) -> bool:
    return bool(held) and held.items() <= sent.items()
