# SPDX-License-Identifier: Apache-2.0
"""Whatever is read from a disk and is damaged is named, or reads as before: seeded mutations of every kind of file."""

import io
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from models.errors import DoubleflowError
from tasks.config.tree import TrainConfig
from tasks.data.digests import check_files
from tasks.data.embeddings import PromptEmbeddings, write_embeddings
from tasks.data.pairs import SIDES, PairDataset, _pixels, common_size, read_pictures, write_pairs
from tasks.data.prompts import Prompt, build_prompt_table, load_prompts, prompt_uid
from tasks.records.run_store import CheckpointStore, RunState
from tasks.run.opening import RUN_RECORD, _remember_run_id, _remembered_run_id

TEXTS = ["a red cup", "a sign that says open", "el niño 472", "写真"]
DIGESTED = ("embeddings/index.json", "embeddings", "pairs/index.json", "pairs", "checkpoints/state.json", "checkpoints")
ROUNDS = 25
"""Of each of the twelve kinds."""


@dataclass(frozen=True)
class Kind:
    """A file, and what reads all of it, as plain values that can be compared."""

    file: str
    read: Callable[[Path], Any]


def table_of(file: str) -> Callable[[Path], Any]:
    def read(folder: Path) -> Any:
        table = build_prompt_table([str(folder / file)], n_test=1, n_train=None, seed=0, target_pattern=None)
        table.to_parquet(folder / "again.parquet", index=False)
        return load_prompts(folder / "again.parquet")

    return read


def embeddings(folder: Path) -> Any:
    store = PromptEmbeddings.open(folder / "embeddings")
    check_files(store.folder, store.sha256 or {})
    read = store.get([prompt_uid(text) for text in TEXTS]) | store.negative()
    return {name: tensor.tolist() for name, tensor in read.items()}, store.dim, store.max_sequence_length


def pairs(folder: Path) -> Any:
    data = PairDataset.open(folder / "pairs")
    check_files(data.folder, data.sha256 or {})
    return data.pairs, data._latents(data.pairs).tolist()


def preferences(folder: Path) -> Any:
    file = folder / "preferences.parquet"
    pictures = read_pictures(file)
    size = common_size(pictures, str(file))
    return size, [
        (pair, *(_pixels(sides, side, pair, str(file)).tolist() for side in SIDES)) for pair, sides in pictures
    ]


def config_in(folder: Path) -> TrainConfig:
    return TrainConfig(trainer={"default_local_dir": folder / "runs"})


def checkpoint(folder: Path) -> Any:
    state, files = CheckpointStore(folder / "checkpoints").latest("config", "data-weights")
    return state, (files / "weights").read_bytes()


STATE = "checkpoints/iter_000001/"
KINDS = [
    Kind("prompts.txt", table_of("prompts.txt")),
    Kind("prompts.jsonl", table_of("prompts.jsonl")),
    Kind("prompts.parquet", table_of("prompts.parquet")),
    Kind("table.parquet", lambda folder: load_prompts(folder / "table.parquet")),
    Kind("embeddings/index.json", embeddings),
    Kind("embeddings/embeddings-00000-of-00003.safetensors", embeddings),
    Kind("pairs/index.json", pairs),
    Kind("pairs/pairs-00000.safetensors", pairs),
    Kind("preferences.parquet", preferences),
    Kind(RUN_RECORD, lambda folder: _remembered_run_id(config_in(folder))),
    Kind(STATE + "state.json", checkpoint),
    Kind(STATE + "trainer/weights", checkpoint),
]


def png(shade: int) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.full((4, 6, 3), shade, np.uint8)).save(stream, format="PNG")
    return stream.getvalue()


def encoded(texts: list[str]) -> dict[str, torch.Tensor]:
    rows = torch.arange(len(texts) * 12, dtype=torch.float32).reshape(len(texts), 3, 4) + len(texts[0])
    return {"prompt_embeds": rows, "prompt_embeds_mask": torch.ones(len(texts), 3), "pooled": rows[:, 0]}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of each."""
    folder = tmp_path_factory.mktemp("whole")
    rows = [{"prompt": text, "target": text[:3], "count": n, "tags": ["x", 1.5]} for n, text in enumerate(TEXTS)]
    (folder / "prompts.txt").write_text("\n".join(TEXTS) + "\n")
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pd.DataFrame([row | {"tags": ["x"]} for row in rows]).to_parquet(folder / "prompts.parquet")
    table = build_prompt_table([str(folder / "prompts.txt")], n_test=1, n_train=None, seed=0, target_pattern=None)
    table.to_parquet(folder / "table.parquet", index=False)
    prompts = [Prompt(prompt_uid(text), text, None, {}, "here") for text in TEXTS]
    said = {"negative_prompt": "", "max_sequence_length": 8, "model": "m", "model_digest": "d"}
    write_embeddings(prompts, encoded, folder / "embeddings", 2, batch_size=2, **said)
    pictures = [
        (f"pair-{number}", text, png(20 * number + 9 * chosen), chosen, 0.5 + chosen / 4)
        for number, text in enumerate(TEXTS)
        for chosen in (True, False)
    ]
    columns = ["pair", "prompt", "image", "chosen", "score"]
    pd.DataFrame(pictures, columns=columns).to_parquet(folder / "preferences.parquet", write_page_checksum=True)
    latents = lambda images: torch.from_numpy(images).float().mean(-1)  # noqa: E731
    table_read = read_pictures(folder / "preferences.parquet")
    write_pairs(table_read, latents, folder / "pairs", shard_size=2, model_digest="d")
    store = CheckpointStore(folder / "checkpoints")
    state = RunState(1, "config", "data-weights", "run", {"reward": 0.5})
    store.save(state, lambda inner: (inner / "weights").write_bytes(bytes(range(200))) and None)
    config = config_in(folder)
    config.run_dir.mkdir(parents=True)
    _remember_run_id(config, "5d0e1f6a7b8c9d0e1f2a3b4c5d6e7f80")
    return folder


def damaged(content: bytes, draw: random.Random, is_json: bool) -> bytes:
    """One mutation: bits, a cut, bytes lost, put in or doubled, or in JSON a value of another type or a lost key."""
    kind = draw.choice(["flip", "flip", "cut", "lose", "insert", "double", "noise"] + ["type", "type", "key"] * is_json)
    place = draw.randrange(len(content))
    if kind in ("type", "key"):
        return retyped(json.loads(content), draw, kind == "key")
    match kind:
        case "flip":
            return content[:place] + bytes([content[place] ^ 1 << draw.randrange(8)]) + content[place + 1 :]
        case "cut":
            return content[:place]
        case "lose":
            return content[:place] + content[place + draw.randint(1, 16) :]
        case "insert":
            odd = [b"\0", b"\x1b[31m", "\u202e".encode(), "\ufeff".encode(), b"\r", b"\xff", b"{" * 3000, b"9" * 5000]
            return content[:place] + draw.choice(odd) + content[place:]
        case "double":
            return content[:place] + content
        case _:
            return content[:place] + draw.randbytes(64) + content[place + 64 :]


def retyped(record: Any, draw: random.Random, lose: bool) -> bytes:
    holder, names = record, []
    while isinstance(holder, dict | list) and holder:
        name = draw.choice([*holder] if isinstance(holder, dict) else range(len(holder)))
        names.append((holder, name))
        holder = holder[name]
    place, name = draw.choice(names)
    if lose:
        del place[name]
    else:
        place[name] = draw.choice([None, True, -1, 1e300, float("nan"), "", "../x", [], {}, [[1]], {"a": 1}])
    return json.dumps(record).encode()


def path_of(kind: Kind, folder: Path) -> Path:
    return config_in(folder).run_dir / RUN_RECORD if kind.file == RUN_RECORD else folder / kind.file


def outcome(kind: Kind, folder: Path, before: Any) -> str:
    """named, same, other, or the error that nobody should see."""
    try:
        found = kind.read(folder)
    except DoubleflowError as error:
        return "named" if Path(kind.file).parts[0].split(".")[0] in str(error) else f"unnamed: {error}"
    except Exception as error:
        return f"raw {type(error).__name__}: {error}"
    return "same" if found == before else "other"


@pytest.mark.parametrize("kind", KINDS, ids=[kind.file for kind in KINDS])
def test_a_damaged_file_is_named_or_reads_as_before(kind: Kind, whole: Path, tmp_path: Path) -> None:
    """Texts without a digest of their own may read as another text: a letter for a letter nobody can see."""
    folder = Path(shutil.copytree(whole, tmp_path / "copy"))
    file, content = path_of(kind, folder), path_of(kind, whole).read_bytes()
    before = kind.read(folder)
    draw = random.Random(f"damage/{kind.file}")
    counts: dict[str, int] = {}
    for _ in range(ROUNDS):
        mutated = damaged(content, draw, kind.file.endswith("json"))
        file.write_bytes(mutated)
        found = outcome(kind, folder, before)
        counts[found] = counts.get(found, 0) + (mutated != content)
    print(kind.file, counts)
    assert not [found for found in counts if found not in ("named", "same", "other")]
    if kind.file.startswith(("embeddings", "pairs", "checkpoints", "preferences")):
        assert not counts.get("other")
    assert counts["named"] > ROUNDS // 4
