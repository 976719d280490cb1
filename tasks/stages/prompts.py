# SPDX-License-Identifier: Apache-2.0
"""The tasks that rewrite an iteration's prompts, and that have prompts encoded within the run."""

from collections.abc import Sequence

from tasks.data.live_embeddings import LiveEmbeddings, Taken
from tasks.data.prompts import Prompt
from tasks.data.rewriting import Rewriting, rewritten
from tasks.stages.stage import stage


@stage("rewrite_prompts")
def rewrite_prompts(rewrite: Rewriting, prompts: Sequence[Prompt], iteration: int, seed: int) -> list[Prompt]:
    """See `rewritten`."""
    return rewritten(rewrite, prompts, iteration, seed)


@stage("encode_prompts")
def encode_prompts(embeddings: LiveEmbeddings, prompts: Sequence[Prompt], needs_negative: bool) -> Taken:
    """See `LiveEmbeddings.take`."""
    return embeddings.take(prompts, needs_negative)
