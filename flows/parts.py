# SPDX-License-Identifier: Apache-2.0
"""A long run's iterations as flow runs of their own, so that the run's page in Prefect stays readable."""

from collections.abc import Callable, Iterator

from prefect import flow

MOST_PARTS = 20
"""As many as have their names side by side on Prefect's page."""
FEWEST_ITERATIONS = 20
"""Of a part, at whose end Prefect waits a second for the thread of its heartbeats; a run of so few has no parts."""


def parts(first: int, total: int) -> Iterator[tuple[int, int]]:
    """(first, last) of each part of the iterations `first` to `total`; a resumed run's end where they would have."""
    size = max(-(-total // MOST_PARTS), FEWEST_ITERATIONS)
    while first <= total:
        last = min(((first - 1) // size + 1) * size, total)
        yield first, last
        first = last + 1


def in_parts(first: int, total: int, work: Callable[[int], None]) -> None:
    """Call `work` with the number of each iteration from `first` to `total`."""

    @flow(name="iterations", flow_run_name="{first}-{last}", persist_result=False)
    def part(first: int, last: int) -> None:
        for number in range(first, last + 1):
            work(number)

    for bounds in parts(first, total):
        (part.fn if total <= FEWEST_ITERATIONS else part)(*bounds)
