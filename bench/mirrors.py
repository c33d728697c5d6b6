"""mirrors: 400 changes a second with a view in each other store, beside PostgreSQL's views alone.

A change is in another store when that view's position has passed it: rows are written before the
position moves.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import psycopg

from bench import data
from bench.freshness import (
    RATE,
    SECONDS,
    SECONDS_QUICK,
    WARM_SECONDS,
    Sender,
    latest_table,
    milliseconds,
    prepared,
    running_pipeline,
    sender_of,
)
from bench.report import Reach, Result, result
from bench.session import Session
from bench.stores import STORES
from everstate.config import Config
from everstate.views.control import Control

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from kit.served_store import ServedStore

_POLL_S = 0.1


def run(session: Session) -> list[Result]:
    seconds = SECONDS_QUICK if session.quick else SECONDS
    beside: list[tuple[float, float]] = []
    alone: list[tuple[float, float]] = []
    lags: dict[str, list[float]] = {each.server.name: [] for each in STORES}
    for number in range(session.repeat):
        alone.append(_measured(session, seconds, [])[0])
        with _servers() as servers:
            times, found = _measured(session, seconds, servers)
        beside.append(times)
        for name, lag in found.items():
            lags[name].append(lag)
        others = ", ".join(f"{name} {lag:.0f} ms" for name, lag in found.items())
        session.say(
            f"[dim]  run {number + 1}: PostgreSQL p50 {times[0]:.0f} ms, p99 {times[1]:.0f} ms "
            f"beside {alone[-1][0]:.0f} and {alone[-1][1]:.0f}; p99 of {others}[/dim]"
        )
    stores = ", ".join(lags)
    return [
        result(
            "mirrors",
            f"{RATE} changes/s beside {stores}, row visible in PostgreSQL, p99",
            "ms",
            [run[1] for run in beside],
            floors=[run[1] for run in alone],
            floor_is="without the other stores",
            reach=Reach(ratio_max=1.3),
        ),
        *(
            result(
                "mirrors",
                f"the same, row in {name}, p99",
                "ms",
                values,
                reach=Reach(value_max=3_000),
            )
            for name, values in lags.items()
        ),
    ]


@contextmanager
def _servers() -> Iterator[list[ServedStore]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                each.server.alone(
                    Path(stack.enter_context(TemporaryDirectory(prefix="everstate-bench-")))
                )
            )
            for each in STORES
        ]


def _measured(
    session: Session, seconds: int, servers: list[ServedStore]
) -> tuple[tuple[float, float], dict[str, float]]:
    """PostgreSQL's percentiles, and the 99th of each other store, in milliseconds."""
    config = prepared(session)
    os.environ["BENCH_STORES"] = " ".join(served.name for served in servers)
    more = "".join(served.section for served in servers)
    names = {f"in_{served.name}": served.name for served in servers}
    with running_pipeline(config, "bench.project:mirrored", more):
        sender = sender_of(session, config, seconds)
        with _Positions(config, names).followed() as positions:
            times = sender.percentiles(latest_table(config))
            positions.wait_for(sender.first + sender.count)
    lags = positions.lags(config, sender)
    session.drop(config)
    return times, {names[view]: lag for view, lag in lags.items()}


@dataclass
class _Positions:
    """Positions of views in other stores, read again and again in a thread."""

    config: Config
    views: Mapping[str, str]
    times: list[float] = field(default_factory=list)
    offsets: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    """The next offset by view and partition at each of the times."""

    @contextmanager
    def followed(self) -> Iterator[_Positions]:
        stop = threading.Event()
        thread = threading.Thread(target=self._follow, args=(stop,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            stop.set()
            thread.join()

    def _follow(self, stop: threading.Event) -> None:
        with psycopg.connect(self.config.store_dsn, autocommit=True) as connection:
            control = Control(connection, self.config.views.schema_name)
            while not stop.wait(_POLL_S):
                try:
                    found = control.positions(data.ENTITY)
                except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
                    continue
                now = time.perf_counter()
                for each in found:
                    if each.view in self.views:
                        seen = self.offsets.setdefault((each.view, each.partition), [])
                        seen.extend([0] * (len(self.times) - len(seen)))
                        seen.append(each.next_offset)
                self.times.append(now)

    def wait_for(self, count: int) -> None:
        """Until each view has passed so many changes."""
        deadline = time.monotonic() + 180
        while any(self._passed(view) < count for view in self.views):
            assert time.monotonic() < deadline, "a view in another store does not catch up"
            time.sleep(_POLL_S)

    def _passed(self, view: str) -> int:
        return sum(seen[-1] for (of, _), seen in list(self.offsets.items()) if of == view)

    def lags(self, config: Config, sender: Sender) -> dict[str, float]:
        """The 99th of a hundred by view, in milliseconds, after the warm-up."""
        with psycopg.connect(config.store_dsn) as connection:
            partitions: dict[str, int] = dict(
                connection.execute(f"SELECT key, partition FROM {latest_table(config)}").fetchall()
            )
        # All changes were sent in order by few producers: a change's offset is the number of
        # earlier changes in its partition.
        before: Counter[int] = Counter()
        found: dict[str, list[float]] = {view: [] for view in self.views}
        for index in range(sender.first + sender.count):
            partition = partitions[data.key_of(data.place(index).number)]
            offset, number = before[partition], index - sender.first
            before[partition] += 1
            if number >= WARM_SECONDS * RATE:
                for view, lags in found.items():
                    at = bisect_right(self.offsets[view, partition], offset)
                    lags.append(self.times[at] - sender.sent[number])
        return {view: milliseconds(lags)[1] for view, lags in found.items()}
