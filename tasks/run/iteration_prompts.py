# SPDX-License-Identifier: Apache-2.0
"""Prompts as they are sampled: rewritten where a function of the user's does so, and encoded where the run does."""

from collections.abc import Sequence

from models.config.pipeline import DiffusionPipelineConfig
from tasks.actors.rollout_group import RolloutGroup
from tasks.data.live_embeddings import LiveEmbeddings, Taken
from tasks.data.prompts import Prompt
from tasks.data.rewriting import get_rewriting
from tasks.run.training import TrainingRun
from tasks.stages.prompts import encode_prompts, rewrite_prompts
from tasks.system.stopwatch import Stopwatch


def iteration_prompts(run: TrainingRun, number: int, clock: Stopwatch) -> tuple[list[Prompt], Taken | None]:
    """The iteration's train prompts with their embeddings at hand, and what of these was; None of those on disk.

    A function of the config, the seed and the iteration, if what rewrites them is: so a run that was killed goes on
    with the same.
    """
    prompts, config = run.prompts(number), run.config
    if config.data.rewrite_prompts is not None:
        rewrite = get_rewriting(config.data.rewrite_prompts)
        prompts = rewrite_prompts(clock, rewrite, prompts, number, config.trainer.seed)
    return prompts, have_encoded(clock, run.online.rollout, prompts)


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
