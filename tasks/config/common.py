# SPDX-License-Identifier: Apache-2.0
"""The ten fields of a recipe that people change first, as a section that Prefect's form shows before all others."""

from typing import Any, cast

from pydantic import BaseModel, Field, create_model
from pydantic.fields import FieldInfo

from models.config.bounds import RewardName
from models.config.section import IMPORT_PATH, choices
from tasks.config.errors import ConfigError
from tasks.config.overrides import Form, flat, left_out, merged, set_fields
from tasks.config.presets import tree_of
from tasks.config.tree import TrainConfig

PATHS = {
    "experiment_name": "trainer.experiment_name",
    "total_training_steps": "trainer.total_training_steps",
    "seed": "trainer.seed",
    "lr": "actor_rollout_ref.actor.optim.lr",
    "train_batch_size": "data.train_batch_size",
    "n": "actor_rollout_ref.rollout.n",
    "algorithm": "algorithm.name",
    "model": "actor_rollout_ref.model.path",
    "n_gpus_per_node": "trainer.n_gpus_per_node",
}
"""Name here -> the field that it changes."""
REWARDS = (
    *(
        "ocr",
        "by_data_source",
        "tesseract",
        "ink_and_paper",
        "shapes",
        "geneval",
        "clip_score",
        "clip_preference",
        "pickscore",
        "hps",
        "hpsv3",
        "aesthetic",
        "image_reward",
    ),
    *("judge_ocr", "judge_grade", "remote", "remote_video", "remote_latents"),
    *("jpeg_compressibility", "jpeg_incompressibility", "brightness"),
)
"""Those that are registered; this module is read where their own are not imported."""


def field_at(path: str) -> FieldInfo:
    """The field of the config at a dotted path."""
    *sections, leaf = path.split(".")
    section: type[BaseModel] = TrainConfig
    for name in sections:
        section = cast(type[BaseModel], section.model_fields[name].annotation)
    return section.model_fields[leaf]


def _reward() -> tuple[Any, Any]:
    offered = choices(*REWARDS, own=IMPORT_PATH)

    def shown(schema: dict[str, Any]) -> None:
        schema.pop("default", None)
        offered(schema)

    said = "One reward with its own defaults, in place of the recipe's: a registered name or package.module:object."
    return RewardName, Field(default=None, description=said, json_schema_extra=shown)


FIELDS: dict[str, Any] = {name: left_out(field_at(path)) for name, path in PATHS.items()}
CommonSettings: Any = create_model(
    "CommonSettings",
    __base__=Form,
    __doc__="What people change first; each field stands for one of the config, see its description.",
    **FIELDS | {"reward": _reward()},
)


def combined(common: Any, overrides: Any) -> dict[str, Any]:
    """The changes of both, as a mapping of the config's fields.

    Raises:
        ConfigError: both change the same field.
    """
    first, rest = set_fields(common or {}), set_fields(overrides or {})
    tree = tree_of({PATHS[name]: value for name, value in first.items() if name != "reward"})
    if "reward" in first:
        tree["reward"] = {"functions": {first["reward"]: {}}}
    both = flat(tree).keys() & flat(rest).keys()
    if both or ("reward" in first and "functions" in rest.get("reward", {})):
        twice = ", ".join(sorted(both)) or "reward.functions"
        raise ConfigError(f"{twice} is given under common and under overrides: give it once")
    return merged(tree, rest, TrainConfig)
