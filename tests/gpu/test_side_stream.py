# SPDX-License-Identifier: Apache-2.0
"""A GPU copies to the host while it computes something else.

Skipped without CUDA. On a GPU machine: `python -m pytest tests/gpu`.
"""

import pytest
import torch

from models.runtime.side_stream import Mark, SideStream

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; there is none here")

SECOND = 2_000_000_000
"""Clock cycles: about so long."""


def test_what_was_marked_arrives_before_later_work_is_done() -> None:
    side, source = SideStream("cuda"), torch.zeros(1 << 20, device="cuda")
    for later_work in (1, SECOND):  # the first time kernels are loaded and memory is taken, which waits for all work
        source.zero_()
        torch.cuda._sleep(SECOND // 10)
        source += 7.0  # marked, and not there yet
        mark = Mark("cuda")
        torch.cuda._sleep(later_work)
        later = torch.cuda.current_stream().record_event()
        with side.after(mark):
            copied = torch.stack([source, 2 * source]).cpu()
    assert not later.query(), "the copy waited for what was queued after the mark"
    assert torch.equal(copied, torch.tensor([[7.0], [14.0]]).expand(2, 1 << 20))
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
