# SPDX-License-Identifier: Apache-2.0
"""The task that has prompts encoded within the run."""

from collections.abc import Sequence

from tasks.data.live_embeddings import LiveEmbeddings, Taken
from tasks.data.prompts import Prompt
from tasks.stages.stage import stage


@stage("encode_prompts")
def encode_prompts(embeddings: LiveEmbeddings, prompts: Sequence[Prompt], needs_negative: bool) -> Taken:
    """See `LiveEmbeddings.take`."""
    return embeddings.take(prompts, needs_negative)
