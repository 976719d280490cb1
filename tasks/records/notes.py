# SPDX-License-Identifier: Apache-2.0
"""The descriptions on MLflow's pages: of a run in five lines, and of a registered version."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tasks.records.headline import HEADLINE

LEARNT = "- **Learnt:**"
"""How a description that this project wrote begins."""


@dataclass(frozen=True)
class Weights:
    """Exported weights, and what it takes to load them.

    Attributes:
        folder: absolute path of the export.
        pipeline: class of diffusers that loads the base model.
        base_model: folder of the weights that the run began with.
        lora: are they LoRA weights, which want the base model beside them?
        registered: their address in the registry, models:/<name>/<version>; empty before they are there.
    """

    folder: str
    pipeline: str
    base_model: str
    lora: bool
    registered: str = ""

    def snippet(self) -> str:
        """Python that loads them: from the registry, or from their folder on this machine."""
        source = f'"{self.folder}"'
        if self.registered:
            source = f'mlflow.artifacts.download_artifacts("{self.registered}")'
        if not self.lora:
            return f"pipe = {self.pipeline}.from_pretrained({source})"
        return f'pipe = {self.pipeline}.from_pretrained("{self.base_model}"); pipe.load_lora_weights({source})'


@dataclass(frozen=True)
class RunNote:
    """What a run's page says first.

    Attributes:
        held_out: iteration -> held-out reward.
        reward: iteration -> reward of the training samples.
        spent: the run's newest metrics, of which cost and speed are told.
        on_gpu: does the run hold GPUs? Its cost is told in GPU-hours then.
        commit: of the code, empty where there is none.
        changed: did files differ from the commit?
        weights: the exported weights; None before there are any.
        links: words -> address.
    """

    held_out: Mapping[int, float]
    reward: Mapping[int, float]
    spent: Mapping[str, float]
    on_gpu: bool
    commit: str
    changed: bool
    weights: Weights | None = None
    links: Mapping[str, str] = field(default_factory=dict)

    def text(self) -> str:
        """Markdown: five lines, each of a list."""
        links = " · ".join(f"[{words}]({address})" for words, address in self.links.items())
        lines = {
            "Learnt": self._learnt(),
            "Links": links
            or "none",  # MLflow's page lays a veil over all below the second line: no link is clicked there
            "Cost": self._cost(),
            "Code": self._code(),
            "Weights": f"`{self.weights.snippet()}`" if self.weights else "not exported yet",
        }
        return "\n".join(f"- **{name}:** {line}" for name, line in lines.items())

    def _learnt(self) -> str:
        iterations = max([0, *self.reward, *self.held_out])
        told = [f"held-out reward {_change(self.held_out)}" if self.held_out else "held-out reward not measured"]
        if self.reward:
            told.append(f"reward of the training samples {_change(self.reward)}")
        return f"{', '.join(told)}, in {iterations} iterations"

    def _cost(self) -> str:
        hours = self.spent.get("cost/hours", 0.0)
        spent = f"{60 * hours:.1f} minutes on the CPU"
        if self.on_gpu:
            spent = f"{self.spent.get('cost/gpu_hours', 0.0):.3g} GPU-hours ({60 * hours:.1f} minutes)"
        images = f"{self.spent.get('cost/images', 0.0):,.0f} images"
        speed = self.spent.get(f"{HEADLINE}/images_per_second")
        return ", ".join([spent, images, *([f"{speed:.3g} images/s"] if speed else [])])

    def _code(self) -> str:
        if not self.commit:
            return "no commit is known"
        beside = "and the changes in lineage/\\*/code.patch" if self.changed else "as it is"
        return f"commit {self.commit[:12]} {beside}"


def _change(values: Mapping[int, float]) -> str:
    """The first and the last value; one alone is told as it is."""
    first, last = values[min(values)], values[max(values)]
    return f"{last:.3f}" if len(values) == 1 else f"{first:.3f} → {last:.3f}"


def version_note(weights: Weights, iteration: int, held_out: str | None) -> str:
    """Markdown that describes a registered version: what it achieved, how it is loaded and where its files are.

    Args:
        held_out: the weights' held-out reward; None where it was not measured of these.
    """
    code = f"import mlflow\nfrom diffusers import {weights.pipeline}\n\n{weights.snippet().replace('; ', chr(10))}"
    return (
        f"Held-out reward **{held_out or 'not measured'}**, after {iteration} iterations from {weights.base_model}.\n\n"
        f"```python\n{code}\n```\n\nExported to `{weights.folder}`."
    )
