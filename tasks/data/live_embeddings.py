# SPDX-License-Identifier: Apache-2.0
"""Prompt embeddings that the run itself makes: encoded when they are asked for, and kept as long as there is room."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from hashlib import blake2b

import torch

from models.samples.trajectories import PromptTable
from tasks.data.embeddings import Embeddings, Row
from tasks.data.prompt_files import NEGATIVE_UID, DatasetError
from tasks.data.prompts import Prompt

EncodePrompts = Callable[[Sequence[Prompt]], Sequence[Row]]
"""The embeddings of prompts, each as long as it is."""
StartEncoding = Callable[[Sequence[Prompt]], Callable[[], Sequence[Row]]]
"""Has prompts encoded meanwhile; what it gives waits for their embeddings."""
Shapes = Mapping[str, tuple[int, ...]]
"""Name -> shape of one prompt's embedding."""


@dataclass(frozen=True)
class Taken:
    """What `LiveEmbeddings.take` found.

    Attributes:
        texts: different texts that were asked for, negative prompts among them.
        hits: those of them whose embeddings were there already, and not because they were encoded ahead.
    """

    texts: int
    hits: int

    @property
    def share(self) -> float:
        """The share of the texts that were there already, from 0 to 1."""
        return self.hits / self.texts if self.texts else 1.0


class LiveEmbeddings(Embeddings):
    """Embeddings by the run's own text encoders, with a cache by the digest of a prompt's text.

    The cache is in this process's memory. On the disk it would take the room and the time that embeddings on disk do.

    Args:
        prompts: those of the data set; `take` may give a uid another text.
        negative_prompt: of all prompts that have none of their own.
        max_sequence_length: with which they are encoded.
        shapes: of a prompt of that many tokens; None where they are not known.
        extras: names of what there is beside the sequence.
        cache_bytes: of embeddings that are kept beyond those of the last `take`.

    Attributes:
        encode: what encodes, once there is something.
        start: the same for prompts that will be asked for; None where nothing is to be encoded ahead.
    """

    def __init__(
        self,
        prompts: Iterable[Prompt],
        *,
        negative_prompt: str,
        max_sequence_length: int,
        shapes: Shapes | None,
        extras: Sequence[str] = (),
        cache_bytes: float = 0.0,
    ):
        self.max_sequence_length, self.extras = max_sequence_length, tuple(extras)
        self.encode: EncodePrompts | None = None
        self.start: StartEncoding | None = None
        self._shapes, self._limit = shapes, cache_bytes
        self._negative_prompt = Prompt(NEGATIVE_UID, negative_prompt, None, {}, "the negative prompt")
        self._texts: dict[str, Prompt] = {NEGATIVE_UID: self._negative_prompt}
        self._own_negatives: dict[str, str] = {}
        self._cache: OrderedDict[bytes, Row] = OrderedDict()  # those used last at the end
        self._held: set[bytes] = set()  # of the last `take`
        self._ahead: set[bytes] = set()  # asked for by `encode_ahead`, and by no `take` yet
        self._arriving: tuple[list[bytes], Callable[[], Sequence[Row]]] | None = None
        self._size = 0
        for prompt in prompts:
            self._know(prompt)

    def __contains__(self, uid: str) -> bool:
        return uid in self._texts

    @property
    def _negatives(self) -> Mapping[str, str]:
        return self._own_negatives

    def longest_table(self, uids: Sequence[str], needs_negative: bool) -> PromptTable | None:
        """A prompt of as many tokens as one may have, since none is encoded yet; its numbers are zeros."""
        if self._shapes is None:
            return None
        table = {name: torch.zeros(1, *shape) for name, shape in self._shapes.items()}
        table["prompt_embeds_mask"] = torch.ones(table["prompt_embeds"].shape[:2], dtype=torch.bool)
        negative = {f"negative_{name}": tensor for name, tensor in table.items()} if needs_negative else {}
        return PromptTable.of(table | negative)

    def prompts(self, uids: Iterable[str]) -> list[Prompt]:
        """What these uids stand for, each once."""
        return [self._texts[uid] for uid in dict.fromkeys(uids)]

    def take(self, prompts: Sequence[Prompt], needs_negative: bool) -> Taken:
        """Have the embeddings of these prompts at hand, all encoded in one go; from now on their uids stand for these
        texts.

        Args:
            needs_negative: have those of their negative prompts, too.

        Raises:
            DatasetError: a prompt is too long and to be refused, or the text encoders give numbers that are not finite.
        """
        for prompt in prompts:
            self._know(prompt)
        uids = [prompt.uid for prompt in prompts]
        if needs_negative:
            uids += [self._own_negatives.get(uid, NEGATIVE_UID) for uid in uids]
        wanted = {digest(self._texts[uid].prompt): self._texts[uid] for uid in uids}
        self._held = set(wanted)
        new = [key for key in wanted if key not in self._cache or key in self._ahead]
        self._arrive(wanted)
        self._ahead -= wanted.keys()
        for key in wanted.keys() & self._cache.keys():
            self._cache.move_to_end(key)
        self._encode([wanted[key] for key in wanted if key not in self._cache])
        return Taken(len(wanted), len(wanted) - len(new))

    def encode_ahead(self, prompts: Sequence[Prompt], needs_negative: bool) -> None:
        """Begin to encode what the `take` of these prompts will ask for, and return at once.

        What their uids stand for does not change yet. What is wrong with a prompt, the `take` says.
        """
        if self.start is None:
            return
        self._arrive()
        negatives = [prompt.negative or self._negative_prompt for prompt in prompts] if needs_negative else []
        wanted = {digest(prompt.prompt): prompt for prompt in (*prompts, *negatives)}
        self._ahead = {key for key in wanted if key not in self._cache}
        missing = [prompt for key, prompt in wanted.items() if key in self._ahead]
        if missing:
            self._arriving = [digest(prompt.prompt) for prompt in missing], self.start(missing)

    def _arrive(self, wanted: Iterable[bytes] | None = None) -> None:
        """Wait for what is being encoded ahead, where it is wanted; None waits for it anyway."""
        if self._arriving is None or (wanted is not None and all(key in self._cache for key in wanted)):
            return
        keys, wait = self._arriving
        self._arriving = None
        for key, row in zip(keys, wait(), strict=True):
            self._keep(key, row)

    def _know(self, prompt: Prompt) -> None:
        self._texts[prompt.uid] = prompt
        negative = prompt.negative
        self._own_negatives.pop(prompt.uid, None)
        if negative is not None and negative.prompt != self._negative_prompt.prompt:
            self._own_negatives[prompt.uid] = negative.uid
            self._texts[negative.uid] = negative

    def _read(self, uids: Sequence[str]) -> dict[str, Row]:
        unknown = [uid for uid in uids if uid not in self._texts]
        if unknown:
            raise DatasetError(f"the prompt table has no prompt of uid {unknown[0]!r}, so there is nothing to encode")
        texts = {digest(self._texts[uid].prompt): self._texts[uid] for uid in uids}
        self._arrive(texts)
        self._encode([prompt for key, prompt in texts.items() if key not in self._cache], keep=set(texts))
        rows = {}
        for uid in uids:
            key = digest(self._texts[uid].prompt)
            self._cache.move_to_end(key)
            rows[uid] = self._cache[key]
        return rows

    def _encode(self, prompts: Sequence[Prompt], keep: AbstractSet[bytes] = frozenset()) -> None:
        """Encode prompts of different texts; make room afterwards, but not with those to keep."""
        if prompts:
            if self.encode is None:
                raise RuntimeError("the run has no text encoders yet: nothing can be encoded")
            for prompt, row in zip(prompts, self.encode(prompts), strict=True):
                self._keep(digest(prompt.prompt), row)
        needed = self._held | self._ahead | keep
        beyond = [key for key in self._cache if key not in needed] if self._size > self._limit else []
        for key in beyond:
            if self._size <= self._limit:
                break
            self._size -= _bytes(self._cache.pop(key))

    def _keep(self, key: bytes, row: Row) -> None:
        if key not in self._cache:
            self._cache[key] = row
            self._size += _bytes(row)


def digest(text: str) -> bytes:
    """The name of a prompt in the cache: 16 bytes of its text's BLAKE2b."""
    return blake2b(text.encode(), digest_size=16).digest()


def _bytes(row: Row) -> int:
    return sum(tensor.nbytes for tensor in row.values())
