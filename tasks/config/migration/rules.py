# SPDX-License-Identifier: Apache-2.0
"""What VeRL-Omni's fields are here: one rule a field, for all that do not have the same name and meaning.

Names and defaults on the other side are those of its files under `verl_omni/trainer/config/` and of its example scripts
as of summer 2026.
"""

import re
from dataclasses import dataclass
from typing import Any

from tasks.config.migration import rewards
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
    renamed,
)
from tasks.config.presets import ACTOR, CORRECTION, FINISHED_SAMPLES, MODEL, PRESETS, ROLLOUT
from tasks.config.tree import TrainConfig

ESTIMATORS = ("flow_grpo", "mix_grpo", "dance_grpo", "gdpo")
"""Named here again: the estimators themselves come with torch."""
PROMPTS, MINI_BATCH = 1024, 256
"""Prompts of an iteration, and of an optimiser step, that their scripts do not say."""
ITERATIONS = TrainConfig().trainer.total_training_steps
"""Of a recipe that does not say how many."""

NUMBERS: dict[str, Number] = {
    "trainer.nnodes": Number(1),
    "trainer.n_gpus_per_node": Number(1),
    "trainer.total_training_steps": Number(1, optional=True),
    "trainer.save_freq": Number(-1),
    "trainer.test_freq": Number(-1),
    "data.train_batch_size": Number(1),
    "data.val_max_samples": Number(-1, optional=True),
    f"{ROLLOUT}.nnodes": Number(0),
    f"{ROLLOUT}.n_gpus_per_node": Number(1),
    f"{ROLLOUT}.tensor_model_parallel_size": Number(1, optional=True),
    f"{ROLLOUT}.n": Number(1),
    f"{ROLLOUT}.pipeline.num_frames": Number(1, optional=True),
    "algorithm.timestep_fraction": Number(0, whole=False),
    f"{ROLLOUT}.pipeline.num_inference_steps": Number(1),
    f"{ACTOR}.ppo_mini_batch_size": Number(1),
    f"{ACTOR}.ppo_epochs": Number(1),
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": Number(1, optional=True),
    f"{ACTOR}.optim.lr_warmup_steps": Number(-1, optional=True),
    f"{ACTOR}.optim.lr_warmup_steps_ratio": Number(0, whole=False, optional=True),
    f"{ACTOR}.optim.min_lr_ratio": Number(0, whole=False, optional=True),
    f"{ACTOR}.optim.num_cycles": Number(0, whole=False, optional=True),
}


@dataclass(frozen=True)
class Family:
    """What a family of models reads of `pipeline`: again as its adapter says, which comes with torch."""

    called: str
    reads: tuple[str, ...]
    frames_of: int | None = None
    trains_by: str | None = None
    """What theirs reads in its update in place of the first that is read here."""


FAMILIES: dict[str, Family] = {
    "qwen-image": Family("Qwen-Image", ("true_cfg_scale",)),
    "stable-diffusion-3": Family("Stable Diffusion 3", ("guidance_scale",)),
    "wan": Family("Wan", ("guidance_scale", "num_frames"), frames_of=4, trains_by="true_cfg_scale"),
    "z-image": Family("Z-Image", ("guidance_scale",)),
    "flux.2": Family("FLUX.2", ("guidance_scale",)),
    "flux2": Family("FLUX.2", ("guidance_scale",)),
    "flux": Family("FLUX.1", ("true_cfg_scale", "guidance_scale")),
}
"""Part of the model folder's name -> its family."""
SAYS_NOTHING = {"true_cfg_scale": 1, "guidance_scale": None, "num_frames": 1}
ENGINES = {"dp_diffusion": "fsdp2", "veomni_diffusion": "veomni"}
"""Their `diffusion/model_engine` -> `actor.strategy`."""


def _family(given: Given) -> Family | None:
    """The family of the script's model, as far as the name of its folder says it."""
    name = str(given.get(f"{MODEL}.path", "")).rpartition("/")[2].lower().replace("_", "-")
    return next((family for part, family in FAMILIES.items() if name.startswith(part)), None)


def _same(note: str) -> Rule:
    """The same field, of which something is to be known."""
    return lambda path, value, given: Taken({path: value}, note)


# ---- what needs more than one value


def _algorithm(path: str, value: Any, given: Given) -> Outcome:
    if str(value) in PRESETS:
        return Taken({"algorithm.name": value})
    return Problem(f"algorithm {value} is not here: set algorithm.name, to one of {', '.join(PRESETS)}")


def _estimator(path: str, value: Any, given: Given) -> Outcome:
    if value in ESTIMATORS:
        return Taken({path: value})
    if str(value) in PRESETS:
        return Elsewhere("the algorithm's name chooses it")
    return Problem(f"estimator {value} is not here: set algorithm.adv_estimator, to one of {', '.join(ESTIMATORS)}")


def _loss(path: str, value: Any, given: Given) -> Outcome:
    if str(value) in PRESETS and f"{MODEL}.algorithm" not in given:
        return Taken({"algorithm.name": value}, "the name sets the loss")
    return Taken({path: value})


def _model_path(path: str, value: Any, given: Given) -> Taken:
    folder = folder_of(str(value))
    if folder:
        return Taken({path: folder}, f"a folder in diffusers format: download {value} to it")
    return Taken({path: str(value)}, "a folder in diffusers format")


def _config_path(path: str, value: Any, given: Given) -> Outcome:
    subfolder = given.get(f"{MODEL}.transformer_subfolder") or "transformer"
    if value in (None, f"{given.get(f'{MODEL}.path')}/{subfolder}"):
        return Elsewhere("the denoiser's config.json is read beside its weights")
    return Taken({path: folder_of(str(value)) or str(value)}, "the folder that has the denoiser's config.json")


def _subfolder(path: str, value: Any, given: Given) -> Outcome:
    if value in (None, "transformer"):
        return Elsewhere("the denoiser is in the folder transformer, of every model")
    return Taken({path: str(value)}, "the folder of path with the denoiser's weights")


def _warm_up(path: str, value: Any, given: Given) -> Outcome:
    steps, counted = given.get("trainer.total_training_steps"), given.get(f"{ACTOR}.optim.lr_warmup_steps", -1)
    if counted > 0:
        return Elsewhere("lr_warmup_steps counts")
    if not value:
        return Taken({f"{ACTOR}.optim.lr_warmup_steps": 0})
    if steps is None:
        return Elsewhere(f"warm-up is counted in optimiser steps here: set {ACTOR}.optim.lr_warmup_steps")
    warm = int(value * steps) * _updates(given)
    return Taken({f"{ACTOR}.optim.lr_warmup_steps": warm}, "in optimiser steps, where theirs are iterations")


def _warm_up_steps(path: str, value: Any, given: Given) -> Outcome:
    if value < 0:
        return Elsewhere("below 0 its ratio counts")
    updates = _updates(given)
    return Taken({path: value * updates}, "in optimiser steps, where theirs are iterations" if updates > 1 else "")


def _schedule(path: str, value: Any, given: Given) -> Outcome:
    """Theirs is constant or cosine, with fields of its own for what are arguments here."""
    optim = f"{ACTOR}.optim"
    name, floor = given.get(f"{optim}.lr_scheduler_type", "constant"), given.get(f"{optim}.min_lr_ratio")
    if name == "constant":
        warm = given.get(f"{optim}.lr_warmup_steps", 0) > 0 or given.get(f"{optim}.lr_warmup_steps_ratio")
        if path != f"{optim}.lr_scheduler_type":
            return Elsewhere("the schedule is constant, which does not read it")
        return Taken({path: "constant_with_warmup"}, "by transformers' name") if warm else Taken({path: name})
    if name != "cosine":
        return (
            Taken({path: name}) if path == f"{optim}.lr_scheduler_type" else Elsewhere("it is of the schedule cosine")
        )
    arguments = {"num_cycles": given.get(f"{optim}.num_cycles"), "min_lr_rate": floor or None}
    kwargs = {argument: number for argument, number in arguments.items() if number is not None}
    settings = {f"{optim}.lr_scheduler_type": "cosine_with_min_lr" if floor else name}
    return Taken(settings | ({f"{optim}.lr_scheduler_kwargs": kwargs} if kwargs else {}))


def _updates(given: Given) -> int:
    """Optimiser steps of an iteration."""
    return max(_prompts(given) // _mini_batch(given), 1) * given.get(f"{ACTOR}.ppo_epochs", 1)


def _prompts(given: Given) -> Any:
    """Prompts of an iteration."""
    return given.get("data.train_batch_size", PROMPTS)


def _mini_batch(given: Given) -> Any:
    """Prompts of an optimiser step."""
    return given.get(f"{ACTOR}.ppo_mini_batch_size", MINI_BATCH)


def _kl(path: str, value: Any, given: Given) -> Outcome:
    """Theirs divides by what its scheduler hands on: g with sde, the whole deviation with the other kernels."""
    if not value:
        return Taken({path: value})
    form, note = "gaussian", "of the whole deviation, as there with this kernel"
    if given.get(f"{ROLLOUT}.algo.sde_type", "sde") == "sde":
        form, note = "flow_grpo", "of the form without the step length, as there"
    return Taken({path: value, f"{ACTOR}.kl_loss_type": form}, note)


def _levels(path: str, value: Any, given: Given) -> Outcome:
    """Theirs draws so many of all levels; the share of that name here cuts the clean end off."""
    if value == 1:
        return Elsewhere("every level, as here")
    trained = max(int(given.get(f"{ROLLOUT}.pipeline.num_inference_steps", 10) * value), 1)
    return Taken({"algorithm.num_train_timesteps": trained}, "noise levels of each sample, drawn of all")


def _old_policy(path: str, value: Any, given: Given) -> Outcome:
    updates = _updates(given)
    if value == "copy" or updates == 1:
        return Taken({path: value})
    note = f"counted in optimiser steps here, of which an iteration has {updates}, and there in iterations"
    return Taken(
        {path: value}, f"{note}: it goes {updates} times as fast; algorithm.old_policy_decay is a constant one"
    )


def _loggers(path: str, value: Any, given: Given) -> Outcome:
    names = [name for name in (value if isinstance(value, list) else [value]) if name in ("wandb", "tensorboard")]
    return Taken({"tracking.also": names}, "beside MLflow, which is always there") if names else TRACKED


def _strategy(path: str, value: Any, given: Given) -> Outcome:
    if value in ("fsdp", "fsdp2"):
        return Taken({path: "fsdp2"})
    if value == "veomni":
        return Elsewhere("fsdp2 computes the same and needs nothing more; docs/training.md says how to use VeOmni")
    return Problem(f"{value} is no training engine here: set actor.strategy, to fsdp2 or veomni (docs/training.md)")


def _engine(path: str, value: Any, given: Given) -> Outcome:
    return _strategy(f"{ACTOR}.strategy", ENGINES.get(str(value), value), given)


def _micro_batch(path: str, value: Any, given: Given) -> Taken:
    """Where a rank has no whole number of micro-batches, which is refused here, the next smaller that divides."""
    n = given.get(f"{ROLLOUT}.n", 1)
    ranks = given.get("trainer.nnodes", 1) * given.get("trainer.n_gpus_per_node", 8)
    samples = _mini_batch(given) * n // ranks
    fits = next((size for size in range(min(value, samples), 0, -1) if samples % size == 0), value)
    sampled = fits if given.get("algorithm.paired_preference") is not True else max(fits // n, 1) * n
    note = "the rollout samples as many together, so that its log-probs are replayed to the bit"
    if sampled != fits:
        note = "the rollout keeps the samples of a prompt together, from which pairs are made"
    elif fits != value:
        note = f"{value} does not divide the {samples} samples of a rank's optimiser step"
    return Taken({path: fits, f"{ROLLOUT}.micro_batch_size": sampled}, note)


def _denoised_together(path: str, value: Any, given: Given) -> Outcome:
    if f"{ACTOR}.ppo_micro_batch_size_per_gpu" in given:
        return Elsewhere("the rollout samples as many together as the update takes, for equal bits")
    return Taken({f"{ROLLOUT}.micro_batch_size": value})


def _rollout_seed(path: str, value: Any, given: Given) -> Outcome:
    if "data.seed" in given:
        return Elsewhere("data.seed is the one seed of data, rollout and weights")
    return Taken({"trainer.seed": value}, ONE_SEED)


def _model_dtype(path: str, value: Any, given: Given) -> Taken:
    names = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    dtype = names.get(str(value), str(value))
    return Taken({f"{MODEL}.dtype": dtype}, "of the frozen weights; what is trained is fp32")


def _master_dtype(path: str, value: Any, given: Given) -> Outcome:
    """Theirs is the format of all weights in memory, from which param_dtype, bfloat16, computes."""
    if value in ("fp32", "float32"):
        return Elsewhere("what is trained is fp32 here; frozen weights have model.dtype, in which both sides compute")
    return _model_dtype(path, value, given)


_sums_up_whole = renamed(f"{ACTOR}.fsdp_config.shard_gradients", convert=lambda value: not value)
"""Theirs exchanges nothing between the passes of an optimiser step."""


def _device(path: str, value: Any, given: Given) -> Outcome:
    if value in ("cuda", "gpu"):
        return Taken({path: "cuda"})
    if value == "cpu":
        return Taken({path: value})
    return Elsewhere(f"trainer.device is cuda or cpu here, not {value}: the recipe says cuda")


def _tensor_parallel(path: str, value: Any, given: Given) -> Outcome:
    if value in (None, 1) or _separate(given):
        return Taken({f"{ROLLOUT}.vllm_omni.tensor_parallel_size": value or 1})
    return Elsewhere(
        f"a rollout worker of {value} GPUs needs GPUs of its own here (rollout.placement=separate): the recipe has "
        "workers of one GPU each"
    )


def _pipeline(path: str, value: Any, given: Given) -> Outcome:
    """Guidance and frames, which a run refuses where its model's family does not read them."""
    field, family = path.rpartition(".")[2], _family(given)
    if field == "num_frames" and value == 1 and (family is None or not family.frames_of):
        return Elsewhere("a picture has no frames here")
    if family is None:
        return Taken({path: value})
    if field in family.reads:
        return _frames(path, value, family) if field == "num_frames" else Taken({path: value})
    guidance = f"{path.rpartition('.')[0]}.{family.reads[0]}"
    if field == family.trains_by and guidance not in given:
        return Taken({guidance: value}, f"by which {family.called} is guided, in rollout and update alike")
    return Elsewhere(f"{family.called} does not read it: it reads {' and '.join(family.reads)}")


def _frames(path: str, value: int, family: Family) -> Taken:
    """Theirs rounds as diffusers' pipeline does."""
    every = family.frames_of or 1
    frames = value if value % every == 1 else value // every * every + 1
    note = "" if frames == value else f"{family.called} samples 1 frame and a multiple of {every}; theirs makes it that"
    return Taken({path: frames}, note)


def _validation_size(path: str, value: Any, given: Given) -> Elsewhere:
    field = path.rpartition(".")[2]
    if value == given.get(f"{ROLLOUT}.pipeline.{field}", 1 if field == "num_frames" else 512):
        return Elsewhere("validation samples at the rollout's size, which is the same")
    return Elsewhere("validation samples at the rollout's size; a validation sweep measures others (docs/measuring.md)")


def _attention(path: str, value: Any, given: Given) -> Outcome:
    if value in ("FLASH_ATTN", "TORCH_SDPA"):
        return Taken({f"{ROLLOUT}.vllm_omni.attention_backend": value})
    return Elsewhere(f"vLLM-Omni chooses by itself here, or FLASH_ATTN or TORCH_SDPA; {value} is not offered")


def _bypass(path: str, value: Any, given: Given) -> Taken:
    corrects = given.get(f"{CORRECTION}.rollout_is") or given.get(f"{CORRECTION}.rollout_rs")
    if value and corrects:
        return Taken(
            {path: False}, "weights and rejection compare with log-probs of the trainer, which bypass leaves out"
        )
    return Taken({path: value})


def _correcting_mode(path: str, value: Any, given: Given) -> Outcome:
    return Taken({path: re.sub(r"^token_", "step_", str(value)) if value else value})


def _rejection(path: str, value: Any, given: Given) -> Outcome:
    """verl's k1 is -lr, so that its bounds of exp are upside down here; k2 and k3 are the same."""
    if not str(given.get(f"{CORRECTION}.rollout_rs")).endswith("_k1") or value is None:
        return Taken({path: value})
    low, high = _two(value)
    if low is None or high is None:
        return Problem(f"{path} is {value!r} and should be two bounds above 0, lo_hi, as in 0.5_2.0")
    return Taken({path: [1 / high, 1 / low]}, "verl bounds exp(-lr), here exp(lr) is bounded (docs/algorithms.md)")


def _truncation(path: str, value: Any, given: Given) -> Outcome:
    """One number cuts weights off; of two, lo_hi, what is outside counts as 0."""
    if not isinstance(value, str):
        return Taken({path: value})
    low, high = _two(value)
    if low is None or high is None:
        return Problem(f"{path} is {value!r} and should be a number, or two above 0, lo_hi, as in 0.5_2.0")
    if not given.get(f"{CORRECTION}.rollout_is"):
        return Elsewhere("there are no weights without rollout_is")
    return Taken({f"{CORRECTION}.rollout_is_bounds": [low, high], path: high}, "what is outside counts as 0")


def _two(value: Any) -> tuple[float, float] | tuple[None, None]:
    """The bounds that verl writes as `lo_hi`; a single one is [1 / it, it]."""
    parts = [value, value] if isinstance(value, int | float) else str(value).split("_")
    try:
        low, high = map(float, parts)
    except ValueError:
        return None, None
    if isinstance(value, int | float) and low > 0:
        low = 1 / low
    return (low, high) if 0 < low <= high else (None, None)


def _async(path: str, value: Any, given: Given) -> Outcome:
    if value == "sync":
        return Taken({"trainer.one_step_off_policy": False})
    if value == "separate_async":
        return Taken({"trainer.one_step_off_policy": True}, "one iteration ahead, never more (docs/iteration.md)")
    return Elsewhere(f"{value} is not offered: one_step_off_policy samples one iteration ahead on GPUs of its own")


def _is_vllm_omni(given: Given) -> bool:
    """Is the rollout vLLM-Omni's?"""
    return given.get(f"{ROLLOUT}.name") == "vllm_omni"


def _separate(given: Given) -> bool:
    """Does the rollout have GPUs of its own?"""
    return bool(given.get(f"{ROLLOUT}.nnodes"))


def _rollout_workers(given: Given) -> int:
    ranks = given.get("trainer.nnodes", 1) * given.get("trainer.n_gpus_per_node", 8)
    if not _separate(given):
        return ranks
    gpus = given[f"{ROLLOUT}.nnodes"] * given.get(f"{ROLLOUT}.n_gpus_per_node", given.get("trainer.n_gpus_per_node", 8))
    return gpus // (given.get(f"{ROLLOUT}.tensor_model_parallel_size") or 1)


def _needs_no_old_log_probs(given: Given) -> bool:
    """Does the loss read none, or compare with those of the weights that sampled, as it must when sampling ahead?"""
    if given.get("trainer.v1.trainer_mode") == "separate_async":
        return True
    names = (given.get(f"{MODEL}.algorithm"), given.get(f"{ACTOR}.diffusion_loss.loss_mode"))
    return any(FINISHED_SAMPLES.items() <= PRESETS.get(str(name), {}).items() for name in names)


def _is(given: Given, algorithm: str, family: str | None = None) -> bool:
    """Is it this algorithm, on a model of this family?"""
    named = given.get(f"{MODEL}.algorithm"), given.get(f"{ACTOR}.diffusion_loss.loss_mode")
    return algorithm in named and (family is None or _family(given) is FAMILIES[family])


def _resume(path: str, value: Any, given: Given) -> Outcome:
    if value == "resume_path":
        return Elsewhere("a run goes on in its own folder: trainer.default_local_dir and the same config find it")
    return Taken({path: "disable" if value == "disable" else "auto"})


def _epochs(path: str, value: Any, given: Given) -> Elsewhere:
    """How many iterations an epoch has is the number of their prompts, which no override says."""
    if "trainer.total_training_steps" in given:
        return Elsewhere("a run is counted in iterations, trainer.total_training_steps")
    return Elsewhere(
        f"a run is counted in iterations, of which the recipe has {ITERATIONS}: set trainer.total_training_steps, to "
        f"{value} x (prompts of the table // {_prompts(given)})"
    )


def _never(path: str, value: Any, given: Given) -> Taken:
    """-1 is never there; 0 is here."""
    return Taken({path: max(value, 0)})


def _limit(to: str) -> Rule:
    def rule(path: str, value: Any, given: Given) -> Outcome:
        return Taken({to: value}) if value and value > 0 else Elsewhere("all, as here")

    return rule


SERVED = Elsewhere(
    "the run serves a judge that a reward asks: its model is reward.reward_model.model_path, its server's settings "
    "reward.reward_model.arguments"
)
NO_COPY = Elsewhere("weights go from the trainer to the rollout in memory, whichever way rollout.weight_transport says")
ENCODED = Elsewhere(
    "prompts are encoded once, before the run: `python -m flows.prepare embeddings --model ... --max-sequence-length N`"
)
PREPARED = Elsewhere(
    "prompts become one table with a split: `python -m flows.prepare prompts` reads files (docs/data.md)"
)
OLD_LOG_PROBS = Elsewhere("old and reference log-probs are computed in the update's micro-batches, for equal bits")
RECORDED = Elsewhere("log-probs are recorded wherever the loss reads them")
BY_LOSS = Elsewhere("the loss says which copies of the weights are kept, and which of them samples")
TRACKED = Elsewhere("metrics and pictures go to MLflow: tracking.uri, tracking.pictures")
MEMORY = Elsewhere("nothing is reserved: the estimate before the start says whether a run fits (docs/training.md)")
ONE_SEED = "one seed for data, rollout and weights"
SEEDED = renamed("trainer.seed", note=ONE_SEED)
SHARDED = Elsewhere(
    "FSDP2 shards over all trainer ranks; frozen weights stay whole with fsdp_config.shard_frozen=false"
)
ALWAYS_ODE = Elsewhere("validation is always the ODE, with the same noise for every checkpoint")
PROFILED = Elsewhere("torch.profiler traces of chosen iterations and ranks: trainer.profile (docs/measuring.md)")
BOTH_KINDS = Elsewhere("pictures and latents are both there for rewards")
OFF_POLICY = Elsewhere("sampling ahead is by one iteration, so that no limit of age is needed")

RULES: dict[str, Rule] = {
    # data
    "data.train_files": PREPARED,
    "data.val_files": PREPARED,
    "data.train_max_samples": Elsewhere("prompts of the table: n_train of params.yaml, or fewer lines in the file"),
    "data.val_max_samples": _limit(f"{ROLLOUT}.val_kwargs.max_prompts"),
    "data.max_prompt_length": ENCODED,
    "data.truncation": Elsewhere(
        "a prompt that is too long for the text encoder is refused when it is encoded, or with `too_long: cut` of the "
        "data set cut as the model's pipeline does"
    ),
    "data.seed": SEEDED,
    "data.custom_cls.path": PREPARED,
    "data.custom_cls.name": PREPARED,
    "data.custom_cls.collate_fn": PREPARED,
    # model
    f"{MODEL}.algorithm": _algorithm,
    f"{MODEL}.model_type": Elsewhere("the model's family is read from model_index.json"),
    f"{MODEL}.path": _model_path,
    f"{MODEL}.transformer_subfolder": _subfolder,
    f"{MODEL}.config_path": _config_path,
    f"{MODEL}.tokenizer_path": ENCODED,
    f"{MODEL}.extra_tokenizers": ENCODED,
    f"{MODEL}.custom_chat_template": ENCODED,
    f"{MODEL}.attn_backend": Elsewhere("torch's attention, of one kernel for rollout and update (docs/training.md)"),
    f"{MODEL}.policy_state_adapters": BY_LOSS,
    f"{MODEL}.lora_dtype": Elsewhere("LoRA is fp32 and computes in model.dtype"),
    f"{MODEL}.enable_gradient_checkpointing": renamed(f"{ACTOR}.fsdp_config.gradient_checkpointing"),
    **{f"{ROLLOUT}.pipeline.{field}": _pipeline for field in SAYS_NOTHING},
    f"{ROLLOUT}.val_kwargs.pipeline.true_cfg_scale": _pipeline,
    f"{ROLLOUT}.val_kwargs.pipeline.guidance_scale": _pipeline,
    f"{ROLLOUT}.val_kwargs.pipeline.num_frames": _validation_size,
    f"{MODEL}.pipeline.guidance_scale": renamed(f"{ROLLOUT}.pipeline.guidance_scale", note="it stands once"),
    # actor
    "diffusion/model_engine": _engine,
    "model_engine": _engine,
    f"{ACTOR}.strategy": _strategy,
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": _micro_batch,
    f"{ACTOR}.diffusion_loss.loss_mode": _loss,
    f"{ACTOR}.diffusion_loss.mix_beta": renamed(f"{ACTOR}.diffusion_loss.nft_beta"),
    f"{ACTOR}.diffusion_loss.ref_kl_coef": lambda path, value, given: Taken(
        {f"{ACTOR}.use_kl_loss": bool(value)} | ({f"{ACTOR}.kl_loss_coef": value} if value else {})
    ),
    f"{ACTOR}.diffusion_loss.add_kl_coefficient": Elsewhere("grpo_guard's coefficient is always applied"),
    f"{ACTOR}.use_kl_loss": _kl,
    f"{ACTOR}.optim.lr_warmup_steps": _warm_up_steps,
    f"{ACTOR}.optim.lr_warmup_steps_ratio": _warm_up,
    f"{ACTOR}.optim.lr_scheduler_type": _schedule,
    f"{ACTOR}.optim.num_cycles": _schedule,
    f"{ACTOR}.optim.min_lr_ratio": _schedule,
    f"{ACTOR}.optim.total_training_steps": Elsewhere("the run fills in its own number of optimiser steps, as there"),
    f"{ACTOR}.grad_clip": renamed(f"{ACTOR}.optim.clip_grad"),
    f"{ACTOR}.fsdp_config.model_dtype": _master_dtype,
    f"{ACTOR}.use_no_sync_for_gradient_accumulation": _sums_up_whole,
    f"{ACTOR}.fsdp_config.use_no_sync_for_gradient_accumulation": _sums_up_whole,
    f"{ACTOR}.fsdp_config.fsdp_size": SHARDED,
    f"{ACTOR}.fsdp_config.offload_policy": renamed(
        f"{ACTOR}.fsdp_config.param_offload", note="FSDP2's own offload is the only one"
    ),
    # rollout
    f"{ROLLOUT}.mode": Elsewhere("the rollout always takes batches as they come and gives them as they end"),
    f"{ROLLOUT}.tensor_model_parallel_size": _tensor_parallel,
    f"{ROLLOUT}.data_parallel_size": Elsewhere("rollout.num_actors workers share the batches"),
    f"{ROLLOUT}.agent.num_workers": Elsewhere(
        "the run's own process hands batches out; workers are rollout.num_actors"
    ),
    f"{ROLLOUT}.nnodes": Elsewhere("above 0: rollout.placement=separate, with its GPUs as rollout.num_actors"),
    f"{ROLLOUT}.n_gpus_per_node": Elsewhere("see rollout.nnodes"),
    f"{ROLLOUT}.dtype": _model_dtype,
    f"{ROLLOUT}.load_format": NO_COPY,
    f"{ROLLOUT}.layered_summon": NO_COPY,
    f"{ROLLOUT}.checkpoint_engine.backend": NO_COPY,
    f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": renamed(
        f"{ROLLOUT}.update_weights_bucket_megabytes"
    ),
    f"{ROLLOUT}.free_cache_engine": renamed(f"{ROLLOUT}.enable_sleep_mode"),
    f"{ROLLOUT}.gpu_memory_utilization": MEMORY,
    f"{ROLLOUT}.enforce_eager": renamed(f"{ROLLOUT}.vllm_omni.enforce_eager"),
    f"{ROLLOUT}.step_execution": renamed(f"{ROLLOUT}.vllm_omni.step_execution"),
    f"{ROLLOUT}.max_num_seqs": _denoised_together,
    f"{ROLLOUT}.engine_kwargs.vllm_omni.max_num_seqs": Elsewhere(
        "samples denoised together are rollout.micro_batch_size, here the update's, for equal bits"
    ),
    f"{ROLLOUT}.engine_kwargs.vllm_omni.request_batch_max_wait_ms": renamed(
        f"{ROLLOUT}.vllm_omni.request_batch_max_wait_ms"
    ),
    f"{ROLLOUT}.rollout_attn_backend": _attention,
    f"{ROLLOUT}.rollout_adapter": BY_LOSS,
    f"{ROLLOUT}.max_prompt_embed_length": ENCODED,
    f"{ROLLOUT}.calculate_log_probs": RECORDED,
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": OLD_LOG_PROBS,
    f"{ROLLOUT}.seed": _rollout_seed,
    f"{ROLLOUT}.pipeline.max_sequence_length": _same("embeddings of another length are refused"),
    f"{ROLLOUT}.pipeline.output_type": BOTH_KINDS,
    f"{ROLLOUT}.algo.sample_strategy": renamed(f"{ROLLOUT}.algo.sde_window_mode"),
    f"{ROLLOUT}.algo.sde_window_seed": Elsewhere("the window is drawn from trainer.seed and the iteration"),
    f"{ROLLOUT}.val_kwargs.pipeline.height": _validation_size,
    f"{ROLLOUT}.val_kwargs.pipeline.width": _validation_size,
    f"{ROLLOUT}.val_kwargs.pipeline.output_type": BOTH_KINDS,
    f"{ROLLOUT}.external_lib": renamed(f"{MODEL}.external_lib"),
    # algorithm
    "algorithm.adv_estimator": _estimator,
    "algorithm.timestep_fraction": _levels,
    "algorithm.old_policy_decay_schedule": _old_policy,
    f"{CORRECTION}.bypass_mode": _bypass,
    f"{CORRECTION}.loss_type": Elsewhere("the ratio is the loss's own"),
    f"{CORRECTION}.rollout_rs": _correcting_mode,
    f"{CORRECTION}.rollout_rs_threshold": _rejection,
    f"{CORRECTION}.rollout_is_threshold": _truncation,
    # reward
    rewards.JUDGE: rewards.judge,
    "reward.num_workers": Elsewhere("workers are counted a reward: reward.functions.<name>.num_workers"),
    "reward.custom_reward_function.path": rewards.custom_function,
    "reward.custom_reward_function.name": rewards.custom_function,
    "reward.aggregation": lambda path, value, given: Elsewhere(
        "rewards are added up by their weights"
        if value == "weighted_sum"
        else f"{value} is not offered: weighted sum is"
    ),
    # trainer
    "trainer.device": _device,
    "trainer.logger": _loggers,
    "trainer.project_name": renamed("tracking.experiment", note="MLflow's experiment"),
    "trainer.log_val_generations": TRACKED,
    "trainer.rollout_data_dir": TRACKED,
    "trainer.validation_data_dir": TRACKED,
    "trainer.total_epochs": _epochs,
    "trainer.resume_mode": _resume,
    "trainer.resume_from_path": Elsewhere("a run goes on in its own folder, trainer.default_local_dir"),
    "trainer.save_freq": _never,
    "trainer.test_freq": _never,
    "trainer.use_v1": Elsewhere("there is one loop"),
    "trainer.v1.trainer_mode": _async,
    # distillation
    "distillation.enabled": Elsewhere("a loss by distillation and actor.teacher_path say so"),
    "distillation.teacher_models.teacher_model.model_path": renamed(f"{ACTOR}.teacher_path"),
}

SECTIONS: dict[str, Rule] = {
    "actor_rollout_ref.ref.": OLD_LOG_PROBS,
    f"{ACTOR}.fsdp_config.wrap_policy.": Elsewhere("each family names the blocks that are sharded"),
    f"{ACTOR}.veomni_config.": Elsewhere("fsdp_config says the same, for fsdp2 and for veomni"),
    f"{ACTOR}.profiler.": PROFILED,
    f"{ROLLOUT}.profiler.": PROFILED,
    "global_profiler.": PROFILED,
    f"{ROLLOUT}.val_kwargs.algo.": ALWAYS_ODE,
    f"{ROLLOUT}.agent.": Elsewhere("there is no agent loop: a prompt is sampled once"),
    "reward.reward_functions.": rewards.entry,
    "reward.reward_manager.": Elsewhere("reward.functions is the manager of any number of rewards"),
    "reward.reward_model.": SERVED,
    "trainer.v1.": OFF_POLICY,
    "transfer_queue.": Elsewhere("batches stay in Ray's object store, and only references travel"),
}
"""Rules of whole sections, for what has none of its own."""

DEFAULTS: dict[str, Any] = {
    # What a script leaves out is VeRL-Omni's default, where it is not ours; docs/defaults.md says why ours differs.
    "data.train_batch_size": PROMPTS,
    f"{MODEL}.dtype": "bfloat16",  # of their rollout, and of their update's passes
    f"{ROLLOUT}.n": 1,
    f"{ROLLOUT}.algo.noise_level": 1.0,
    f"{ROLLOUT}.algo.iters_per_group": 1,
    f"{ROLLOUT}.val_kwargs.pipeline.num_inference_steps": 50,
    f"{ROLLOUT}.placement": lambda given: "separate" if _separate(given) else "colocated",
    f"{ROLLOUT}.num_actors": _rollout_workers,
    f"{ROLLOUT}.weight_transport": lambda given: "collective" if _separate(given) else "ipc",
    f"{ROLLOUT}.vllm_omni.enforce_eager": lambda given: False if _is_vllm_omni(given) else None,
    f"{ACTOR}.ppo_mini_batch_size": MINI_BATCH,
    f"{ACTOR}.optim.lr": 1e-6,
    f"{ACTOR}.optim.weight_decay": 0.01,
    f"{ACTOR}.diffusion_loss.dpo_beta": 2000.0,
    f"{ACTOR}.diffusion_loss.nft_beta": 0.5,
    f"{ACTOR}.kl_loss_coef": lambda given: 0.001 if given.get(f"{ACTOR}.use_kl_loss") else None,
    # What the algorithm's name sets here and leaves alone there.
    f"{ACTOR}.use_kl_loss": lambda given: False if _is(given, "diffusion_nft") else None,
    "algorithm.old_policy_decay_schedule": lambda given: "copy" if _is(given, "diffusion_nft") else None,
    f"{ACTOR}.diffusion_loss.clip_ratio": lambda given: 1e-4 if _is(given, "grpo_guard") else None,
    f"{ROLLOUT}.algo.sde_type": lambda given: "sde" if _is(given, "dance_grpo") else None,
    f"{ACTOR}.fsdp_config.gradient_checkpointing": True,
    f"{ACTOR}.fsdp_config.param_dtype": "bfloat16",
    # They divide gradients after every pass, which of LoRA's few is no matter.
    f"{ACTOR}.fsdp_config.shard_gradients": lambda given: None if given.get(f"{MODEL}.lora_rank") else True,
    # Their pairs are noised at levels of the scheduler's table, and Stable Diffusion 3's is shifted by 3.
    "algorithm.logit_normal_shift": lambda given: 3.0 if _is(given, "dpo", "stable-diffusion-3") else None,
    # The default of their one pipeline for Wan, which no field of theirs says.
    f"{ROLLOUT}.algo.init_same_noise": lambda given: True if _is(given, "dance_grpo", "wan") else None,
    f"{CORRECTION}.bypass_mode": lambda given: None if _needs_no_old_log_probs(given) else False,
    "trainer.device": "cuda",
    "trainer.n_gpus_per_node": 8,
    "trainer.test_freq": 0,
    "trainer.save_freq": 0,
}
"""Also what follows from several fields at once."""

VERL_OMNI = System(RULES, SECTIONS, DEFAULTS, NUMBERS)
