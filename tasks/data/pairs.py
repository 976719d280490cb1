# SPDX-License-Identifier: Apache-2.0
"""Preference pairs: two pictures of one prompt, of which one is better; read by training with `sample_source: offline`.

A table of pictures (long form: one row a picture) becomes latents once, in a data stage, since the VAE is not trained.
"""

import io
import math
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from PIL import ExifTags, Image, ImageOps
from pydantic import TypeAdapter
from safetensors.torch import save_file

from models.samples.trajectories import FinishedLatents
from models.schedulers.noise_keys import NoiseKey
from tasks.data.digests import check_listed, file_digests, read_index, validated, write_index
from tasks.data.embeddings import INDEX, Embeddings, prompt_table
from tasks.data.prompt_files import DatasetError, check_text, read_parquet
from tasks.data.prompts import Prompt, ShardName, prompt_uid
from tasks.data.shard_files import ShardFiles
from tasks.system.files import put_in_place

COLUMNS = ("pair", "prompt", "image", "chosen", "score")
SIDES = ("chosen", "rejected")
FORMATS = ("PNG", "JPEG")
SIDEWAYS = range(5, 9)
"""EXIF's orientations that are turned by a quarter."""
DEEPER = ("I", "F")
"""Pillow's modes of more than 8 bits, of which it would clip what is above 255; of colours it takes the high byte."""
PICTURE_ERRORS = (
    *(OSError, SyntaxError, ValueError, TypeError, LookupError, EOFError, struct.error, zlib.error),
    Image.DecompressionBombError,
)
"""What Pillow raises for bytes that are no whole picture."""


@dataclass(frozen=True)
class Pair:
    """One pair of the data set.

    Attributes:
        uid: its name.
        prompt_uid: of its prompt's text; `PairDataset.named_by` makes it a table's.
        chosen_score, rejected_score: what the better and the worse picture were worth; None where only the choice is
            known.
        shard: file of its latents.
    """

    uid: str
    prompt_uid: str
    chosen_score: float | None
    rejected_score: float | None
    shard: ShardName = ""


@dataclass(frozen=True)
class PairsIndex:
    """What `PairDataset` reads of its index; see there."""

    latent_shape: list[int]
    model_digest: str
    pairs: list[Pair]
    sha256: dict[str, str] | None = None


_PAIRS_INDEX = TypeAdapter(PairsIndex)


@dataclass(frozen=True)
class PairBatch:
    """Some pairs as the trainer takes them.

    Attributes:
        trajectories: finished latents, which alternate between better and worse.
        advantages: 1 for the better, -1 for the worse.
    """

    trajectories: FinishedLatents
    advantages: np.ndarray

    @property
    def keys(self) -> tuple[NoiseKey, ...]:
        """The noise key of each sample; it names the pair, and by the index the side."""
        return self.trajectories.keys

    @property
    def text(self) -> tuple[int, int]:
        """Tokens of the denoiser's text and of its negative prompt, 0 where there is none."""
        return self.trajectories.prompts.lengths


def read_pictures(file: Path) -> list[tuple[Pair, dict[str, Any]]]:
    """The pairs of a preference table, each with its two rows by side.

    The table is parquet with a row a picture: `pair` (name of the pair), `prompt`, `image` (PNG or JPEG bytes),
    `chosen` (bool) and `score` (float or null).

    Raises:
        DatasetError: a pair has not exactly one chosen and one rejected picture, of one prompt, or its chosen picture
            is not worth more than its rejected one.
    """
    if file.is_dir():
        raise DatasetError(
            f"{file} is a folder: give the preference table itself, such as {file / 'preferences.parquet'}"
        )
    if not file.is_file():
        raise DatasetError(f"{file} is missing; `dvc repro preferences` makes it, or give a table of your own")
    rows = read_parquet(file)
    if not rows or not set(COLUMNS) <= set(rows[0]):
        raise DatasetError(f"{file} must have the columns {', '.join(COLUMNS)} and at least one pair")
    members: dict[str, list[dict[str, Any]]] = {}
    for number, row in enumerate(rows, 1):
        _check_picture_row(row, f"{file}:{number}")
        row["prompt"] = row["prompt"].strip()  # as a prompt table has it
        members.setdefault(str(row["pair"]), []).append(row)
    return [_checked_pair(file, uid, pictures) for uid, pictures in members.items()]


def _check_picture_row(row: dict[str, Any], source: str) -> None:
    """Raise DatasetError for values of another type than `read_pictures` names, but for `chosen` and the bytes."""
    if isinstance(row["pair"], bool) or not isinstance(row["pair"], str | int):
        raise DatasetError(f"{source}: the pair's name must be a text or a whole number, not {row['pair']!r}")
    if not isinstance(row["prompt"], str) or not row["prompt"].strip():
        raise DatasetError(f"{source}: the prompt must be a text that is not blank, not {row['prompt']!r}")
    check_text(str(row["pair"]), "pair's name", source)
    check_text(row["prompt"], "prompt", source)
    score = row["score"]
    is_number = isinstance(score, int | float) and not isinstance(score, bool)
    if score is not None and not (is_number and math.isfinite(score)):
        raise DatasetError(f"{source}: the score must be a finite number or null, not {score!r}")


def _checked_pair(file: Path, uid: str, pictures: list[dict[str, Any]]) -> tuple[Pair, dict[str, Any]]:
    if not all(isinstance(row["chosen"], bool) for row in pictures):
        raise DatasetError(f"{file}: `chosen` of a picture of pair {uid!r} is neither true nor false; say which it is")
    sides = {SIDES[not row["chosen"]]: row for row in pictures}
    if len(pictures) != 2 or len(sides) != 2:
        chosen = sum(row["chosen"] for row in pictures)
        raise DatasetError(
            f"{file}: pair {uid!r} has {len(pictures)} pictures, {chosen} of them chosen; a pair is one chosen and one "
            "rejected picture"
        )
    prompts = {row["prompt"] for row in pictures}
    if len(prompts) != 1:
        raise DatasetError(f"{file}: the pictures of pair {uid!r} have two prompts, {sorted(prompts)}; give them one")
    pair = Pair(uid, prompt_uid(prompts.pop()), sides["chosen"]["score"], sides["rejected"]["score"])
    check_order(pair, str(file))
    return pair, sides


def check_order(pair: Pair, where: str) -> None:
    """Raises DatasetError for a chosen picture that is worth less than the rejected one."""
    better, worse = pair.chosen_score, pair.rejected_score
    if better is not None and worse is not None and not better > worse:
        raise DatasetError(
            f"{where}: the chosen picture of pair {pair.uid!r} scores {better:g}, not more than the rejected one's "
            f"{worse:g}; swap them or leave the pair out"
        )


def write_pairs(
    pictures: Sequence[tuple[Pair, dict[str, Any]]],
    encode: "Callable[[np.ndarray], torch.Tensor]",
    out_dir: Path,
    *,
    shard_size: int,
    model_digest: str,
    where: str = "the preference table",
) -> None:
    """Encode the pictures into shards of `shard_size` pairs and an index; `out_dir` appears whole or not at all.

    Args:
        encode: pictures uint8 [B, H, W, 3] -> latents [B, ...].
        model_digest: of the VAE's files.
        where: the pictures' table, for errors.

    Raises:
        DatasetError: a picture is damaged.
    """
    names = [f"pairs-{start // shard_size:05d}.safetensors" for start in range(0, len(pictures), shard_size)]
    index: list[dict[str, Any]] = []
    with put_in_place(out_dir) as folder:
        folder.mkdir()
        for number, name in enumerate(names):
            part = pictures[number * shard_size : (number + 1) * shard_size]
            tensors: dict[str, torch.Tensor] = {}
            for pair, sides in part:
                latents = encode(np.stack([_pixels(sides, side, pair, where) for side in SIDES]))
                tensors |= {f"{pair.uid}/{side}": latents[i].contiguous().clone() for i, side in enumerate(SIDES)}
                index.append(asdict(pair) | {"shard": name})
            save_file(tensors, folder / name)
        shape = list(next(iter(tensors.values())).shape)
        record = {
            "latent_shape": shape,
            "model_digest": model_digest,
            "sha256": file_digests(folder),
            "pairs": index,
        }
        write_index(folder / INDEX, record)


def _pixels(sides: dict[str, Any], side: str, pair: Pair, where: str) -> np.ndarray:
    try:
        picture = ImageOps.exif_transpose(_opened(sides[side]["image"]))  # as whoever chose between them saw it
        pixels = np.asarray(picture.convert("RGB"))
    except PICTURE_ERRORS as error:
        raise DatasetError(
            f"{where}: the {side} picture of pair {pair.uid!r} is damaged: {error}; replace it or leave the pair out"
        ) from error
    if picture.has_transparency_data and np.asarray(picture.convert("RGBA"))[..., 3].min() < 255:
        raise DatasetError(
            f"{where}: the {side} picture of pair {pair.uid!r} is transparent in places: save it as it was looked at, "
            "on its ground"
        )
    if picture.mode.startswith(DEEPER):
        raise DatasetError(
            f"{where}: the {side} picture of pair {pair.uid!r} has more than 8 bits a pixel (mode {picture.mode}): "
            "save it as 8 bits"
        )
    return pixels


def _opened(content: bytes) -> Image.Image:
    return Image.open(io.BytesIO(content), formats=FORMATS)


def common_size(pictures: Sequence[tuple[Pair, dict[str, Any]]], where: str) -> tuple[int, int]:
    """Height and width, which all pictures share. Raises DatasetError naming the first pair that differs."""
    sizes: dict[tuple[int, int], str] = {}
    for pair, sides in pictures:
        for side in SIDES:
            try:
                picture = _opened(sides[side]["image"])
                turned = picture.getexif().get(ExifTags.Base.Orientation, 1) in SIDEWAYS
                width, height = reversed(picture.size) if turned else picture.size
            except PICTURE_ERRORS as error:
                raise DatasetError(f"{where}: the {side} picture of pair {pair.uid!r} is no PNG or JPEG") from error
            sizes.setdefault((height, width), pair.uid)
    if len(sizes) > 1:
        (((rows, columns), _), ((height, width), uid), *_) = sizes.items()
        raise DatasetError(
            f"{where}: a picture of pair {uid!r} is {width} x {height} but those before it are {columns} x {rows}; "
            "give all of them one size"
        )
    return next(iter(sizes))


class PairDataset:
    """The pairs of the `pairs` stage; latents are read when they are asked for.

    `model_digest` says which VAE it was, see `digests.parts_digest`; `sha256` is of each file, None in data of
    older versions.
    """

    def __init__(
        self,
        folder: Path,
        latent_shape: tuple[int, ...],
        pairs: list[Pair],
        model_digest: str,
        sha256: dict[str, str] | None,
    ):
        """Take what an index says; `open` reads and checks one."""
        self.folder, self.latent_shape, self.pairs = folder, latent_shape, pairs
        self.model_digest, self.sha256 = model_digest, sha256
        self._files = ShardFiles(folder, (pair.shard for pair in pairs), sha256)

    @classmethod
    def open(cls, folder: str | Path) -> "PairDataset":
        """The pairs that `write_pairs` left in `folder`. Raises DatasetError for none, or one in the wrong order."""
        index = Path(folder) / INDEX
        record = validated(_PAIRS_INDEX, read_index(index, "pairs"), index, "pairs")
        check_listed(index, "pairs", {pair.shard for pair in record.pairs}, record.sha256)
        for pair in record.pairs:
            check_order(pair, str(index))
        return cls(Path(folder), tuple(record.latent_shape), record.pairs, record.model_digest, record.sha256)

    def named_by(self, prompts: Sequence[Prompt]) -> "PairDataset":
        """The same pairs, each with the uid that its prompt has in this table; a pair of no prompt of it as it is.

        A pair knows its prompt's text, whose digest is the prompt's uid unless a data set gives uids of its own.
        """
        own = {prompt_uid(prompt.prompt): prompt.uid for prompt in prompts}
        pairs = [replace(pair, prompt_uid=own.get(pair.prompt_uid, pair.prompt_uid)) for pair in self.pairs]
        return PairDataset(self.folder, self.latent_shape, pairs, self.model_digest, self.sha256)

    def batches(
        self, pairs: Sequence[Pair], embeddings: Embeddings, size: int, seed: int, iteration: int
    ) -> Iterator[PairBatch]:
        """Batches of `size` pairs, in order, with the noise keys of this iteration."""
        for start in range(0, len(pairs), size):
            part = pairs[start : start + size]
            uids = list(dict.fromkeys(pair.prompt_uid for pair in part))
            rows = [uids.index(pair.prompt_uid) for pair in part for _ in SIDES]
            finished = FinishedLatents(
                keys=tuple(NoiseKey(seed, iteration, pair.uid, side) for pair in part for side in range(2)),
                prompts=prompt_table(embeddings, uids, needs_negative=False),
                prompt_index=torch.tensor(rows),
                latents=self._latents(part),
            )
            signs = np.tile(np.array([1.0, -1.0], np.float32), len(part))
            yield PairBatch(finished, signs)

    def _latents(self, pairs: Sequence[Pair]) -> torch.Tensor:
        found: dict[str, torch.Tensor] = {}
        for shard in sorted({pair.shard for pair in pairs}):
            with self._files.open(shard) as file:
                for pair in pairs:
                    if pair.shard == shard:
                        found |= {f"{pair.uid}/{side}": file.get_tensor(f"{pair.uid}/{side}") for side in SIDES}
        odd = [name for name, latents in found.items() if tuple(latents.shape) != self.latent_shape]
        if odd:
            raise DatasetError(
                f"{self.folder} holds latents {list(found[odd[0]].shape)} of {odd[0]}, but its index says "
                f"{list(self.latent_shape)}; run `dvc repro pairs`"
            )
        return torch.stack([found[f"{pair.uid}/{side}"] for pair in pairs for side in SIDES]).float()


def best_and_worst(
    prompts: Sequence[str], pictures: np.ndarray, scores: np.ndarray, images_per_prompt: int
) -> pd.DataFrame:
    """A preference table out of scored pictures: of each prompt's the best and the worst; ties give no pair.

    Args:
        prompts: P of them.
        pictures: uint8 [P * images_per_prompt, H, W, 3], prompt by prompt.
        scores: [P * images_per_prompt]; NaN is left out.
    """
    rows = []
    for number, prompt in enumerate(prompts):
        own = scores[number * images_per_prompt : (number + 1) * images_per_prompt]
        if np.isnan(own).all() or not np.nanmax(own) > np.nanmin(own):
            continue
        for chosen, place in ((True, int(np.nanargmax(own))), (False, int(np.nanargmin(own)))):
            stream = io.BytesIO()
            Image.fromarray(pictures[number * images_per_prompt + place]).save(stream, format="PNG")
            rows.append((prompt_uid(prompt), prompt, stream.getvalue(), chosen, float(own[place])))
    return pd.DataFrame(rows, columns=list(COLUMNS))
