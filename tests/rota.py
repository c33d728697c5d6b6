"""Run the tests of the full tier in turn: those whose last green run is the longest ago come first.

``python tests/rota.py MINUTES [FOLDER…]`` runs them, or those of some folders or files, and keeps
each result in ``tests/rota.json``; ``python tests/rota.py`` prints the ten oldest. A test is a
function: its parameters count together.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

ROOT: Final = Path(__file__).parents[1]
KEPT: Final = ROOT / "tests" / "rota.json"
_RESULTS: Final = Path("test-results") / "rota"
_UNKNOWN_S: Final = 120.0
"""How long a test is expected to take that was never run."""

_LAST_FILE_S: Final = 600.0


@dataclass(frozen=True)
class Run:
    """The last run of a test, and when it was green for the last time (empty: never)."""

    commit: str
    date: str
    seconds: float
    result: str
    green: str = ""


def only_full(everything: Iterable[str], quick: Iterable[str]) -> list[str]:
    """Functions of which some test runs in the full tier only, by node id without parameters.

    Their order is that of the files: a test may say what holds after those before it.
    """
    also = set(quick)
    return list(dict.fromkeys(node.partition("[")[0] for node in everything if node not in also))


def due(tests: Iterable[str], runs: Mapping[str, Run]) -> list[str]:
    """Tests in the order in which they should run: never green first, then the oldest."""
    return sorted(tests, key=lambda test: (runs[test].green if test in runs else "", test))


def chosen(tests: Iterable[str], runs: Mapping[str, Run], seconds: float) -> list[str]:
    """The first tests that fit into some seconds, as long as they took before; at least one."""
    found: list[str] = []
    for test in tests:
        seconds -= runs[test].seconds if test in runs else _UNKNOWN_S
        if found and seconds < 0:
            break
        found.append(test)
    return found


def read(path: Path = KEPT) -> dict[str, Run]:
    """The runs that are kept, by test."""
    if not path.is_file():
        return {}
    return {test: Run(**run) for test, run in json.loads(path.read_text("utf-8")).items()}


def results(report: Path) -> dict[str, tuple[float, str]]:
    """Function → seconds and result, from a report in JUnit's form."""
    found: dict[str, tuple[float, str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        file = case.get("classname", "").replace(".", "/")
        test = f"{file}.py::{case.get('name', '').partition('[')[0]}"
        result = next((kind for kind in ("error", "failure", "skipped") if _has(case, kind)), "ok")
        seconds, before = found.get(test, (0.0, "ok"))
        took = seconds + float(case.get("time", 0))
        found[test] = took, result if before == "ok" else before
    return found


def _has(case: ElementTree.Element, kind: str) -> bool:
    return case.find(kind) is not None


def collected(*options: str) -> list[str]:
    """Node ids of the tests that a run with some options would have."""
    command = (sys.executable, "-m", "pytest", "--collect-only", "-q", *options)
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [line for line in listed.splitlines() if "::" in line]


def run_file(file: str, tests: Iterable[str], timeout_s: float) -> dict[str, tuple[float, str]]:
    """Run some tests of a file in a process of their own; without a report each is an error."""
    names = list(tests)
    report = ROOT / _RESULTS / f"{Path(file).stem}.xml"
    report.unlink(missing_ok=True)
    arguments = ("--full", "-q", "--results", _RESULTS, "--junitxml", report, *names)
    command = (sys.executable, str(ROOT / "tests" / "suite.py"), *map(str, arguments))
    began = time.monotonic()
    # suite.py ends by SIGTERM what it started.
    process = subprocess.Popen(("timeout", f"{timeout_s:.0f}", *command), cwd=ROOT)
    process.wait()
    found = results(report) if report.is_file() else {}
    took = (time.monotonic() - began) / len(names)
    return {test: found.get(test, (took, "error")) for test in names}


def keep(runs: Mapping[str, Run], path: Path = KEPT) -> None:
    """Write the runs, in the order of the tests' names."""
    told = {test: asdict(runs[test]) for test in sorted(runs)}
    path.write_text(json.dumps(told, indent=1) + "\n", "utf-8")


def rota(minutes: float, *within: str) -> int:
    """Run what is due in some folders or files (default: in all); 1 when a test was not green.

    No file begins after the minutes; the last one that did has ten more.
    """
    end, is_red = time.monotonic() + 60 * minutes, False
    tests = only_full(collected("--full"), collected())
    runs = {test: run for test, run in read().items() if test in tests}
    words = ("git", "describe", "--always", "--dirty")
    commit = subprocess.check_output(words, cwd=ROOT, text=True).strip()
    possible = [test for test in due(tests, runs) if test.startswith(within or "tests")]
    picked = chosen(possible, runs, 60 * minutes)
    in_order = sorted(picked, key=tests.index)
    for file, group in groupby(in_order, lambda test: test.partition("::")[0]):
        left = end - time.monotonic()
        if left < 0:
            break
        for test, (seconds, result) in run_file(file, group, left + _LAST_FILE_S).items():
            now = datetime.now(UTC).isoformat(timespec="seconds")
            before = runs[test].green if test in runs else ""
            green = now if result == "ok" else before
            runs[test] = Run(commit, now, round(seconds, 1), result, green)
            is_red |= result != "ok"
        keep(runs)
    show(tests, runs)
    return int(is_red)


def show(tests: Iterable[str], runs: Mapping[str, Run]) -> None:
    """Print how many tests were green, and the ten whose last green run is the longest ago."""
    ordered = due(tests, runs)
    never = [test for test in ordered if test not in runs or not runs[test].green]
    print(f"{len(ordered)} tests of the full tier; {len(never)} were never green in the rota")
    for test in ordered[:10]:
        run = runs.get(test)
        when = "never run" if run is None else f"green {run.green or 'never'}, now {run.result}"
        print(f"  {when:<44} {test}")


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.exit(rota(float(sys.argv[1]), *sys.argv[2:]))
    show(only_full(collected("--full"), collected()), read())
