# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest: the tests run in several processes, forks of the one that has collected them.

    python -m pytest -p tests.support.side_by_side --processes 2

What they import is imported once. Each process takes the next module that no other has taken, so that all end at about
the same time; a module's results are shown when it has ended. A session's fixture is made in each process that asks for
it.

Modules that are marked `waits` have one more process to themselves: they hardly compute, and in one that does they
would leave a core idle. A process more for all modules would fill it too, but then each computes more slowly: what the
cores have in their caches is another process's at every turn, which costs a fifth of the time.
"""

import multiprocessing as mp
import os
import warnings
from collections.abc import Iterator
from itertools import groupby, pairwise
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

FORK = mp.get_context("fork")
PLACE = 4
"""Bytes of a module's number in the queue: so few are read whole."""
WAITS = "waits"
Module = list[pytest.Item]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processes", type=int, default=2, help="that compute at the same time: as many as cores")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool:
    if session.testsfailed:
        raise session.Interrupted(f"{session.testsfailed} errors during collection")
    if session.config.option.collectonly:
        return True
    modules = [list(items) for _, items in groupby(session.items, key=lambda item: item.nodeid.split("::")[0])]
    session.config._tmp_path_factory.getbasetemp()  # one folder for all processes
    waiting = [number for number, module in enumerate(modules) if module[0].get_closest_marker(WAITS)]
    computing = [number for number in range(len(modules)) if number not in waiting]
    queues = [_queue_of(computing), _queue_of(waiting)]
    readers: dict[Connection, Any] = {}
    for own in [queues] * session.config.option.processes + [queues[1:]] * bool(waiting):
        reader, writer = FORK.Pipe(duplex=False)
        process = FORK.Process(target=_run_modules, args=(session, modules, own, writer))
        process.start()
        writer.close()
        readers[reader] = process
    for queue in queues:
        os.close(queue)
    _report(session, readers)
    return True


def _queue_of(numbers: list[int]) -> int:
    """A pipe with these modules' numbers, from which each process reads the next one."""
    reading, writing = os.pipe()
    os.write(writing, b"".join(number.to_bytes(PLACE) for number in numbers))
    os.close(writing)
    return reading


def _report(session: pytest.Session, readers: dict[Connection, Any]) -> None:
    """Hand on what the processes tell, until the last one has ended.

    Raises:
        pytest.Session.Failed: `-x` or `--maxfail` says that it is enough.
        RuntimeError: a process ended before its tests did.
    """
    processes = dict(readers)
    try:
        while readers:
            for reader in wait(list(readers)):
                try:
                    happened = reader.recv()
                except EOFError:
                    readers.pop(reader)
                    processes[reader].join()
                    if processes[reader].exitcode:
                        raise RuntimeError(f"a process of the tests ended with {processes[reader].exitcode}") from None
                    continue
                for hook, values in happened:
                    _hand_on(session, hook, values)
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
    finally:
        for process in processes.values():
            process.terminate()


def _hand_on(session: pytest.Session, hook: str, values: dict[str, Any]) -> None:
    hooks = session.config.hook
    if hook == "pytest_runtest_logreport":
        values = {"report": hooks.pytest_report_from_serializable(config=session.config, data=values)}
    if hook == "pytest_warning_recorded":
        hooks.pytest_warning_recorded.call_historic(kwargs=values)
    else:
        getattr(hooks, hook)(**values)


class _Told:
    """In place of a process's own terminal: what happened in the module that runs."""

    def __init__(self, config: pytest.Config):
        self._config = config
        self.happened: list[tuple[str, dict[str, Any]]] = []

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self.happened.append(("pytest_runtest_logstart", {"nodeid": nodeid, "location": location}))

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        self.happened.append(("pytest_runtest_logfinish", {"nodeid": nodeid, "location": location}))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self.happened.append(("pytest_runtest_logreport", data))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any
    ) -> None:
        told = warning_message  # its message may hold what cannot be sent
        values = {
            "warning_message": warnings.WarningMessage(str(told.message), told.category, told.filename, told.lineno),
            "when": when,
            "nodeid": nodeid,
            "location": location,
        }
        self.happened.append(("pytest_warning_recorded", values))

    def taken(self) -> list[tuple[str, dict[str, Any]]]:
        happened, self.happened = self.happened, []
        return happened


def _run_modules(session: pytest.Session, modules: list[Module], queues: list[int], results: Connection) -> None:
    plugins = session.config.pluginmanager
    told = _Told(session.config)
    plugins.unregister(plugins.getplugin("terminalreporter"))
    plugins.register(told)
    capture = plugins.getplugin("capturemanager")
    capture.stop_global_capturing()  # its files are the other processes' too
    capture.start_global_capturing()
    capture.suspend_global_capture()
    for item, following in _in_turn(modules, queues):
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if following is None or following.path != item.path:
            results.send(told.taken())
    results.close()


def _in_turn(modules: list[Module], queues: list[int]) -> Iterator[tuple[pytest.Item, pytest.Item | None]]:
    """Each test with the one after it; the next module is taken when the last test of one begins, and not before."""
    module = _next_module(modules, queues)
    while module:
        yield from pairwise(module)
        following = _next_module(modules, queues)
        yield module[-1], following[0] if following else None
        module = following


def _next_module(modules: list[Module], queues: list[int]) -> Module | None:
    """The next one of the first queue that has one left."""
    places = (os.read(queue, PLACE) for queue in queues)
    place = next(filter(None, places), None)
    return modules[int.from_bytes(place)] if place else None
