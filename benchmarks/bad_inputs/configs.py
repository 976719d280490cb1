# SPDX-License-Identifier: Apache-2.0
"""Configs: random mutations of whole ones, chosen values, and `--set` on the command line."""

import functools
import json
import math
import random
import re
from collections.abc import Iterator, Mapping
from contextlib import chdir
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from mlflow.exceptions import MlflowException
from mlflow.utils.validation import _validate_experiment_name, _validate_metric_name

from benchmarks.bad_inputs.cases import Case, draws
from models.algorithms.advantages import check_advantage
from models.schedulers.kernels import check_kernel
from tasks.actors.reward_model import check_reward_model
from tasks.config.recipes import parse_changes
from tasks.config.tree import TrainConfig, TrainOverrides
from tasks.data.rewriting import get_rewriting
from tasks.run.early import as_config_errors, check_early

MUTATIONS = "config: random mutations"
CHOSEN = "config: chosen values"
SET = "`--set`"
BASES: tuple[dict[str, Any], ...] = (
    {},
    *({"algorithm": {"name": name}} for name in ("dance_grpo", "mix_grpo", "grpo_guard", "flow_dppo", "awm")),
    {
        "reward": {
            "functions": {
                "jpeg_incompressibility": {"weight": 0.5, "num_workers": 2},
                "brightness": {"guard": True},
            }
        },
        "algorithm": {"rollout_correction": {"bypass_mode": False, "rollout_is": "step"}},
        "trainer": {"profile": {"iterations": [1, 2]}, "test_freq": 5},
        "actor_rollout_ref": {"model": {"lora_rank": 4, "target_modules": ["to_q", "to_k"]}},
    },
    {
        "data": {"name": "words", "embeddings": "live", "text_encoder": {"negative_prompt": "blurred"}},
        "reward": {
            "functions": {"judge_grade": {"options": {"axes": ["alignment"]}}},
            "reward_model": {
                "model_path": "data/base_model",
                "command": ["serve", "{port}"],
                "arguments": ["--max-model-len", "8192"],
            },
        },
        "actor_rollout_ref": {"rollout": {"pipeline": {"max_sequence_length": 16}}},
        "tracking": {"also": ["tensorboard"]},
        "trainer": {"compile_cache": "compiled"},
    },
)
ITSELF: list[Any] = []
ITSELF.append(ITSELF)
VALUES: tuple[Any, ...] = (
    *(math.inf, -math.inf, math.nan, -1, 0, -0.0, 1, 2, 0.5, 1e-320, 1e308, -1e308, 10**50, -(10**50), 2**31, 2**63),
    *(2**64, 10**9, True, False, None, "", " ", "\0", "a\0b", "../..", "/dev/null", "a\nb", "\x1b[31m", "\u202egnp"),
    *("\ud800", "a" * 5000, "1", "1e3", "inf", "nan", "0x10", "1_000", "true", "no", "null", "é", "a b", "a,b", "x%"),
    *("a (v2)", "os:system", ":x", "x:", ".a:b", "..", "no_such_module:thing", "json:loads", [], [1], [1, 2], [[1]]),
    *([math.nan, 1], {}, {"a": 1}, {"": 1}, {1: 2}, {"a": {"b": {"c": None}}}, b"bytes", 1j, {1, 2}, object, ITSELF),
)
MOST_PROCESSES = 100_000
COUNTS = re.compile(
    r"(^|[._])(num_(actors|threads|workers|cpus|gpus|gpus_per_actor)|nnodes|n_gpus_per_node|tensor_parallel_size"
    r"|ulysses_sequence_parallel_size)$"
)
"""Fields that count processes, threads and devices: a billion of them is a slip of the hand."""


def leaves(tree: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Every value of a tree with its path; a list is one value, and each entry of it, too."""
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from leaves(value, (*path, name))
        return
    yield path, tree
    if isinstance(tree, list | tuple):
        for number, value in enumerate(tree):
            yield from leaves(value, (*path, number))


def set_at(tree: Any, path: tuple[str | int, ...], value: Any) -> None:
    """Put a value into the tree, whose sections are made where they are missing."""
    for part, following in pairwise(path):
        missing: Any = [] if isinstance(following, int) else {}
        tree = tree.setdefault(part, missing) if isinstance(tree, dict) else tree[part]
    tree[path[-1]] = value


def get_at(tree: Any, path: tuple[str | int, ...]) -> Any:
    """The value at a path of a dumped config."""
    return functools.reduce(lambda node, part: node[part], path, tree)


@functools.cache
def _whole(number: int) -> str:
    return json.dumps(TrainConfig.model_validate(BASES[number]).model_dump(mode="json"))


def random_mutations(seed: int) -> list[Case]:
    """One or two values of a whole config, or of changes to one, replaced, left out or misspelt."""
    return [_mutation(number, draws(MUTATIONS, number, seed)) for number in range(520)]


def _mutation(number: int, rng: random.Random) -> Case:
    base = rng.randrange(len(BASES))
    tree = json.loads(_whole(base))
    kind = rng.choice(["value"] * 7 + ["section", "misspelt", "left out"])
    paths = [path for path, _ in leaves(tree) if path]
    wanted: dict[tuple[str | int, ...], Any] = {}
    for _ in range(rng.choice([1, 1, 1, 2])):
        path = rng.choice(paths)
        if kind == "section":
            path = path[: rng.randint(1, len(path))]
        wanted[path] = rng.choice(VALUES)
    if kind == "misspelt":
        (path, value), *_ = wanted.items()
        wanted = {(*path[:-1], f"{path[-1]}{rng.choice(['s', '_', '.', ' '])}"): value}
        if isinstance(path[-1], int):
            wanted = {("trainr",): value}
    if kind == "left out":
        (path, _), *_ = wanted.items()
        wanted = {}
        _leave_out(tree, path)
    return _case(MUTATIONS, f"#{number} {kind}", tree, wanted, rng.randrange(3) if kind == "value" else 0)


def _leave_out(tree: Any, path: tuple[str | int, ...]) -> None:
    parent = get_at(tree, path[:-1])
    if isinstance(parent, dict):
        del parent[path[-1]]
    else:
        parent.pop(path[-1])


def _case(target: str, name: str, tree: dict[str, Any], wanted: dict[tuple[str | int, ...], Any], way: int) -> Case:
    """Way 0 checks the whole tree, 1 lays the values over a config as a mapping, 2 as the form of a deployment."""
    told = ", ".join(f"{'.'.join(map(str, path))}={repr(value)[:60]}" for path, value in wanted.items())

    def act(folder: Path) -> TrainConfig:
        with chdir(folder):
            if way == 0:
                given = dict(tree)
                for path, value in _settable(tree, wanted):
                    set_at(given, path, value)
                config = TrainConfig.model_validate(given)
            else:
                changes: dict[str, Any] = {}
                for path, value in _settable(tree, wanted):
                    whole = path if not any(isinstance(part, int) for part in path) else path[: _first_list(path)]
                    if whole != path:
                        entries = list(get_at(tree, whole))
                        entries[path[-1]] = value
                        value = entries
                    set_at(changes, whole, value)
                form = changes if way == 1 else TrainOverrides.model_validate(changes)
                config = TrainConfig.model_validate(tree).with_changes(form)
            return checked(config)

    return Case(target, f"{name} way {way}: {told}", write_stubs, act, lambda config: fault_of_config(config, wanted))


def _first_list(path: tuple[str | int, ...]) -> int:
    return next(place for place, part in enumerate(path) if isinstance(part, int))


def _settable(tree: Any, wanted: dict[tuple[str | int, ...], Any]) -> list[tuple[tuple[str | int, ...], Any]]:
    """Without those below one that is replaced as a whole: they would have no place."""
    return [
        (path, value)
        for path, value in wanted.items()
        if not any(path != other and path[: len(other)] == other for other in wanted)
    ]


def write_stubs(folder: Path) -> None:
    """The files that the check before a run looks for."""
    model, table = "data/base_model/model_index.json", "data/prompts.parquet"
    for name in (model, table, "data/words/prompts.parquet", "data/embeddings/index.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    (folder / "data/pairs").mkdir()
    (folder / "data/pairs/index.json").touch()


def checked(config: TrainConfig) -> TrainConfig:
    """The config, past everything that is looked at before a model loads and data is read."""
    check_early(config)
    algo = config.actor_rollout_ref.rollout.algo
    with as_config_errors():
        check_advantage(config.algorithm.adv_estimator, config.algorithm.adv_options)
        check_kernel(algo.sde_type, algo.sde_options)
        check_reward_model(config.reward)
        if config.data.rewrite_prompts is not None:
            get_rewriting(config.data.rewrite_prompts)
    return config


def fault_of_config(config: TrainConfig, wanted: Mapping[tuple[str | int, ...], Any]) -> str | None:
    """The oracle: every value is what was written, finite, within what a machine has, and MLflow takes the names."""
    dumped = config.model_dump()
    for path, value in wanted.items():
        if any(path != other and path[: len(other)] == other for other in wanted):
            continue
        try:
            taken = get_at(dumped, path)
        except (KeyError, IndexError, TypeError):
            return f"{path} is not there"
        if not same(value, taken):
            return f"{'.'.join(map(str, path))} was {value!r} and became {taken!r}"[:300]
    for path, value in leaves(dumped):
        fault = fault_of_value(".".join(map(str, path)), value)
        if fault:
            return f"{'.'.join(map(str, path))} is {value!r:.80}: {fault}"
    if not all(0 <= beta < 1 for beta in config.actor_rollout_ref.actor.optim.betas):
        return f"betas {config.actor_rollout_ref.actor.optim.betas}"
    if TrainConfig.model_validate_json(config.model_dump_json()) != config:
        return "its JSON is another config"
    names = [f"train/reward/{label}/mean" for label in config.reward.functions]
    return fault_of_names(names, config.tracking.experiment)


def fault_of_names(metrics: list[str], experiment: str) -> str | None:
    """What MLflow says of them."""
    try:
        for name in metrics:
            _validate_metric_name(name)
        _validate_experiment_name(experiment)
    except MlflowException as error:
        return f"MLflow: {error}"
    if any("//" in name for name in metrics):
        return f"an empty name in {metrics}"
    return None


def fault_of_value(field: str, value: Any) -> str | None:
    """Why a value of a config can be of no use, whatever field it is of."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | float):
        if not math.isfinite(value):
            return "not finite"
        if isinstance(value, int) and not -(2**63) <= value < 2**64:
            return "no number of 64 bits"
        if COUNTS.search(field) and value > MOST_PROCESSES:
            return "more than any machine has"
        return None
    if isinstance(value, str | Path):
        text = str(value)
        if any(ord(character) < 32 or 0x7F <= ord(character) < 0xA0 for character in text):
            return "a control character"
        if any(0xD800 <= ord(character) < 0xE000 for character in text):
            return "half of a surrogate pair"
    return None


def same(written: Any, taken: Any) -> bool:
    """Is what a config holds what was written? Numbers may be written as text, and lists are tuples there."""
    if isinstance(written, bool) or isinstance(taken, bool):
        return isinstance(taken, bool) and _truth(written) is taken
    if isinstance(taken, Path):
        return isinstance(written, str | Path) and Path(written) == taken
    if isinstance(taken, int | float):
        return _number(written, taken)
    if isinstance(taken, tuple | list):
        written = written.split("_") if isinstance(written, str) else written
        entries = isinstance(written, tuple | list) and len(written) == len(taken)
        return entries and all(same(one, other) for one, other in zip(written, taken, strict=True))
    if isinstance(taken, dict):
        return isinstance(written, Mapping) and all(
            name in taken and same(written[name], taken[name]) for name in written
        )
    if isinstance(written, bytes):  # YAML's !!binary
        return written == str(taken).encode()
    return written == taken or (written, taken) == ("token", "step")


def _truth(written: Any) -> bool | None:
    words = {True: ("true", "yes", "on", "1", "t", "y"), False: ("false", "no", "off", "0", "f", "n")}
    if isinstance(written, str):
        return next((truth for truth, known in words.items() if written.lower() in known), None)
    return bool(written) if isinstance(written, int | float) and written in (0, 1) else None


def _number(written: Any, taken: int | float) -> bool:
    try:
        number = float(written) if isinstance(written, str) else written
    except ValueError:
        return False
    if not isinstance(number, int | float):
        return False
    if isinstance(number, int) and isinstance(taken, int):
        return number == taken
    return number == taken or math.isclose(number, taken, rel_tol=1e-12)


ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
ONE_REWARD = {"reward": "jpeg_incompressibility"}
CHOSEN_VALUES: tuple[tuple[str, Any], ...] = (
    *(
        (f"{ACTOR}.optim.{name}", value)
        for name in ("lr", "eps", "clip_grad", "weight_decay")
        for value in (math.inf, math.nan)
    ),
    *(
        (f"{ACTOR}.optim.betas", value)
        for value in ([math.nan, 0.9], [-1, 5], [1, 1], [0.9, 1.0], [0.9], [0.9] * 3, "ab")
    ),
    *(
        (f"{ACTOR}.diffusion_loss.{name}", math.inf)
        for name in ("clip_ratio", "adv_clip_max", "kl_mask_threshold", "dpo_beta")
    ),
    *(("trainer.canary_tolerance", value) for value in (math.inf, math.nan, -1, "x")),
    *(("trainer.seed", value) for value in (10**50, 2**64, -1, 0.5, math.nan, "1e3", True, [1])),
    *(
        (f"trainer.{name}", value)
        for name in ("nnodes", "n_gpus_per_node", "num_threads")
        for value in (10**9, 10**30, 0)
    ),
    *(
        (f"{ROLLOUT}.{name}", value)
        for name in ("num_actors", "n", "num_threads")
        for value in (10**12, math.inf, True)
    ),
    *((f"{ROLLOUT}.num_gpus_per_actor", value) for value in (math.inf, math.nan, -1, 1e300)),
    *((f"{ROLLOUT}.algo.noise_level", value) for value in (math.nan, math.inf, -0.1, 11)),
    *(
        (f"{ROLLOUT}.algo.sde_window_range", value)
        for value in ([0, 0], [5, 2], [-1, 3], [0, 10**30], [0], "0_2", [0.5, 2])
    ),
    *((f"{ROLLOUT}.pipeline.{name}", value) for name in ("height", "true_cfg_scale") for value in (10**40, math.inf)),
    *(
        ("reward.functions", {"jpeg_incompressibility": {name: value}})
        for name, value in (
            *(("weight", math.nan), ("weight", math.inf), ("num_workers", 10**9), ("timeout_s", math.nan)),
            *(("num_gpus", math.inf), ("num_cpus", math.nan), ("retries", 10**30), ("retry_wait_s", math.inf)),
            *(("batch_size", 0), ("options", {"x": 1}), ("options", {"token": "s3"}), ("options", ITSELF)),
        )
    ),
    *(
        ("reward.functions", {label: ONE_REWARD})
        for label in (
            *(
                "",
                " ",
                "a (v2)",
                "a,b",
                "x%",
                "a//b",
                "../x",
                "/a",
                "a/",
                ".",
                "..",
                "a\nb",
                "\0",
                "a" * 300,
                "é",
                "a:b",
                "-",
            ),
            *("a\u202eb", "#", "a/../b", "'", '"', "a=b", "a b"),
        )
    ),
    *(("trainer.experiment_name", value) for value in ("", "..", "-rf", "a/b", "\0", "a" * 300, "é", " ", "a\n", ".x")),
    *(("tracking.experiment", value) for value in ("", " ", "\0", "a" * 600, "a\nb", "x'y", "x`y")),
    *(("algorithm.name", value) for value in (["x"], {}, None, 3, "", "no_such", "flow_grpo ")),
    *(
        ("algorithm.adv_estimator", value)
        for value in (":x", ".a:b", "os:system", "no_such:x", "json:", "\0:x", "a b:c")
    ),
    *(
        (f"{ACTOR}.diffusion_loss.loss_mode", value)
        for value in (":x", ".a:b", "os:getcwd", "no_such", "builtins:eval")
    ),
    *((f"{ROLLOUT}.algo.sde_type", value) for value in (":x", ".a:b", "os:getcwd", "no_such", "", "\0")),
    *(
        (f"data.{name}", value)
        for name in ("prompts", "embeddings", "pairs")
        for value in ("", "a\0b", "a" * 5000, "\ud800")
    ),
    *(("trainer.default_local_dir", value) for value in ("a\0b", "/dev/null", "/proc/x", "a" * 5000, "")),
    *(("tracking.uri", value) for value in ("postgresql://a:b@c/d", "a\0b", "http://[", "sqlite://u:p@x/y")),
)


def chosen_values(seed: int) -> list[Case]:
    """Values that a number, a name or a path of its field's kind may have and that no run can use."""
    cases = []
    for number, (field, value) in enumerate(CHOSEN_VALUES):
        path = tuple(field.split("."))
        cases.append(_case(CHOSEN, f"#{number}", json.loads(_whole(0)), {path: value}, number % 3))
    return cases


WORDS = (
    *("1", "0.5", "-1", "1e400", ".inf", ".nan", "", "null", "~", "true", "off", "[1, 2", "{a: 1", "{a", "]", '"', "'"),
    *(
        "*a",
        "&a [*a]",
        "&a {b: *a}",
        "!!python/object:os.system x",
        "!!python/name:os.system",
        "!!binary 'x'",
        "!!set {a}",
    ),
    *(
        "!!int x",
        "!!float []",
        "!!timestamp x",
        "2001-13-01",
        "2001-01-01",
        "0x1F",
        "0b1",
        "1_000",
        "12:30:45",
        "\t1",
        "? x",
    ),
    *(
        "<<: 1",
        "{<<: 1}",
        "- 1",
        "a: b: c",
        "%TAG x",
        "--- 1\n--- 2",
        "\0",
        "\ud800",
        "\x1b",
        "[" * 2000,
        "{a: " * 500,
        "9" * 5000,
    ),
    *(
        "{1: 2}",
        "{[1]: 2}",
        "{{}: 1}",
        "@x",
        "`x",
        "|",
        ">",
        "#",
        "a #b",
        "1 #b",
        "{jpeg_incompressibility: {}}",
        "{ocr: {}}",
    ),
)
FIELDS = (
    *(
        "trainer.seed",
        "trainer.experiment_name",
        f"{ACTOR}.optim.lr",
        f"{ACTOR}.optim.betas",
        f"{ROLLOUT}.n",
        "reward.functions",
    ),
    *(
        "trainer",
        "trainer.profile.iterations",
        "data.prompts",
        "algorithm.name",
        "no.such",
        "trainer.sed",
        "",
        ".",
        "a..b",
        " ",
    ),
    *(
        "=",
        "trainer.seed.x",
        "trainer.",
        ".trainer",
        "trainer.seed ",
        "actor_rollout_ref",
        "reward.functions.ocr.weight",
        "\0",
    ),
)


def set_strings(seed: int) -> list[Case]:
    """Settings of the command line, some of them two that contradict each other."""
    cases = []
    fixed = [
        ["a=1", "a.b=2"],
        ["trainer=1", "trainer.seed=2"],
        ["trainer.seed=1", "trainer={}"],
        ["trainer.seed"],
        [""],
    ]
    fixed += [
        ["trainer.seed=1", "trainer={test_freq: 3}"],
        ["algorithm.name=[x]"],
        ["trainer.seed=1", "trainer.seed=2"],
    ]
    for number in range(100):
        rng = draws(SET, number, seed)
        count = rng.choice([1, 1, 2])
        settings = [
            f"{rng.choice(FIELDS)}{rng.choice(['=', '=', '=', '=', '', ':'])}{rng.choice(WORDS)}" for _ in range(count)
        ]
        cases.append(_set_case(fixed[number] if number < len(fixed) else settings))
    return cases


def _set_case(settings: list[str]) -> Case:
    def act(folder: Path) -> TrainConfig:
        with chdir(folder):
            return checked(TrainConfig().with_changes(parse_changes(settings)))

    def fault(config: TrainConfig) -> str | None:
        wanted = {}
        for setting in settings:
            path, _, value = setting.partition("=")
            wanted[tuple(path.strip().split("."))] = yaml.safe_load(value)
        return fault_of_config(config, wanted) or _fault_of_order(settings, config)

    return Case(SET, repr(settings)[:200], write_stubs, act, fault)


def _fault_of_order(settings: list[str], config: TrainConfig) -> str | None:
    """Each setting counts, also where one is a part of another."""
    for setting in settings:
        path, _, value = setting.partition("=")
        later = settings[settings.index(setting) + 1 :]
        if any(other.partition("=")[0].strip() == path.strip() for other in later):
            continue
        taken = get_at(config.model_dump(), tuple(path.strip().split(".")))
        if not same(yaml.safe_load(value), taken):
            return f"{setting} came to {taken!r:.100}"
    return None


def whole() -> list[Case]:
    """Configs and a setting with nothing wrong."""
    given = [_case(CHOSEN, f"base {number}", json.loads(_whole(number)), {}, 0) for number in range(len(BASES))]
    return [*given, _set_case(["trainer.seed=7", "algorithm.name=awm"])]
