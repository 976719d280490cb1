# SPDX-License-Identifier: Apache-2.0
"""Curves as SVG, drawn here so that a page needs nothing from elsewhere and follows the reader's light or dark mode."""

import base64
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup, escape

MOST_POINTS = 160
"""Points of a drawn line; a longer one is drawn by the means of neighbours."""
SPARK_POINTS = 60
LEFT, RIGHT, TOP, BOTTOM = 56, 10, 8, 22
TICKS = 4
HEADLINE = 26
"""Height of the line above a chart that stands by itself."""
LIGHT = (
    "--paper: #fff; --card: #f6f7f9; --ink: #1c2128; --soft: #5d6673; --line: #dfe3e8; "
    "--c0: #3557d6; --c1: #ad5404; --c2: #15784f; --c3: #a13fb3"
)
"""Colours as CSS names them."""
MARKS = """svg text { font: 11px system-ui, sans-serif; fill: var(--soft); }
  .grid { stroke: var(--line); } .line { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
  .band { opacity: .17; stroke: none; } .cursor { stroke: var(--soft); stroke-dasharray: 3 3; visibility: hidden; }
  .line.c0 { stroke: var(--c0); } .line.c1 { stroke: var(--c1); } .line.c2 { stroke: var(--c2); }
  .line.c3 { stroke: var(--c3); }
  .band.c0, .dot.c0 { fill: var(--c0); } .band.c1, .dot.c1 { fill: var(--c1); } .band.c2, .dot.c2 { fill: var(--c2); }
  .band.c3, .dot.c3 { fill: var(--c3); }"""
"""How a chart's parts look, as CSS."""
Band = Mapping[int, tuple[float, float]]


@dataclass(frozen=True)
class Series:
    """One line of a chart.

    Attributes:
        points: iteration -> value; what is not finite is left out.
        band: iteration -> (low, high), not necessarily of the same iterations.
        colour: number of the page's colour.
    """

    name: str
    points: Mapping[int, float]
    band: Band = field(default_factory=dict)
    colour: int = 0


@dataclass(frozen=True)
class Chart:
    """A drawn chart.

    Attributes:
        title: what is drawn.
        size: width and height.
        marks: SVG of axes and lines.
        latest: the newest value of each line, in words.
        legend: (name, colour) of each line.
        data: what the page's script shows under the pointer.
    """

    title: str
    size: tuple[int, int]
    marks: Markup
    latest: str
    legend: list[tuple[str, int]]
    data: dict[str, Any]

    @property
    def svg(self) -> Markup:
        """The picture, for a page whose style has `MARKS`."""
        label = escape(f"{self.title}: {self.latest}")
        height = self.size[1]
        return Markup(
            f'<svg viewBox="0 0 {self.size[0]} {height}" role="img" aria-label="{label}">{self.marks}'
            f'<line class="cursor" y1="{TOP}" y2="{height - BOTTOM}"/></svg>'
        )

    def as_address(self) -> str:
        """The picture with its title and legend as a data URI, in light colours on paper: for the pages of others."""
        width, height = self.size[0], self.size[1] + HEADLINE
        # A wide space between the names: SVG joins those that follow each other.
        names = "".join(f'<tspan class="dot c{colour}" dx="14">{escape(name)}</tspan>' for name, colour in self.legend)
        picture = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
            f"<style>svg {{ {LIGHT} }} {MARKS} text.title {{ font-size: 13px; fill: var(--ink); }}</style>"
            f'<rect width="{width}" height="{height}" fill="var(--paper)"/>'
            f'<text class="title" x="{LEFT}" y="18">{escape(self.title)}, over iterations{names}</text>'
            f'<g transform="translate(0 {HEADLINE})">{self.marks}</g></svg>'
        )
        return f"data:image/svg+xml;base64,{base64.b64encode(picture.encode()).decode()}"


def spread(steps: Iterable[int], most: int, among: Iterable[int] | None = None) -> list[int]:
    """At most `most` + 2 of the steps, ascending: the first, the last, and every 2^k-th of `among` between them.

    With more steps the choice becomes a part of what it was, so that what is computed for a step can be kept.

    Args:
        steps: to choose from.
        among: of which `steps` are those that are still there; they themselves by default.
    """
    there = sorted(steps)
    stride = 1
    while len(there) > most * stride:
        stride *= 2
    places = {step: number for number, step in enumerate(sorted(among) if among is not None else there)}
    return [s for s in there if s in (there[0], there[-1]) or places.get(s, 1) % stride == 0]


def finite(points: Mapping[int, float]) -> dict[int, float]:
    """Without what is missing, in the order of iterations."""
    return {step: points[step] for step in sorted(points) if math.isfinite(points[step])}


def thinned(points: Mapping[int, float], most: int = MOST_POINTS) -> tuple[dict[int, float], Band]:
    """Finite points as they are, or the mean, and (lowest, highest), of as many neighbours as make `most` points."""
    there = finite(points)
    if len(there) <= most:
        return there, {}
    steps, size = list(there), math.ceil(len(there) / most)
    parts = [steps[start : start + size] for start in range(0, len(steps), size)]
    values = {part[-1]: [there[step] for step in part] for part in parts}
    means = {step: sum(part) / len(part) for step, part in values.items()}
    return means, {step: (min(part), max(part)) for step, part in values.items()}


def line_chart(title: str, series: Sequence[Series], size: tuple[int, int] = (420, 190)) -> Chart | None:
    """Lines over iterations with their bands; None where no line has a point.

    A line without a band that has more than `MOST_POINTS` points gets the range of what each of its points stands for.
    """
    drawn = []
    for line in series:
        points, ranges = thinned(line.points)
        if points:
            drawn.append(Series(line.name, points, line.band or ranges, line.colour))
    if not drawn:
        return None
    plot = _Plot.around(drawn, size)
    marks = Markup("".join([*plot.axes(), *(mark for line in drawn for mark in plot.marks(line))]))
    legend = [(line.name, line.colour) for line in drawn]
    return Chart(title, size, marks, _latest(drawn), legend, plot.data(drawn))


def sparkline(points: Mapping[int, float]) -> Markup:
    """A line without axes."""
    there, _ = thinned(points, SPARK_POINTS)
    if len(there) < 2:
        return Markup("")
    low, high = min(there.values()), max(there.values())
    first, last = min(there), max(there)
    path = " ".join(
        f"{1 + 118 * (step - first) / (last - first):.1f},{21 - 18 * ((value - low) / (high - low or 1)):.1f}"
        for step, value in there.items()
    )
    return Markup(f'<svg class="spark" viewBox="0 0 120 24" aria-hidden="true"><polyline points="{path}"/></svg>')


def number(value: float) -> str:
    """Four significant digits, all of a large number; "missing" where there is no value."""
    if not math.isfinite(value):
        return "missing"
    if 1e4 <= abs(value) < 1e9:
        return f"{value:,.0f}"
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        digits = max(0, 3 - math.floor(math.log10(abs(value)))) if value else 0
        return f"{value:.{digits}f}"
    return f"{value:.3g}"


@dataclass(frozen=True)
class _Plot:
    """Where values stand in a picture of (width, height)."""

    size: tuple[int, int]
    steps: tuple[int, int]
    values: tuple[float, float]

    @classmethod
    def around(cls, lines: Sequence[Series], size: tuple[int, int]) -> "_Plot":
        steps = [step for line in lines for step in line.points]
        values = [v for line in lines for v in line.points.values()]
        values += [v for line in lines for edge in _in_order(line.band).values() for v in edge]
        low, high = min(values), max(values)
        if high - low <= 1e-9 * max(abs(low), abs(high)):
            low, high = low - (abs(low) * 0.1 or 1.0), high + (abs(high) * 0.1 or 1.0)
        room = 0.04 * (high - low)
        return cls(size, (min(steps), max(steps)), (low - room, high + room))

    def x(self, step: float) -> float:
        first, last = self.steps
        return LEFT + (step - first) / ((last - first) or 1) * (self.size[0] - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high = self.values
        return TOP + (high - value) / (high - low) * (self.size[1] - TOP - BOTTOM)

    def axes(self) -> Iterator[str]:
        width, height = self.size
        for tick in ticks(*self.values):
            y = f"{self.y(tick):.1f}"
            yield f'<line class="grid" x1="{LEFT}" x2="{width - RIGHT}" y1="{y}" y2="{y}"/>'
            yield f'<text x="{LEFT - 6}" y="{y}" dy="0.35em" text-anchor="end">{_tick(tick)}</text>'
        for step in sorted({round(tick) for tick in ticks(*self.steps)} | set(self.steps)):
            if step in self.steps or min(abs(self.x(step) - self.x(end)) for end in self.steps) > 28:
                yield f'<text x="{self.x(step):.1f}" y="{height - 6}" text-anchor="middle">{step}</text>'

    def marks(self, line: Series) -> Iterator[str]:
        band = _in_order(line.band)
        if len(band) > 1:
            edges = [(step, low) for step, (low, _) in band.items()]
            edges += [(step, high) for step, (_, high) in reversed(band.items())]
            yield f'<polygon class="band c{line.colour}" points="{self._path(edges)}"/>'
        points = list(line.points.items())
        yield f'<polyline class="line c{line.colour}" points="{self._path(points)}"/>'
        for step, value in points if len(points) <= 30 else points[-1:]:
            yield f'<circle class="dot c{line.colour}" cx="{self.x(step):.1f}" cy="{self.y(value):.1f}" r="2.4"/>'

    def data(self, lines: Sequence[Series]) -> dict[str, Any]:
        width = self.size[0]
        shown = [{"name": line.name, "points": [[step, *_texts(line, step)] for step in line.points]} for line in lines]
        return {"width": width, "from": LEFT, "to": width - RIGHT, "steps": self.steps, "series": shown}

    def _path(self, points: Iterable[tuple[int, float]]) -> str:
        return " ".join(f"{self.x(step):.1f},{self.y(value):.1f}" for step, value in points)


def ticks(low: float, high: float) -> list[float]:
    """About `TICKS` round numbers between two."""
    if high <= low:
        return [low]
    rough = (high - low) / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough)
    first = math.ceil(low / step)
    return [n * step for n in range(first, math.floor(high / step) + 1)]


def _tick(value: float) -> str:
    return "0" if abs(value) < 1e-12 else f"{value:.6g}" if 1e-3 <= abs(value) < 1e5 else f"{value:.2g}"


def _in_order(band: Band) -> dict[int, tuple[float, float]]:
    return {step: band[step] for step in sorted(band) if all(map(math.isfinite, band[step]))}


def _texts(line: Series, step: int) -> list[str]:
    edges = line.band.get(step)
    return [number(line.points[step]), *([f"[{number(edges[0])}, {number(edges[1])}]"] if edges else [])]


def _latest(lines: Sequence[Series]) -> str:
    last = [(line.name, number(line.points[max(line.points)])) for line in lines]
    return last[0][1] if len(last) == 1 else " · ".join(f"{name} {value}" for name, value in last)
