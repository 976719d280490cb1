# SPDX-License-Identifier: Apache-2.0
"""The task that rewrites an iteration's prompts."""

from collections.abc import Sequence

from tasks.data.prompts import Prompt
from tasks.data.rewriting import Rewriting, rewritten
from tasks.stages.stage import stage


@stage("rewrite_prompts")
def rewrite_prompts(rewrite: Rewriting, prompts: Sequence[Prompt], iteration: int, seed: int) -> list[Prompt]:
    """See `rewritten`."""
    return rewritten(rewrite, prompts, iteration, seed)
