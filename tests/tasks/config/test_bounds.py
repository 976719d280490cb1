# SPDX-License-Identifier: Apache-2.0
"""Every number of the settings has bounds and none is NaN or infinite; text, names and options can be written down."""

import datetime
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from mlflow import MlflowClient
from mlflow.entities import Metric
from pydantic import BaseModel, ValidationError

from models.config.bounds import DEEPEST_OPTIONS
from models.families import load_families
from tasks.config.errors import ConfigError, RecipeError, described
from tasks.config.measurement import Measurement
from tasks.config.params import PrepareParams
from tasks.config.presets import PRESETS, tree_of
from tasks.config.recipes import load_config, parse_changes, validate_section
from tasks.config.sweep import SweepConfig
from tasks.config.tree import TrainConfig
from tasks.rewards import RewardError, check_reward
from tests.support.mlflow_store import mlflow_in

ROOT = Path(__file__).parents[3]
SETTINGS = (TrainConfig, SweepConfig, Measurement, PrepareParams)
WITHOUT_BOUNDS = {
    "PrepareParams.base_model.model": "its file is a dependency of a data stage, so PrepareParams checks the numbers",
    "PrepareParams.words.model": "likewise",
}
EVERYWHERE = {"prompts": "a", "embeddings": "b"}
SPACE = {"trainer.seed": {"choices": [1, 2]}}


def numbers(node: Mapping[str, Any], sections: Mapping[str, Any], path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Path and schema of every number; * is any name of a mapping's entry, [] any entry of a list."""
    node = sections[node["$ref"].rpartition("/")[2]] if "$ref" in node else node
    for part in (*node.get("anyOf", ()), *node.get("allOf", ())):
        yield from numbers(part, sections, path)
    for name, part in node.get("properties", {}).items():
        yield from numbers(part, sections, f"{path}.{name}")
    for name, kind in (("additionalProperties", ".*"), ("items", "[]")):
        if isinstance(node.get(name), Mapping):
            yield from numbers(node[name], sections, path + kind)
    for part in node.get("prefixItems", ()):
        yield from numbers(part, sections, f"{path}[]")
    if node.get("type") in ("integer", "number"):
        yield path, node


def numbers_of(settings: type[BaseModel]) -> list[tuple[str, Mapping[str, Any]]]:
    schema = settings.model_json_schema()
    return list(numbers(schema, schema["$defs"], settings.__name__))


@pytest.mark.parametrize("settings", SETTINGS)
def test_every_number_has_bounds_on_both_sides(settings: type[BaseModel]) -> None:
    found = numbers_of(settings)
    assert len(found) > 5
    sides = [{"minimum", "exclusiveMinimum"}, {"maximum", "exclusiveMaximum"}]
    open_ended = {path for path, schema in found if not all(side & schema.keys() for side in sides)}
    assert {path for path in open_ended if path.rpartition(".")[0] not in WITHOUT_BOUNDS} == set()
    listed = {reason for reason in WITHOUT_BOUNDS if reason.startswith(settings.__name__)}
    assert {path.rpartition(".")[0] for path in open_ended} == listed, "a reason that nothing needs"


def placed(path: str, value: Any) -> dict[str, Any]:
    """{"a": {"x": {"b": [value, value]}}} of the path Name.a.*.b[]."""
    _, *parts = path.removesuffix("[]").replace("*", "x").split(".")
    for part in reversed([*parts[:-1], parts[-1]]):
        value = {part: [value, value] if path.endswith("[]") and part == parts[-1] else value}
    return value


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf, 10**50, -(10**50)])
@pytest.mark.parametrize("settings", [TrainConfig, Measurement])
def test_no_number_is_odd(settings: type[BaseModel], odd: float) -> None:
    """In the whole tree, and in text as well as in numbers."""
    for path, _ in numbers_of(settings):
        leaf = re.split(r"\W+", path.removesuffix("[]"))[-1]
        for value in (odd, str(odd)):
            with pytest.raises(ValidationError) as refused:
                settings.model_validate(placed(path, value))
            said = described(refused.value, settings)
            assert re.search(rf"\b{leaf}\b.*(finite|less than|greater than|valid integer|of another kind)", said), said


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"actor": {"optim": {"betas": [1, 1]}}}, r"betas.0 is 1; it should be less than 1"),
        ({"actor": {"optim": {"betas": [-1, 0.9]}}}, r"betas.0 is -1; it should be greater than or equal to 0"),
        ({"rollout": {"algo": {"sde_window_range": [0, 10**6]}}}, "sde_window_range.1 is 1000000; it should be less"),
        ({"rollout": {"num_actors": 10**9}}, "num_actors is 1000000000; it should be less than or equal to 4096"),
    ],
)
def test_bounds_that_are_reached_by_mistake(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainConfig().with_changes({"actor_rollout_ref": changes})


def test_a_negative_weight_and_the_largest_seed_are_right() -> None:
    changes = {"trainer": {"seed": 2**63 - 1}, "reward": {"functions": {"ocr": {"weight": -2.5}}}}
    assert TrainConfig().with_changes(changes).reward.functions["ocr"].share == -2.5


@pytest.mark.parametrize("field", ["model.lr", "model.seed", "gate.seed", "gate.prompts"])
@pytest.mark.parametrize("odd", [math.nan, math.inf, -(10**12), 10**30])
def test_the_base_models_numbers_are_finite_and_small(field: str, odd: float) -> None:
    params = yaml.safe_load((ROOT / "params.yaml").read_text())
    section, name = field.split(".")
    params["base_model"][section][name] = odd
    with pytest.raises(ValidationError) as refused:
        PrepareParams.model_validate(params)
    assert name in described(refused.value, PrepareParams)


# ---- text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"prompts": "a\0b"}}, r"^data\.prompts: the text has the character U\+0000"),
        ({"data": {"embeddings": "a\x1b[31m"}}, r"^data\.embeddings: the text has the character U\+001B"),
        ({"tracking": {"uri": "sqlite:///a\nb"}}, r"^tracking\.uri: the text has the character U\+000A"),
        ({"tracking": {"uri": ""}}, r"^tracking\.uri: the text is blank"),
        ({"trainer": {"default_local_dir": "\ud800"}}, r"default_local_dir: the text has the character U\+D800"),
        ({"actor_rollout_ref": {"model": {"path": "x" * 5000}}}, r"model\.path: the text has 5000 characters"),
        ({"actor_rollout_ref": {"model": {"target_modules": ["to_q", "a\0"]}}}, "target_modules: the text has the ch"),
        ({"ray_init": {"gpu_pool": "a/b"}}, r"^ray_init\.gpu_pool: 'a/b' is no name: give text without /"),
        ({"ray_init": {"gpu_pool": ""}}, r"^ray_init\.gpu_pool: '' is no name"),
    ],
)
def test_text_that_cannot_be_written_down_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainConfig().with_changes(changes)


@pytest.mark.parametrize("blank", ["", " "])
def test_a_blank_path_is_not_the_folder_that_a_command_stands_in(blank: str, tmp_path: Path) -> None:
    """By --set, by a file and by JSON, which a deployment has; a dot says that folder."""
    told, field = "the text is blank: give a value, or leave this out", "trainer.default_local_dir"
    for name in ("changes.yaml", "config.json"):
        (tmp_path / name).write_text(json.dumps({"trainer": {"default_local_dir": blank}}))
    readers = [
        lambda: parse_changes([f"{field}='{blank}'"]),
        lambda: parse_changes([], [tmp_path / "changes.yaml"]),
        lambda: load_config(tmp_path / "config.json"),
    ]
    for read in readers:
        with pytest.raises(RecipeError, match=f"{field}: {told}"):
            read()
    with pytest.raises(ValidationError, match=told):
        TrainConfig.model_validate_json((tmp_path / "config.json").read_text())
    with pytest.raises(ConfigError, match=f"data.embeddings: {told}"):
        TrainConfig().with_changes({"data": {"embeddings": blank}})
    assert TrainConfig().with_changes(parse_changes([f"{field}=."])).trainer.default_local_dir == Path()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (math.inf, "option x is inf: numbers are finite"),
        ([{"y": math.nan}], r"option x\.0\.y is nan"),
        (10**50, "option x is a whole number of 167 bits"),
        ("a\0", r"option x: the text has the character U\+0000"),
        (datetime.date(2026, 1, 1), "option x is a date: give text"),
        (b"a", "option x is a bytes"),
        ({1: 2}, "option x has the key 1"),
    ],
)
@pytest.mark.parametrize("holder", ["reward.functions", "algorithm.adv_options", "actor_rollout_ref.rollout.algo"])
def test_options_are_what_json_gives_back(holder: str, value: Any, message: str) -> None:
    inside = {"functions": {"ocr": {"options": {"x": value}}}, "algo": {"sde_options": {"x": value}}}
    changes = tree_of({holder: inside.get(holder.rpartition(".")[2], {"x": value})})
    with pytest.raises(ConfigError, match=rf"options: {message}"):
        TrainConfig().with_changes(changes)


def test_options_that_hold_themselves_are_refused() -> None:
    option = yaml.safe_load("&a [*a]")
    with pytest.raises(ConfigError, match=f"nested more than {DEEPEST_OPTIONS} levels deep"):
        TrainConfig().with_changes({"reward": {"functions": {"ocr": {"options": {"x": option}}}}})
    with pytest.raises(ConfigError, match="an alias that holds itself"):
        TrainConfig().with_changes({"reward": {"functions": {"ocr": {"options": yaml.safe_load("&a {x: *a}")}}}})


def test_options_come_back_from_a_recorded_config(tmp_path: Path) -> None:
    """JSON's 1e-7 is text to YAML: a sweep's run would have had another option, and another name, than its sweep."""
    options = {"small": 1e-7, "large": 1e22, "lines": "one\n\ttwo", "nested": {"list": [1, None, True, "é"]}}
    config = TrainConfig().with_changes({"reward": {"functions": {"ocr": {"options": options}}}})
    (tmp_path / "run.json").write_text(config.model_dump_json(exclude_unset=True))
    (tmp_path / "config.json").write_text(json.dumps(config.model_dump(mode="json")))
    for name in ("run.json", "config.json"):
        read = load_config(tmp_path / name)
        assert read.reward.functions["ocr"].options == options
        assert read.run_name == config.run_name


# ---- names

WRONG_NAMES = ["", " ", "a (v2)", "a,b", "x%", "../x", "a/b", ".", "a'b", "a\n", "-x", "x" * 101]


@pytest.mark.parametrize("name", WRONG_NAMES)
def test_a_name_that_mlflow_or_a_file_system_refuses_is_refused_at_once(name: str) -> None:
    refused = r"functions: .* is no name: give letters, digits and _ \. - : with blanks between"
    with pytest.raises(ConfigError, match=f"^reward.{refused}"):
        TrainConfig().with_changes({"reward": {"functions": {name: {"reward": "ocr"}}}})
    with pytest.raises(RecipeError, match=f"^m: reward.{refused}"):
        validate_section(Measurement, {"reward": {"functions": {name: {"reward": "ocr"}}}}, "m")
    with pytest.raises(RecipeError, match=r"^m: sets: .* is no name: give ASCII letters"):
        validate_section(Measurement, {"sets": {name: EVERYWHERE}}, "m")
    with pytest.raises(RecipeError, match=r"^s: name "):
        validate_section(SweepConfig, {"name": name, "space": SPACE}, "s")


def test_a_set_has_no_colon_and_only_ascii_which_mlflows_pictures_ask_for() -> None:
    for name in ("a:b", "é"):
        with pytest.raises(RecipeError, match="is no name: give ASCII letters"):
            validate_section(Measurement, {"sets": {name: EVERYWHERE}}, "m")


@pytest.mark.parametrize(
    ("experiment", "right"),
    [("doubleflow", True), ("/Users/a@b.org/x", True), ("", False), ("a'b", False), ("x" * 300, False), (" a", False)],
)
def test_names_of_experiments(experiment: str, right: bool) -> None:
    if right:
        assert TrainConfig().with_changes({"tracking": {"experiment": experiment}}).tracking.experiment == experiment
        return
    with pytest.raises(ConfigError, match=r"^tracking\.experiment: .* is no name"):
        TrainConfig().with_changes({"tracking": {"experiment": experiment}})


def test_mlflow_takes_the_longest_names_that_are_right(tmp_path: Path) -> None:
    """Of a reward and a set in one metric, with everything that stands between."""
    reward, prompts = "m.n:" + "Ré 9-" * 19 + "x", "Set_1. -" * 6 + "x"
    changes = {"reward": {"functions": {reward: {"reward": "ocr"}}}}
    TrainConfig().with_changes(changes)
    validate_section(Measurement, {"sets": {prompts: EVERYWHERE}} | changes, "m")
    client = MlflowClient(mlflow_in(tmp_path))
    run = client.create_run(client.create_experiment("e" * 200, str(tmp_path / "artifacts"))).info.run_id
    metric = f"val/{prompts}/steps_1000/true_cfg_scale_12.3457/reward/{reward}/mean"
    client.log_batch(run, metrics=[Metric(metric, 1.0, 0, 0)])
    assert client.get_run(run).data.metrics == {metric: 1.0}


# ---- odd input is answered in a sentence


@pytest.mark.parametrize("changes", [3, "x", [1], [("trainer", 1)], {1: 2}, {None: 1}])
def test_changes_that_are_no_mapping_are_refused(changes: Any) -> None:
    for use in (TrainConfig().with_changes, TrainConfig().left_behind):
        with pytest.raises(ConfigError, match=r"^the changes are .*; they should be a mapping of the sections data, "):
            use(changes)


@pytest.mark.parametrize("name", [["x"], {}, 3, None])
def test_an_algorithms_name_is_text(name: Any) -> None:
    with pytest.raises(ConfigError, match=r"^algorithm\.name is .*; known: flow_grpo"):
        TrainConfig().with_changes({"algorithm": {"name": name}})


@pytest.mark.parametrize(
    "value",
    [
        *("[1", "2020-13-45", '!!int ""', "!!bool x", "!!timestamp x", "!!python/object:os.system x", "="),
        *("!!binary x", "[" * 1000, "9" * 5000, "{[1]: 2}", "\0"),
    ],
)
def test_text_that_is_no_yaml_is_refused(value: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"^--set 'trainer\.seed=.* the value is not YAML: .") as refused:
        parse_changes([f"trainer.seed={value}"])
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400
    (tmp_path / "file.yaml").write_text(f"trainer: {{seed: {value}")
    with pytest.raises(RecipeError, match="is neither YAML nor JSON"):
        load_config(tmp_path / "file.yaml")


@pytest.mark.parametrize("settings", [["trainer=1", "trainer.seed=2"], ["trainer.seed=2", "trainer={device: cpu}"]])
def test_a_section_and_its_field_are_not_both_set_unless_the_section_comes_first(settings: list[str]) -> None:
    with pytest.raises(RecipeError, match=r"^--set 'trainer.* (is set to 1 as well|would undo 'trainer\.seed=2')"):
        parse_changes(settings)


def test_a_field_of_a_section_that_was_set_before_is_added_to_it() -> None:
    config = TrainConfig().with_changes(parse_changes(["trainer={seed: 1, nnodes: 2}", "trainer.seed=3"]))
    assert (config.trainer.seed, config.trainer.nnodes) == (3, 2)


@pytest.mark.parametrize("path", [":x", ".a:b", "..:b", "a:", "os:"])
def test_an_import_path_that_is_none_is_refused(path: str) -> None:
    with pytest.raises(RewardError, match=rf"^the reward '{re.escape(path)}' cannot be imported: "):
        check_reward(path)


@pytest.mark.parametrize("module", [".a", "..", "no_such_module"])
def test_a_module_that_cannot_be_imported_is_named(module: str) -> None:
    with pytest.raises(ValueError, match=rf"external_lib names '{re.escape(module)}', which cannot be imported: "):
        load_families(module)


# ---- what was right stays right


@pytest.mark.parametrize("name", PRESETS)
def test_every_named_algorithm_is_within_the_bounds(name: str) -> None:
    paired = {"sample_source": "offline"} if name == "dpo" else {}
    assert TrainConfig().with_changes({"algorithm": {"name": name} | paired}).algorithm.name == name
