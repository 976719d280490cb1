# SPDX-License-Identifier: Apache-2.0
"""Embeddings, preference tables and the index of pairs."""

import io
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image

from benchmarks.bad_inputs.cases import Case, damaged, draws
from benchmarks.bad_inputs.configs import VALUES
from tasks.data.digests import check_files
from tasks.data.embeddings import PromptEmbeddings, write_embeddings
from tasks.data.pairs import PairDataset, common_size, read_pictures, write_pairs
from tasks.data.prompts import Prompt

EMBEDDINGS = "embeddings: shards and index"
PAIRS = "preference tables, and pairs: shards and index"
PROMPTS = [Prompt(f"uid-{number}", f"the number {number}", None, {}, "") for number in range(5)]
UIDS = [*(prompt.uid for prompt in PROMPTS), "negative"]


def _encode(texts: list[str]) -> dict[str, torch.Tensor]:
    """Random embeddings of 3 to 5 tokens of 4 numbers, the same for a text each time."""
    lengths = torch.tensor([3 + len(text) % 3 for text in texts])
    rows = [torch.randn(5, 4, generator=torch.Generator().manual_seed(sum(text.encode()))) for text in texts]
    mask = torch.arange(5) < lengths[:, None]
    return {"prompt_embeds": torch.stack(rows), "prompt_embeds_mask": mask, "pooled": torch.stack(rows)[:, 0].clone()}


def _write_embeddings(folder: Path) -> None:
    write_embeddings(
        PROMPTS, _encode, folder / "embeddings", 2, batch_size=2, negative_prompt="", max_sequence_length=8, model="m",
        model_digest="sha256-ends:" + "0" * 64,
    )  # fmt: skip


def _read_embeddings(folder: Path) -> dict[str, Any]:
    """As a run's start and its rollout read them."""
    found = PromptEmbeddings.open(folder / "embeddings")
    if found.sha256 is not None:
        check_files(found.folder, found.sha256)
    facts = {"dim": found.dim, "tokens": found.max_sequence_length, "model": found.model_digest}
    return facts | {"longest": found.longest(UIDS)} | found.get(UIDS)


def _embeddings_as_written() -> dict[str, Any]:
    encoded = _encode([*(prompt.prompt for prompt in PROMPTS), ""])
    mask = encoded["prompt_embeds_mask"]
    length = int(mask.sum(1).max())
    embeds = (encoded["prompt_embeds"] * mask[..., None])[:, :length]
    facts = {"dim": 4, "tokens": 8, "model": "sha256-ends:" + "0" * 64, "longest": UIDS[int(mask.sum(1).argmax())]}
    return facts | {"prompt_embeds": embeds, "prompt_embeds_mask": mask[:, :length], "pooled": encoded["pooled"]}


def _difference(taken: dict[str, Any], wanted: dict[str, Any]) -> str | None:
    for name in {*taken, *wanted}:
        one, other = taken.get(name), wanted.get(name)
        equal = (
            torch.equal(one, other)
            if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
            else one == other
        )
        if not equal:
            return f"{name} is not what was written"
    return None


def embeddings(seed: int) -> list[Case]:
    """Damaged shards, a damaged index, and an index with other values."""
    cases = []
    for number in range(120):
        rng = draws(EMBEDDINGS, number, seed)
        name, change = _change_of(rng, "embeddings", number)
        cases.append(
            Case(
                EMBEDDINGS,
                f"#{number} {name}",
                _prepared(_write_embeddings, change),
                _read_embeddings,
                _fault_of_embeddings,
            )
        )
    return cases


def _prepared(write: Callable[[Path], None], change: Callable[[Path], None]) -> Callable[[Path], None]:
    def prepare(folder: Path) -> None:
        write(folder)
        change(folder)

    return prepare


def _change_of(rng: random.Random, folder_name: str, number: int) -> tuple[str, Callable[[Path], None]]:
    """One change of a data set in a folder: (name, what makes it)."""
    kind = ("shard", "index", "value", "shard", "value", "files")[number % 6]
    value, choice, more = rng.choice(VALUES), rng.random(), rng.randrange(10**9)

    def change(folder: Path) -> None:
        again = random.Random(more)
        place = folder / folder_name
        shards = sorted(place.glob("*.safetensors"))
        shard = shards[int(choice * len(shards))]
        if kind == "shard":
            shard.write_bytes(damaged(shard.read_bytes(), again)[1])
        elif kind == "index":
            (place / "index.json").write_bytes(damaged((place / "index.json").read_bytes(), again)[1])
        elif kind == "value":
            _edit_index(place / "index.json", value, again)
        elif choice < 0.3:
            shard.unlink()
        elif choice < 0.6:
            shards[0].write_bytes(shards[-1].read_bytes())
        elif choice < 0.8:
            shard.unlink()
            shard.mkdir()
        else:
            (place / "index.json").unlink()

    return f"{kind} {repr(value)[:40] if kind == 'value' else ''} {choice:.2f} {more}", change


def _edit_index(file: Path, value: Any, rng: random.Random) -> None:
    """One value replaced or left out; what JSON has no form for is left out."""
    index = json.loads(file.read_text())
    node, key = index, rng.choice(sorted(index))
    while isinstance(node[key], dict | list) and node[key] and rng.random() < 0.7:
        node = node[key]
        key = rng.randrange(len(node)) if isinstance(node, list) else rng.choice(sorted(node))
    node[key] = value
    try:
        text = json.dumps(index)
    except (TypeError, ValueError, RecursionError):
        del node[key]
        text = json.dumps(index)
    file.write_text(text)


SIDE = {"chosen": 200, "rejected": 50}
PICTURES = [(f"pair-{number}", f"the number {number}") for number in range(4)]


def _png(level: int) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.full((8, 8, 3), level, np.uint8)).save(stream, format="PNG")
    return stream.getvalue()


def _rows() -> list[dict[str, Any]]:
    return [
        {
            "pair": pair,
            "prompt": prompt,
            "image": _png(level + number),
            "chosen": side == "chosen",
            "score": level / 100,
        }
        for number, (pair, prompt) in enumerate(PICTURES)
        for side, level in SIDE.items()
    ]


def _table(rows: list[dict[str, Any]]) -> bytes:
    stream = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), stream, write_page_checksum=True, compression="NONE")
    return stream.getvalue()


def _to_latents(pictures: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(pictures).permute(0, 3, 1, 2).float()


def _make_pairs(folder: Path) -> None:
    pictures = read_pictures(folder / "preferences.parquet")
    common_size(pictures, "preferences.parquet")
    write_pairs(pictures, _to_latents, folder / "pairs", shard_size=2, model_digest="sha256-ends:" + "1" * 64)


def _read_pairs(folder: Path) -> dict[str, Any]:
    found = PairDataset.open(folder / "pairs")
    if found.sha256 is not None:
        check_files(found.folder, found.sha256)
    facts = {"shape": tuple(found.latent_shape), "model": found.model_digest}
    facts |= {"pairs": [(pair.uid, pair.chosen_score, pair.rejected_score) for pair in found.pairs]}
    return facts | {"latents": found._latents(found.pairs)}


def _pairs_as_written(rows: list[dict[str, Any]]) -> dict[str, Any]:
    uids = list(dict.fromkeys(row["pair"] for row in rows))
    by_side = {(row["pair"], row["chosen"]): row for row in rows}
    ordered = [by_side[uid, chosen] for uid in uids for chosen in (True, False)]
    pixels = np.stack([np.asarray(Image.open(io.BytesIO(row["image"])).convert("RGB")) for row in ordered])
    pairs = [(uid, by_side[uid, True]["score"], by_side[uid, False]["score"]) for uid in uids]
    latents = _to_latents(pixels)
    return {"shape": tuple(latents.shape[1:]), "model": "sha256-ends:" + "1" * 64, "pairs": pairs, "latents": latents}


ODD_CELLS: tuple[tuple[str, Any], ...] = (
    *(("chosen", value) for value in (None, "true", 1, 0.0)),
    *(("score", value) for value in (float("nan"), float("inf"), "high", True, 10.0, -1e308)),
    *(("image", value) for value in (None, b"", b"x", "text", _png(3)[:60], _png(3)[:-20], b"GIF89a" + bytes(20))),
    *(("prompt", value) for value in (None, 5, "", "another", "a\0b", ["x"], "\u202ea")),
    *(("pair", value) for value in (None, 5, "", "../x", "a/b", "\0", "pair-1", "__metadata__", "x" * 100_000)),
)


def preferences(seed: int) -> list[Case]:
    """Tables with odd cells and damaged tables, as they become pairs; and damaged pairs."""
    cases = []
    for column, value in ODD_CELLS:
        for whole in (False, True):
            rows = _rows()
            for row in rows if whole else rows[:1]:
                row[column] = value
            cases.append(_table_case(f"{column}={value!r:.30} in {'all' if whole else 'one'}", rows, None))
    cases += [
        _table_case(f"without {column}", [{k: v for k, v in row.items() if k != column} for row in _rows()], None)
        for column in _rows()[0]
    ]
    cases += [_table_case("a row less", _rows()[1:], None), _table_case("a row twice", [*_rows(), _rows()[0]], None)]
    for number in range(30):
        what, content = damaged(_table(_rows()), draws(PAIRS, number, seed))
        cases.append(_table_case(f"#{number} {what}", _rows(), content))
    for number in range(48):
        name, change = _change_of(draws(PAIRS, 1000 + number, seed), "pairs", number)
        cases.append(
            Case(
                PAIRS,
                f"#{1000 + number} {name}",
                _prepared(_whole_pairs, change),
                _read_pairs,
                lambda taken: _difference(taken, _pairs_as_written(_rows())),
            )
        )
    return cases


def _whole_pairs(folder: Path) -> None:
    (folder / "preferences.parquet").write_bytes(_table(_rows()))
    _make_pairs(folder)


def _table_case(name: str, rows: list[dict[str, Any]], content: bytes | None) -> Case:
    """A table becomes pairs; `content` is a damaged file of the rows."""
    if content is None:
        try:
            content = _table(rows)
        except (pa.ArrowException, TypeError):  # a column of two kinds: all of it as text
            column = next(key for key in rows[0] if not isinstance(rows[0][key], type(rows[-1][key])))
            rows = [row | {column: repr(row[column])} for row in rows]
            content = _table(rows)

    def act(folder: Path) -> dict[str, Any]:
        _make_pairs(folder)
        return _read_pairs(folder)

    def fault(taken: dict[str, Any]) -> str | None:
        told = _fault_of_rows(rows)
        return told or _difference(taken, _pairs_as_written(rows))

    return Case(PAIRS, name, lambda folder: _put(folder / "preferences.parquet", content), act, fault)


def _put(file: Path, content: bytes) -> None:
    file.write_bytes(content)


def _fault_of_rows(rows: list[dict[str, Any]]) -> str | None:
    """What no table of preferences can hold."""
    for row in rows:
        if (
            not isinstance(row["prompt"], str)
            or not row["prompt"].strip()
            or any(ord(c) < 32 or c == "\u202e" for c in row["prompt"])
        ):
            return f"the prompt {row['prompt']!r}"
        if not isinstance(row["pair"], str) or not row["pair"]:
            return f"the pair {row['pair']!r:.30}"
        if row["score"] is not None and (type(row["score"]) is not float or not math.isfinite(row["score"])):
            return f"the score {row['score']!r}"
    return None


def whole() -> list[Case]:
    """Embeddings, a table and pairs as they were written."""
    kept = Case(EMBEDDINGS, "whole", _write_embeddings, _read_embeddings, _fault_of_embeddings)
    pairs = Case(
        PAIRS, "whole", _whole_pairs, _read_pairs, lambda taken: _difference(taken, _pairs_as_written(_rows()))
    )
    return [kept, _table_case("whole", _rows(), None), pairs]


def _fault_of_embeddings(taken: dict[str, Any]) -> str | None:
    return _difference(taken, _embeddings_as_written())
