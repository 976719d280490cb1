# SPDX-License-Identifier: Apache-2.0
"""What scores here as the reward functions of VeRL-Omni's files do, and what it needs."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from models.config.section import IMPORT_PATH
from tasks.config.common import REWARDS as REGISTERED
from tasks.config.migration.outcome import Elsewhere, Given, Outcome, Problem, Taken, folder_of
from tasks.config.tree import REWARDS

PACKAGE = "verl_omni"
PLACE_HOLDER = "placeholder"
MANAGERS = "reward_manager"
"""In the names of their files that add rewards up and score nothing."""
JUDGE = "reward.reward_model.model_path"
STARTED = "reward.reward_model.enable"
NAMING = ("reward.custom_reward_function.", "reward.reward_functions.", "reward_fn")
"""How the paths begin with which a script names its reward."""


@dataclass(frozen=True)
class Scorer:
    """A reward of ours, for one of theirs.

    Attributes:
        reward: its registered name.
        options: what it must be given, among them where the weights are expected.
        note: what is to be done before it can score.
        asks: the hub id of the model that it asks where the script names none; None asks none.
        option_names: what options of that function are called here.
    """

    reward: str
    options: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    asks: str | None = None
    option_names: Mapping[str, str] = field(default_factory=dict)


CLIP = "data/clip_vit_large_patch14"
PICKSCORE = {"model": "data/pickscore_v1", "processor": "data/clip_vit_h_14_laion2b_s32b_b79k"}
SCORERS: dict[str, Scorer] = {
    "jpeg_compressibility": Scorer("jpeg_compressibility"),
    "ocr": Scorer("ocr"),
    "genrm_ocr": Scorer("judge_ocr", asks="", note="or use ocr, which reads on the CPU"),
    "unified_reward": Scorer("judge_grade", asks="CodeGoat24/UnifiedReward-2.0-qwen3vl-2b"),
    "pickscore": Scorer("pickscore", PICKSCORE, "its weights and its processor are to be in these folders"),
    "pickscore_reward": Scorer(
        "pickscore",
        PICKSCORE | {"divide_by": 26.0},
        "yuvalkirstain/PickScore_v1 and laion/CLIP-ViT-H-14-laion2B-s32B-b79K are to be in these folders",
    ),
    "hpsv3_reward": Scorer(
        "hpsv3",
        {"model": "data/hpsv3", "head": "data/hpsv3_head.safetensors"},
        "its weights are to be there in two parts, and its instruction as options.template: docs/rewards.md",
    ),
    "hpsv2": Scorer("hps", {"model": "data/hpsv2"}, "its weights are to be there as a CLIPModel: docs/rewards.md"),
    "clip_score": Scorer("clip_score", {"model": CLIP}, "openai/clip-vit-large-patch14 is to be there"),
    "aesthetic": Scorer(
        "aesthetic",
        {"model": CLIP, "head": "data/aesthetic.safetensors"},
        "openai/clip-vit-large-patch14 and the predictor's head are to be there: docs/rewards.md",
    ),
    "image_reward": Scorer(
        "image_reward",
        {"model": "data/image_reward", "head": "data/image_reward_head.safetensors"},
        "its weights are to be there in two parts: docs/rewards.md",
    ),
    "http_scorer_client": Scorer(
        "remote",
        note="that server speaks pickle, ours JSON: host its reward with `python -m tasks.rewards.serve` at this url",
        option_names={"server_url": "url"},
    ),
}
"""Stem of a file's name -> what scores as its function does."""

FIELDS = {"weight": "weight", "required": "required", "timeout": "timeout_s", "max_retries": "retries"}
"""Of an entry of `reward.reward_functions`, what each is called in one of `reward.functions`."""


def custom_function(path: str, value: Any, given: Given) -> Outcome:
    """What becomes of the one reward: its file and the function in it."""
    file, function = given.get("reward.custom_reward_function.path"), given.get("reward.custom_reward_function.name")
    if PLACE_HOLDER in str(function):
        return Elsewhere("only holds a place: the rewards are those of reward.reward_functions")
    if path.endswith(".name"):
        return Elsewhere("named by its path")
    if file is None:
        return Problem("the script names no reward: name one under reward.functions")
    return _scored_by("reward", str(file), function, given)


def entry(path: str, value: Any, given: Given) -> Outcome:
    """`reward.reward_functions.<name>.<field>`."""
    name, _, option = path.removeprefix("reward.reward_functions.").partition(".")
    if not option:
        return Problem(f"it is {value!r}, and should be a section: give {path}.path, .name and .weight")
    if option == "path":
        return _scored_by(name, str(value), given.get(f"reward.reward_functions.{name}.name"), given)
    if option == "name":
        return Elsewhere("named by its path")
    if option in FIELDS:
        return Taken({f"{REWARDS}.{name}.{FIELDS[option]}": value})
    scorer = SCORERS.get(_module(str(given.get(f"reward.reward_functions.{name}.path"))).rpartition(".")[2])
    if scorer is not None and option in scorer.option_names:
        return Taken({f"{REWARDS}.{name}.options.{scorer.option_names[option]}": value})
    return Elsewhere(f"an option of that function: reward.functions.{name}.options, where the reward takes it")


def judge(path: str, value: Any, given: Given) -> Outcome:
    """The model that is served beside the run, which a function of one's own may ask."""
    if given.get(STARTED) is not True:
        return Elsewhere(f"{STARTED} is not true, so no model is served")
    files = _files(given)
    if not files:
        own = {f"{REWARDS}.reward.reward": "reward_model"}  # refused by the run
        return Problem("the script's reward is that model itself: name one that asks it under reward.functions", own)
    if not _is_asked(files):
        return Elsewhere("no reward of the script asks it")
    if not value:
        return Problem(f"it is {value!r}: name the folder of the model that the reward asks")
    return _served(str(value))


def untrained(told: Iterable[str], config: Mapping[str, Any]) -> str | None:
    """That the script has a reward and the recipe none, or one that is no reward, in a sentence; `told`: the paths."""
    functions = config.get("reward", {}).get("functions", {})
    if not functions and any(path.startswith(NAMING) for path in told):
        return "the script's reward has no counterpart here: name one under reward.functions (docs/rewards.md)"
    for label, settings in functions.items():
        name = settings.get("reward") or label
        if name not in REGISTERED and not re.match(IMPORT_PATH, str(name)):
            return f"there is no reward {name}: name one under {REWARDS}.{label}.reward (docs/rewards.md)"
    return None


def _files(given: Given) -> list[str]:
    """Where the script's reward functions are."""
    named = [(path, str(file)) for path, file in given.items() if path.startswith(NAMING) and path.endswith(".path")]
    return [file for _, file in named if MANAGERS not in file]


def _is_asked(files: Iterable[str]) -> bool:
    """Is there a function that asks the served model, or may, being one of another's own?"""
    scorers = [SCORERS.get(_module(file).rpartition(".")[2]) for file in files]
    return any(scorer is None or scorer.asks is not None for scorer in scorers)


def _served(model: str) -> Taken:
    folder = folder_of(model)
    note = f"the run serves it from a folder: download {model} to it" if folder else "the run serves it from a folder"
    return Taken({JUDGE: folder or model}, f"{note}, and say on how many GPUs as reward.reward_model.num_gpus")


def _scored_by(name: str, file: str, function: Any, given: Given) -> Outcome:
    module = _module(file)
    scorer = SCORERS.get(module.rpartition(".")[2])
    its_own = f"{module}:{function or 'compute_score'}"
    label = f"{REWARDS}.{name}"
    if scorer is None:
        if PACKAGE not in file and re.match(IMPORT_PATH, its_own):
            return Taken({f"{label}.reward": its_own}, "as it is; its file is to be on PYTHONPATH")
        return Problem(
            f"the script's reward {its_own} is not here: name one under reward.functions, or that function in a file "
            "of yours with its imports changed (docs/rewards.md)",
            {f"{label}.reward": its_own},  # refused by the run, unless it can be imported and is that reward
        )
    settings = {f"{label}.reward": scorer.reward}
    settings |= {f"{label}.options.{option}": value for option, value in scorer.options.items()}
    for theirs in scorer.option_names:
        if given.get(f"reward.reward_functions.{name}.{theirs}") is None:
            return Problem(f"the script's reward {its_own} has no {theirs}: give its server's address", settings)
    if scorer.asks is None:
        return Taken(settings, scorer.note)
    model = given.get(JUDGE) or scorer.asks
    if not model:
        return Problem(f"the script's reward {its_own} asks a model: name its folder as {JUDGE}", settings)
    served = _served(str(model))
    return Taken(settings | served.settings, "; ".join(filter(None, (served.note, scorer.note))))


def _module(file: str) -> str:
    """The module of a file, by its name alone, or of `pkg://a.b`."""
    return file.removeprefix("pkg://") if file.startswith("pkg://") else PurePosixPath(file).stem
