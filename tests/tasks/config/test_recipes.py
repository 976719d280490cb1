# SPDX-License-Identifier: Apache-2.0
"""Every deployment of prefect.yaml is one that its flow would accept."""

import importlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from matplotlib import font_manager
from PIL import Image, ImageDraw, ImageFont
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools.validation import ValidationError, validate

from models.algorithms.advantages import _ADVANTAGES
from models.algorithms.losses import _LOSSES
from models.families.base import DiffusionModelBase
from models.schedulers.kernels import KERNELS
from tasks.config.common import CommonSettings, combined
from tasks.config.errors import ConfigError, RecipeError
from tasks.config.named_values import named_values, typed_value
from tasks.config.overrides import set_fields
from tasks.config.params import PrepareParams
from tasks.config.presets import PRESETS
from tasks.config.recipes import changed_recipe, load_config, load_recipe, parse_changes
from tasks.config.sweep import SweepConfig
from tasks.config.tree import NO_OVERRIDES, TrainConfig, TrainOverrides
from tasks.rewards import get_reward
from tasks.rewards.base import _REGISTRY
from tasks.system.distinct_names import plain_yaml

ROOT = Path(__file__).parents[3]
DATA_PAGE = (ROOT / "docs" / "data.md").read_text()
DEPLOYMENTS = {d["name"]: d for d in yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]}
NEEDS_MORE = {"reproduce": {"run": "0"}, "compare": {"run": "0", "against": "1"}}


@cache
def recipe_of(name: str) -> TrainConfig:
    """A recipe of the project; read once, as a config cannot be changed."""
    return load_recipe(name, ROOT / "prefect.yaml")


def flow_of(deployment: dict[str, Any]) -> Any:
    file, name = deployment["entrypoint"].split(":")
    return getattr(importlib.import_module(file.removesuffix(".py").replace("/", ".")), name)


@cache
def schema_of(entrypoint: str) -> dict[str, Any]:
    """What Prefect's form of a flow is made from; deployments of one flow have the same."""
    return parameter_schema(flow_of({"entrypoint": entrypoint}).fn).model_dump_for_openapi()


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_the_flow_accepts_the_deployments_parameters(name: str) -> None:
    deployment = DEPLOYMENTS[name]
    flow_of(deployment).validate_parameters(deployment.get("parameters", {}) | NEEDS_MORE.get(name, {}))


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_every_parameter_is_described(name: str) -> None:
    """What Prefect's form shows."""
    schema = schema_of(DEPLOYMENTS[name]["entrypoint"])
    fields = dict(schema["properties"])
    for section, definition in schema.get("definitions", {}).items():
        fields |= {f"{section}.{field}": entry for field, entry in definition.get("properties", {}).items()}
    assert [field for field, entry in fields.items() if not entry.get("description")] == []


def form_of(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameters and definitions of what Prefect's form of a deployment shows."""
    schema = schema_of(DEPLOYMENTS[name]["entrypoint"])
    return schema["properties"], schema["definitions"]


def test_the_form_begins_with_the_ten_fields_that_people_change_first() -> None:
    parameters, definitions = form_of("quickstart")
    assert sorted(parameters, key=lambda name: parameters[name]["position"]) == ["common", "config", "overrides"]
    fields = definitions["CommonSettings"]["properties"]
    assert len(fields) == 10
    assert {"total_training_steps", "seed", "lr", "train_batch_size", "model", "reward", "n_gpus_per_node"} <= {*fields}
    assert fields["lr"]["allOf"][0]["exclusiveMinimum"] == 0, "with the bounds of the field that it stands for"


def test_no_section_of_the_form_is_shown_as_none() -> None:
    parameters, definitions = form_of("quickstart")
    assert parameters["overrides"]["default"] == parameters["common"]["default"] == {}
    assert definitions["TrainConfigOverride"]["properties"]["trainer"]["$ref"].endswith("/TrainerConfigOverride")
    assert definitions["TrainerConfigOverride"]["properties"]["seed"]["allOf"][0]["type"] == "integer"
    for name in ("common", "overrides"):
        assert "anyOf" not in parameters[name], "below null or a section a wrong value has no field of its own"


def test_the_form_fills_in_nothing_that_may_be_left_out() -> None:
    """Prefect's sends false for a boolean, and the default of what has one, where nobody has touched it."""
    _, definitions = form_of("quickstart")
    offered = 0
    for name in [*(name for name in definitions if name.endswith("Override")), "CommonSettings"]:
        for field, entry in definitions[name]["properties"].items():
            choices = entry.get("anyOf", [entry])
            assert "default" not in entry or entry["default"] == {}, (name, field)
            assert choices[0].get("type") not in ("boolean", "null"), (name, field)
            below = choices[0].get("$ref", "").rpartition("/")[2]
            assert not below or below.endswith("Override"), (name, field)
            offered += True in entry.get("enum", ())
    assert offered > 30


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"trainer": {"seed": "many"}}, "'overrides.trainer.seed'. Failure reason: 'many' is not of type 'integer'"),
        ({"trainer": {"seed": 1.5}}, "1.5 is not of type 'integer'"),
        ({"actor_rollout_ref": {"actor": {"optim": {"lr": "low"}}}}, "'low' is not of type 'number'"),
        ({"trainer": {"val_before_train": "yes"}}, "'yes' is not one of [True, False]"),
        ({"trainer": {"total_training_steps": -1}}, "-1 is less than the minimum of 1"),
    ],
)
def test_a_value_of_another_type_is_refused_with_its_field_and_what_would_be_right(
    changes: dict[str, Any], told: str
) -> None:
    """By what Prefect's server looks at when a run is created."""
    parameters = DEPLOYMENTS["quickstart"]["parameters"] | {"overrides": changes}
    with pytest.raises(ValidationError, match=re.escape(told)):
        validate(parameters, schema_of(DEPLOYMENTS["quickstart"]["entrypoint"]), raise_on_error=True)


def shipped(registry: Mapping[str, Any]) -> set[str]:
    """Names of what the project itself has registered; other tests register more."""
    return {name for name, entry in registry.items() if entry.__module__.startswith(("models.", "tasks."))}


def test_the_form_offers_what_there_is_to_choose_from() -> None:
    """And lets through what somebody registers or names by its import path, but no unknown algorithm."""
    _, definitions = form_of("quickstart")

    def offered(section: str, field: str) -> Any:
        return definitions[f"{section}Override"]["properties"][field]

    for field in (offered("DiffusionAlgoConfig", "name"), definitions["CommonSettings"]["properties"]["algorithm"]):
        assert field["enum"] == [*PRESETS]
    registered = {
        ("DiffusionLossConfig", "loss_mode"): shipped(_LOSSES.entries),
        ("DiffusionAlgoConfig", "adv_estimator"): shipped(_ADVANTAGES.entries),
        ("DiffusionRolloutAlgoConfig", "sde_type"): shipped({name: k.step for name, k in KERNELS.items()}),
    }
    for (section, name), known in registered.items():
        ours, own = offered(section, name)["anyOf"]
        assert {*ours["enum"]} == known
        assert all(re.search(own["pattern"], text) for text in ("own_name", "package.module:object"))
    ours, own = definitions["CommonSettings"]["properties"]["reward"]["anyOf"]
    assert {*ours["enum"]} == shipped(_REGISTRY)
    assert re.search(own["pattern"], "package.module:object")
    assert not re.search(own["pattern"], "orc")


def test_the_first_ten_fields_and_the_overrides_change_a_recipe_together_but_not_twice() -> None:
    config, overrides = recipe_of("flow-grpo"), {"trainer": {"device": "cpu"}}
    common = CommonSettings(seed=7, lr=1e-5, reward="brightness", model="elsewhere")
    changed = config.with_changes(combined(common, TrainOverrides.model_validate(overrides)))
    assert (changed.trainer.seed, changed.actor_rollout_ref.actor.optim.lr) == (7, 1e-5)
    assert (list(changed.reward.functions), changed.actor_rollout_ref.model.path) == (["brightness"], "elsewhere")
    assert config.with_changes(combined(None, None)) == config.with_changes(combined(CommonSettings(), NO_OVERRIDES))
    with pytest.raises(ConfigError, match=r"trainer\.seed is given under common and under overrides"):
        combined(common, {"trainer": {"seed": 8}})
    with pytest.raises(ConfigError, match=r"reward\.functions is given under common and under overrides"):
        combined(common, {"reward": {"functions": {"ocr": {}}}})


def test_a_path_to_one_rewards_field_changes_no_other(tmp_path: Path) -> None:
    """By --set, on a recipe and on a file of overrides, and by a sweep; all rewards at once are other ones."""
    config, path = recipe_of("words"), "reward.functions.ocr.num_workers"
    ways = [parse_changes([f"{path}=2"], recipe=config), config.at_paths({path: 2})]
    for changed in map(config.with_changes, ways):
        rewards = changed.reward.functions
        assert (rewards["ocr"].num_workers, config.reward.functions["ocr"].num_workers) == (2, 14)
        assert rewards | {"ocr": None} == config.reward.functions | {"ocr": None}
        assert (rewards["ocr"].options, changed.digest()) == (config.reward.functions["ocr"].options, config.digest())
    file = tmp_path / "overrides.yaml"
    file.write_text("reward: {functions: {shapes: {weight: 2}}}")
    changed = config.with_changes(parse_changes(["reward.functions.shapes.num_workers=3"], [file], config))
    assert set_fields(changed.reward.functions["shapes"]) == {"weight": 2, "num_workers": 3}
    assert list(changed.reward.functions) == ["shapes"]
    for setting in ("reward.functions={ocr: {}}", "reward={functions: {ocr: {}}}"):
        changed = config.with_changes(parse_changes([setting, f"{path}=2"], recipe=config))
        assert {name: set_fields(reward) for name, reward in changed.reward.functions.items()} == {
            "ocr": {"num_workers": 2}
        }


@pytest.mark.parametrize(
    ("settings", "there"),
    [
        (["brightness.num_workers=2"], "ocr, tesseract, ink_and_paper"),
        (["brightness.options.low=1"], "ocr, tesseract, ink_and_paper"),
        (["ocr.num_workers=2", "brightness.num_workers=2"], "ocr, tesseract, ink_and_paper"),
        (["={shapes: {}}", "brightness.num_workers=2"], "shapes"),
    ],
)
def test_a_path_to_one_field_of_a_reward_that_is_not_there_adds_none(settings: list[str], there: str) -> None:
    """It would be trained on."""
    given = [f"reward.functions{'' if setting.startswith('=') else '.'}{setting}" for setting in settings]
    path = ".".join(given[-1].partition("=")[0].split(".")[:4])
    with pytest.raises(RecipeError) as refused:
        parse_changes(given, recipe=recipe_of("words"))
    assert str(refused.value) == (
        f"--set {path}: there is no reward brightness here, so this would add one and train on it with weight 1; there "
        f"are {there}: name one of them, or add it with its weight, as in reward.functions.brightness.weight=1"
    )


def test_a_path_cannot_name_a_reward_whose_label_has_dots() -> None:
    with pytest.raises(RecipeError, match=r"reward\.functions\.my has no field 'package:Reward'"):
        parse_changes(["reward.functions.my.package:Reward.num_workers=2"], recipe=recipe_of("words"))


def test_a_reward_is_added_by_paths_that_say_what_it_is_for(tmp_path: Path) -> None:
    """Or by all of it at once; a file's rewards are there, and no longer the recipe's."""
    recipe, path = recipe_of("words"), "reward.functions.brightness"
    for said in ("weight=1", "guard=true", "reward=brightness"):
        changed = recipe.with_changes(parse_changes([f"{path}.num_workers=2", f"{path}.{said}"], recipe=recipe))
        assert [*changed.reward.functions] == [*recipe.reward.functions, "brightness"]
        assert changed.reward.functions["brightness"].num_workers == 2
    for setting in (f"{path}={{num_workers: 2}}", "reward.functions={brightness: {num_workers: 2}}"):
        changed = recipe.with_changes(parse_changes([setting], recipe=recipe))
        assert changed.reward.functions["brightness"].num_workers == 2
    file = tmp_path / "overrides.yaml"
    file.write_text("reward: {functions: {brightness: {}}}")
    assert parse_changes([f"{path}.num_workers=2"], [file], recipe).reward.functions["brightness"].num_workers == 2
    with pytest.raises(RecipeError, match=r"there is no reward ocr here, .* there are brightness: name"):
        parse_changes(["reward.functions.ocr.num_workers=2"], [file], recipe)


OPTIONS, SCHEDULE = "reward.functions.ocr.options", "actor_rollout_ref.actor.optim"


def test_a_mapping_of_free_names_is_replaced_where_it_is_given_and_by_a_path_below_it_in_one_entry(
    tmp_path: Path,
) -> None:
    """By --set, in a file, by a deployment's overrides and by a sweep; the other rewards and options stay."""
    recipe = recipe_of("words")

    def options(*settings: str) -> dict[str, Any]:
        changed = recipe.with_changes(parse_changes([*settings], recipe=recipe))
        assert changed.reward.functions | {"ocr": None} == recipe.reward.functions | {"ocr": None}
        assert changed.reward.functions["ocr"].num_workers == 14
        return changed.reward.functions["ocr"].options

    both = {"upscale": 1, "rec_image_shape": [3, 48, 192]}
    assert options() == both
    assert options(f"{OPTIONS}={{}}") == options("reward.functions.ocr={options: {}}") == {}
    assert options(f"{OPTIONS}={{detect: true}}") == {"detect": True}
    assert options(f"{OPTIONS}.upscale=2") == both | {"upscale": 2}
    swept = recipe.with_changes(recipe.at_paths({f"{OPTIONS}.upscale": 2}))
    assert swept.reward.functions["ocr"].options == both | {"upscale": 2}

    scheduled = recipe.with_changes(
        {
            "actor_rollout_ref": {
                "actor": {"optim": {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2}}}
            }
        }
    )
    settings = [f"{SCHEDULE}.lr_scheduler_type=cosine", f"{SCHEDULE}.lr_scheduler_kwargs={{}}"]
    cosine = scheduled.with_changes(parse_changes(settings, recipe=scheduled)).actor_rollout_ref.actor.optim
    assert (cosine.lr_scheduler_kwargs, cosine.lr) == ({}, recipe.actor_rollout_ref.actor.optim.lr)
    file = tmp_path / "overrides.yaml"
    file.write_text("actor_rollout_ref: {actor: {optim: {lr_scheduler_kwargs: {lr_end: 0.0}}}}")
    for given, expected in (
        ([], {"lr_end": 0}),
        ([f"{SCHEDULE}.lr_scheduler_kwargs.power=3"], {"lr_end": 0, "power": 3}),
    ):
        changed = scheduled.with_changes(parse_changes(given, [file], scheduled))
        assert changed.actor_rollout_ref.actor.optim.lr_scheduler_kwargs == expected


def test_a_path_below_an_option_of_another_algorithm_takes_nothing_from_the_one_before() -> None:
    kernel = "actor_rollout_ref.rollout.algo"
    recipe = TrainConfig().with_changes(
        parse_changes([f"{kernel}.sde_type=a.b:c", f"{kernel}.sde_options={{x: 1, y: 2}}"])
    )
    same = parse_changes([f"{kernel}.sde_options.x=3"], recipe=recipe)
    assert recipe.with_changes(same).actor_rollout_ref.rollout.algo.sde_options == {"x": 3, "y": 2}
    other = parse_changes(["algorithm.name=dance_grpo", f"{kernel}.sde_options.x=3"], recipe=recipe)
    assert set_fields(other)["actor_rollout_ref"]["rollout"]["algo"]["sde_options"] == {"x": 3}


def test_a_number_without_a_dot_is_a_number_for_an_option_too() -> None:
    """YAML 1.1 takes 1e-3 for text, of which a typed field makes a number, and an option nothing."""
    options = "actor_rollout_ref.rollout.algo.sde_options"
    for text, number in (("1e-3", 1e-3), ("-2E+1", -20.0), ("5e2", 500.0), ("1.5e3", 1500.0), (".5e-1", 0.05)):
        changed = parse_changes([f"{options}.x={text}", f"{options}.y='{text}'"])
        assert changed.actor_rollout_ref.rollout.algo.sde_options == {"x": number, "y": text}
        assert named_values([f"x={text}"]) == {"x": number}
    assert parse_changes([f"{options}.x=e5"]).actor_rollout_ref.rollout.algo.sde_options == {"x": "e5"}


def test_a_file_of_overrides_and_a_config_read_numbers_as_a_setting_does(tmp_path: Path) -> None:
    """prefect.yaml is read as Prefect reads it: a recipe's option is the same by the command and by a deployment."""
    changes = {"actor_rollout_ref": {"rollout": {"algo": {"sde_options": {"x": "NUMBER", "y": "TEXT"}}}}}
    written = yaml.safe_dump(changes).replace("NUMBER", "1e-3").replace("TEXT", "'1e-3'")
    file = tmp_path / "changes.yaml"
    file.write_text(written)
    for config in (parse_changes([], [file]), load_config(file)):
        assert config.actor_rollout_ref.rollout.algo.sde_options == {"x": 1e-3, "y": "1e-3"}
    recipe = {"config": yaml.safe_load(written)}
    deployment = {"name": "own", "entrypoint": "flows/train.py:train", "parameters": recipe}
    project = tmp_path / "prefect.yaml"
    project.write_text(yaml.safe_dump({"deployments": [deployment]}).replace("'1e-3'", "1e-3"))
    assert load_recipe("own", project).actor_rollout_ref.rollout.algo.sde_options == {"x": "1e-3", "y": "1e-3"}


def test_a_section_that_says_nothing_of_the_rewards_leaves_them_to_a_path_below() -> None:
    recipe = recipe_of("words")
    settings = ["reward={max_missing_fraction: 0.5}", "reward.functions.ocr.num_workers=2"]
    changed = recipe.with_changes(parse_changes(settings, recipe=recipe)).reward
    assert changed.functions["ocr"].options == recipe.reward.functions["ocr"].options
    assert [*changed.functions] == [*recipe.reward.functions]


def test_a_runs_own_record_is_a_config_too(tmp_path: Path) -> None:
    """The one file of JSON in a run's folder."""
    config = recipe_of("words").with_changes(parse_changes(["trainer.seed=7"]))
    record = {"mlflow_run_id": "0a1b", "run_name": "words", "config": config.model_dump(mode="json")}
    (tmp_path / "run.json").write_text(json.dumps(record))
    assert load_config(tmp_path / "run.json") == config
    record["config"]["trainer"]["sead"] = 1
    (tmp_path / "run.json").write_text(json.dumps(record))
    with pytest.raises(RecipeError, match=r"run\.json: trainer has no field 'sead'"):
        load_config(tmp_path / "run.json")


def test_files_of_overrides_are_laid_over_one_another_in_the_order_given(tmp_path: Path) -> None:
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("trainer: {seed: 1, nnodes: 1}\nreward: {functions: {ocr: {}, shapes: {}}}")
    second.write_text("trainer: {seed: 2}\nreward: {functions: {shapes: {weight: 0.5}}}")
    both, turned = (set_fields(parse_changes([], files)) for files in ([first, second], [second, first]))
    assert (both["trainer"], turned["trainer"]) == ({"seed": 2, "nnodes": 1}, {"seed": 1, "nnodes": 1})
    assert [[*changes["reward"]["functions"]] for changes in (both, turned)] == [["shapes"], ["ocr", "shapes"]]
    assert parse_changes(["trainer.seed=3"], [first, second]).trainer.seed == 3


def test_what_a_reward_loses_where_all_are_replaced_is_known() -> None:
    config = recipe_of("words")
    lost = config.lost_of_rewards({"reward": {"functions": {"tesseract": {"guard": True, "options": {"upscale": 2}}}}})
    own = {"num_workers": 3, "training_share": 0.25}
    assert lost == {f"reward.functions.tesseract.{field}": value for field, value in own.items()}
    assert config.lost_of_rewards({"reward": {"functions": {"shapes": {}}}}) == {}
    assert config.lost_of_rewards(parse_changes(["trainer.seed=1"])) == config.lost_of_rewards(None) == {}


def test_a_sweeps_dimensions_are_fields_of_its_config() -> None:
    search = SweepConfig.model_validate(DEPLOYMENTS["sweep"]["parameters"]["search"])
    parameters = recipe_of("flow-grpo").model_dump()
    for path in search.space:
        node: Any = parameters
        for part in path.split("."):
            node = node[part]


# ---- docs/recipes.md: each recipe of real size beside its public original

PAGE = (ROOT / "docs/recipes.md").read_text()
SECTIONS = dict(re.findall(r"^## `([\w-]+)`$(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
REAL_SIZE = [name for name, d in DEPLOYMENTS.items() if "gpu" in d["tags"]]
ELSEWHERE = (  # where and how fast a recipe runs, and what it measures and keeps on the way
    "data.name",
    "actor_rollout_ref.model.path",
    "actor_rollout_ref.model.compile",
    "actor_rollout_ref.rollout.micro_batch_size",
    "actor_rollout_ref.rollout.num_actors",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    "actor_rollout_ref.actor.fsdp_config.",
    "algorithm.name",
    "reward.functions.ocr.num_workers",
    "reward.functions.ocr.batch_size",
    "ray_init.",
    "trainer.",
)


def rows_of(recipe: str) -> Iterator[tuple[str, str, str, str, str]]:
    """(field path, ours, theirs, where, why) of a recipe's table."""
    for line in SECTIONS[recipe].splitlines():
        if line.startswith("| `"):
            field, ours, theirs, where, why = (cell.strip() for cell in line.strip().strip("|").split("|"))
            path = field.strip("`")
            prefix = "actor_rollout_ref." if path.partition(".")[0] in ("model", "rollout", "actor") else ""
            yield prefix + path, ours.strip("`"), theirs, where, why


def value_at(tree: Any, path: str) -> Any:
    for part in path.split("."):
        tree = tree[part]
    return tree


def leaves(tree: Any, path: str = "") -> Iterator[str]:
    """Paths of the fields that a recipe sets; a reward's options are one field."""
    for name, value in tree.items():
        inner = f"{path}.{name}".lstrip(".")
        if isinstance(value, dict) and name != "options":
            yield from leaves(value, inner)
        else:
            yield inner


def test_every_recipe_of_real_size_has_its_table() -> None:
    assert set(REAL_SIZE) == {*SECTIONS}
    assert len(REAL_SIZE) == 7


def test_the_recipes_that_draw_fewer_pictures_are_those_that_the_page_names() -> None:
    """Each row's first setting, `path: value`; off is its default."""
    section = (ROOT / "docs" / "algorithms.md").read_text().split("## Fewer images")[1].split("\n## ")[0]
    head, table = section.split("\n|", 1)
    settings = re.findall(r"^\|[^|]*\| `([a-z_.]+): ([^`]+)`(?: with `([a-z_]+): ([^`]+)`)?", f"|{table}", re.MULTILINE)
    assert len(settings) == 6
    on: dict[str, list[str]] = {}
    for recipe, deployment in DEPLOYMENTS.items():
        if deployment["entrypoint"].startswith("flows/train.py"):
            tree = recipe_of(recipe).model_dump(mode="json")
            for path, value, beside, other in settings:
                prefix = "" if path.startswith("algorithm.") else "actor_rollout_ref."
                field = f"{path.rpartition('.')[0]}.{beside}" if beside else path
                wanted, found = yaml.safe_load(other or value), value_at(tree, prefix + field)
                if found == wanted or (wanted == "K" and found is not None):
                    on.setdefault(recipe, []).append(field.rpartition(".")[2])
    assert on == {recipe: names for recipe, *names in [re.findall(r"`(\w+)`", head)]}


def data_set_rows() -> dict[str, list[str]]:
    """`data.name` -> the other cells of the data page's table, without their marks."""
    section = DATA_PAGE.split("### The recipes' data sets")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:3] == "| `"]
    return {row[0].strip("`"): [cell.replace("`", "") for cell in row[1:]] for row in rows[1:]}


@pytest.mark.parametrize("recipe", REAL_SIZE)
def test_the_data_page_says_how_a_recipes_data_set_is_made(recipe: str) -> None:
    policy, rows = recipe_of(recipe).actor_rollout_ref, data_set_rows()
    (name,) = (name for name, row in rows.items() if recipe in row[-1].split(", "))
    _, model, adapter, length, negative, _ = rows[name]
    assert recipe_of(recipe).data.name == name
    assert model == policy.model.path
    assert policy.rollout.pipeline.max_sequence_length in (int(length), None)
    family = adapter.removesuffix(".py").replace("/", ".")
    classes = [cls for cls in vars(importlib.import_module(family)).values() if isinstance(cls, type)]
    (own,) = (cls for cls in classes if issubclass(cls, DiffusionModelBase) and cls.__module__ == family)
    assert negative == f'"{own.negative_prompt}"'


def test_an_entry_of_the_data_page_is_one_that_params_yaml_may_hold() -> None:
    """As it stands in its first row's place, and with the values of any other."""
    written = yaml.safe_load(DATA_PAGE.split("```yaml\n")[1].split("```")[0])["data_sets"]
    ((first, entry),) = written.items()
    rows = data_set_rows()
    assert [first] == [*rows][:1]
    assert [entry["embeddings"][key] for key in ("model", "adapter")] == rows[first][1:3]
    assert entry["embeddings"]["max_sequence_length"] == int(rows[first][3])
    params = yaml.safe_load((ROOT / "params.yaml").read_text())
    for name, (_, model, adapter, length, *_) in rows.items():
        embeddings = entry["embeddings"] | {"model": model, "adapter": adapter, "max_sequence_length": int(length)}
        params["data_sets"][name] = entry | {"folder": f"data/{name}", "embeddings": embeddings}
    assert rows.keys() <= PrepareParams.model_validate(params).data_sets.keys()


@pytest.mark.parametrize("recipe", REAL_SIZE)
def test_the_tables_say_what_the_recipes_say(recipe: str) -> None:
    """Our column is the recipe's, the original has a file and a line, and what differs has a reason."""
    config = recipe_of(recipe).model_dump(mode="json")
    for path, ours, theirs, where, why in rows_of(recipe):
        assert yaml.safe_load(ours) == value_at(config, path), path
        assert re.fullmatch(r"`[\w./]+:\d+`", where), (path, where)
        assert (theirs == "the same") == (why == ""), path
        assert theirs == "the same" or yaml.safe_load(theirs.strip("`")) != value_at(config, path), path


@pytest.mark.parametrize("recipe", REAL_SIZE)
def test_the_tables_leave_no_field_out(recipe: str) -> None:
    shown = [path for path, *_ in rows_of(recipe)]
    given = {p for p in leaves(DEPLOYMENTS[recipe]["parameters"]["config"]) if not p.startswith(ELSEWHERE)}
    assert given - {*shown} == set()
    assert len(shown) == len({*shown})
    assert "trainer.total_training_steps" in shown


# ---- the rewards


@dataclass(frozen=True)
class Wanted:
    """A prompt whose picture should show `target`."""

    target: str
    prompt: str = ""
    metadata: Any = None


@cache
def ocr_of(name: str, options: str) -> Any:
    """The reward of a recipe; recipes that share name and options share it."""
    return get_reward(name, **yaml.safe_load(options))


def reward_of(recipe: str) -> Any:
    named = recipe_of(recipe).reward.named().values()
    (entry,) = [entry for entry in named if not entry[1].guard]
    return ocr_of(entry[0], yaml.safe_dump(entry[1].options))


def picture_of(text: str, letters: int, height: int, width: int) -> np.ndarray:
    """The text in the middle of a light picture, letters of so many pixels."""
    picture = Image.new("RGB", (width, height), (200, 220, 240))
    font = ImageFont.truetype(font_manager.findfont("DejaVu Sans"), letters)
    ImageDraw.Draw(picture).text((width / 2, height / 2), text, font=font, fill=(20, 20, 60), anchor="mm")
    return np.asarray(picture)


TEXTS = {
    "gpu": [("OPEN 24 HOURS", 40), ("Hello World", 64), ("COFFEE", 120)],
    "one-gpu": [("orava", 34), ("bakapu", 38), ("acotugu", 42)],  # of the words model's pictures
    "cpu": [("472", 18), ("905", 20), ("138", 22)],  # of the tiny model's
}
SAMPLED = [name for name, d in DEPLOYMENTS.items() if d["entrypoint"].startswith("flows/train.py:")]


@pytest.mark.parametrize("recipe", SAMPLED)
def test_a_recipes_reward_knows_a_perfect_picture_from_an_empty_one(recipe: str) -> None:
    """At the recipe's own size."""
    pipeline = recipe_of(recipe).actor_rollout_ref.rollout.pipeline
    size, texts = (pipeline.height, pipeline.width), DEPLOYMENTS[recipe]["tags"][1]
    perfect, empty = scores_of(reward_of(recipe), texts, *size, video=pipeline.num_frames is not None)
    assert perfect > 0.95
    assert empty < 0.05


@cache
def scores_of(reward: Any, name: str, height: int, width: int, video: bool) -> tuple[float, float]:
    """The lowest score of perfect pictures and the highest of an empty one; recipes that share all of it share them."""
    texts = TEXTS[name]
    perfect = np.stack([picture_of(text, letters, height, width) for text, letters in texts])
    wanted = [Wanted(text) for text, _ in texts]
    scores = [*reward(perfect, wanted).scores]
    if video:
        scores += [*reward(np.repeat(perfect[:1, None], 2, axis=1), wanted[:1]).scores]
    return min(scores), max(reward(np.full((1, height, width, 3), 127, np.uint8), wanted[:1]).scores)


@pytest.mark.parametrize("recipe", REAL_SIZE)
def test_another_text_scores_less(recipe: str) -> None:
    pipeline = recipe_of(recipe).actor_rollout_ref.rollout.pipeline
    other = picture_of("Hello Moon", 64, pipeline.height, pipeline.width)[None]
    assert 0.3 < reward_of(recipe)(other, [Wanted("Hello World")]).scores[0] < 0.8


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.yaml", "trainer: {seed: 1}\ndata: {}\ntrainer: {save_freq: 2}", "'trainer' stands there twice in line 3"),
        ("a.json", '{"trainer": {"seed": 1, "seed": 2}}', "'seed' stands there twice"),
        ("a.yaml", "trainer.seed: 1", "'trainer.seed' is one name with dots: .* as in trainer: {seed: ...}"),
    ],
)
def test_what_a_file_says_twice_or_with_dots_is_refused(tmp_path: Path, name: str, content: str, sentence: str) -> None:
    """Of two sections of one name the first was lost, without a word."""
    (tmp_path / name).write_text(content)
    with pytest.raises(RecipeError, match=sentence):
        parse_changes([], [tmp_path / name])
    with pytest.raises(RecipeError, match="'ocr' stands there twice"):
        parse_changes(["reward.functions={ocr: {weight: 1}, ocr: {}}"])


def test_what_is_merged_may_stand_there_once_more() -> None:
    assert plain_yaml("base: &base {seed: 1}\ntrainer: {<<: *base, seed: 2}")["trainer"] == {"seed": 2}


def test_what_is_merged_may_have_been_merged_itself_before_its_turn_comes() -> None:
    """PyYAML puts what a mapping merges among the mapping's own names as soon as another one merges that."""
    text = "a: &a {x: 0, y: 2}\nouter:\n  base: &b {<<: *a, x: 1}\nother: {<<: *b}"
    assert plain_yaml(text) == yaml.safe_load(text)
    with pytest.raises(yaml.YAMLError, match="'x' stands there twice"):
        plain_yaml(text.replace("x: 1", "x: 1, x: 3"))
    assert plain_yaml("{'1': 1, 1: 2}") == {"1": 1, 1: 2}


@pytest.mark.parametrize(("text", "value"), [("010", "010"), ("1:30", "1:30"), ("0.5_2", "0.5_2"), ("-.5", -0.5)])
def test_numbers_are_those_of_yaml_1_2(text: str, value: object) -> None:
    """By 1.1 these are 8, 90 and 0.52."""
    assert typed_value(text) == value


@pytest.mark.parametrize(
    ("path", "number"),
    [
        ("actor_rollout_ref.rollout.num_gpus_per_actor", 1.5),
        ("reward.functions.ocr.num_gpus", 2.5),
        ("data.text_encoder.num_gpus", 0.00001),
    ],
)
def test_gpus_that_ray_cannot_give_are_refused(path: str, number: float) -> None:
    with pytest.raises(RecipeError, match=f"{number:g} GPUs cannot be given: take a share of one"):
        parse_changes([f"{path}={number:.6f}"])


def test_a_rollout_worker_on_cuda_has_a_gpu() -> None:
    rollout = {"num_gpus_per_actor": 0}
    for device, refused in (("cuda", True), ("cpu", False)):
        with pytest.raises(ValueError, match="num_gpus_per_actor is 0, but") if refused else nullcontext():
            TrainConfig.model_validate({"actor_rollout_ref": {"rollout": rollout}, "trainer": {"device": device}})


@pytest.mark.parametrize(
    ("workers", "share", "reward", "gpus"),
    [
        (4, 0.6, 0.0, 5),  # no two of these are on one GPU: with the rank's that is five, and not 3.4
        (2, 0.5, 0.0, 2),
        (3, 1 / 3, 0.0, 2),
        (1, 0.5, 0.5, 2),
        (1, 0.7, 0.5, 2.2),
        (1, 0.25, 0.5, 1.75),
        (2, 1.0, 2.0, 5),
    ],
)
def test_a_share_of_a_gpu_is_of_one_gpu(workers: int, share: float, reward: float, gpus: float) -> None:
    """Ray would wait for ever for workers that it has the sum of GPUs for."""
    rollout = {"num_actors": workers, "num_gpus_per_actor": share}
    config = TrainConfig.model_validate(
        {
            "actor_rollout_ref": {"rollout": rollout},
            "reward": {"functions": {"ocr": {"num_gpus": reward}}},
            "trainer": {"device": "cuda"},
        }
    )
    assert config.gpus_needed() == pytest.approx(gpus)
    assert config.gpus_needed(trains=False) == pytest.approx(gpus - 1)


# ---- machines/: overrides for a machine whose GPUs rollout and update share, mostly fewer than a recipe is written for


@pytest.mark.parametrize("recipe", REAL_SIZE)
@pytest.mark.parametrize(("machine", "gpus"), [("one_h200", 1), ("two_h200", 2), ("four_h200", 4), ("eight_h200", 8)])
def test_a_recipe_of_real_size_becomes_one_for_shared_gpus(recipe: str, machine: str, gpus: int) -> None:
    """As the command line and as a deployment's parameter read the file; what shapes the run stays as it is."""
    file, config = ROOT / f"machines/{machine}.json", recipe_of(recipe)
    changed = config.with_changes(parse_changes(["trainer.seed=7"], [file]))
    assert changed.gpus_needed() == gpus
    # On one GPU the weights need not go by way of the host.
    assert changed.actor_rollout_ref.rollout.weight_transport == "ipc"
    assert changed.trainer.seed == 7
    assert config.gpus_needed() == 8
    assert config.with_changes(TrainOverrides.model_validate_json(file.read_text())).digest() == config.digest()


@pytest.mark.parametrize("name", ["sd35-ocr-flow-grpo", "qwen-image-ocr-flow-grpo-lora"])
def test_whole_frozen_weights_stay_in_the_models_own_format(name: str) -> None:
    """FSDP casts what it has, so that the first product would be of two formats."""
    sharding = "actor_rollout_ref.actor.fsdp_config"
    said = "param_dtype is bfloat16 and shard_frozen is false, .* leave param_dtype out, set it to float32, or set"
    with pytest.raises(ConfigError, match=said):
        changed_recipe(name, ["actor_rollout_ref.model.dtype=float32"])
    for change in (f"{sharding}.shard_frozen=true", f"{sharding}.param_dtype=float32"):
        changed_recipe(name, ["actor_rollout_ref.model.dtype=float32", change])
