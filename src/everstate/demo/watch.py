"""Progress of the demonstration: in the store, in the log, in the views, in the lake."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import psutil
from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from everstate.archive.commits import ArchiveLog
from everstate.archive.reader import ArchiveReader
from everstate.config import Config
from everstate.demo.play import NEW_YORK
from everstate.errors import MissingTable
from everstate.log.lag import Lag, ReaderPosition
from everstate.log.topics import TopicNames
from everstate.parts import read_states
from everstate.postgres import connect, refusals
from everstate.views.control import Control

_PLAIN_EVERY_S = 5.0
_RATE_OVER_S = 3.0
_MEMORY_EVERY_S = 1.0
_ARCHIVE_EVERY_S = 1.0
_TROUBLE_AFTER_S = 2.0
"""Shorter troubles pass by themselves, such as a server that is starting."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Counts of changes at one moment; ``at`` is a monotonic clock's seconds."""

    at: float
    written: int
    published: int
    applied: int
    archived: int
    lag_seconds: float | None
    """Age of the oldest change in the log that the views do not have yet; ``None``: Spark is
    still starting, and there are no views."""
    clock: datetime | None


@dataclass
class Course:
    """The samples of one run, and figures computed from them."""

    total: int
    samples: list[Sample] = field(default_factory=list)
    before: int = 0
    """Changes that an earlier run has written."""

    def add(self, sample: Sample) -> None:
        """Add a sample."""
        self.samples.append(sample)

    def rate(self, name: str) -> float:
        """Changes a second over the last seconds; after the last change, over the whole run."""
        counts = [(sample.at, int(getattr(sample, name))) for sample in self.samples]
        if counts[-1][1] >= self.total:
            newest = next(at_count for at_count in counts if at_count[1] >= self.total)
            oldest = next((c for c, after in pairwise(counts) if after[1]), newest)
        else:
            newest = counts[-1]
            recent = (c for c in counts[:-1] if newest[0] - c[0] <= _RATE_OVER_S)
            # On a slow machine the sample before it is older than that.
            oldest = next(recent, counts[-2:][0])
        if newest[0] == oldest[0]:
            return 0.0
        return (newest[1] - oldest[1]) / (newest[0] - oldest[0])

    def overall_rate(self) -> float:
        """Changes a second from this run's first one written to the last one shown by the views."""
        began = next((s for s in self.samples if s.written > self.before), None)
        if began is None:
            return 0.0
        ended = next((s for s in self.samples if s.applied >= self.total), self.samples[-1])
        return max(0, ended.applied - self.before) / max(ended.at - began.at, 1e-3)

    def median_lag_s(self) -> float:
        """Median lag in seconds over the samples taken while changes came in."""
        lags = [
            s.lag_seconds
            for s in self.samples
            if s.lag_seconds is not None and 0 < s.applied < self.total
        ]
        return statistics.median(lags) if lags else 0.0


class Troubles:
    """Prints why a part of `everstate run` does not work, each reason once."""

    def __init__(self, console: Console, data_dir: Path) -> None:
        self._console, self._data_dir = console, data_dir
        self.told: list[str] = []

    def look(self) -> None:
        """Print the reasons that are new, with their advice."""
        now = time.time()
        for state in read_states(self._data_dir):
            for name, part in state.parts.items():
                told = f"{name}: {part.reason}"
                lasts = part.state != "running" and now - part.since >= _TROUBLE_AFTER_S
                if lasts and part.reason and told not in self.told:
                    self.told.append(told)
                    advice = f"\n  {part.advice}" if part.advice else ""
                    self._console.print(
                        f"{told}{advice}", style="yellow", highlight=False, markup=False
                    )


class Display:
    """Shows a course: a live table on a terminal, periodic lines elsewhere."""

    def __init__(self, console: Console, course: Course) -> None:
        self._console, self._course = console, course
        self._live: Live | None = None
        self._told_at = 0.0
        self._told = ""
        if console.is_terminal:
            self._live = Live(console=console, auto_refresh=False, transient=False)
            self._live.start()

    def update(self) -> None:
        """Draw the newest sample."""
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
        elif time.monotonic() - self._told_at >= _PLAIN_EVERY_S:
            self.tell()

    def close(self) -> None:
        """Stop drawing; the last table stays visible."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        else:
            self.tell()

    def tell(self) -> None:
        """Print one plain line if the counts have changed."""
        self._told_at = time.monotonic()
        if not self._course.samples:
            return
        now, course = self._course.samples[-1], self._course
        counts = (
            f"{_clock(now.clock)}  store {now.written:,}, log {now.published:,}, "
            f"views {now.applied:,}, archive {now.archived:,} of {course.total:,} changes"
        )
        if counts != self._told:
            self._told = counts
            pace = f"{course.rate('applied'):,.0f}/s, {_behind(now.lag_seconds)}"
            self._console.print(f"{counts} ({pace})", highlight=False)

    def _table(self) -> RenderableType:
        now, course = self._course.samples[-1], self._course
        grid = Table.grid(padding=(0, 2))
        grid.add_column(no_wrap=True)
        grid.add_column(justify="right", no_wrap=True)
        grid.add_column(width=24)
        grid.add_column(justify="right", no_wrap=True)
        grid.add_column(style="dim", no_wrap=True)
        notes = {
            "written": ("source of truth", ""),
            "published": ("in the log", ""),
            "applied": ("in the views", _behind(now.lag_seconds)),
            "archived": ("in the archive", ""),
        }
        for name, (title, note) in notes.items():
            count = getattr(now, name)
            bar = ProgressBar(total=max(course.total, 1), completed=count, width=24)
            grid.add_row(title, f"{count:,}", bar, f"{course.rate(name):,.0f}/s", note)
        grid.add_row("[bold]airport clock[/]", "", f"[bold yellow]{_clock(now.clock)}[/]")
        return grid


class PeakMemory:
    """Peak memory of processes and their descendants; shared pages are counted once.

    If the kernel does not report shared pages (PSS), the resident size is used.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._next = 0.0

    def sample(self, pids: Iterable[int]) -> None:
        """Measure now, at most once a second."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _MEMORY_EVERY_S
        self.peak_bytes = max(self.peak_bytes, sum(map(_bytes, _families(pids))))


def _families(pids: Iterable[int]) -> set[psutil.Process]:
    found: set[psutil.Process] = set()
    for pid in pids:
        try:
            process = psutil.Process(pid)
            found |= {process, *process.children(recursive=True)}
        except psutil.NoSuchProcess:
            continue
    return found


def _bytes(process: psutil.Process) -> int:
    with suppress(psutil.Error):
        with suppress(psutil.AccessDenied):
            info = process.memory_full_info()
            return int(getattr(info, "pss", info.rss))
        return int(process.memory_info().rss)
    return 0


class Watcher:
    """Counts changes in store, log, views and lake; close its database connection at the end."""

    def __init__(self, config: Config, entity: str) -> None:
        self._config, self._entity = config, entity
        schema = config.views.schema_name
        self._connection = connect(config.store_dsn)
        self._views = connect(config.views_dsn)
        self._lag = Lag(config)
        self._archived = 0
        self._archive_due = 0.0
        self._control = Control(self._views, schema)

    def close(self) -> None:
        """Close the connections."""
        self._connection.close()
        self._views.close()
        self._lag.close()

    def sample(self, written: int, clock: datetime | None) -> Sample:
        """Count now. Cost: three small statements, one request to the log, the lake's log."""
        row = self._connection.execute(
            "SELECT count(*) FROM everstate_store.outbox_unpublished"
        ).fetchone()
        applied, lag_seconds = self._kept()
        return Sample(
            at=time.monotonic(),
            written=written,
            published=max(0, written - (row[0] if row else 0)),
            applied=applied,
            archived=self._in_archive(),
            lag_seconds=lag_seconds,
            clock=clock,
        )

    def _kept(self) -> tuple[int, float | None]:
        """Changes that the core applied, and its lag; ``None`` before the core exists."""
        try:
            with refusals():
                applied = self._control.counters(self._entity).applied
                vector = self._control.core_vector(self._entity)
        except MissingTable:
            return 0, None
        topic = TopicNames(self._config.log.prefix).changes(self._entity)
        positions = [
            ReaderPosition(self._entity, topic, partition, offset)
            for partition, offset in vector.items()
        ]
        lags = (behind.lag_seconds for behind in self._lag.rows(positions))
        return applied, max(lags, default=None)

    def _in_archive(self) -> int:
        """Rows in the lake, counted from its statistics at most once a second."""
        if time.monotonic() >= self._archive_due:
            self._archive_due = time.monotonic() + _ARCHIVE_EVERY_S
            if ArchiveLog(self._config, self._entity).exists():
                files = ArchiveReader(self._config, self._entity).files()
                self._archived = sum(file.rows for file in files)
        return self._archived


def _clock(moment: datetime | None) -> str:
    return "–" if moment is None else f"{moment.astimezone(NEW_YORK):%a %Y-%m-%d %H:%M}"


def _behind(lag_seconds: float | None) -> str:
    if lag_seconds is None:
        return "Spark is starting"
    return f"{lag_seconds:.1f} s behind" if lag_seconds else "up to date"
