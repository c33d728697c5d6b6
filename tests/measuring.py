"""What each test file uses: time, processor seconds, servers; and the limits of its budget.

A pytest plugin. Each worker adds up what its own processes and all their descendants use while a
file's tests run. The controller writes the sums to ``test-results/files.json``; with ``--budgets``
it also runs the longest files first and fails the run when a file takes more than its share.
"""

from __future__ import annotations

import json
import time
from collections.abc import Generator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from budgets import Budgets, loop_s, make_scheduler
from processes_seen import KEPT_FOLDERS, Watch, adopt_orphans, end_leftovers, used_cpu_s
from second_look import results_folder
from tiers import TIER

_Around = Generator[None, object, object]
_OUTPUT = "everstate_files"
_LOOP = "everstate_loop_s"
SHARED = "(shared servers)"
"""Where the cost of fixtures of the whole run is counted: it belongs to no single file."""


@dataclass(slots=True)
class Used:
    """What one test file has used."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    starts: dict[str, int] = field(default_factory=dict)
    """Server or JVM → how many were started."""
    left: list[str] = field(default_factory=list)
    """Command lines of processes that its tests left behind."""

    def add(self, other: Used) -> None:
        """Add what another part of the file has used."""
        self.wall_s += other.wall_s
        self.cpu_s += other.cpu_s
        for name, count in other.starts.items():
            self.starts[name] = self.starts.get(name, 0) + count
        self.left += other.left


class Measuring:
    """Measures files in a worker (or in the only process) and hands the figures over."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._files: dict[str, Used] = {}
        self._watch = Watch()
        self._loop_s = loop_s()
        self._at = time.monotonic(), used_cpu_s()
        self._file: str | None = None
        self._of_file: set[psutil.Process] = set()
        """What the fixtures of the running file started."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> _Around:
        if self._file is None:
            self._at = time.monotonic(), used_cpu_s()
        self._file = item.path.relative_to(self._config.rootpath).as_posix()
        result = yield
        if nextitem is None or nextitem.path != item.path:
            self._charge(SHARED if nextitem is None else self._file)
            self._of_file.clear()
            self._files[self._file].left += self._end_leftovers(self._of_file)
            self._file = None
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, nextitem: pytest.Item | None) -> _Around:
        if nextitem is None and self._file is not None:
            # The fixtures of the whole run end with its last test.
            self._charge(self._file)
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> _Around:
        if fixturedef.scope == "function" or self._file is None:
            return (yield)
        if fixturedef.scope != "session":
            try:
                return (yield)
            finally:
                self._of_file.update(psutil.Process().children(recursive=True))
        self._charge(self._file)
        try:
            return (yield)
        finally:
            self._charge(SHARED)
            self._watch.keep_all()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        result = yield
        if result.failed and call.when != "setup" and self._file is not None:
            # The next test of the file still needs what the file's own fixtures started.
            self._used(self._file).left += self._end_leftovers(self._of_file)
        return result

    def pytest_sessionfinish(self) -> None:
        self._watch.stop()
        output: dict[str, Any] | None = getattr(self._config, "workeroutput", None)
        if output is not None:
            output[_OUTPUT] = {name: asdict(used) for name, used in self._files.items()}
            output[_LOOP] = max(self._loop_s, loop_s())
        else:
            _collect(self._config, self._files, max(self._loop_s, loop_s()))

    def _charge(self, name: str) -> None:
        """Count what was used since the last time for ``name``."""
        now = time.monotonic(), used_cpu_s()
        starts = self._watch.started()
        self._used(name).add(Used(now[0] - self._at[0], now[1] - self._at[1], starts))
        self._at = now

    def _used(self, name: str) -> Used:
        return self._files.setdefault(name, Used())

    def _end_leftovers(self, kept: set[psutil.Process]) -> list[str]:
        folders = self._config.stash.get(KEPT_FOLDERS, [])
        return end_leftovers(self._watch.kept | kept, folders)


@dataclass
class Collected:
    """The figures of all workers."""

    files: dict[str, Used] = field(default_factory=dict)
    loop_s: float = 0.0
    """The slowest machine of those that they ran on, by :func:`budgets.loop_s`."""


_COLLECTED: pytest.StashKey[Collected] = pytest.StashKey()


def _collect(config: pytest.Config, files: dict[str, Used], loop: float) -> None:
    collected = config.stash.setdefault(_COLLECTED, Collected())
    collected.loop_s = max(collected.loop_s, loop)
    for name, used in files.items():
        collected.files.setdefault(name, Used()).add(used)


class Reporting:
    """Collects the workers' figures, writes them down and compares them with the budgets."""

    def __init__(self, config: pytest.Config, budgets: Budgets | None) -> None:
        self._config, self._budgets = config, budgets
        self._over: list[str] = []
        """Files that took more than their budget: named, and no failure."""
        self._broken: list[str] = []
        """Unit tests that started a server: a failure."""

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        output = getattr(node, "workeroutput", {})
        files = {name: Used(**used) for name, used in output.get(_OUTPUT, {}).items()}
        _collect(self._config, files, output.get(_LOOP, 0.0))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        if self._budgets is None:
            return None
        return make_scheduler(config, log, self._budgets)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        collected = self._config.stash.setdefault(_COLLECTED, Collected())
        longest = sorted(collected.files.items(), key=lambda each: -each[1].cpu_s)
        listed = {
            name: {**asdict(used), "wall_s": round(used.wall_s, 1), "cpu_s": round(used.cpu_s, 1)}
            for name, used in longest
        }
        told = {"loop_s": collected.loop_s, "files": listed}
        written = results_folder(self._config) / "files.json"
        written.write_text(json.dumps(told, indent=1) + "\n", "utf-8")
        if self._budgets is not None and not TIER.is_full:
            cpu_s = {name: each.cpu_s for name, each in collected.files.items() if name != SHARED}
            self._over = self._budgets.over(cpu_s, collected.loop_s)
        self._broken = [
            f"{name} started {_listed(used.starts)}: a unit test has no JVM and no server."
            for name, used in collected.files.items()
            if name.startswith("tests/unit/") and used.starts
        ]
        if self._broken:
            # Not the code of failed tests: no second look makes such a run green.
            session.exitstatus = pytest.ExitCode.USAGE_ERROR

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        collected = self._config.stash.setdefault(_COLLECTED, Collected())
        total = Used()
        for used in collected.files.values():
            total.add(used)
        terminalreporter.section(
            f"test files: {total.cpu_s:.0f} processor seconds, started {_listed(total.starts)}"
        )
        longest = sorted(collected.files.items(), key=lambda each: -each[1].cpu_s)
        for name, each in longest[:30]:
            line = f"{each.cpu_s:8.1f} {each.wall_s:8.1f}  {name}  {_listed(each.starts)}"
            terminalreporter.write_line(line.rstrip())
        for name, each in collected.files.items():
            for command in each.left:
                terminalreporter.write_line(f"left behind by {name}, and ended: {command}")
        for line in self._over:
            terminalreporter.write_line(line, yellow=True)
        for line in self._broken:
            terminalreporter.write_line(line, red=True)


def _listed(starts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(starts.items()))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--budgets``."""
    parser.addoption(
        "--budgets",
        type=Path,
        default=None,
        help="run the longest files first by this file, and name those that take 1.5 times more",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Measure where tests run; report where their results come together."""
    adopt_orphans()
    path: Path | None = config.getoption("budgets")
    budgets = None if path is None else Budgets.read(config.rootpath, path)
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Reporting(config, budgets), "everstate-reporting")
    config.pluginmanager.register(Measuring(config), "everstate-measuring")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Longest files first, those that share a server one after the other."""
    path: Path | None = config.getoption("budgets")
    if path is not None:
        budgets = Budgets.read(config.rootpath, path)
        order = budgets.order(dict.fromkeys(item.nodeid.partition("::")[0] for item in items))
        items.sort(key=lambda item: order[item.nodeid.partition("::")[0]])
