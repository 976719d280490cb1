# SPDX-License-Identifier: Apache-2.0
"""What a user's own function gives for an iteration's prompts, and options and metadata of rewards."""

import json
import math
from collections.abc import Callable
from contextlib import chdir
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.bad_inputs.cases import Case
from tasks.config.recipes import validate_section
from tasks.config.reward import RewardConfig
from tasks.data.prompts import Prompt
from tasks.data.rewriting import rewritten
from tasks.rewards import check_reward
from tasks.run.early import as_config_errors

REWRITTEN = "prompts that a function has rewritten"
REWARDS = "options and metadata of rewards"
PROMPTS = [Prompt("a", "a red cup", "cup", {"level": 1}, "p.txt:1"), Prompt("b", "a blue cup", None, {}, "p.txt:2")]


@dataclass(frozen=True)
class Other:
    """Not a prompt."""

    uid: str = "a"


def _each(**changes: Any) -> Callable[[list[Prompt]], Any]:
    return lambda prompts: [replace(prompt, **changes) for prompt in prompts]


ITSELF: dict[str, Any] = {}
ITSELF["x"] = ITSELF
DEEP: Any = []
for _ in range(2000):
    DEEP = [DEEP]
RETURNED: tuple[tuple[str, Callable[[list[Prompt]], Any]], ...] = (
    *(
        (repr(value), lambda prompts, value=value: value)
        for value in (None, 5, "ab", b"ab", [], {}, True, [None], [1, 2])
    ),
    ("others", lambda prompts: [Other()] * 2),
    ("the first alone", lambda prompts: prompts[:1]),
    ("in another order", lambda prompts: prompts[::-1]),
    ("twice", lambda prompts: [*prompts, *prompts]),
    ("texts", lambda prompts: [prompt.prompt for prompt in prompts]),
    ("a generator", lambda prompts: (replace(prompt, prompt=f"{prompt.prompt}!") for prompt in prompts)),
    *(
        (f"prompt {value!r:.30}", _each(prompt=value))
        for value in (None, 5, "", " ", "a\0b", "\u202ea", "\ud800", ["a"])
    ),
    *((f"prompt of {n} characters", _each(prompt="x" * n)) for n in (16_384, 16_385, 30_000_000)),
    *((f"target {value!r:.30}", _each(target=value)) for value in (5, "a\0b", ["a"], {"a": 1}, "x" * 20_000)),
    *((f"uid {value!r:.30}", _each(uid=value)) for value in (None, 5, "c", "")),
    *(
        (f"metadata {value!r:.30}", _each(metadata=value))
        for value in (
            None,
            5,
            [],
            "a",
            [("a", 1)],
            {1: 2},
            {"a": object},
            {"a": {1, 2}},
            {"a": b"x"},
            {"a": 1j},
            {"a": (1,)},
        )
    ),
    *(
        (f"metadata {value!r:.30}", _each(metadata=value))
        for value in ({"a": math.nan}, {"a": math.inf}, {"a": "\ud800"}, {"\ud800": 1}, {"uid": 5}, {"split": "x"})
    ),
    *((name, _each(metadata=value)) for name, value in (("itself", ITSELF), ("deep", {"a": DEEP}))),
    *(
        (f"negative {value!r:.20}", _each(metadata={"negative_prompt": value}))
        for value in ("a\0b", "\u202ea", "blurred")
    ),
)


def functions(seed: int) -> list[Case]:
    """What functions return in the place of prompts."""
    return [_rewritten_case(name, function) for name, function in RETURNED]


def _rewritten_case(name: str, function: Callable[[list[Prompt]], Any]) -> Case:
    def act(folder: Path) -> list[Prompt]:
        return rewritten(lambda prompts, iteration, seed: function(list(prompts)), PROMPTS, 3, 0)

    def fault(taken: list[Prompt]) -> str | None:
        wanted = list(function(list(PROMPTS)))
        if [(p.uid, p.prompt, p.target) for p in taken] != [(p.uid, p.prompt, p.target) for p in wanted]:
            return f"{taken!r:.200}"
        for prompt in taken:
            text = f"{prompt.prompt}{prompt.target or ''}{prompt.metadata.get('negative_prompt') or ''}"
            if not prompt.prompt.strip() or len(text) > 33_000 or any(ord(c) < 32 or ord(c) == 0x202E for c in text):
                return f"{prompt!r:.100}"
            if json.loads(json.dumps(prompt.metadata, allow_nan=False).encode()) != prompt.metadata:
                return f"metadata {prompt.metadata!r:.100}"
        return None

    return Case(REWRITTEN, name, lambda folder: None, act, fault)


GRADE = {"axes": ["alignment"]}
OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    *(
        ("by_data_source", {"sources": value})
        for value in (None, 5, [], {}, {"a": 5}, {"a": None}, {"a": []}, {"a": {}})
    ),
    *(
        ("by_data_source", {"sources": {"a": {"reward": value}}})
        for value in (None, 5, [], "no_such", "os:system", ":x")
    ),
    *(
        ("by_data_source", {"sources": {"a": {"reward": "ocr", "options": value}}})
        for value in (5, "x", [1], [["a", 1]])
    ),
    *(("by_data_source", {"sources": {name: "ocr"}}) for name in ("", "a,b", "x" * 101, "a\nb", "a:b")),
    ("by_data_source", {"sources": {"a": {"reward": "by_data_source", "options": {"sources": {"b": "ocr"}}}}}),
    ("by_data_source", {"sources": {"a": {"reward": "judge_grade", "options": GRADE | {"api_key": "k"}}}}),
    *(("geneval", {"model": value}) for value in (None, 5, [], {}, "a/hub-id", "", "\0", "x" * 5000)),
    *(
        ("geneval", {"model": "detector", name: value})
        for name in ("threshold", "nms_threshold")
        for value in (-1, 2, "x", [], True)
    ),
    *(("geneval", {"model": "detector", "max_objects": value}) for value in (0, -1, 1.5, "x", True, None)),
    *(
        ("geneval", {"model": "detector", "classes": value})
        for value in (5, "a", ["a"], {"a": 5}, {"a": ["dog"]}, {"a": "cow"})
    ),
    *(("geneval", {"model": "detector", "scoring": value}) for value in (None, 5, "loose", ["strict"])),
    *(("geneval", {"model": "detector", "clip": value}) for value in (5, "a/hub-id", [])),
    *(
        ("geneval", {"model": "broken", "threshold": 0.5}),
        ("geneval", {"model": "listed"}),
        ("geneval", {"model": "labels"}),
    ),
    *(("hpsv3", {"model": value}) for value in (None, 5, "a/hub-id", [])),
    *(("hpsv3", {"model": "detector", "template": value}) for value in (5, "", "{picture}", "x" * 100)),
    *(("judge_grade", GRADE | {name: value}) for name in ("model", "api_key_env") for value in ("x",)),
    *(("judge_grade", GRADE | {"base_url": value}) for value in ("http://a:b@c", "http://j/v1")),
    *(("judge_grade", GRADE | {name: "k"}) for name in ("api_key", "token", "X-Api-Key", "no_such")),
    *(("remote", {"url": value}) for value in ("http://a:b@c",)),
)
"""Each is one that no reward can use."""
SERVED: tuple[dict[str, Any], ...] = (
    *({"model_path": value} for value in (None, 5, "", "a\0b", [])),
    *(
        {"model_path": "m", "arguments": value}
        for value in (5, "x", [5], [None], ["a\0b"], ["--api-key", "k"], ["--token=k"])
    ),
    *(
        {"model_path": "m", "command": value}
        for value in ("serve {port}", ["serve"], [5], ["s", "{port}", "http://a:b@c"])
    ),
    *({"model_path": "m", "num_gpus": value} for value in (-1, math.inf, math.nan, 1e9, "x", True)),
    *({"model_path": "m", "start_timeout_s": value} for value in (0, -1, math.inf, math.nan, 1e12)),
    *({"model_path": "m", "engine": value} for value in (None, "sglang", 5)),
    *({"model_path": "m", "python": value} for value in ("a\0b", 5)),
    *({"model_path": "m", "sleep": value} for value in (5, "x")),
    *({"model_path": "m", "no_such": 1}, {"model_path": "m", "engine": "transformers", "sleep": True}),
)
"""Each is none that could be served."""
METADATA: tuple[Any, ...] = (
    *(
        {},
        {"include": None},
        {"include": []},
        {"include": 5},
        {"include": "dog"},
        {"include": [5]},
        {"include": {"class": "dog"}},
    ),
    *({"include": [{"class": value, "count": 1}]} for value in (None, 5, "", " ", ["dog"], "cow")),
    *(
        {"include": [{"class": "dog", "count": value}]}
        for value in (None, 0, -1, 1.5, "1", True, math.inf, math.nan, 10**9)
    ),
    *({"include": [{"class": "dog", "count": 1, "color": value}]} for value in (5, "mauve", ["red"], "red")),
    *(
        {"include": [{"class": "dog", "count": 1, "position": value}]}
        for value in (
            5,
            "left of",
            [],
            ["left of"],
            ["left of", 0],
            ["left of", 5],
            ["near", 1],
            ["left of", True],
            [["left of"], 0],
        )
    ),
    *(
        {"include": [{"class": "dog", "count": 1}], "exclude": value}
        for value in (5, [5], [{"class": "dog", "count": 0}])
    ),
    *({"extra_info": value} for value in (5, [], {"include": 5})),
    *({"data_source": value} for value in (None, 5, ["a"], {"a": 1}, "b", "")),
)
"""Each is none that a reward of the two below can read."""


def rewards(seed: int) -> list[Case]:
    """Options, served models and prompts' metadata that are all wrong: one that is taken is taken wrongly."""
    cases = [
        _wrong(f"{name} {options!r:.80}", lambda n=name, o=options: check_reward(n, **o)) for name, options in OPTIONS
    ]
    cases += [_wrong(f"reward model {given!r:.80}", lambda g=given: _served(g)) for given in SERVED]
    for metadata in METADATA:
        name = "by_data_source" if "data_source" in metadata else "geneval"
        options: dict[str, Any] = {"sources": {"a": "ocr"}} if name == "by_data_source" else {"model": "detector"}
        cases.append(_wrong(f"{name} {metadata!r:.80}", lambda n=name, o=options, m=metadata: _scored(n, o, m)))
    return cases


def _served(given: dict[str, Any]) -> RewardConfig:
    functions = {"judge_grade": {"options": GRADE}}
    return validate_section(RewardConfig, {"functions": functions, "reward_model": given}, "reward")


def _scored(name: str, options: dict[str, Any], metadata: Any) -> None:
    found = check_reward(name, **options)
    assert isinstance(found, type)
    found.check_prompts(name, options, [Prompt("a", "a dog", None, metadata, "p.txt:1")])


def _wrong(name: str, use: Callable[[], Any], is_right: bool = False) -> Case:
    def act(folder: Path) -> str:
        with chdir(folder), as_config_errors():
            use()
        return "taken"

    return Case(REWARDS, name, _write_detectors, act, lambda taken: None if is_right else "it was taken")


def _write_detectors(folder: Path) -> None:
    """Configs of detectors: one that is right, one that is no JSON, and ones of another form."""
    texts = {
        "detector": '{"id2label": {"0": "dog"}}',
        "broken": "{",
        "listed": "[1]",
        "labels": '{"id2label": ["dog"]}',
    }
    for name, text in texts.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(text)
    (folder / "m").mkdir()


def whole() -> list[Case]:
    """A function and a reward with nothing wrong."""
    dogs = {"include": [{"class": "dog", "count": 2}]}
    return [
        _rewritten_case("longer", _each(prompt="a green cup", metadata={"level": 2})),
        _wrong("dogs", lambda: _scored("geneval", {"model": "detector"}, dogs), is_right=True),
        _wrong("served", lambda: _served({"model_path": "m", "arguments": ["--max-tokens", "5"]}), is_right=True),
    ]
