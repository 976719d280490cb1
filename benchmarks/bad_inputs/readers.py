# SPDX-License-Identifier: Apache-2.0
"""Raw files as others write them, `params.yaml`, files of overrides, and scripts of VeRL-Omni."""

import io
import json
import math
import re
from collections.abc import Callable
from contextlib import chdir
from copy import deepcopy
from pathlib import Path
from typing import Any

import pyarrow as pa
import yaml

from benchmarks.bad_inputs.cases import Case, damaged, draws
from benchmarks.bad_inputs.configs import WORDS, checked, fault_of_config, leaves, same, set_at, write_stubs
from benchmarks.bad_inputs.prompts import fault_of_rows
from tasks.config.migration.script import read_overrides
from tasks.config.migration.translate import Translation, translate
from tasks.config.params import PrepareParams, load_params
from tasks.config.recipes import parse_changes
from tasks.config.tree import TrainConfig
from tasks.data.prompts import Prompt, build_prompt_table, load_prompts

CHATS = "chats, GenEval's lists and saved data sets"
PARAMS = "`params.yaml`"
OVERRIDES = "`--overrides` files"
SCRIPTS = "scripts of VeRL-Omni"
ROOT = Path(__file__).parents[2]
TEXTS = ("a red cup", "a sign that says “open”", "日本の猫", "two dogs 🐕‍🦺")
LONGEST_MADE = 1_000_000
"""Characters of a recipe: a script of a few lines is not made into more."""

# ---- raw files


def chat(text: Any, role: str = "user") -> list[dict[str, Any]]:
    """As the field writes a prompt."""
    return [{"role": "system", "content": "Describe it."}, {"role": role, "content": text}]


ODD_PROMPTS: tuple[Any, ...] = (
    *([], [{}], [{"role": "user"}], [{"role": "user", "content": None}], [{"role": "user", "content": 5}]),
    *(chat("a", "assistant"), chat("a") + chat("b"), [{"content": "a"}], [{"role": ["user"], "content": "a"}]),
    *(chat([]), chat([{"type": "text"}]), chat([{"type": "text", "text": None}]), chat([{"type": "image"}])),
    *(
        chat([{"type": "text", "text": 5}]),
        chat([{"type": "text", "text": {"a": 1}}]),
        chat(["a"]),
        chat({"text": "a"}),
    ),
    *(chat(""), chat(" "), chat("a\0b"), chat("\u200b"), chat("\u202ea"), chat("\ud800"), chat("x" * 20_000)),
    *([chat("a")], [["a"]], [None], {"role": "user", "content": "a"}, 5, True, "user: a", [{"role": "user"}, None]),
)
ODD_FIELDS: tuple[dict[str, Any], ...] = (
    *({"negative_prompt": value} for value in ("a\0b", "\u202ea", "\ud800", "x" * 20_000, 5, [], {}, chat("\x1b"), "")),
    *({"negative_prompt": value} for value in (chat([{"type": "image"}]), chat("a", "tool"), [[1]], True)),
    *({"reward_model": value} for value in (5, [], {"ground_truth": 5}, {"ground_truth": "\0"}, {"ground_truth": ""})),
    *({"extra_info": value} for value in ({"split": 5}, {"split": ["test"]}, {"split": "valid"}, [], {"index": 1e999})),
    *({"include": value} for value in (5, [1], {"class": "dog"}, [{"class": "dog", "count": math.nan}])),
    *({"system_prompt": value} for value in (5, {"a": 1})),
    *({"uid": "a/b"}, {"split": 5}, {"target": 5}, {"target": chat("a")}, {"tag": math.inf}),
)


def _rows() -> list[dict[str, Any]]:
    """A chat, the text to be shown and the split, as VeRL-Omni's files have them, and GenEval's metadata."""
    return [
        {
            "prompt": chat(text),
            "negative_prompt": chat("blurred")[1:],
            "reward_model": {"style": "model", "ground_truth": f"t{number}"},
            "extra_info": {"split": "train", "index": number},
            "include": [{"class": "dog", "count": 1 + number}],
        }
        for number, text in enumerate(TEXTS)
    ]


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """What a sound row says, read by code of the suite's own. Raises where that is not clear."""
    plain = dict(row)
    for key in ("prompt", "negative_prompt"):
        if isinstance(plain.get(key), list):
            said = {message["role"]: message["content"] for message in plain[key]}
            if len(said) != len(plain[key]) or not set(said) <= {"user", "system"}:
                raise ValueError(f"{key} is a chat of other turns")
            parts = {role: text if isinstance(text, str) else _joined(text) for role, text in said.items()}
            plain[key] = parts["user"]
            plain |= {"system_prompt": parts["system"]} if key == "prompt" and "system" in parts else {}
    truth = plain.get("reward_model")
    if "target" not in plain and isinstance(truth, dict) and type(truth.get("ground_truth")) in (str, int):
        plain["target"] = str(truth["ground_truth"])
    return plain


def _joined(parts: list[dict[str, str]]) -> str:
    return "".join(part["text"] + "" for part in parts)


def raw_files(seed: int) -> list[Case]:
    """Rows with chats and fields that no one can mean, and saved folders whose files are damaged."""
    cases = []
    for number, prompt in enumerate(ODD_PROMPTS):
        row = _rows()[0] | {"prompt": prompt}
        cases.append(_listed(f"prompt {number} {prompt!r:.60}", [row, _rows()[1]]))
    cases += [_listed(f"{fields!r:.60}", [_rows()[0] | fields, _rows()[1]]) for fields in ODD_FIELDS]
    cases += [_damaged_folder(number, seed) for number in range(90)]
    cases += [_folder(name, {file: content}, expected=None) for name, file, content in _odd_folders()]
    return cases


def _listed(name: str, rows: list[dict[str, Any]]) -> Case:
    content = "".join(f"{json.dumps(row)}\n" for row in rows).encode()
    return _read_case(name, lambda folder: _write(folder / "p.jsonl", content), "p.jsonl", lambda _: rows)


def _read_case(
    name: str, prepare: Callable[[Path], None], file: str, expected: Callable[[Path], list[dict[str, Any]]]
) -> Case:
    def act(folder: Path) -> tuple[list[Prompt], Path]:
        table = build_prompt_table([str(folder / file)], n_test=0, n_train=None, seed=0, target_pattern=None)
        table.to_parquet(folder / "table.parquet", index=False)
        return load_prompts(folder / "table.parquet"), folder

    def fault(taken: tuple[list[Prompt], Path]) -> str | None:
        prompts, folder = taken
        try:
            rows = [_plain(row) for row in expected(folder)]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return f"what is there says nothing: {error!r}"
        odd = next((p for p in prompts if _hides(str(p.metadata.get("negative_prompt") or ""))), None)
        return f"negative prompt of {odd.prompt!r}" if odd else fault_of_rows(prompts, rows)

    return Case(CHATS, name, prepare, act, fault)


def _hides(text: str) -> bool:
    return len(text) > 16_384 or any(ord(c) < 9 or ord(c) == 27 or 0x202A <= ord(c) <= 0x202E for c in text)


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def _saved() -> dict[str, bytes]:
    """The files of a folder with one split in it, as `datasets` saves them."""
    stream, table = io.BytesIO(), pa.Table.from_pylist(_rows())
    with pa.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_fingerprint": "a", "_split": "train"}
    return {
        "saved/dataset_dict.json": json.dumps({"splits": ["train"]}).encode(),
        "saved/train/state.json": json.dumps(state).encode(),
        "saved/train/data-00000-of-00001.arrow": stream.getvalue(),
    }


def _damaged_folder(number: int, seed: int) -> Case:
    rng, files = draws(CHATS, number, seed), _saved()
    file = [*files][number % 3]
    what, content = damaged(files[file], rng)
    expected = None if file.endswith(".arrow") else _rows()
    return _folder(f"#{number} {file} {what}", {file: content}, expected)


def _folder(name: str, changed: dict[str, bytes], expected: list[dict[str, Any]] | None) -> Case:
    """Arrow's files have no checksums: of a damaged one, pyarrow's full check says what is in it."""

    def prepare(folder: Path) -> None:
        for file, content in (_saved() | changed).items():
            _write(folder / file, content)

    def rows(folder: Path) -> list[dict[str, Any]]:
        if expected is not None:
            return expected
        with pa.ipc.open_stream((folder / "saved/train/data-00000-of-00001.arrow").read_bytes()) as stream:
            table = stream.read_all()
        table.validate(full=True)
        return [{"split": "train"} | row for row in table.to_pylist()]

    return _read_case(name, prepare, "saved", rows)


def _odd_folders() -> list[tuple[str, str, bytes]]:
    parts, state = "saved/dataset_dict.json", "saved/train/state.json"
    splits = [5, "train", [5], [["train"]], ["../saved/train"], [None], {}, [], ["/etc"], ["train", "train"], None]
    files: list[Any] = [5, {}, [5], [{}], [{"filename": 5}], [{"filename": "../../out.arrow"}], None, [None]]
    files += [[{"filename": name}] for name in ("/etc/passwd", "..", "", "a\0b", "state.json", "x" * 5000)]
    odd = [(f"splits {value!r:.40}", parts, json.dumps({"splits": value}).encode()) for value in splits]
    odd += [(f"files {value!r:.40}", state, json.dumps({"_data_files": value}).encode()) for value in files]
    return odd + [(f"state {text!r:.20}", state, text) for text in (b"[]", b"null", b"[" * 100_000, b"\xff", b"{}")]


# ---- params.yaml


def params(seed: int) -> list[Case]:
    """The project's own file, damaged, and values of its fields that no stage can use."""
    whole = (ROOT / "params.yaml").read_text()
    cases = []
    for number in range(60):
        what, content = damaged(whole.encode(), draws(PARAMS, number, seed))
        cases.append(_params_case(f"#{number} {what}", content))
    tree = yaml.safe_load(whole)
    paths = sorted((path for path, _ in leaves(tree)), key=str)
    values = [
        math.inf,
        math.nan,
        -1,
        10**30,
        "a\0b",
        "",
        None,
        [],
        {},
        [[1]],
        "../x",
        "data/raw/../../x",
        True,
        "os:system",
    ]
    for number in range(80):
        rng, other = draws(PARAMS, 1000 + number, seed), deepcopy(tree)
        path, value = rng.choice(paths), rng.choice(values)
        set_at(other, path, value)
        cases.append(_params_case(f"{'.'.join(map(str, path))}={value!r:.30}", yaml.safe_dump(other).encode()))
    texts = ("", "[]", "5", "{", "a: *b", "!!python/object:os.system x", "2001-13-01: 1", "[" * 5000, "a: !!int x")
    return cases + [_params_case(f"{text[:30]!r}", text.encode()) for text in texts]


def _params_case(name: str, content: bytes) -> Case:
    def act(folder: Path) -> PrepareParams:
        return load_params(folder / "params.yaml")

    def fault(taken: PrepareParams) -> str | None:
        written, dumped = yaml.safe_load(content), taken.model_dump(mode="json")
        for path, value in leaves(written):
            if any(isinstance(part, int) for part in path) or path[-1] == "files":
                continue
            found: Any = dumped
            for part in path:
                found = found[part]
            if not same(value, found):
                return f"{path} was {value!r} and became {found!r}"[:300]
            if isinstance(value, float) and not math.isfinite(value):
                return f"{path} is {value}"
        return None

    return Case(PARAMS, name, lambda folder: _write(folder / "params.yaml", content), act, fault)


# ---- files of overrides


def override_files(seed: int) -> list[Case]:
    """A file of changes, damaged, and contents that are none."""
    tree = {"trainer": {"seed": 7, "total_training_steps": 3}, "actor_rollout_ref": {"rollout": {"n": 8}}}
    cases = []
    for number in range(40):
        rng, suffix = draws(OVERRIDES, number, seed), (".yaml", ".json")[number % 2]
        what, content = damaged((yaml.safe_dump(tree) if suffix == ".yaml" else json.dumps(tree)).encode(), rng)
        cases.append(_overrides_case(f"#{number} {suffix} {what}", suffix, content))
    for text in (*WORDS, *(f"trainer: {word}" for word in WORDS)):
        cases.append(_overrides_case(repr(text)[:60], ".yaml", text.encode("utf-8", "surrogatepass")))
    return cases


def _overrides_case(name: str, suffix: str, content: bytes) -> Case:
    def act(folder: Path) -> TrainConfig:
        with chdir(folder):
            return checked(TrainConfig().with_changes(parse_changes([], [folder / f"changes{suffix}"])))

    def fault(taken: TrainConfig) -> str | None:
        written = yaml.safe_load(content) if suffix == ".yaml" else json.loads(content)
        return fault_of_config(taken, {path: value for path, value in leaves(written) if path})

    def prepare(folder: Path) -> None:
        write_stubs(folder)
        _write(folder / f"changes{suffix}", content)

    return Case(OVERRIDES, name, prepare, act, fault)


# ---- scripts

SCRIPT = """#!/bin/bash
GPUS=${GPUS:-4}
MODEL=${MODEL:-a/model}
python3 -m verl_omni.trainer.main_diffusion \\
    data.train_batch_size=8 \\
    actor_rollout_ref.model.path=$MODEL \\
    actor_rollout_ref.actor.optim.lr=3e-4 \\
    actor_rollout_ref.rollout.n=$((GPUS * 2)) \\
    trainer.n_gpus_per_node=$GPUS "$@"
"""
DOUBLING = "A=xxxxxxxxxx\n" + "".join(
    f"{b}=${a}${a}${a}${a}\n" for a, b in zip("ABCDEFGHIJKLMN", "BCDEFGHIJKLMNO", strict=True)
)
ODD_SCRIPTS = (
    *("", "\0", "echo", "a=b", "# data.seed=1", "data.seed=", "data.seed", "'", 'data.x="', "data.seed=1 '"),
    *(
        f"{DOUBLING}data.train_batch_size=$O\n",
        "A=$A\ndata.seed=$A",
        "A=$B\nB=$A\ndata.seed=$A",
        "data.seed=${A:-${B:-1}}",
    ),
    *(f"data.seed=$(({sum_}))" for sum_ in ("1/0", "1%0", "9" * 5000, "1*" * 3000 + "1", "(" * 500 + "1" + ")" * 500)),
    *(
        f"data.seed=$(({sum_}))"
        for sum_ in ("2**9999999", "x", "1 if 2 else 3", "__import__('os')", "-1", "1.5", "'a'*9")
    ),
    *(f"data.train_batch_size={word}" for word in WORDS if "\n" not in word),
    *(
        f"{path}=1"
        for path in ("data.seed.x", "a.b.c.d.e", "trainer", "~trainer.seed", "++trainer.seed", "data.__class__")
    ),
    *("data.seed=1\ndata.seed.x=2", "data.seed.x=2\ndata.seed=1", "reward.functions.a.b=1", "x" * 2_000_000),
)


def scripts(seed: int) -> list[Case]:
    """A script, damaged, and scripts with words that a shell, Python or YAML would choke on."""
    cases = []
    for number in range(60):
        what, content = damaged(SCRIPT.encode(), draws(SCRIPTS, number, seed))
        cases.append(_script_case(f"#{number} {what}", content.decode("utf-8", "replace")))
    return cases + [_script_case(f"{text[:60]!r}", text) for text in ODD_SCRIPTS]


def _script_case(name: str, text: str) -> Case:
    def act(folder: Path) -> Translation:
        return translate(read_overrides(text))

    def fault(taken: Translation) -> str | None:
        made = yaml.safe_dump(taken.config)
        if len(made) > LONGEST_MADE:
            return f"a recipe of {len(made)} characters"
        paths = set(re.findall(r"(?<![\w.$])\+{0,2}([A-Za-z_]\w*(?:\.[\w-]+)+)=", text))
        # What else is said of settings, `~a.b` or `group=choice`, has a line, and is no part of the recipe.
        told = {line.override.path for line in taken.lines if line.kind != "unknown"}
        if not told <= paths:
            return f"{told - paths} were never given"
        if taken.problem is None:
            TrainConfig.model_validate(taken.config)
        return None

    return Case(SCRIPTS, name, lambda folder: None, act, fault)


def whole() -> list[Case]:
    """Each kind, undamaged."""
    changes = yaml.safe_dump({"trainer": {"seed": 7}}).encode()
    return [
        _listed("whole chats", _rows()),
        _folder("whole folder", {}, _rows()),
        _params_case("whole", (ROOT / "params.yaml").read_bytes()),
        _overrides_case("whole", ".yaml", changes),
        _script_case("whole", SCRIPT),
    ]
