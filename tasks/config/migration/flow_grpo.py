# SPDX-License-Identifier: Apache-2.0
"""What the settings of flow_grpo's and DiffusionNFT's configuration functions are here: one rule a field.

Names and defaults on the other side are those of their `config/*.py` and training scripts as of summer 2026. The number
of GPUs, which no field of theirs holds, is `gpus`.
"""

from typing import Any

from tasks.config.migration.outcome import (
    Elsewhere,
    Given,
    Number,
    Outcome,
    Problem,
    Rule,
    System,
    Taken,
    folder_of,
    only,
    renamed,
)
from tasks.config.migration.rewards import JUDGE, SCORERS
from tasks.config.presets import ACTOR, KERNEL, LOSS, MODEL, ROLLOUT
from tasks.config.tree import REWARDS

PIPELINE = f"{ROLLOUT}.pipeline"
DECAYS = {0: "copy", 1: "linear_to_0_5", 2: "delayed_linear_to_0_999"}
SOLVERS = {"dpm2": "dpm2", "flow": "euler"}
MODES = ("positive_only", "negative_only", "one_only", "binary")
FORMATS = {"fp16": "bfloat16", "bf16": "bfloat16", "no": "float32"}
GPUS_OF_A_NODE = 8

READS: dict[str, tuple[str, dict[str, Any]]] = {
    "ocr": ("ocr", {"detect": True, "upscale": 1, "substring_is_full": True}),
    "geneval": ("geneval", {"model": "data/rtdetr", "clip": "data/clip_vit_large_patch14", "scoring": "share"}),
    **{
        theirs: (SCORERS[ours].reward, dict(SCORERS[ours].options))
        for theirs, ours in {
            "pickscore": "pickscore_reward",
            "hpsv2": "hpsv2",
            "clipscore": "clip_score",
            "aesthetic": "aesthetic",
            "imagereward": "image_reward",
            "jpeg_compressibility": "jpeg_compressibility",
            "unifiedreward": "unified_reward",
        }.items()
    },
}
"""Their name of a reward -> ours, and what it must be given."""
IN_UNITS = {"jpeg_compressibility": 500, "clipscore": 0.3}
"""Ours is so many times theirs: theirs are kB / 500, and CLIP's logits, 100 times the cosine, / 30."""
IN_UNITS_OF_NFT = IN_UNITS | {"clipscore": 1}
"""DiffusionNFT's scorer divides the logits by 100."""
NOTES = {
    "geneval": "geneval there grades counts by 1 - |found - wanted| / wanted, and share is the share of the conditions "
    "that hold",
    "unifiedreward": "unifiedreward there is one final score of the judge / 5, and judge_grade the mean of "
    "(grade - 1) / 4 of three axes: weigh it anew beside other rewards",
}
"""Where ours differs by more than a unit."""
SHARED: dict[str, tuple[str, ...]] = {
    "sample.train_batch_size": ("sample.train_batch_size", "sample.num_batches_per_epoch"),
    "train.gradient_accumulation_steps": ("train.batch_size", "train.gradient_accumulation_steps"),
}
"""Two products with the number of GPUs: samples of an iteration, and of an optimiser step."""

NUMBERS: dict[str, Number] = {
    "gpus": Number(1),
    "seed": Number(0),
    "save_freq": Number(1),
    "eval_freq": Number(1),
    **{f"sample.{field}": Number(1) for field in ("num_steps", "train_batch_size", "num_batches_per_epoch")},
    "sample.num_image_per_prompt": Number(1),
    "sample.sde_window_size": Number(0),
    "train.batch_size": Number(1),
    "train.gradient_accumulation_steps": Number(1),
    **{f"train.{field}": Number(0, whole=False) for field in ("beta", "timestep_fraction", "adam_beta1", "adam_beta2")},
}


def _is_nft(given: Given) -> bool:
    """Is it DiffusionNFT's? Its loss has a beta of its own."""
    return "beta" in given or "decay_type" in given


def _gpus(path: str, value: Any, given: Given) -> Outcome:
    nodes = value // GPUS_OF_A_NODE if value % GPUS_OF_A_NODE == 0 else 1
    settings = {"trainer.nnodes": nodes, "trainer.n_gpus_per_node": value // nodes, f"{ROLLOUT}.num_actors": value}
    return Taken(settings, "the number does not shape the run: any other that divides the batches does")


def _model(path: str, value: Any, given: Given) -> Outcome:
    folder = folder_of(str(value))
    note = f": download {value} to it" if folder else ""
    return Taken({f"{MODEL}.path": folder or str(value)}, f"a folder in diffusers format{note}")


def _lora(path: str, value: Any, given: Given) -> Outcome:
    if not value:
        return Taken({f"{MODEL}.lora_rank": 0})
    return Taken({f"{MODEL}.lora_rank": 32, f"{MODEL}.lora_alpha": 64}, "as their training script has it")


def _prompts(path: str, value: Any, given: Given) -> Outcome:
    """An iteration's, or an optimiser step's: samples of all GPUs by samples of a prompt."""
    parts = [*SHARED[path], "gpus", "sample.num_image_per_prompt"]
    to = "data.train_batch_size" if path.startswith("sample") else f"{ACTOR}.ppo_mini_batch_size"
    missing = [part for part in parts if part not in given]
    if missing:
        return Elsewhere(f"it makes {to} with {', '.join(missing)}, which is not known: set {to}")
    *factors, n = (given[part] for part in parts)
    samples = factors[0] * factors[1] * factors[2]
    if samples % n:
        return Problem(f"{' x '.join(map(str, factors))} samples are no whole number of prompts of {n}: set {to}")
    return Taken({to: samples // n}, "in prompts, of all GPUs")


def _micro_batch(path: str, value: Any, given: Given) -> Outcome:
    return Taken(
        {f"{ACTOR}.ppo_micro_batch_size_per_gpu": value, f"{ROLLOUT}.micro_batch_size": value},
        "rollout and update take as many together, so that log-probs are replayed to the bit",
    )


def _precision(path: str, value: Any, given: Given) -> Outcome:
    if str(value) not in FORMATS:
        return Problem(f"{path} is {value!r} and should be one of {', '.join(FORMATS)}")
    dtype = FORMATS[str(value)]
    note = "bfloat16 needs no scaling of the loss" if value == "fp16" else ""
    return Taken({f"{MODEL}.dtype": dtype, f"{ACTOR}.fsdp_config.param_dtype": dtype}, note)


def _kl(path: str, value: Any, given: Given) -> Outcome:
    if not value:
        return Taken({f"{ACTOR}.use_kl_loss": False})
    form = {} if _is_nft(given) else {f"{ACTOR}.kl_loss_type": "flow_grpo"}
    return Taken({f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_coef": value} | form)


def _average(path: str, value: Any, given: Given) -> Outcome:
    if not value:
        return Taken({f"{ACTOR}.ema.enable": False})
    every = 1 if _is_nft(given) else 8
    settings = {f"{ACTOR}.ema.enable": True, f"{ACTOR}.ema.decay": 0.9, f"{ACTOR}.ema.update_interval": every}
    return Taken(settings, "as their training script has it")


def _betas(path: str, value: Any, given: Given) -> Outcome:
    if path == "train.adam_beta2" and "train.adam_beta1" in given:
        return Elsewhere("the second of optim.betas")
    betas = [given.get("train.adam_beta1", 0.9), given.get("train.adam_beta2", 0.999)]
    return Taken({f"{ACTOR}.optim.betas": betas})


def _fraction(path: str, value: Any, given: Given) -> Outcome:
    """Of the steps from the noisiest on, rounded down."""
    steps = given.get("sample.num_steps")
    if steps is None:
        return Elsewhere("it is of sample.num_steps, which is not known: set the levels yourself")
    trained = int(steps * value)
    if _is_nft(given):
        return Taken({"algorithm.num_train_timesteps": trained}, "noise levels of each sample, drawn")
    if given.get("sample.sde_window_size"):
        return Elsewhere("the steps of the window, all of them, are trained on here")
    if trained >= steps - 1:
        return Elsewhere("all steps but the last, as here")
    return Taken({f"{KERNEL}.sde_window_range": [0, trained]}, "noise is added in the steps that are trained on alone")


def _window(path: str, value: Any, given: Given) -> Outcome:
    """A size of 0 is no window."""
    if not given.get("sample.sde_window_size"):
        return Elsewhere("noise is added in every step")
    return Taken({f"{KERNEL}.{path.removeprefix('sample.')}": value})


def _noise(path: str, value: Any, given: Given) -> Outcome:
    if _is_nft(given) and given.get("sample.deterministic") is True:
        return Elsewhere("sample.deterministic is true, so that nothing reads it")
    return Taken({f"{KERNEL}.noise_level": value})


def _deterministic(path: str, value: Any, given: Given) -> Outcome:
    return (
        Taken({f"{KERNEL}.noise_level": 0.0}, "the ODE") if value is True else Elsewhere("sample.noise_level says so")
    )


def _table(known: dict[Any, str], to: str) -> Rule:
    """A value of theirs by ours."""

    def rule(path: str, value: Any, given: Given) -> Outcome:
        found = next((ours for theirs, ours in known.items() if theirs == value), None)
        if found is None:
            return Problem(f"{path} is {value!r}, which is not here: set {to} ({', '.join(map(str, known))} are known)")
        return Taken({to: found})

    return rule


def _rewards(path: str, value: Any, given: Given) -> Outcome:
    if not isinstance(value, dict) or not value:
        return Problem(f"{path} is {value!r} and should name rewards: name one under reward.functions")
    settings: dict[str, Any] = {}
    for name, weight in value.items():
        reward, options = READS.get(name, (name, {}))
        scale = (IN_UNITS_OF_NFT if _is_nft(given) else IN_UNITS).get(name, 1)
        settings[f"{REWARDS}.{name}.reward"] = reward
        settings[f"{REWARDS}.{name}.weight"] = weight / scale if isinstance(weight, int | float) else weight
        settings |= {f"{REWARDS}.{name}.options.{option}": one for option, one in options.items()}
    lost = [str(name) for name in value if name not in READS]
    if lost:
        return Problem(f"the reward {', '.join(lost)} is not here: name one under reward.functions", settings)
    if "unifiedreward" in value:
        settings[JUDGE] = folder_of("CodeGoat24/UnifiedReward-qwen-7b")
    folders = ["weights of models are to be in these folders (docs/rewards.md)"] if "data/" in str(settings) else []
    return Taken(settings, "; ".join(folders + [note for name, note in NOTES.items() if name in value]))


PREPARED = Elsewhere("a data set of prompts by its name, data.name (docs/data.md)")
OWN_FOLDER = Elsewhere("a run's folder is in trainer.default_local_dir, and goes on there")
NOTHING = Elsewhere("nothing here reads it")
ONE_RANGE = Elsewhere(f"one range for both sides: {LOSS}.clip_ratio")

RULES: dict[str, Rule] = {
    "gpus": _gpus,
    "seed": renamed("trainer.seed"),
    "run_name": lambda path, value, given: (
        Taken({"trainer.experiment_name": value.replace("/", "-")}) if value and isinstance(value, str) else NOTHING
    ),
    "num_epochs": renamed("trainer.total_training_steps", note="one epoch of theirs is one iteration"),
    "save_freq": renamed("trainer.save_freq"),
    "eval_freq": renamed("trainer.test_freq"),
    "num_checkpoint_limit": renamed("trainer.max_actor_ckpt_to_keep"),
    "mixed_precision": _precision,
    "allow_tf32": Elsewhere("matrix products are in model.dtype"),
    "debug": NOTHING,
    "logdir": OWN_FOLDER,
    "save_dir": OWN_FOLDER,
    "resume_from": OWN_FOLDER,
    "dataset": PREPARED,
    "prompt_fn": PREPARED,
    "prompt_fn_kwargs": PREPARED,
    "base_model": Elsewhere("the model's family is read from model_index.json"),
    "pretrained.model": _model,
    "pretrained.revision": Elsewhere("a folder has none"),
    "use_lora": _lora,
    "activation_checkpointing": renamed(f"{ACTOR}.fsdp_config.gradient_checkpointing"),
    "fsdp_optimizer_offload": renamed(f"{ACTOR}.fsdp_config.optimizer_offload"),
    "resolution": renamed(f"{PIPELINE}.height", f"{PIPELINE}.width"),
    "per_prompt_stat_tracking": only(
        True,
        why="an advantage compares the samples of one prompt",
        wrong="an advantage compares the samples of one prompt here: leave it true",
    ),
    "reward_fn": _rewards,
    "beta": renamed(f"{LOSS}.nft_beta"),
    "decay_type": _table(DECAYS, "algorithm.old_policy_decay_schedule"),
    "sample.num_steps": renamed(f"{PIPELINE}.num_inference_steps"),
    "sample.eval_num_steps": renamed(f"{ROLLOUT}.val_kwargs.pipeline.num_inference_steps"),
    "sample.guidance_scale": renamed(f"{PIPELINE}.guidance_scale"),
    "sample.eval_guidance_scale": renamed(f"{ROLLOUT}.val_kwargs.pipeline.guidance_scale"),
    "sample.num_image_per_prompt": renamed(f"{ROLLOUT}.n"),
    "sample.same_latent": renamed(f"{KERNEL}.init_same_noise"),
    "sample.sde_window_size": _window,
    "sample.sde_window_range": _window,
    "sample.train_batch_size": _prompts,
    "sample.num_batches_per_epoch": Elsewhere("see sample.train_batch_size"),
    "sample.batch_size": Elsewhere("sample.train_batch_size counts"),
    "sample.test_batch_size": Elsewhere("validation denoises rollout.micro_batch_size samples together"),
    "sample.global_std": renamed("algorithm.global_std"),
    "sample.noise_level": _noise,
    "sample.deterministic": _deterministic,
    "sample.solver": _table(SOLVERS, f"{PIPELINE}.solver"),
    "train.algorithm": only(
        "grpo",
        why="Flow-GRPO, the default",
        wrong="of their configurations those of GRPO and NFT are translated: set algorithm.name, and what it reads",
    ),
    "train.ref_update_step": Elsewhere("the reference stays the model that training starts from"),
    "train.batch_size": _micro_batch,
    "train.gradient_accumulation_steps": _prompts,
    "train.num_inner_epochs": renamed(f"{ACTOR}.ppo_epochs"),
    "train.use_8bit_adam": only(
        False, why="AdamW's moments are fp32", wrong="AdamW's moments are fp32 here: leave it false"
    ),
    "train.learning_rate": renamed(f"{ACTOR}.optim.lr"),
    "train.adam_beta1": _betas,
    "train.adam_beta2": _betas,
    "train.adam_weight_decay": renamed(f"{ACTOR}.optim.weight_decay"),
    "train.adam_epsilon": renamed(f"{ACTOR}.optim.eps"),
    "train.max_grad_norm": renamed(f"{ACTOR}.optim.clip_grad"),
    "train.cfg": Elsewhere("the update is guided as the rollout is, by rollout.pipeline.guidance_scale"),
    "train.adv_clip_max": renamed(f"{LOSS}.adv_clip_max"),
    "train.clip_range": renamed(f"{LOSS}.clip_ratio"),
    "train.clip_range_lt": ONE_RANGE,
    "train.clip_range_gt": ONE_RANGE,
    "train.timestep_shift": Elsewhere("of BAGEL, which is not here"),
    "train.adv_mode": _table({"all": "continuous"} | {mode: mode for mode in MODES}, "algorithm.adv_mode"),
    "train.timestep_fraction": _fraction,
    "train.beta": _kl,
    "train.ema": _average,
    "train.lora_path": only(
        None,
        why="training starts from the model's weights",
        wrong="weights to start from are a folder that a run of this project exported: set model.initial_weights",
    ),
}

DEFAULTS: dict[str, Any] = {
    "algorithm.name": lambda given: "diffusion_nft" if _is_nft(given) else None,
    "algorithm.drop_equal_groups": lambda given: None if _is_nft(given) else True,
    f"{ACTOR}.guidance_gradient": lambda given: None if _is_nft(given) else "conditional",
    f"{PIPELINE}.max_sequence_length": 128,
    f"{ROLLOUT}.placement": "colocated",
    f"{ROLLOUT}.weight_transport": "ipc",
    "trainer.device": "cuda",
}
"""What their training scripts do, whatever the configuration says."""

FLOW_GRPO = System(RULES, {}, DEFAULTS, NUMBERS)
