# SPDX-License-Identifier: Apache-2.0
"""One bad input, what became of it, and how that is judged."""

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from tasks.cli.terminal import sentence

LONGEST_ERROR = 3000
"""Characters: a message of more is no sentence."""


class Outcome(Enum):
    """What became of an input."""

    CLEAR = "clear error"
    RIGHT = "accepted, rightly"
    TRACEBACK = "raw traceback"
    WRONG = "accepted, wrongly"
    DAMAGED = "a file was damaged"


GOOD = (Outcome.CLEAR, Outcome.RIGHT)


@dataclass(frozen=True)
class Case:
    """One input.

    Attributes:
        target: what it is given to.
        name: what is wrong with it, for a report.
        prepare: writes its files into an empty folder.
        act: gives it to the code, in that folder; what the code took. Raises what the code raises.
        fault: the oracle: None if what was taken is what the input says and can be used, else why not.
        may_change: names of files that the code may change or remove.
    """

    target: str
    name: str
    prepare: Callable[[Path], None]
    act: Callable[[Path], Any]
    fault: Callable[[Any], str | None]
    may_change: tuple[str, ...] = ()


@dataclass(frozen=True)
class Judged:
    """An input's outcome, and the error or the fault in words."""

    case: Case
    outcome: Outcome
    words: str


def judge(case: Case, folder: Path) -> Judged:
    """Give the input to the code, in this empty folder."""
    case.prepare(folder)
    before = _contents(folder, case.may_change)
    try:
        taken = case.act(folder)
    except Exception as error:
        outcome, words = _of_error(error)
    else:
        fault = _fault(case, taken)
        outcome, words = (Outcome.RIGHT, "") if fault is None else (Outcome.WRONG, fault)
    after = _contents(folder, case.may_change)
    changed = [name for name, digest in before.items() if after.get(name) != digest]
    if changed:
        return Judged(case, Outcome.DAMAGED, f"changed: {', '.join(changed)}; {words}")
    return Judged(case, outcome, words)


def _fault(case: Case, taken: Any) -> str | None:
    """The oracle's answer; what it cannot even look at is not right."""
    try:
        return case.fault(taken)
    except Exception as error:
        return f"the oracle raised {error!r:.300}"


def _of_error(error: Exception) -> tuple[Outcome, str]:
    """Clear is what a command prints of it: one line, of a length that is read."""
    said = sentence(error)
    if said is None:
        return Outcome.TRACEBACK, f"{type(error).__module__}.{type(error).__name__}: {str(error)[:300]!r}"
    if not said.strip() or len(said) > LONGEST_ERROR or len(said.splitlines()) > 1:
        return Outcome.TRACEBACK, f"not one sentence ({len(said)} characters): {said[:300]!r}"
    return Outcome.CLEAR, said


def _contents(folder: Path, left_out: tuple[str, ...]) -> dict[str, str]:
    """Relative name -> digest of each file and link below the folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if any(part in left_out for part in path.relative_to(folder).parts):
            continue
        if path.is_symlink():
            found[name] = f"link to {path.readlink()}"
        elif path.is_file():
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def draws(target: str, number: int, seed: int) -> random.Random:
    """The generator of one input: a function of the seed, its target and its number."""
    return random.Random(f"{seed}/{target}/{number}")


def damaged(content: bytes, rng: random.Random) -> tuple[str, bytes]:
    """(what was done, the content with it): a flipped bit, a missing end, bytes more, less, zeroed, or none."""
    kind = rng.choice(["flip", "flip", "flip", "cut", "insert", "zeros", "drop", "twice", "empty", "noise"])
    place = rng.randrange(max(len(content), 1))
    length = rng.randint(1, 16)
    match kind:
        case "flip" if content:
            changed = bytearray(content)
            changed[place] ^= 1 << rng.randrange(8)
            return f"bit of byte {place} flipped", bytes(changed)
        case "cut":
            return f"cut at byte {place}", content[:place]
        case "insert":
            return f"{length} bytes inserted at {place}", content[:place] + rng.randbytes(length) + content[place:]
        case "zeros":
            return f"{length} bytes zeroed at {place}", content[:place] + bytes(length) + content[place + length :]
        case "drop":
            return f"{length} bytes dropped at {place}", content[:place] + content[place + length :]
        case "twice":
            return "written twice", content + content
        case "noise":
            return "random bytes", rng.randbytes(rng.randint(1, 400))
    return "empty", b""
