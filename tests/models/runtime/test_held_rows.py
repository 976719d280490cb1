# SPDX-License-Identifier: Apache-2.0
"""Which rows inductor is asked to hold. That its kernels do so is tests/gpu/test_held_rows.py's."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import sympy
from torch._inductor import config
from torch._inductor.choices import InductorChoices
from torch._inductor.runtime.hints import ReductionHint

from models.runtime.held_rows import HOLD_ROWS, RULE, hold_marked_rows, is_held


@dataclass
class Features:
    """What inductor says of a kernel: its rows' length and hint, and what its nodes read and write, by name."""

    reduction_numel: Any
    hint: ReductionHint = ReductionHint.INNER
    nodes: list[tuple[set[str], set[str]]] = field(default_factory=list)

    def get_reduction_hint(self) -> ReductionHint:
        return self.hint

    def scheduler_nodes(self) -> list[Any]:
        def named(names: set[str]) -> list[Any]:
            return [SimpleNamespace(name=name) for name in names]

        return [SimpleNamespace(read_writes=SimpleNamespace(reads=named(r), writes=named(w))) for r, w in self.nodes]


LARGEST_FIRST = [({"activations"}, {"largest"}), ({"activations", "largest"}, {"rounded"})]
OF_ANOTHER = [({"activations", "gradient"}, {"largest"}), ({"activations", "gradient", "largest"}, {"rounded"})]


@pytest.fixture
def marked() -> Iterator[None]:
    """What inductor's configuration is while a marked graph is compiled."""
    with config.patch(HOLD_ROWS):
        yield


@pytest.mark.parametrize(
    ("features", "held"),
    [
        (Features(sympy.Integer(1536)), True),
        (Features(sympy.Integer(4096), nodes=OF_ANOTHER), True),
        (Features(sympy.Integer(6144), nodes=LARGEST_FIRST), True),
        (Features(sympy.Integer(16_384), nodes=LARGEST_FIRST), True),
        (Features(sympy.Integer(6144), nodes=OF_ANOTHER), False),
        (Features(sympy.Integer(16_385), nodes=LARGEST_FIRST), False),
        (Features(sympy.Symbol("length", integer=True)), False),
        (Features(sympy.Integer(1536), ReductionHint.OUTER), False),
        (Features(sympy.Integer(1536), ReductionHint.DEFAULT), False),
    ],
)
@pytest.mark.usefixtures("marked")
def test_rows_that_are_held(features: Features, held: bool) -> None:
    assert is_held(features) is held


def test_only_marked_graphs_hold_rows() -> None:
    assert not is_held(Features(sympy.Integer(1536)))


@pytest.mark.usefixtures("marked")
def test_inductor_asks_for_the_mark_once_and_decides_of_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def own(features: Any, cooperative_reduction: bool) -> bool:
        asked.append(cooperative_reduction)
        return cooperative_reduction

    monkeypatch.setattr(InductorChoices, RULE, staticmethod(own))
    hold_marked_rows()
    rule = getattr(InductorChoices, RULE)
    hold_marked_rows()
    assert getattr(InductorChoices, RULE) is rule
    assert rule(Features(sympy.Integer(1536)), False)
    assert asked == []
    others = Features(sympy.Integer(1536), ReductionHint.OUTER)
    assert [InductorChoices().should_use_persistent_reduction(others, last) for last in (False, True)] == [False, True]  # type: ignore[arg-type]
    assert asked == [False, True]


def test_a_torch_without_the_rule_is_left_alone_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(InductorChoices, RULE)
    hold_marked_rows()
    assert not hasattr(InductorChoices, RULE)
    assert "torch has no InductorChoices.should_use_persistent_reduction" in caplog.text
