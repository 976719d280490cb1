# SPDX-License-Identifier: Apache-2.0
"""The examples of docs/examples, run as a reader would run them: what they print is what the maths says."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.forked import Program
from tests.support.patience import PATIENCE

pytestmark = pytest.mark.waits

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
PAGE = (ROOT / "docs" / "examples.md").read_text()
NUMBER = r"-?\d+\.\d+(?:e[-+]\d+)?"


RUN = """
import contextlib, runpy, sys
with open(sys.argv.pop(1), "w") as printed, contextlib.redirect_stdout(printed):
    del sys.argv[0]  # what is left is the command line of a reader: the example's own path comes first
    runpy.run_path(sys.argv[0], run_name="__main__")
"""
Printed = Callable[..., list[str]]


@pytest.fixture
def printed(tmp_path: Path) -> Printed:
    """(name, arguments) -> the lines that an example prints, run in a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def run(name: str, *arguments: Path) -> list[str]:
        command = ["-c", RUN, *map(str, (tmp_path / "printed", EXAMPLES / f"{name}.py", *arguments))]
        program = Program(command, tmp_path, environment, tmp_path / "errors")
        assert program.wait(PATIENCE) == 0, program.output()
        return (tmp_path / "printed").read_text().splitlines()

    return run


def numbers(line: str) -> list[float]:
    return [float(found) for found in re.findall(NUMBER, line)]


def test_sampling(printed: Printed, tmp_path: Path) -> None:
    pictures, latents, *samples = printed("sample", tmp_path / "first")
    assert pictures == "pictures (3, 16, 24, 3) torch.uint8"
    assert latents == "latents (3, 3, 24, 16)"
    log_probs = [numbers(line) for line in samples]
    assert [len(steps) for steps in log_probs] == [2, 2, 2]
    assert len({number for steps in log_probs for number in steps}) == 6, "samples and steps have noise of their own"
    # For x' = mu + sd z the log-prob is -z^2/2 - log sd - log(2 pi)/2, and the 384 numbers of z average near 1.
    assert all(-2 < number < 0 for steps in log_probs for number in steps)
    assert printed("sample", tmp_path / "second") == [pictures, latents, *samples], "every draw has a key"


@pytest.mark.parametrize("name", ["sample", "family"])
def test_an_example_that_writes_a_folder_asks_for_it(name: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(EXAMPLES / f"{name}.py")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr.endswith("error: the following arguments are required: folder\n")


def test_a_loss_step(printed: Printed) -> None:
    (loss, deviation), (after, moved) = (numbers(line) for line in printed("loss_step"))
    assert deviation == 0, "before the first step the policy is the one that sampled"
    assert loss == pytest.approx(0, abs=1e-6), "-mean A, and advantages are centred in their groups"
    assert after < loss - 1e-6
    assert moved > 0


def test_a_reward(printed: Printed) -> None:
    redness, brightness, total = printed("reward")
    assert numbers(redness) == [0.8, 0.8, 0.0]
    assert redness.endswith("{'wanted': [True, False, False]}")
    assert numbers(brightness) == [0.299, 1.0, 0.0], "the luma of red (ITU-R BT.601), of white and of black"
    expected = [one - 0.5 * other for one, other in zip(numbers(redness), numbers(brightness), strict=True)]
    assert numbers(total) == pytest.approx(expected, abs=1e-3)


def test_a_kernel(printed: Printed) -> None:
    lines = printed("kernel")
    assert [line.split()[1] for line in lines] == ["1.000", "0.667", "0.334"]
    for line in lines:
        sigma, deviation, error = numbers(line)
        assert deviation == pytest.approx(0.7 * sigma**0.5 * (1 / 3) ** 0.5, abs=1e-3), "g sqrt(-D), g = a s^0.5"
        assert error < 1e-5, "the log-prob is the Gaussian's own"


def test_a_family(printed: Printed, tmp_path: Path) -> None:
    pictures, log_probs = printed("family", tmp_path / "toy")
    assert pictures == "Mirror (2, 16, 24, 3)"
    first, second = numbers(log_probs)
    assert first != second
    assert -2 < first < 0
    assert -2 < second < 0


def test_the_page_shows_every_example() -> None:
    shown = re.findall(r"^python docs/examples/(\w+)\.py", PAGE, re.MULTILINE)
    assert sorted(shown) == sorted(path.stem for path in EXAMPLES.glob("*.py"))
    for name in shown:
        assert f"](examples/{name}.py)" in PAGE
        assert f'--8<-- "docs/examples/{name}.py"' in PAGE


@pytest.mark.parametrize("example", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_an_example_is_read_at_a_glance(example: str) -> None:
    lines = [line for line in (EXAMPLES / example).read_text().splitlines() if line and "import " not in line]
    assert len(lines) <= 36
