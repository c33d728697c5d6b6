"""Run the tests; those that fail run once more, alone, in one process with new servers.

A test that fails both times makes the run red. A test that passes the second time is *flaky*: it
is named at the end, counted in the closing line and written to ``test-results/flaky.json``, and
the run is green. More than ten failed tests are red at once: then something is broken that no
second look explains.

As a pytest plugin, this module writes down what a run came to.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

FAILED_MAX: Final = 10
"""How many failed tests get a second look."""
_OUTCOME: Final = "outcome.json"
_RESULTS: Final = Path("test-results")
_SECOND: Final = _RESULTS / "second-look"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--results``."""
    parser.addoption(
        "--results", type=Path, default=_RESULTS, help="folder for what a run writes down"
    )


def results_folder(config: pytest.Config) -> Path:
    """The folder for what this run writes down; it exists."""
    folder: Path = config.rootpath / config.getoption("results")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Write the number of tests that passed, and each test that failed with its reason."""
    if hasattr(config, "workerinput"):  # A worker of pytest-xdist: its results come together.
        return
    stats = terminalreporter.stats
    failed = {
        report.nodeid: _reason(report)
        for report in [*stats.get("failed", []), *stats.get("error", [])]
    }
    told = {"passed": len(stats.get("passed", [])), "failed": failed}
    (results_folder(config) / _OUTCOME).write_text(json.dumps(told, indent=1) + "\n", "utf-8")


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The first line of what a failed test said."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash is not None else report.longrepr).partition("\n")[0]


def _look(arguments: list[str], results: Path) -> tuple[int, int, dict[str, str]]:
    """Exit code of pytest, number of tests that passed, and those that failed with the reason."""
    (results / _OUTCOME).unlink(missing_ok=True)
    code = subprocess.call([sys.executable, "-m", "pytest", *arguments, f"--results={results}"])
    try:
        told = json.loads((results / _OUTCOME).read_text("utf-8"))
    except FileNotFoundError:  # pytest ended before it could say anything.
        return code or pytest.ExitCode.INTERNAL_ERROR, 0, {}
    return code, told["passed"], told["failed"]


@dataclass(frozen=True)
class Outcome:
    """What the tests came to, both looks taken together."""

    code: int
    passed: int
    failed: Mapping[str, str]
    flaky: Mapping[str, str]

    def tell(self) -> None:
        """Name the flaky tests, and count: the last lines of a run."""
        for name, why in self.flaky.items():
            print(f"flaky: {name}: {why}")
        flaky = f"{len(self.flaky)} of the passed are flaky"
        print(f"{self.passed} passed, {len(self.failed)} failed, {flaky}", flush=True)


def run(arguments: list[str]) -> Outcome:
    """Run pytest with these arguments, and what failed a second time."""
    code, passed, failed = _look(arguments, _RESULTS)
    flaky: dict[str, str] = {}
    if code == pytest.ExitCode.TESTS_FAILED and 0 < len(failed) <= FAILED_MAX:
        print(f"\nsecond look at {len(failed)} failed tests, alone, on new servers", flush=True)
        junit = f"--junitxml={_SECOND / 'junit.xml'}"
        tier = [each for each in arguments if each == "--full" or each.startswith("--kills=")]
        code, again, still = _look([*failed, "-q", junit, *tier], _SECOND)
        if code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            flaky = {name: why for name, why in failed.items() if name not in still}
            passed, failed = passed + again, still
    (_RESULTS / "flaky.json").write_text(json.dumps(flaky, indent=1) + "\n", "utf-8")
    return Outcome(code, passed, failed, flaky)
