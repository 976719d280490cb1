# SPDX-License-Identifier: Apache-2.0
"""What a reward may know of the prompt of a sample."""

from collections.abc import Mapping
from typing import Any, Protocol


class ScoredPrompt(Protocol):
    """What a reward may know of a sample's prompt; `tasks.data.prompts.Prompt` is one."""

    @property
    def prompt(self) -> str:
        """What the picture was asked for."""

    @property
    def target(self) -> str | None:
        """The text that it is to show, where the data set names one."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Whatever else the data set's row holds."""
