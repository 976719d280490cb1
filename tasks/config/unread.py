# SPDX-License-Identifier: Apache-2.0
"""Which settings nothing reads, because of what others say: those of another algorithm, engine or mode.

They are told and not refused: a recipe may hold them for another algorithm's name, and runs that began with them go on.
What could only be a mistake is refused where the fields agree (`tasks.config.agreement`, `tasks.run.loss_checks`).
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from models.config.actor import LOSSES
from tasks.config.overrides import flat
from tasks.config.presets import ACTOR, CORRECTION, KERNEL, LOSS, MODEL, PRESETS, ROLLOUT
from tasks.config.tree import TrainConfig

CLIPPED = {"flow_grpo", "dance_grpo", "mix_grpo", "grpo_guard", "awm"}
READ_BY_LOSSES = {
    "clip_ratio": CLIPPED,
    "adv_clip_max": CLIPPED | {"diffusion_nft"},
    "kl_mask_threshold": {"flow_dppo"},
    "dpo_beta": {"dpo"},
    "nft_beta": {"diffusion_nft"},
    "awm_weighting": {"awm"},
    "awm_ema_coef": {"awm"},
}
"""Field of `diffusion_loss` -> those of the project's losses that read it; one of your own may read any."""
KEEP_OLD_POLICY = {"diffusion_nft", "awm"}
ENCODER, REWARDS = "data.text_encoder", "reward.functions"
OWN_REWARDS = {f"{REWARDS}.{label}" for label in TrainConfig().reward.functions}
TRUE_ANYHOW = ((f"{KERNEL}.noise_level", 0.0),)
"""Values that say what is done without them: samples that nothing explores are the ODE's."""


@dataclass(frozen=True)
class Unread:
    """Some settings, and when nothing reads them.

    Attributes:
        fields: dotted paths; a section stands for all that is below it.
        holds: does this config read none of them?
        why: in a clause; {loss} is the loss.
    """

    fields: tuple[str, ...]
    holds: Callable[[TrainConfig], bool]
    why: str


def _loss(config: TrainConfig) -> str:
    return config.actor_rollout_ref.actor.diffusion_loss.loss_mode


def _trains_on_finished(config: TrainConfig) -> bool:
    return config.algorithm.trainer_type == "direct_preference"


def _is_unguided(config: TrainConfig) -> bool:
    """Is there surely no guidance, whatever the family? Z-Image is guided by any scale above 0, others above 1."""
    pipeline = config.actor_rollout_ref.rollout.pipeline
    return pipeline.true_cfg_scale <= 1 and not pipeline.guidance_scale


def _is_ours_but(readers: set[str]) -> Callable[[TrainConfig], bool]:
    """Is the loss one of the project's, and none of these? What a loss of one's own reads is not known."""
    return lambda config: _loss(config) in set(LOSSES) - readers


def _below(section: str, *fields: str) -> tuple[str, ...]:
    return tuple(f"{section}.{field}" for field in fields)


ADVANTAGES = _below(
    "algorithm",
    *("adv_mode", "adv_estimator", "adv_options"),
    *("norm_adv_by_std_in_grpo", "global_std", "drop_equal_groups"),
)
OLD_POLICY = _below("algorithm", "old_policy_decay_schedule", "old_policy_decay", "old_policy_update_interval")
OF_SAMPLING = (
    *_below(ROLLOUT, "n", "enable_sleep_mode", "weight_transport", "update_weights_bucket_megabytes"),
    *_below("trainer", "canary_tolerance", "canary_missing_share", "canary_timesteps", "canary_batch"),
    *_below("trainer", "keep_stages", "profile.rollout_workers"),
    *_below("tracking", "pictures", "keep_pictures", "keep_validation_grids"),
    "reward.guards",
)
"""What training reads where it samples, and a measurement of weights nowhere."""
OF_MEASURING = (
    *_below(ROLLOUT, "name", "micro_batch_size", "num_actors", "num_gpus_per_actor", "num_threads", "placement"),
    *_below(ROLLOUT, "cuda_graphs", "max_queued_batches", "max_restarts", "vllm_omni"),
    *_below(ROLLOUT, "pipeline.solver", "val_kwargs.n", "val_kwargs.pipeline"),
    "reward",
)
"""What a measurement of weights reads, too; `val_kwargs.max_prompts` is not here: so many have to have embeddings."""
RULES = (
    Unread((KERNEL,), _trains_on_finished, "loss {loss} trains on finished samples, which the ODE makes"),
    Unread(
        (
            *_below("algorithm", "timestep_sampling", "num_train_timesteps", "timestep_fraction", "logit_normal_shift"),
            f"{ACTOR}.matching_loss_coef",
        ),
        lambda config: not _trains_on_finished(config),
        "loss {loss} trains on the sampler's own steps and noises nothing",
    ),
    Unread(OLD_POLICY, _is_ours_but(KEEP_OLD_POLICY), "loss {loss} keeps no old policy"),
    *(
        Unread((f"{LOSS}.{field}",), _is_ours_but(by), "loss {loss} does not read it")
        for field, by in READ_BY_LOSSES.items()
    ),
    Unread(
        OLD_POLICY[:1],
        lambda config: config.algorithm.old_policy_decay is not None,
        "algorithm.old_policy_decay stands in its place",
    ),
    Unread(
        ADVANTAGES,
        lambda config: _loss(config) in ("distill_kl", "distill_fm_mse"),
        "loss {loss} does not learn from rewards",
    ),
    Unread(
        ADVANTAGES,
        lambda config: not config.is_online,
        "algorithm.sample_source offline has no advantages",
    ),
    Unread(
        (f"{KERNEL}.iters_per_group",),
        lambda config: config.actor_rollout_ref.rollout.algo.sde_window_mode == "random",
        "sde_window_mode is random",
    ),
    Unread(
        (f"{ACTOR}.kl_loss_coef",),
        lambda config: not config.actor_rollout_ref.actor.use_kl_loss,
        "actor.use_kl_loss is false",
    ),
    Unread(
        _below(f"{ACTOR}.ema", "decay", "update_interval"),
        lambda config: not config.actor_rollout_ref.actor.ema.enable,
        "actor.ema.enable is false",
    ),
    Unread(
        _below(MODEL, "lora_alpha", "target_modules"),
        lambda config: not config.actor_rollout_ref.model.trains_lora,
        "model.lora_rank 0 trains all weights",
    ),
    Unread(
        (f"{ROLLOUT}.vllm_omni",),
        lambda config: config.actor_rollout_ref.rollout.name != "vllm_omni",
        "rollout.name is another engine",
    ),
    Unread(
        (f"{CORRECTION}.rollout_is_threshold",),
        lambda config: config.algorithm.rollout_correction.rollout_is is None,
        "rollout_correction.rollout_is is null",
    ),
    Unread(
        (f"{CORRECTION}.bypass_mode",),
        lambda config: _loss(config) == "distill_kl",
        "loss {loss} compares with no old log-probs",
    ),
    Unread((ENCODER,), lambda config: not config.data.is_live, "data.embeddings is not live"),
    Unread(
        ("data.pairs",),
        lambda config: config.is_online and config.data.name is None,
        "algorithm.sample_source is online: offline reads pairs",
    ),
    Unread(
        _below("trainer", "test_freq", "val_before_train"),
        lambda config: not config.is_online,
        "algorithm.sample_source offline starts no rollout that could validate",
    ),
    Unread(OF_SAMPLING, lambda config: not config.is_online, "algorithm.sample_source offline samples nothing"),
    Unread(
        OF_MEASURING,
        lambda config: not config.is_online,
        "algorithm.sample_source offline starts neither rollout nor rewards, which flows.validate does",
    ),
    Unread(
        _below(ENCODER, "num_gpus", "enable_sleep_mode"),
        lambda config: config.data.text_encoder.device == "cpu",
        "data.text_encoder.device is cpu",
    ),
    Unread(
        (f"{ENCODER}.num_gpus",),
        lambda config: config.data.text_encoder.is_colocated,
        "data.text_encoder.placement is colocated, which takes no GPU besides",
    ),
    Unread(
        (f"{ROLLOUT}.num_gpus_per_actor",),
        lambda config: config.shares_gpus,
        "rollout.placement is colocated, where a worker takes what its rank's GPU leaves",
    ),
    Unread((f"{ROLLOUT}.num_gpus_per_actor",), lambda config: config.trainer.device == "cpu", "trainer.device is cpu"),
    Unread((f"{ACTOR}.guidance_gradient",), _is_unguided, "rollout.pipeline asks for no guidance"),
    Unread(
        (f"{ROLLOUT}.enable_sleep_mode",),
        lambda config: config.actor_rollout_ref.rollout.placement != "colocated",
        "rollout.placement is separate, where no worker takes turns with the update",
    ),
    Unread(
        (f"{ROLLOUT}.update_weights_bucket_megabytes",),
        lambda config: config.actor_rollout_ref.rollout.weight_transport == "object_store",
        "rollout.weight_transport is object_store, which sends no buckets",
    ),
    Unread(
        ("trainer.max_logprob_difference",),
        _trains_on_finished,
        "loss {loss} trains on finished samples, which have no log-probs",
    ),
    Unread(
        ("trainer.max_nonfinite_steps",),
        lambda config: config.trainer.on_nonfinite == "stop",
        "trainer.on_nonfinite is stop",
    ),
    Unread(
        ("trainer.compile_cache",), lambda config: not config.actor_rollout_ref.model.compile, "model.compile is false"
    ),
    Unread(
        ("trainer.profile",),
        lambda config: not config.trainer.profile.iterations,
        "trainer.profile.iterations is empty",
    ),
)


def unread(config: TrainConfig) -> Iterator[tuple[str, str]]:
    """(dotted path of a field or section, why) of all that nothing reads in a run of training with this config."""
    for rule in RULES:
        if rule.holds(config):
            for path in rule.fields:
                yield path, rule.why.format(loss=_loss(config))


def without_effect(config: TrainConfig) -> dict[str, str]:
    """Dotted path of a setting -> why nothing reads it, of those that somebody has given another value than they have
    by the algorithm's name."""
    default = _defaults(config.algorithm.name)
    given = {
        path: value
        for path, value in _values(config).items()
        if (path not in default or value != default[path]) and (path, value) not in TRUE_ANYHOW
    }
    found: dict[str, str] = {}
    for section, why in unread(config):
        for path in given:
            if _is_below(path, section):
                found.setdefault(path, why)
    return found


def told(config: TrainConfig) -> str | None:
    """The settings `without_effect` in a sentence; None where there are none."""
    values, reasons = _values(config), dict[str, list[str]]()
    for path, why in without_effect(config).items():
        reasons.setdefault(why, []).append(f"{path} {values[path]}".rstrip())
    parts = [f"{', '.join(settings)} ({why})" for why, settings in reasons.items()]
    return f"without effect in this run: {'; '.join(parts)}" if parts else None


def why_unread(config: TrainConfig, path: str) -> str | None:
    """Why nothing reads the field at a dotted path, whatever its value; None where something does."""
    return next((why for section, why in unread(config) if _is_below(path, section)), None)


def _values(config: TrainConfig) -> dict[str, Any]:
    """Dotted path of each setting -> its value. A reward that is there by no default, and the model that rewards ask,
    are one setting each, and not one for each of their fields."""
    there = {f"{REWARDS}.{label}": entry.reward or "" for label, entry in config.reward.functions.items()}
    whole: dict[str, Any] = {path: name for path, name in there.items() if path not in OWN_REWARDS}
    if config.reward.reward_model is not None:
        whole["reward.reward_model"] = config.reward.reward_model.model_path
    values = flat(config.model_dump())
    return {path: value for path, value in values.items() if not any(_is_below(path, name) for name in whole)} | whole


def _is_below(path: str, section: str) -> bool:
    """Is it this field or section, or in this section?"""
    return path == section or path.startswith(f"{section}.")


@functools.cache
def _defaults(name: str) -> Mapping[str, Any]:
    return flat(TrainConfig().model_dump()) | PRESETS[name]
