# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest: the tests run in several processes, forks of the one that has collected them.

    python -m pytest -p tests.support.side_by_side --processes 2

What they import is imported once. Each process takes the next module that no other has taken, so that all end at about
the same time; a module's results are shown when it has ended. A session's fixture is made in each process that asks for
it.

Modules that are marked `waits` have one more process to themselves: they hardly compute, and in one that does they
would leave a core idle. A process more for all modules would fill it too, but then each computes more slowly: what the
cores have in their caches is another process's at every turn, which costs a fifth of the time.

Only one process can collect. With `--first tests/models` the modules of that folder are collected before the others,
and one of the processes begins with them while these are imported. What came later it has not: when no module of the
folder is left, another process takes its place.
"""

import atexit
import fcntl
import multiprocessing as mp
import os
import sys
import warnings
from collections.abc import Callable, Generator, Iterator
from itertools import groupby, pairwise
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

# Tests of a GPU ask whether there is one as they are collected. By its driver torch would find out in a way after which
# no fork may use it.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
FORK = mp.get_context("fork")
PLACE = 4
"""Bytes of a module's number in the queue: so few are read whole."""
WAITS = "waits"
FIRST = "first of the tests"
"""The name of the plugin that knows them."""
UNREAD = 1 << 20
"""Bytes of results that a process may be ahead of who shows them: what all tests collect takes seconds."""
Module = list[pytest.Item]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processes", type=int, default=2, help="that compute at the same time: as many as cores")
    parser.addoption("--first", type=Path, help="a folder whose tests begin while the others are collected")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.first and not config.option.collectonly:
        config.pluginmanager.register(_First(config.invocation_params.dir / config.option.first), FIRST)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_cmdline_main() -> Generator[None, int, int]:
    """All is done, and said: the interpreter would take half a second to free what the tests have imported."""
    status = yield
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class _First:
    """The process that begins with a folder's modules while the others are collected.

    Attributes:
        readers: the end of its results -> the process, as soon as it runs.
        files: the modules that it has begun with.
        queue: where it and others take these from.
        alive: what is open at its other end as long as the process runs.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._items: list[pytest.Item] = []
        self.readers: dict[Connection, Any] = {}
        self.files: set[Path] = set()

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        self._items.append(item)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        if self._items and self._has(self._items[0]) and not self._has(collector) and not self.readers:
            self._begin(collector.session)
        report = yield
        if collector.path == self._folder.parent:
            report.result.sort(key=lambda node: not self._has(node))
        return report

    def pytest_unconfigure(self) -> None:
        for process in self.readers.values():  # which still runs where the others could not be collected
            process.terminate()

    def _has(self, node: pytest.Item | pytest.Collector) -> bool:
        return node.path.is_relative_to(self._folder)

    def _begin(self, session: pytest.Session) -> None:
        session.config._tmp_path_factory.getbasetemp()  # one folder for all processes
        self.files = {item.path for item in self._items}
        self.queue, writing = os.pipe()
        self.alive, held = os.pipe()
        self.readers = _started(self._run, session, list(self._items), writing)
        (reader,) = self.readers
        fcntl.fcntl(reader.fileno(), fcntl.F_SETPIPE_SZ, UNREAD)
        os.close(writing)
        os.close(held)

    def _run(self, session: pytest.Session, items: list[pytest.Item], writing: int, results: Connection) -> None:
        told = _told_instead_of_shown(session.config)
        session.items = items
        hooks = session.config.hook
        hooks.pytest_collection_modifyitems(session=session, config=session.config, items=items)
        hooks.pytest_collection_finish(session=session)
        modules = _modules_of(session)
        _fill(writing, [number for number, module in enumerate(modules) if not _waits(module)])
        _run_modules(session, modules, [self.queue], told, results)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool:
    if session.testsfailed:
        raise session.Interrupted(f"{session.testsfailed} errors during collection")
    if session.config.option.collectonly:
        return True
    session.config._tmp_path_factory.getbasetemp()  # one folder for all processes
    modules = _modules_of(session)
    first = session.config.pluginmanager.getplugin(FIRST)
    begun = first if first and first.readers else None
    readers = dict(begun.readers) if begun else {}
    queues = _queues(modules, session.config.option.processes, begun)
    for own in queues:
        readers |= _started(_run_all, session, modules, own)
    for queue in {descriptor for own in queues for descriptor in own}:
        os.close(queue)
    _report(session, readers)
    return True


def _queues(modules: list[Module], processes: int, begun: _First | None) -> list[list[int]]:
    """For each process that is to start the queues from which it takes modules, one after the other."""
    waiting = [number for number, module in enumerate(modules) if _waits(module)]
    taken = [number for number, module in enumerate(modules) if begun and module[0].path in begun.files]
    computing = [number for number in range(len(modules)) if number not in {*waiting, *taken}]
    rest = [_queue_of(computing), _queue_of(waiting)]
    queues = [rest] * processes
    if begun:
        queues = [[begun.alive, *rest], *[[begun.queue, *rest]] * (processes - 1)]
    return queues + [rest[1:]] * bool(waiting)


def _modules_of(session: pytest.Session) -> list[Module]:
    return [list(items) for _, items in groupby(session.items, key=lambda item: item.nodeid.split("::")[0])]


def _waits(module: Module) -> bool:
    return bool(module[0].get_closest_marker(WAITS))


def _started(run: Callable[..., None], *values: Any) -> dict[Connection, Any]:
    """The end of its results -> a process that has begun with `run(*values, results)`."""
    reader, writer = FORK.Pipe(duplex=False)
    process = FORK.Process(target=run, args=(*values, writer))
    process.start()
    writer.close()
    return {reader: process}


def _queue_of(numbers: list[int]) -> int:
    """A pipe with these modules' numbers, from which each process reads the next one."""
    reading, writing = os.pipe()
    _fill(writing, numbers)
    return reading


def _fill(writing: int, numbers: list[int]) -> None:
    os.write(writing, b"".join(number.to_bytes(PLACE) for number in numbers))
    os.close(writing)


def _report(session: pytest.Session, readers: dict[Connection, Any]) -> None:
    """Hand on what the processes tell, until the last one has ended.

    Raises:
        pytest.Session.Failed: `-x` or `--maxfail` says that it is enough.
        RuntimeError: a process ended before its tests did, or nobody has run some.
    """
    processes = dict(readers)
    left = {item.nodeid for item in session.items}
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
                    if hook == "pytest_runtest_logfinish":
                        left.discard(values["nodeid"])
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
    finally:
        for process in processes.values():
            process.terminate()
    if left:
        raise RuntimeError(f"no process has run {len(left)} tests, {min(left)} for one")


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


def _run_all(session: pytest.Session, modules: list[Module], queues: list[int], results: Connection) -> None:
    _run_modules(session, modules, queues, _told_instead_of_shown(session.config), results)


def _told_instead_of_shown(config: pytest.Config) -> _Told:
    plugins = config.pluginmanager
    told = _Told(config)
    plugins.unregister(plugins.getplugin("terminalreporter"))
    plugins.register(told)
    capture = plugins.getplugin("capturemanager")
    capture.stop_global_capturing()  # its files are the other processes' too
    capture.start_global_capturing()
    capture.suspend_global_capture()
    return told


def _run_modules(
    session: pytest.Session, modules: list[Module], queues: list[int], told: _Told, results: Connection
) -> None:
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
