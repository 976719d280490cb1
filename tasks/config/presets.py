# SPDX-License-Identifier: Apache-2.0
"""One name selects an algorithm: which kernel, window, advantage and loss it is made of, with their defaults.

The parts are independent (docs/algorithms.md); a named algorithm is a choice of them. Each field stands at most once
in a preset, and only where it differs from the field's own default, which is Flow-GRPO's.
"""

import reprlib
from collections.abc import Iterator, Mapping
from typing import Any

from models.config.actor import ForwardProcessConfig
from tasks.config.errors import near

MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
KERNEL = f"{ROLLOUT}.algo"
ACTOR = "actor_rollout_ref.actor"
LOSS = f"{ACTOR}.diffusion_loss"
FINISHED_SAMPLES = {"algorithm.trainer_type": "direct_preference"}
KL_FORM = f"{ACTOR}.kl_loss_type"
CORRECTION = "algorithm.rollout_correction"
ADAPTER = f"{MODEL}.algorithm"

DEFAULT = "flow_grpo"
PRESETS: dict[str, dict[str, Any]] = {
    "flow_grpo": {},
    "dance_grpo": {f"{KERNEL}.sde_type": "dance_sde", f"{KERNEL}.noise_level": 0.3},
    "mix_grpo": {f"{KERNEL}.sde_window_size": 2, f"{KERNEL}.sde_window_range": (0, 5)},
    "grpo_guard": {f"{LOSS}.loss_mode": "grpo_guard", f"{LOSS}.clip_ratio": 2e-6},
    "flow_dppo": {f"{LOSS}.loss_mode": "flow_dppo"},
    "dpo": {
        **FINISHED_SAMPLES,
        f"{LOSS}.loss_mode": "dpo",
        "algorithm.paired_preference": True,
        "algorithm.timestep_sampling": "logit_normal",
    },
    "diffusion_nft": {
        **FINISHED_SAMPLES,
        f"{LOSS}.loss_mode": "diffusion_nft",
        f"{ACTOR}.use_kl_loss": True,
        f"{ACTOR}.kl_loss_coef": 1e-4,
        "algorithm.old_policy_decay_schedule": "linear_to_0_5",
    },
    "awm": {
        **FINISHED_SAMPLES,
        f"{LOSS}.loss_mode": "awm",
        f"{LOSS}.clip_ratio": 1.0,
        f"{ACTOR}.use_kl_loss": True,
        f"{ACTOR}.kl_loss_coef": 1e-3,
        "algorithm.old_policy_decay_schedule": "linear_to_0_3",
    },
    "distill_kl": {f"{LOSS}.loss_mode": "distill_kl"},
    "distill_fm_mse": {**FINISHED_SAMPLES, f"{LOSS}.loss_mode": "distill_fm_mse"},
}


def preset(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that `algorithm.name` of a config's given fields stands for, as dotted path -> value.

    The adapter is asked for by the same name; one that serves its architecture alone serves them all.

    Raises:
        ValueError: unknown name; the message lists the known ones.
    """
    algorithm = given.get("algorithm")
    name = algorithm.get("name", DEFAULT) if isinstance(algorithm, Mapping) else DEFAULT
    if not isinstance(name, str) or name not in PRESETS:
        meant = near(str(name), PRESETS, most=1)
        raise ValueError(f"algorithm.name is {reprlib.repr(name)}; known: {', '.join(PRESETS)}{meant}")
    return {ADAPTER: name} | PRESETS[name]


def decided_by_name(name: str) -> list[str]:
    """Dotted paths of all that an algorithm's name speaks for: kernel, window and solver, the loss, its noise levels
    and old policy, the samples that it learns from and what is kept of their advantages, the form of its KL, its
    matching error, and whatever some preset sets; where it reads no log-probs, also how they are corrected. Another
    name takes the place of all of them, not of its preset's alone."""
    unread = [CORRECTION] if name in PRESETS and FINISHED_SAMPLES.items() <= PRESETS[name].items() else []
    set_somewhere = dict.fromkeys(path for fields in PRESETS.values() for path in fields)
    levels = [f"algorithm.{name}" for name in ForwardProcessConfig.model_fields]
    parts = [KERNEL, f"{ROLLOUT}.pipeline.solver", LOSS, KL_FORM, ADAPTER]
    parts += [f"{ACTOR}.levels_per_pass", f"{ACTOR}.matching_loss_coef", "algorithm.best_worst_k", "algorithm.adv_mode"]
    return list(dict.fromkeys([*parts, *levels, *set_somewhere, *unread]))


def tree_of(paths: Mapping[str, Any], made: type[dict[str, Any]] = dict) -> dict[str, Any]:
    """{"a.b": 1} -> {"a": {"b": 1}}, mappings of the class `made`."""
    tree = made()
    for path, value in paths.items():
        *parents, leaf = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, made())
        node[leaf] = value
    return tree


def absent(paths: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[str]:
    """Those of the dotted paths that the given fields lack."""
    for path in paths:
        node: Any = given
        for part in path.split("."):
            if not isinstance(node, Mapping) or part not in node:
                yield path
                break
            node = node[part]
