# SPDX-License-Identifier: Apache-2.0
"""Several benchmarks at once on one machine, each on GPUs and processors of its own, as a plan says.

    python -m benchmarks.lanes PLAN.yaml --folder FOLDER [--limit SECONDS] [--only NAME ...]

A plan is a list of lanes; `benchmarks/plans/` has some:

    - name: base                  # of its log, FOLDER/base.log, and in the lines that are printed
      run: python -m flows.prepare_words base-model
      gpus: "0"                   # CUDA_VISIBLE_DEVICES; the caller's by default
      cores: "0-15"               # processors, as taskset names them; all by default
      needs: [data]               # lanes that have to end well before it begins; by default it begins at once
      after: [other]              # lanes that have to end, in whatever way, as one that keeps the same GPU busy
      folder: work                # where it runs; the present folder by default
      limit: 300                  # seconds after which it is ended

A lane that needs one that failed does not begin; for one that `--only` leaves out it waits for what that waits for.
Ctrl-C, SIGTERM and `--limit` end all that runs, each with whatever it has started. Commands are bash's, and `python`
there is the one that runs this. Prints when each begins and ends, adds a line of JSON for each to FOLDER/lanes.jsonl,
and exits with 1 where not all have ended well.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import yaml
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from tasks.system.processes import wait_until_ended

LOOK_S, PATIENCE_S = 0.2, 60.0
"""Between two looks at the lanes, and for one to end in order before it is killed: a benchmark waits for its runs."""
ENDED_WELL = "ended"


class Lane(BaseModel):
    """One command of a plan; the fields are explained above."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    run: str
    gpus: str | None = None
    cores: str | None = None
    needs: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    folder: Path | None = None
    limit: float | None = None


def read_plan(path: Path, only: Sequence[str] = ()) -> list[Lane]:
    """The lanes of a plan, or those of these names; for one that is left out they wait for what that waits for.

    Raises:
        ValueError: it is no plan, two lanes have one name, or a lane waits for one that does not come before it.
    """
    try:
        lanes = TypeAdapter(list[Lane]).validate_python(yaml.safe_load(path.read_text()))
    except (OSError, ValidationError, yaml.YAMLError) as error:
        raise ValueError(f"{path} is no plan: {error}") from error
    if missing := {*only} - {lane.name for lane in lanes}:
        raise ValueError(f"{path} has no lane {', '.join(sorted(missing))}")
    known: dict[str, Lane] = {}
    for lane in lanes:
        if lane.name in known:
            raise ValueError(f"{path} has two lanes named {lane.name}")
        if unknown := {*lane.needs, *lane.after} - {*known}:
            raise ValueError(f"{lane.name} waits for {', '.join(sorted(unknown))}, which does not stand before it")
        known[lane.name] = _without_left_out(lane, known, only) if only else lane
    return [lane for lane in known.values() if not only or lane.name in only]


def _without_left_out(lane: Lane, before: Mapping[str, Lane], only: Sequence[str]) -> Lane:
    """The lane, which waits for lanes of `only` alone; those of before already do."""
    left_out = [before[name] for name in (*lane.needs, *lane.after) if name not in only]
    needs = {name for name in lane.needs if name in only}
    after = {name for name in lane.after if name in only}
    for other in left_out:
        after |= {*other.needs, *other.after}
        if other.name in lane.needs:
            needs |= {*other.needs}
    return lane.model_copy(update={"needs": tuple(sorted(needs)), "after": tuple(sorted(after))})


class Running:
    """A lane that has begun."""

    def __init__(self, lane: Lane, log: Path):
        self.lane, self.begun = lane, time.monotonic()
        given = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        given |= {} if lane.gpus is None else {"CUDA_VISIBLE_DEVICES": lane.gpus}
        pinned = ["taskset", "-c", lane.cores] if lane.cores else []
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [*pinned, "bash", "-c", lane.run],
                cwd=lane.folder,
                env=os.environ | given,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self.begun

    def is_over(self) -> bool:
        """Has it run for longer than it may?"""
        return self.lane.limit is not None and self.seconds > self.lane.limit

    def stop(self) -> None:
        """End it and all of its session."""
        end_session(self.process)


def end_session(leader: subprocess.Popen[bytes]) -> None:
    """End a process that leads a session, and all of the session: in order, and by force after a while."""
    family = [process for process in psutil.process_iter() if session_of(process) == leader.pid]
    for sent in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(leader.pid, sent)
        wait_until_ended(family, PATIENCE_S)  # a shell is gone at once, and the command it waits for is not
    leader.wait()


def session_of(process: psutil.Process) -> int | None:
    """The process that leads its session; None where it has ended meanwhile."""
    try:
        return os.getsid(process.pid)
    except ProcessLookupError:
        return None


class Plan:
    """Lanes that begin as others end."""

    def __init__(self, lanes: Sequence[Lane], folder: Path):
        self.waiting, self.folder, self.begun = [*lanes], folder, time.monotonic()
        self.running: list[Running] = []
        self.ends: dict[str, str] = {}
        self.is_over = False

    def stop(self, number: int, frame: Any) -> None:
        """What a signal does: nothing at once, as a lane may just be beginning."""
        self.is_over = True

    def say(self, text: str) -> None:
        """A line with the seconds since the beginning."""
        print(f"[{time.monotonic() - self.begun:.0f}] {text}", flush=True)

    def end(self, name: str, how: str, seconds: float = 0.0) -> None:
        """Note how a lane has ended."""
        self.ends[name] = how
        self.say(f"{name}: {how}")
        with (self.folder / "lanes.jsonl").open("a") as log:
            log.write(json.dumps({"lane": name, "end": how, "seconds": round(seconds, 1)}) + "\n")

    def look(self) -> None:
        """Begin and end what can be."""
        for run in [*self.running]:
            code = run.process.poll()
            if code is None and not run.is_over():
                continue
            run.stop()
            self.running.remove(run)
            how = "its limit came" if code is None else ENDED_WELL if code == 0 else f"failed with exit code {code}"
            self.end(run.lane.name, how, run.seconds)
        for lane in [*self.waiting]:
            if not {*lane.needs, *lane.after} <= self.ends.keys():
                continue
            self.waiting.remove(lane)
            if failed := [name for name in lane.needs if self.ends[name] != ENDED_WELL]:
                self.end(lane.name, f"not begun, as {', '.join(failed)} did not end well")
                continue
            try:
                self.running.append(Running(lane, self.folder / f"{lane.name}.log"))
            except OSError as error:  # its folder is not there
                self.end(lane.name, f"not begun: {error.filename}: {error.strerror}")
            else:
                self.say(f"{lane.name} begins")

    def follow(self, limit: float | None) -> Mapping[str, str]:
        """Until all have ended, or for so many seconds; lane -> how it ended."""
        try:
            while (self.waiting or self.running) and not self.is_over:
                if limit is not None and time.monotonic() - self.begun > limit:
                    break
                self.look()
                time.sleep(LOOK_S)
        finally:
            for run in self.running:
                run.stop()
                self.end(run.lane.name, "ended with the plan", run.seconds)
            for lane in self.waiting:
                self.end(lane.name, "not begun")
        return self.ends


def main() -> None:
    """Follow a plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--folder", type=Path, required=True, help="of the logs")
    parser.add_argument("--limit", type=float, help="seconds of all")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these lanes alone")
    chosen = parser.parse_args()
    try:
        lanes = read_plan(chosen.plan, chosen.only)
    except ValueError as error:
        sys.exit(f"error: {error}")
    chosen.folder.mkdir(parents=True, exist_ok=True)
    plan = Plan(lanes, chosen.folder)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, plan.stop)
    ends = plan.follow(chosen.limit)
    sys.exit(any(end != ENDED_WELL for end in ends.values()))


if __name__ == "__main__":
    main()
