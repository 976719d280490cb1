# SPDX-License-Identifier: Apache-2.0
"""How far a run is and how long it will take, in the terminal and on Prefect's page."""

import math
import time
from typing import cast
from uuid import UUID

from prefect.artifacts import create_progress_artifact, update_progress_artifact
from tqdm import tqdm

SECONDS_BETWEEN_UPDATES = 5.0
"""Of Prefect's artifact; an update is a request."""


class Progress:
    """A bar in the terminal and a progress artifact of the flow run, which says what is left.

    Args:
        name: of the run.
        total: iterations.
        done: of these, those that a resumed run has behind it.
    """

    def __init__(self, name: str, total: int, done: int):
        self.name = name
        self.bar = tqdm(total=total, initial=done, desc="training", unit="it", dynamic_ncols=True)
        artifact = create_progress_artifact(progress=100 * done / total, key="training", description=name)
        self._artifact = cast(UUID, artifact)  # Prefect's signature allows for a coroutine, as in async code
        self._updated = time.monotonic()

    def show(self, **numbers: float) -> None:
        """Put numbers behind the bar; what was not measured is left out."""
        self.bar.set_postfix({name: f"{value:.3f}" for name, value in numbers.items() if not math.isnan(value)})

    def advance(self, **numbers: float) -> None:
        """One iteration is done."""
        self.show(**numbers)
        self.bar.update()
        if self.bar.n >= self.bar.total or time.monotonic() - self._updated >= SECONDS_BETWEEN_UPDATES:
            self._updated = time.monotonic()
            percent = 100 * self.bar.n / self.bar.total
            update_progress_artifact(self._artifact, progress=percent, description=f"{self.name}: {self.bar}")

    def close(self) -> None:
        """Leave the bar as it is."""
        self.bar.close()
