"""Results: a figure, the floor beside it, and whether it reaches what was promised."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median

import psutil

Steps = Sequence[tuple[int, float]]
"""Changes and seconds of each step of a run."""

_PACKAGES = ("pyspark", "confluent-kafka", "psycopg", "pyarrow", "pydantic", "msgspec")


@dataclass(frozen=True, slots=True)
class Reach:
    """Bounds that a result is held to; ``None`` is no bound."""

    ratio_min: float | None = None
    ratio_max: float | None = None
    value_min: float | None = None
    value_max: float | None = None

    def __str__(self) -> str:
        bounds = (
            ("ratio", "≥", self.ratio_min),
            ("ratio", "≤", self.ratio_max),
            ("value", "≥", self.value_min),
            ("value", "≤", self.value_max),
        )
        return " and ".join(f"{n} {s} {figure(b)}" for n, s, b in bounds if b is not None)

    def holds(self, value: float, ratio: float | None) -> bool:
        """Whether a result is within all bounds; a bound on a missing ratio does not hold."""
        for measured, lowest, highest in (
            (value, self.value_min, self.value_max),
            (ratio, self.ratio_min, self.ratio_max),
        ):
            if lowest is not None and (measured is None or measured < lowest):
                return False
            if highest is not None and (measured is None or measured > highest):
                return False
        return True


@dataclass(frozen=True, slots=True)
class Result:
    """One row: ``value`` and ``floor`` are medians, ``ratio`` the median of the runs' ratios."""

    bench: str
    metric: str
    value: float
    unit: str
    floor: float | None
    ratio: float | None
    reach: str
    holds: bool
    spread: tuple[float, float]
    """Lowest and highest value of the runs."""
    runs: int
    floor_is: str


@dataclass(frozen=True, slots=True)
class Measured:
    """When, of which commit and on which machine a file of ``bench/`` was run."""

    date: str
    commit: str
    """With ``-dirty`` where the work tree differed from the commit."""
    machine: str


@dataclass(frozen=True, slots=True)
class Kept:
    """A row of ``results.json``: a result, the file of ``bench/`` that measured it, and when."""

    name: str
    result: Result
    measured: Measured


def result(
    bench: str,
    metric: str,
    unit: str,
    values: Sequence[float],
    *,
    floors: Sequence[float] | None = None,
    floor_is: str = "",
    reach: Reach | None = None,
) -> Result:
    """Medians of the runs; ``floors[i]`` was measured right beside ``values[i]``."""
    bounds = reach or Reach()
    value = median(values)
    floor = ratio = None
    if floors is not None:
        floor = median(floors)
        ratio = median(v / f for v, f in zip(values, floors, strict=True))
    spread = (min(values), max(values))
    holds = bounds.holds(value, ratio)
    return Result(
        bench, metric, value, unit, floor, ratio, str(bounds), holds, spread, len(values), floor_is
    )


def figure(value: float | None) -> str:
    """A number as people read it: three digits, thousands apart."""
    if value is None:
        return "–"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def machine() -> str:
    """The machine in one line: processor, cores, memory, system and versions."""
    memory = psutil.virtual_memory().total / 2**30
    packages = ", ".join(f"{name} {version(name)}" for name in _PACKAGES)
    return (
        f"{_processor()}, {os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()} "
        f"{platform.release()}, Python {platform.python_version()}, {packages}"
    )


def _processor() -> str:
    try:
        found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        found = None
    return found.group(1) if found else platform.processor() or platform.machine()


def now() -> Measured:
    """Today, the commit of the work tree, and this machine."""
    commit = _git("rev-parse", "--short", "HEAD") or "unknown"
    # The results of another bench are no difference in what is measured.
    others = (":!bench/RESULTS.md", ":!bench/results.json")
    is_dirty = _git("status", "--porcelain", "--untracked-files=no", "--", ":/", *others)
    commit = f"{commit}-dirty" if is_dirty else commit
    return Measured(datetime.now(UTC).date().isoformat(), commit, machine())


def _git(*words: str) -> str:
    told = subprocess.run(("git", *words), capture_output=True, text=True, check=False)
    return told.stdout.strip()


def table(rows: Sequence[Kept]) -> str:
    """The rows as a Markdown page."""
    machines = list(dict.fromkeys(row.measured.machine for row in rows))
    lines = [
        "# Benchmarks",
        "",
        "Each figure beside its floor, measured alternately in the same run (`python -m bench`):",
        "median of the runs, lowest and highest in brackets. The ratio is the median of the runs'",
        "ratios. Figures of two machines or of two days do not compare; ratios do.",
        "",
        *(f"Machine {number}: {about}.\n" for number, about in enumerate(machines, 1)),
        "| bench | metric | figure | floor | ratio | reach | holds | measured |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(f"| {_cells(row.result)} | {_told(row.measured, machines)} |")
    return "\n".join([*lines, ""])


def _cells(row: Result) -> str:
    low, high = row.spread
    floor = f"{figure(row.floor)} ({row.floor_is})" if row.floor is not None else "–"
    holds = ("yes" if row.holds else "**no**") if row.reach else "–"
    return (
        f"{row.bench} | {row.metric} | {figure(row.value)} {row.unit} "
        f"[{figure(low)} – {figure(high)}, {row.runs} runs] | {floor} | {figure(row.ratio)} "
        f"| {row.reach or '–'} | {holds}"
    )


def _told(measured: Measured, machines: Sequence[str]) -> str:
    machine = machines.index(measured.machine) + 1
    return f"{measured.date}, {measured.commit}, machine {machine}"


def read(json_path: Path) -> dict[str, list[Kept]]:
    """The rows of ``results.json`` by the name of the bench; none when there is no such file."""
    if not json_path.exists():
        return {}
    found: dict[str, list[Kept]] = {}
    for row in json.loads(json_path.read_text("utf-8")):
        about = Measured(*(row.pop(field.name) for field in fields(Measured)))
        name, spread = row.pop("name"), tuple(row.pop("spread"))
        found.setdefault(name, []).append(Kept(name, Result(**row, spread=spread), about))
    return found


def write(rows: Mapping[str, Sequence[Kept]], json_path: Path, order: Sequence[str]) -> None:
    """Write the rows of each bench, in the order of their names, as JSON and as ``RESULTS.md``.

    A bench that is not among ``rows`` keeps the rows that the file has of it.
    """
    merged = {**read(json_path), **rows}
    kept = [row for name in order for row in merged.get(name, ())]
    json_path.parent.mkdir(parents=True, exist_ok=True)
    texts = [{"name": row.name, **asdict(row.result), **asdict(row.measured)} for row in kept]
    json_path.write_text(json.dumps(texts, indent=1, ensure_ascii=False) + "\n", "utf-8")
    json_path.with_name("RESULTS.md").write_text(table(kept), "utf-8")


def between(steps: Steps, marks: Sequence[int]) -> list[float]:
    """Microseconds a change in each stretch; a step across a mark is split by its changes."""
    spent = [0.0] * len(marks)
    done, at = 0, 0
    for changes, seconds in steps:
        left = changes
        while left > 0 and at < len(marks):
            here = min(left, marks[at] - done)
            spent[at] += seconds * here / changes
            done += here
            left -= here
            if done == marks[at]:
                at += 1
    lengths = [mark - before for mark, before in zip(marks, (0, *marks), strict=False)]
    return [1e6 * s / n for s, n in zip(spent, lengths, strict=True)]
