# SPDX-License-Identifier: Apache-2.0
"""A VeRL-Omni script's rewards: those that are trained on here are the script's, or the recipe is not valid."""

from typing import Any

import pytest

from tasks.config.migration.flow_grpo import FLOW_GRPO
from tasks.config.migration.rewards import SCORERS, Scorer
from tasks.config.migration.script import Override, read_overrides
from tasks.config.migration.translate import Translation, translate
from tasks.rewards import check_reward, known_rewards

RUN = "data.train_batch_size=256\nactor_rollout_ref.rollout.n=16\n"
CUSTOM = "reward.custom_reward_function.path={}\nreward.custom_reward_function.name=compute_score\n"
ENTRY = "+reward.reward_functions.{name}.path={path}\n+reward.reward_functions.{name}.name=compute_score\n"
PACKAGE = "verl_omni/utils/reward_score"


def made(script: str) -> Translation:
    return translate(read_overrides(RUN + script))


def functions(one: Translation) -> dict[str, Any]:
    return one.config["reward"]["functions"]


@pytest.mark.parametrize(
    ("file", "reward", "options"),
    [
        ("pickscore_reward", "pickscore", {"divide_by": 26.0}),
        ("hpsv3_reward", "hpsv3", {"head": "data/hpsv3_head.safetensors"}),
        ("jpeg_compressibility", "jpeg_compressibility", {}),
    ],
)
def test_a_custom_reward_is_trained_on(file: str, reward: str, options: dict[str, Any]) -> None:
    one = made(CUSTOM.format(f"{PACKAGE}/{file}.py"))
    assert one.problem is None
    assert functions(one)["reward"]["reward"] == reward
    assert options.items() <= functions(one)["reward"].get("options", {}).items()


@pytest.mark.parametrize(("file", "reward"), [("unified_reward", "judge_grade"), ("genrm_ocr", "judge_ocr")])
def test_a_judge_comes_with_its_model(file: str, reward: str) -> None:
    served = "reward.reward_model.enable=True\nreward.reward_model.model_path=Some/Judge-7B\n"
    one = made(CUSTOM.format(f"{PACKAGE}/{file}.py") + served)
    assert one.problem is None
    assert functions(one)["reward"] == {"reward": reward}
    assert one.config["reward"]["reward_model"] == {"model_path": "data/judge_7b"}


def test_a_judge_without_a_model_takes_theirs_or_is_a_problem() -> None:
    own = made(CUSTOM.format(f"{PACKAGE}/unified_reward.py"))
    assert own.problem is None
    assert own.config["reward"]["reward_model"] == {"model_path": "data/unifiedreward_2.0_qwen3vl_2b"}
    none = made(CUSTOM.format(f"{PACKAGE}/genrm_ocr.py"))
    assert "asks a model: name its folder as reward.reward_model.model_path" in str(none.problem)


def test_the_model_that_a_function_of_ones_own_asks_is_served() -> None:
    served = "reward.reward_model.enable=True\nreward.reward_model.model_path=/models/judge\n"
    one = made(CUSTOM.format("my/grading.py") + served)
    assert one.config["reward"] == {
        "functions": {"reward": {"reward": "grading:compute_score"}},
        "reward_model": {"model_path": "/models/judge"},
    }
    asked_by_none = made(CUSTOM.format(f"{PACKAGE}/jpeg_compressibility.py") + served)
    assert "reward_model" not in asked_by_none.config["reward"]


def test_a_reward_server_is_one_of_ours() -> None:
    entry = ENTRY.format(name="ocr", path="pkg://verl_omni.utils.reward_score.http_scorer_client")
    one = made(entry + "+reward.reward_functions.ocr.weight=0.5\n+reward.reward_functions.ocr.server_url=http://a:1\n")
    assert one.problem is None
    assert functions(one) == {"ocr": {"reward": "remote", "options": {"url": "http://a:1"}, "weight": 0.5}}
    assert "`python -m tasks.rewards.serve`" in " ".join(line.text for line in one.lines)
    assert "has no server_url" in str(made(entry).problem)


@pytest.mark.parametrize(
    "path", ["pkg://verl_omni.utils.reward_score.latent_http_scorer_client", f"{PACKAGE}/clap.py", "$SCORER"]
)
def test_a_reward_that_is_not_here_is_a_problem_and_no_other_is_trained_on(path: str) -> None:
    one = made(ENTRY.format(name="ocr", path=path) + "+reward.reward_functions.ocr.weight=1\n")
    assert "is not here: name one under reward.functions" in str(one.problem)
    assert {line.kind for line in one.lines if line.override.path.endswith("ocr.path")} == {"problem"}
    assert functions(one)["ocr"]["reward"].endswith(":compute_score"), "`ocr` alone would be the local one"
    custom = made(CUSTOM.format(path))
    assert "is not here: name one under reward.functions" in str(custom.problem)
    assert functions(custom)["reward"]["reward"] not in known_rewards()


@pytest.mark.parametrize(
    ("name", "theirs", "ours"),
    [("clipscore", 100 * 0.24 / 30, 0.24), ("jpeg_compressibility", -40 / 500, -40), ("pickscore", 0.85, 0.85)],
)
def test_a_reward_of_flow_grpo_weighs_what_it_does_there(name: str, theirs: float, ours: float) -> None:
    """Each in its own unit, of the same picture: with any other weight another sum of rewards would be trained on."""
    one = translate([Override("reward_fn", {name: 0.7})], FLOW_GRPO)
    assert functions(one)[name]["weight"] * ours == pytest.approx(0.7 * theirs)


def test_clip_scores_of_diffusion_nft_are_cosines() -> None:
    """Its scorer divides CLIP's logits by 100, flow_grpo's by 30."""
    one = translate([Override("beta", 0.1), Override("reward_fn", {"clipscore": 0.7})], FLOW_GRPO)
    assert functions(one)["clipscore"]["weight"] == 0.7


def test_what_differs_by_more_than_a_unit_is_told() -> None:
    one = translate([Override("reward_fn", {"unifiedreward": 0.7, "clipscore": 1.0})], FLOW_GRPO)
    assert functions(one)["unifiedreward"]["weight"] == 0.7
    (line,) = one.lines
    assert "unifiedreward there is one final score of the judge / 5" in line.text


def test_the_weight_may_come_before_the_file() -> None:
    one = made("reward.reward_functions.a.weight=0.5\n" + ENTRY.format(name="a", path="x/jpeg_compressibility.py"))
    assert functions(one) == {"a": {"weight": 0.5, "reward": "jpeg_compressibility"}}


def test_what_an_entry_says_beside_its_file_is_said_here() -> None:
    entry = "+reward.reward_functions.a."
    told = f"{entry}weight=0.5\n{entry}required=False\n{entry}timeout=30\n{entry}max_retries=1\n"
    one = made(ENTRY.format(name="a", path=f"{PACKAGE}/jpeg_compressibility.py") + told)
    assert one.problem is None
    said = {"weight": 0.5, "required": False, "timeout_s": 30, "retries": 1}
    assert said.items() <= functions(one)["a"].items()


def test_a_name_that_nobody_registered_is_a_problem() -> None:
    one = made("reward.reward_functions.drm.weight=1\n")
    assert "there is no reward drm: name one under reward.functions.drm.reward" in str(one.problem)
    assert "the script names no reward" in str(made("reward.custom_reward_function.path=null\n").problem)


def test_a_script_that_has_a_reward_trains_no_other() -> None:
    model = "reward.reward_model.enable=True\nreward.reward_model.model_path=Some/Reward-7B\n"
    one = made(model)
    assert "the script's reward is that model itself" in str(one.problem)
    assert functions(one)["reward"]["reward"] not in known_rewards()
    held = made("reward.custom_reward_function.name=_multi_reward_placeholder\n")
    assert "the script's reward has no counterpart here" in str(held.problem)
    unset = ENTRY.format(name="ocr", path="pkg://verl_omni.utils.reward_score.http_scorer_client")
    one = made(unset + "+reward.reward_functions.ocr.server_url=$ADDRESS\n")
    assert "has no server_url" in str(one.problem)


def test_a_module_of_a_package_is_called_by_all_of_its_name() -> None:
    one = made(CUSTOM.format("pkg://my.rewards.warmth"))
    assert functions(one) == {"reward": {"reward": "my.rewards.warmth:compute_score"}}
    assert "is not here" in str(made(CUSTOM.format("my-rewards.py")).problem)


@pytest.mark.parametrize("scorer", SCORERS.values(), ids=SCORERS)
def test_every_scorer_has_what_its_reward_needs(scorer: Scorer) -> None:
    addresses = dict.fromkeys(scorer.option_names.values(), "http://scorer:8100")
    revisions = {"model": "revision", "processor": "processor_revision"}  # as if the folders were hub ids
    commits = {revisions[option]: "0" * 40 for option in scorer.options if option in revisions}
    check_reward(scorer.reward, **scorer.options, **addresses, **commits)
