# SPDX-License-Identifier: Apache-2.0
"""Numbers in the docs that a default, a recipe or a constant decides are those that it is."""

import functools
import inspect
import json
import re
from pathlib import Path
from typing import Any

import diffusers
import pytest
import yaml

from models.algorithms.rollout_correction import LOG_RATIO_LIMIT, WARNED_SHARE_OF_CLIP
from models.cost.flops import step_flops
from tasks.config.presets import PRESETS
from tasks.config.recipes import load_recipe
from tasks.config.sections import CUDA_CANARY_TOLERANCE, OTHER_ENGINE_TOLERANCE
from tasks.config.tree import TrainConfig
from tasks.run.training import CANARY_PROMPTS
from tasks.stages.validation import GRID_PICTURES
from tests.support.published_models import MODELS, published

ROOT = Path(__file__).parents[2]
NUMBER = r"(\d+(?:\.\d+)?(?:e-?\d+)?)"
WORDS = {"third": 1 / 3, "fourth": 4, "three": 3, "two": 2, "every": 1}


def sentence(text: str) -> re.Pattern:
    """`#` is a number, `…` is anything within a line, and a blank any blanks, line ends included."""
    parts = {" ": r"\s+", "#": NUMBER, "…": r"[^\n]*?", "@": f"({'|'.join(WORDS)})"}
    return re.compile("".join(parts.get(part, re.escape(part)) for part in re.split(r"( |#|…|@)", text)))


def value(config: Any, path: str) -> Any:
    return functools.reduce(getattr, path.split("."), config)


QUICKSTART, DIGITS = (load_recipe(name, ROOT / "prefect.yaml") for name in ("quickstart", "flow-grpo"))
DEFAULTS = TrainConfig()
PARAMS = yaml.safe_load((ROOT / "params.yaml").read_text())
ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"


def quickstart(path: str) -> Any:
    return value(QUICKSTART, path)


def digits(path: str) -> Any:
    return value(DIGITS, path)


def default(path: str) -> Any:
    return value(DEFAULTS, path)


def recipe(name: str, path: str) -> Any:
    return value(load_recipe(name, ROOT / "prefect.yaml"), path)


def named(name: str, path: str) -> Any:
    return value(TrainConfig.model_validate({"algorithm": {"name": name}}), path)


P, N_EACH = digits("data.train_batch_size"), digits(f"{ROLLOUT}.n")
BATCH, RANKS = digits(f"{ROLLOUT}.micro_batch_size"), DIGITS.trainer.world_size
MINI, MICRO = digits(f"{ACTOR}.ppo_mini_batch_size"), digits(f"{ACTOR}.ppo_micro_batch_size_per_gpu")
LOW, HIGH = digits(f"{ROLLOUT}.algo.sde_window_range")
WINDOW = HIGH - LOW
HEIGHT, WIDTH = digits(f"{ROLLOUT}.pipeline.height"), digits(f"{ROLLOUT}.pipeline.width")
KERNELS = {"sde": "a", "dance_sde": "eta", "cps": "a"}
LOSS = f"{ACTOR}.diffusion_loss"


def of_reverse(name: str, window: str = "every step but the last", bound: str = "clip #", field: str = "clip_ratio"):
    """The row of a policy gradient in the table of algorithms."""
    kernel = named(name, f"{ROLLOUT}.algo.sde_type")
    loss = named(name, f"{LOSS}.loss_mode")
    text = f"| `{name}` | … | `{kernel}`, {KERNELS[kernel]} # | {window} | `flow_grpo` | `{loss}`, {bound} |"
    return "docs/algorithms.md", text, named(name, f"{ROLLOUT}.algo.noise_level"), named(name, f"{LOSS}.{field}")


CLAIMS: list[tuple[Any, ...]] = [
    # page, sentence, its numbers in order
    (
        "README.md",
        "trains # iterations of # pictures by DiffusionNFT and validates every @.",
        quickstart("trainer.total_training_steps"),
        P * N_EACH,
        quickstart("trainer.test_freq"),
    ),
    (
        "README.md",
        "# numbers that neither pre-training nor training has seen, # pictures each",
        PARAMS["data_sets"]["digits"]["prompts"]["n_test"],
        quickstart(f"{ROLLOUT}.val_kwargs.n"),
    ),
    (
        "docs/learning.md",
        "on # held-out numbers, # pictures each",
        PARAMS["data_sets"]["digits"]["prompts"]["n_test"],
        digits(f"{ROLLOUT}.val_kwargs.n"),
    ),
    ("docs/learning.md", "trains on the # pairs", PARAMS["data_sets"]["digits"]["prompts"]["n_train"]),
    ("docs/data.md", "in a picture of # by # pixels", HEIGHT, WIDTH),
    ("docs/iteration.md", "prompts | *#* |", P),
    ("docs/iteration.md", "the group | *#* |", N_EACH),
    ("docs/iteration.md", "samples of an iteration | *#* |", P * N_EACH),
    ("docs/iteration.md", "a batch | *#* |", BATCH),
    ("docs/iteration.md", "| batches | *#* |", P * N_EACH / BATCH),
    ("docs/iteration.md", "stochastic and trained | *#* |", WINDOW),
    ("docs/iteration.md", "trainer ranks | *#* |", RANKS),
    ("docs/iteration.md", "prompts of an optimiser step | *#* |", MINI),
    ("docs/iteration.md", "forward and backward pass | *#* |", MICRO),
    ("docs/iteration.md", "in pixels | *#, #* |", HEIGHT, WIDTH),
    ("docs/iteration.md", "different prompts in one batch | *#* |", BATCH / N_EACH),
    ("docs/iteration.md", "The window's steps, *[#, #, #, #]*", *range(LOW, HIGH)),
    ("docs/iteration.md", "fp32 *[#, #, #, #]*; each gap", BATCH, WINDOW + 1, HEIGHT // 4 * (WIDTH // 4), 16),
    ("docs/iteration.md", "uint8 *[#, #, #, 3]*", BATCH, HEIGHT, WIDTH),
    ("docs/iteration.md", "*# batch an optimiser step*", MINI * N_EACH / (BATCH * RANKS)),
    ("docs/iteration.md", "The first `tracking.pictures` pictures, *#*", default("tracking.pictures")),
    ("docs/iteration.md", "the first # test prompts", GRID_PICTURES),
    ("docs/iteration.md", "= P n / m #", P * N_EACH / BATCH),
    ("docs/iteration.md", "= ppo_epochs * P / q #", digits(f"{ACTOR}.ppo_epochs") * P / MINI),
    ("docs/iteration.md", "= q n / (m R) #", MINI * N_EACH / (BATCH * RANKS)),
    (
        "docs/iteration.md",
        "= q n / (m R) ceil(m / u) W #",
        MINI * N_EACH / (BATCH * RANKS) * -(-BATCH // MICRO) * WINDOW,
    ),
    (
        "docs/iteration.md",
        "u is # and m # in `flow-grpo`, and both are # by default",
        MICRO,
        BATCH,
        default(f"{ACTOR}.ppo_micro_batch_size_per_gpu"),
    ),
    (
        "docs/iteration.md",
        "u is # and m # in `flow-grpo`, and both are # by default",
        MICRO,
        BATCH,
        default(f"{ROLLOUT}.micro_batch_size"),
    ),
    of_reverse("flow_grpo"),
    of_reverse("dance_grpo"),
    of_reverse("grpo_guard"),
    of_reverse("flow_dppo", bound="threshold #", field="kl_mask_threshold"),
    (
        "docs/algorithms.md",
        "| `mix_grpo` | … | `sde`, a # | # steps in [#, #), drawn | `flow_grpo` | `flow_grpo`, clip # |",
        named("mix_grpo", f"{ROLLOUT}.algo.noise_level"),
        named("mix_grpo", f"{ROLLOUT}.algo.sde_window_size"),
        *named("mix_grpo", f"{ROLLOUT}.algo.sde_window_range"),
        named("mix_grpo", f"{LOSS}.clip_ratio"),
    ),
    ("docs/algorithms.md", "`dpo`, beta #;", named("dpo", f"{LOSS}.dpo_beta")),
    (
        "docs/algorithms.md",
        "`diffusion_nft`, b #; distance to the start #; old policy",
        named("diffusion_nft", f"{LOSS}.nft_beta"),
        named("diffusion_nft", f"{ACTOR}.kl_loss_coef"),
    ),
    (
        "docs/algorithms.md",
        "`awm`, clip #; distance to the start #; old",
        named("awm", f"{LOSS}.clip_ratio"),
        named("awm", f"{ACTOR}.kl_loss_coef"),
    ),
    (
        "docs/algorithms.md",
        "`--set actor_rollout_ref.actor.diffusion_loss.clip_ratio=#`",
        digits(f"{LOSS}.clip_ratio"),
    ),
    (
        "docs/algorithms.md",
        "a: # for SD3, # for Qwen-Image |",
        recipe("sd35-ocr-flow-grpo", f"{ROLLOUT}.algo.noise_level"),
        recipe("qwen-image-ocr-flow-grpo", f"{ROLLOUT}.algo.noise_level"),
    ),
    ("docs/algorithms.md", "eta: # in the paper", named("dance_grpo", f"{ROLLOUT}.algo.noise_level")),
    ("docs/algorithms.md", "up to # in public recipes", recipe("dance-grpo-wan", f"{ROLLOUT}.algo.noise_level")),
    (
        "docs/algorithms.md",
        "# suits SD3 over the whole trajectory, # Qwen-Image, # `grpo_guard`, # the tiny model",
        recipe("sd35-ocr-flow-grpo", f"{LOSS}.clip_ratio"),
        recipe("qwen-image-ocr-flow-grpo", f"{LOSS}.clip_ratio"),
        named("grpo_guard", f"{LOSS}.clip_ratio"),
        digits(f"{LOSS}.clip_ratio"),
    ),
    ("docs/algorithms.md", "minus that of the rollout, clamped to ±#", LOG_RATIO_LIMIT),
    ("docs/algorithms.md", "above a @ of `clip_ratio`", WARNED_SHARE_OF_CLIP),
    (
        "docs/architecture.md",
        "by default # on CUDA, and on the CPU #, or # with vLLM-Omni",
        CUDA_CANARY_TOLERANCE,
        0,
        OTHER_ENGINE_TOLERANCE,
    ),
    ("docs/architecture.md", "the first @ test prompts", CANARY_PROMPTS),
    ("docs/training.md", "the canary's tolerance on the CPU is #", OTHER_ENGINE_TOLERANCE),
    ("docs/rewards.md", "`reward.max_missing_fraction` (#)", default("reward.max_missing_fraction")),
    ("docs/rewards.md", "over the last `window` (#)", default("reward.guards.window")),
    ("docs/rewards.md", "both tests is `p_value` (#)", default("reward.guards.p_value")),
    ("docs/rewards.md", "when `validations` (#)", default("reward.guards.validations")),
    ("docs/rewards.md", "is # (`reward_margin`)", default("reward.guards.reward_margin")),
    ("docs/rewards.md", "# (`statistics_margin`)", default("reward.guards.statistics_margin")),
    (
        "docs/rewards.md",
        "| `num_workers`, `num_cpus`, `num_gpus` | #, #, # |",
        *(getattr(default("reward.functions")["ocr"], name) for name in ("num_workers", "num_cpus", "num_gpus")),
    ),
    (
        "docs/rewards.md",
        "| `retries`, `retry_wait_s`, `timeout_s` | #, #, # |",
        *(getattr(default("reward.functions")["ocr"], name) for name in ("retries", "retry_wait_s", "timeout_s")),
    ),
    (
        "docs/add-a-model.md",
        "num_inference_steps: #, guidance_scale: #} val_kwargs: {pipeline: {num_inference_steps: #}}",
        recipe("sd35-ocr-flow-grpo", f"{ROLLOUT}.pipeline.num_inference_steps"),
        recipe("sd35-ocr-flow-grpo", f"{ROLLOUT}.pipeline.guidance_scale"),
        recipe("sd35-ocr-flow-grpo", f"{ROLLOUT}.val_kwargs.pipeline.num_inference_steps"),
    ),
]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim[1])
def test_what_a_page_says_is_so(claim: tuple[Any, ...]) -> None:
    page, text, *expected = claim
    found = sentence(text).findall((ROOT / page).read_text())
    assert len(found) == 1, f"{page} has {len(found)} places {text!r}"
    said = found[0] if isinstance(found[0], tuple) else (found[0],)
    assert [WORDS.get(word) or float(word) for word in said] == pytest.approx([float(number) for number in expected])


def test_every_algorithm_of_the_reverse_process_is_among_the_claims() -> None:
    claimed = " ".join(claim[1] for claim in CLAIMS)
    without_numbers = {"distill_fm_mse"}
    assert [name for name in PRESETS if f"`{name}`" not in claimed and name not in without_numbers] == ["distill_kl"]


def test_the_defaults_beside_the_references_are_ours() -> None:
    rows = re.findall(r"^\| `(\S+)` \| `(\S+)` \| (.*?) \|", (ROOT / "docs" / "defaults.md").read_text(), re.MULTILINE)
    assert len(rows) > 20
    for field, here, there in rows:
        assert yaml.safe_load(here) == default(field), field
        assert there != f"`{here}`", field


def test_speeds_are_those_of_the_benchmarks() -> None:
    """What the README says of the H200 stands in benchmarks/RESULTS.md."""
    readme, results = (ROOT / "README.md").read_text(), (ROOT / "benchmarks" / "RESULTS.md").read_text()
    said = sentence(
        "# to # times as many pictures a second without KL and # to # times with it, Qwen-Image # pictures a second, "
        "and # with float8 products; on four H200s # % of four times"
    ).findall(readme)
    assert len(said) == 1
    *times, alone, rounded, share = said[0]
    for settings, ends in (("without KL", times[:2]), ("KL 0.04", times[2:])):
        ratios = re.findall(rf"^\| {settings}, public batch .*\| {NUMBER} \|$", results, re.MULTILINE)
        assert sorted(ratios)[:: len(ratios) - 1] == ends
    (of_one,) = re.findall(rf"^\| Qwen-Image \| 1 \|.*\| {NUMBER} \| \|$", results, re.MULTILINE)
    assert of_one == alone
    lines = (ROOT / "benchmarks" / "measured" / "iteration_float8.jsonl").read_text().splitlines()
    logged = [line for line in map(json.loads, lines) if line.get("model") == "qwen-image"]
    found = [line for line in logged if "float8" in line["variant"]]
    assert f"{found[-1]['images/s']:.2f}" == rounded
    (of_sd35,) = sentence("3.5 makes # pictures a second with float8 products, and # with a KL, where").findall(readme)
    last = [line for line in map(json.loads, lines) if line.get("rows") == "sync on the device" and line["batch"] == 32]
    assert [f"{line['images/s']:.2f}" for line in last if "fused" in line["variant"]] == [*of_sd35]
    shares = re.findall(rf"^\| \| 4 \|.*\| {NUMBER} % \|$", results, re.MULTILINE)
    assert {round(float(found)) for found in shares} == {int(share)}


def test_the_base_models_reward_is_one_number() -> None:
    (start,) = sentence("The held-out reward goes from # to").findall((ROOT / "README.md").read_text())
    learning = re.findall(rf"^\| `\w+` \| {NUMBER} \|", (ROOT / "docs" / "learning.md").read_text(), re.MULTILINE)
    assert {round(float(before), 2) for before in learning} == {float(start)}


MODEL_PAGE = (ROOT / "docs" / "add-a-model.md").read_text()
SIZES = dict(zip(MODELS, re.findall(r"^\| .* \| (\S+)e9 \| (.*) \| (.*) \|$", MODEL_PAGE, re.MULTILINE), strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_sizes_and_operations_of_the_families(name: str, tmp_path: Path) -> None:
    billions, operations, tokens = SIZES[name]
    assert float(billions) == pytest.approx(MODELS[name].billions, rel=0.005)
    _, config = published(name, tmp_path)
    counted = [step_flops(config, int(text)) / 1e12 for text in tokens.split(";")]
    assert [float(said) for said in operations.split(";")] == pytest.approx(counted, rel=0.005)


def test_steps_and_guidance_that_diffusers_begins_with() -> None:
    rows = (rf"^\| {name} \|(.*)\|$" for name in ("architecture", "diffusers' steps, guidance"))
    (architectures,), (said,) = (re.findall(row, MODEL_PAGE, re.MULTILINE) for row in rows)
    for architecture, numbers in zip(architectures.split("|"), said.split("|"), strict=True):
        call = inspect.signature(getattr(diffusers, architecture.strip(" `")).__call__).parameters
        guidance = call["true_cfg_scale" if "QwenImagePipeline" in architecture else "guidance_scale"].default
        assert [float(number) for number in numbers.split(",")] == [call["num_inference_steps"].default, guidance]


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_no_page_has_a_section_twice(page: Path) -> None:
    headings = re.findall(r"^#+ .*$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    assert len(headings) == len(set(headings))
