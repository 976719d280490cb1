# SPDX-License-Identifier: Apache-2.0
"""Prompts as they are sampled: rewritten where a function of the user's does so, and encoded where the run does.

Those of the next iteration are begun while the present one is sampled.
"""

from collections.abc import Sequence

from models.config.pipeline import DiffusionPipelineConfig
from tasks.actors.rollout_group import RolloutGroup
from tasks.data.live_embeddings import LiveEmbeddings, Taken
from tasks.data.prompts import Prompt
from tasks.data.rewriting import get_rewriting
from tasks.records.flow_page import page_logger
from tasks.run.training import TrainingRun
from tasks.stages.encode import encode_prompts
from tasks.stages.rewrite import rewrite_prompts
from tasks.system.stopwatch import Stopwatch


def iteration_prompts(run: TrainingRun, number: int, clock: Stopwatch) -> tuple[list[Prompt], Taken | None]:
    """The iteration's train prompts with their embeddings at hand, and what of these was; None of those on disk.

    A function of the config, the seed and the iteration, if what rewrites them is: so a run that was killed goes on
    with the same.
    """
    there = run.prompts_ahead.pop(number, None)
    prompts = _as_sampled(run, number, clock) if there is None else there
    return prompts, have_encoded(clock, run.online.rollout, prompts)


def encode_ahead(run: TrainingRun, number: int, clock: Stopwatch) -> None:
    """Begin to encode an iteration's prompts, where the run does that and there is such an iteration."""
    rollout = run.online.rollout
    embeddings, last = rollout.embeddings, run.config.trainer.total_training_steps
    if not isinstance(embeddings, LiveEmbeddings) or embeddings.start is None or number > last:
        return
    try:
        prompts = _as_sampled(run, number, clock)
    except Exception as error:  # whatever the user's function raises: that iteration calls it again and stops the run
        page_logger().warning("the prompts of iteration %d could not be rewritten ahead: %s", number, error)
        return
    run.prompts_ahead[number] = prompts
    embeddings.encode_ahead(prompts, rollout.is_guided())


def _as_sampled(run: TrainingRun, number: int, clock: Stopwatch) -> list[Prompt]:
    prompts, config = run.prompts(number), run.config
    if config.data.rewrite_prompts is None:
        return prompts
    rewrite = get_rewriting(config.data.rewrite_prompts)
    return rewrite_prompts(clock, rewrite, prompts, number, config.trainer.seed)


def have_encoded(
    clock: Stopwatch, rollout: RolloutGroup, prompts: Sequence[Prompt], pipeline: DiffusionPipelineConfig | None = None
) -> Taken | None:
    """Have the embeddings of these prompts at hand for a rollout; nothing is to be done for those on disk, and None.

    Args:
        pipeline: with which they are sampled, if not the rollout's own.
    """
    embeddings = rollout.embeddings
    if not isinstance(embeddings, LiveEmbeddings):
        return None
    return encode_prompts(clock, embeddings, prompts, rollout.is_guided(pipeline))
