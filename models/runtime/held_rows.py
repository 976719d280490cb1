# SPDX-License-Identifier: Apache-2.0
"""Inductor's kernels over a denoiser's rows hold a row, where by themselves they would read it once for each question.

Rows of up to 1,024 numbers are held by a program of the GPU from their first read to their last; over longer ones
inductor walks in a loop, once more for each thing that it asks of the whole row: its mean, its deviation, its largest
magnitude, what follows from these. A transformer's rows are longer than that (1,536 numbers in Stable Diffusion 3.5,
3,072 in Qwen-Image and FLUX), and each block norms them, modulates them and rounds them to float8.

Only what compiles imports this module: inductor takes a second to import.
"""

import logging
from functools import wraps
from typing import Any

import torch
from torch._inductor import config
from torch._inductor.choices import InductorChoices
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.runtime.hints import ReductionHint

WIDTH = 4096
"""Numbers of the longest row that is held whatever its kernel does."""
WIDTH_OF_ONE = 16_384
"""And where the kernel reads one tensor alone: for more of them, in so long rows, a program has not the registers."""
RULE = "should_use_persistent_reduction"

log = logging.getLogger(__name__)


class HeldRows(CustomGraphPass):
    """Says of a graph that its long rows are held; it changes nothing of the graph itself.

    Inductor has no option for this. So the graphs' compilation is given this pass, `hold_marked_rows` has inductor look
    for it, and by its name the graph is kept apart from others in the cache of what was compiled.
    """

    def __call__(self, graph: torch.fx.graph.Graph) -> None:
        """Leave the graph as it is."""

    def uuid(self) -> Any:
        """Its name, in the key of the cache."""
        return f"rows held up to {WIDTH}, {WIDTH_OF_ONE} of one tensor"


HOLD_ROWS: dict[str, Any] = {"post_grad_custom_post_pass": HeldRows()}
"""Inductor's option for a graph whose long rows are to be held, after `hold_marked_rows`."""


def hold_marked_rows() -> None:
    """Have inductor hold the rows of graphs that are compiled with `HOLD_ROWS`, from now on in this process.

    Its own rule decides of all others, and of rows that are not for holding. Once more changes nothing. Where torch has
    that rule no more, all are as torch chooses, and the log says so.
    """
    by_itself: Any = getattr(InductorChoices, RULE, None)
    if by_itself is None:
        log.warning("torch has no InductorChoices.%s: compiled kernels read long rows as it chooses", RULE)
    elif not getattr(by_itself, "looks_for_mark", False):

        @wraps(by_itself)
        def choose(features: Any, *others: Any, **named: Any) -> bool:
            return is_held(features) or by_itself(features, *others, **named)

        choose.looks_for_mark = True  # type: ignore[attr-defined]
        setattr(InductorChoices, RULE, staticmethod(choose))


def is_held(features: Any) -> bool:
    """Whether the graph that is compiled now is marked, and the rows of this kernel are for holding: inner ones, whose
    length is known and within the limits.

    Args:
        features: inductor's SIMDKernelFeatures, what is known of a kernel before it is written.
    """
    width = features.reduction_numel
    marked = isinstance(config.post_grad_custom_post_pass, HeldRows)
    if not marked or not width.is_Integer or features.get_reduction_hint() is not ReductionHint.INNER:
        return False
    return bool(width <= WIDTH) or (bool(width <= WIDTH_OF_ONE) and len(tensors_read(features)) == 1)


def tensors_read(features: Any) -> set[str]:
    """Names of those that a kernel reads and does not make itself."""
    nodes = features.scheduler_nodes()
    made = {write.name for node in nodes for write in node.read_writes.writes}
    return {read.name for node in nodes for read in node.read_writes.reads} - made
