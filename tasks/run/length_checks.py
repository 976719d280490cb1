# SPDX-License-Identifier: Apache-2.0
"""Whether a run makes as many optimiser steps as its settings are for."""

import logging
from collections.abc import Iterator

from models.algorithms import get_diffusion_loss_fn
from models.training.schedules import check_span
from tasks.config.errors import ConfigError
from tasks.config.tree import TrainConfig

log = logging.getLogger(__name__)


def check_length(config: TrainConfig) -> None:
    """The run makes as many optimiser steps as its settings are for."""
    ema, planned = config.actor_rollout_ref.actor.ema, config.planned_optimizer_steps
    if ema.enable and planned < ema.update_interval:
        raise ConfigError(
            f"actor.ema.update_interval is {ema.update_interval}, but the run makes {planned} optimiser steps, so the "
            "average that it validates and exports would never move: lower it to at most that, let the run be longer, "
            "or set actor.ema.enable to false"
        )
    after_span = check_span(config.scheduled_actor.optim, planned)
    for beyond in filter(None, (after_span, *_beyond_the_end(config, planned), *_never(config))):
        log.warning(beyond)


def _beyond_the_end(config: TrainConfig, planned: int) -> Iterator[str]:
    """A sentence for each setting of what comes after the run's last step. No error: the run may be made longer.

    Args:
        planned: optimiser steps of the whole run.
    """
    warm_up, last = config.actor_rollout_ref.actor.optim.lr_warmup_steps, config.trainer.total_training_steps
    if warm_up > planned:
        yield (
            f"actor.optim.lr_warmup_steps is {warm_up}, but the run makes {planned} optimiser steps: the learning rate "
            "ends below actor.optim.lr"
        )
    late = ", ".join(str(number) for number in config.trainer.profile.iterations if number > last)
    if late:
        yield f"trainer.profile.iterations names {late}, but the run ends with iteration {last}: they have no traces"


def _never(config: TrainConfig) -> Iterator[str]:
    """A sentence for each setting of what does not come about before the run's end, likewise."""
    trainer, algo, guards = config.trainer, config.actor_rollout_ref.rollout.algo, config.reward.guards
    last, mode = trainer.total_training_steps, algo.sde_window_mode
    explores = config.algorithm.trainer_type == "policy_gradient"
    if explores and mode != "random" and algo.iters_per_group >= last:
        yield (
            f"rollout.algo.sde_window_mode is {mode} and iters_per_group {algo.iters_per_group}, but the run ends with "
            f"iteration {last}: the window never moves"
        )
    loss, interval = config.actor_rollout_ref.actor.diffusion_loss, config.algorithm.old_policy_update_interval
    if interval > last and get_diffusion_loss_fn(loss.loss_mode, loss.options).keeps_old_policy():
        yield (
            f"algorithm.old_policy_update_interval is {interval}, but the run ends with iteration {last}: the old "
            f"policy of loss {loss.loss_mode}, which samples, never moves"
        )
    if guards.action == "stop":
        # The first has none before it to be compared with. The last iteration is one of those that are validated.
        there, needed = trainer.val_before_train + (last - 1) // trainer.test_freq + 1, guards.validations + 1
        if there < needed:
            yield (
                f"reward.guards.action is stop, but the run ends with iteration {last} and has {there} of the {needed} "
                "validations that a flag needs: lower trainer.test_freq or reward.guards.validations, or let the run "
                "be longer"
            )
