"""Clean: raw topics of the captures become changes, in bounded reads (decision 10).

What a read brings is little or much. Little is read and parsed by this process, within some
milliseconds; a backlog (a snapshot, a long outage) is one Spark job a step, whose tasks parse
their partitions in parallel. Both run the same pure function, and both hand the rows to the
capture's :class:`Cleaned`, which completes, numbers and publishes them.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import pyarrow as pa
from pyspark.cloudpickle import dumps, loads
from pyspark.sql import SparkSession

from everstate.config import Config
from everstate.errors import EverstateError
from everstate.log.collector import collector_paused
from everstate.log.consumer import Follower
from everstate.log.positions import Offsets
from everstate.parts import Run, waits, works
from everstate.pipeline.session import spark_errors, spark_session
from everstate.pipeline.source import fair_spans, read_ranges

log = logging.getLogger(__name__)

_OUT_DDL: Final = "topic string, partition int, offset long, parsed binary"
_OUT: Final = pa.schema(
    {
        "topic": pa.string(),
        "partition": pa.int32(),
        "offset": pa.int64(),
        "parsed": pa.binary(),
    }
)
_COLUMNS: Final = (
    *("topic", "partition", "offset", "key", "value", "headers"),
    "unix_millis(timestamp) AS at_ms",
)
_POLL_RECORDS: Final = 5_000
_CHECK_S: Final = 0.5
_RETRY_S: Final = 0.5
_RETRY_S_MAX: Final = 10.0

Header = tuple[str, bytes | None]


class Reader(Protocol):
    """Reads raw records; pure, and can be sent to Spark's tasks."""

    def read(
        self,
        name: str,
        key: bytes | None,
        value: bytes | None,
        headers: Iterable[Header] = (),
        timestamp_ms: int = 0,
    ) -> list[Any]:
        """What one record says; never fails."""


class Codec(Protocol):
    """How what was read crosses from a task to the driver."""

    def encode(self, parsed: list[Any]) -> bytes:
        """As bytes."""

    def decode(self, value: bytes) -> list[Any]:
        """From bytes."""


class Cleaned(Protocol):
    """A capture that is cleaned (:class:`everstate.sources.cdc.cleaning.Cleaning` is one)."""

    name: str
    topics: dict[str, str]
    told_in: frozenset[str]
    """Those that tell of transactions, and have no rows."""

    @property
    def asks_for_ends(self) -> bool:
        """Whether it has to know where the topics end before what waits goes on."""

    @property
    def reader(self) -> Reader:
        """Reads one raw record."""

    @property
    def codec(self) -> Codec:
        """Carries what it read."""

    @property
    def waiting(self) -> int:
        """Records that were added and are not published."""

    def wanted(self) -> frozenset[tuple[str, int]]:
        """Partitions to be read next; none: so much waits that it has to go on first."""

    def ends_at(self, ends: Mapping[tuple[str, int], int]) -> None:
        """Take over where the topics end now."""

    def open(self) -> None:
        """Take over, and find the position."""

    def close(self) -> None:
        """Give up the connections."""

    def read_to(self) -> dict[tuple[str, int], int]:
        """Next offset to be read of each partition."""

    def add(
        self,
        topic: str,
        partition: int,
        records: Iterable[tuple[int, list[Any]]],
        start: int,
        end: int,
    ) -> None:
        """Take over all records of one partition from ``start`` up to ``end``."""

    def step(self, meanwhile: Callable[[], object] | None = None) -> Any:
        """Publish what is ready; ``None``: nothing was. ``meanwhile`` runs before committing."""


@dataclass(frozen=True)
class ParseTask:
    """Parses raw records in a Spark task; one row out for each that says something."""

    reader: bytes
    """The :class:`Reader`, pickled: it is of the project's own modules."""
    paths: tuple[str, ...]
    """Where the driver found those modules; Spark's workers do not look there by themselves."""
    codec: Codec
    names: Mapping[str, str]

    @classmethod
    def of(cls, cleaned: Cleaned) -> ParseTask:
        """Task for a capture's raw topics."""
        paths = tuple(path for path in sys.path if path)
        reader: bytes = dumps(cleaned.reader)  # type: ignore[no-untyped-call]
        return cls(reader, paths, cleaned.codec, cleaned.topics)

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Out: :data:`_OUT`, in the order of the input."""
        sys.path.extend(path for path in self.paths if path not in sys.path)
        read, encode = loads(self.reader).read, self.codec.encode
        for batch in batches:
            columns = batch.to_pydict()
            topics, partitions, offsets = columns["topic"], columns["partition"], columns["offset"]
            found: list[list[Any]] = [[], [], [], []]
            for index, (key, value, at_ms) in enumerate(
                zip(columns["key"], columns["value"], columns["at_ms"], strict=True)
            ):
                headers = [(h["key"], h["value"]) for h in columns["headers"][index] or ()]
                parsed = read(self.names[topics[index]], key, value, headers, at_ms)
                if parsed:
                    row = (topics[index], partitions[index], offsets[index], encode(parsed))
                    for column, item in zip(found, row, strict=True):
                        column.append(item)
            yield pa.RecordBatch.from_arrays(
                [pa.array(column, field.type) for column, field in zip(found, _OUT, strict=True)],
                schema=_OUT,
            )


class Cleaner:
    """Reads the raw topics of one capture and has them cleaned, until it is told to stop.

    ``session`` gives the Spark session when a backlog asks for it, and not before: a role that
    never has a backlog never starts Spark.
    """

    def __init__(
        self,
        config: Config,
        cleaned: Cleaned,
        *,
        session: Callable[[], SparkSession] | None = None,
        bulk_records: int | None = None,
    ) -> None:
        self._config, self._cleaned = config, cleaned
        self._session = session or (lambda: spark_session(config, app_name="everstate clean"))
        self._bulk = config.capture.bulk_records if bulk_records is None else bulk_records
        self._offsets = Offsets(config)
        told_in = cleaned.told_in
        self._groups = [one for one in (frozenset(cleaned.topics) - told_in, told_in) if one]
        self._followers: dict[frozenset[str], Follower] = {}
        """One for each group of topics, as one group may have to wait for the other."""
        self._is_open = False
        self._check_at = 0.0
        self._has_read_ahead = False
        self.bulk_jobs = 0
        """How many Spark jobs have run."""

    @property
    def name(self) -> str:
        """The capture's name."""
        return self._cleaned.name

    def close(self) -> None:
        """Give up the connections; the Spark session is the caller's."""
        self._drop()
        self._cleaned.close()
        self._offsets.close()

    def run(self, stop: threading.Event) -> None:
        """Clean until ``stop`` is set; what may pass is waited out, anything else is raised."""
        pause = _RETRY_S
        while not stop.is_set():
            try:
                self.step(self._config.pipeline.poll_ms / 1000)
                works()
                pause = _RETRY_S
            except EverstateError as error:
                if not error.retryable:
                    raise
                log.warning("clean %s waits %.1f s: %s", self._cleaned.name, pause, error)
                waits(error, pause)
                self._drop()
                stop.wait(pause)
                pause = min(_RETRY_S_MAX, pause * 2)

    def step(self, wait_s: float = 0.05) -> Any:
        """Read once, publish once; ``None``: nothing was ready. Waits ``wait_s`` for records.

        After an error everything is found again in the log by the next step.
        """
        cleaned = self._cleaned
        try:
            if not self._is_open:
                cleaned.open()
                self._is_open = True
                self._check_at = 0.0
            with collector_paused():
                self._read(0.0 if self._has_read_ahead else wait_s)
                self._has_read_ahead = False
                if cleaned.asks_for_ends and cleaned.waiting:
                    cleaned.ends_at(self._offsets.stable_ends(cleaned.topics))
                return cleaned.step(self._read_ahead)
        except BaseException:
            self._drop()
            raise

    def catch_up(self, timeout_s: float = 60.0) -> int:
        """Step until what is in the raw topics now has been read and published.

        Out: how many batches. Open transactions of the source, and rows that are held, stay.
        """
        deadline = time.monotonic() + timeout_s
        batches = 0
        if not self._is_open:
            self._cleaned.open()
            self._is_open = True
        ends = self._offsets.stable_ends(self._cleaned.topics)
        while time.monotonic() < deadline:
            batches += self.step() is not None
            read_to = self._cleaned.read_to()
            if all(read_to[place] >= end for place, end in ends.items()):
                if self._cleaned.waiting == 0:
                    return batches
        return batches

    def _drop(self) -> None:
        self._is_open = self._has_read_ahead = False
        self._unfollow()

    def _unfollow(self) -> None:
        for follower in self._followers.values():
            follower.close()
        self._followers = {}

    def _read_ahead(self) -> None:
        """Read and parse what has come, while the broker commits what was read before."""
        if self._followers:
            self._has_read_ahead = self._read_little(0.0)

    def _read(self, wait_s: float) -> None:
        now = time.monotonic()
        if now >= self._check_at or not self._cleaned.wanted():
            self._check_at = now + _CHECK_S
            spans = self._backlog()
            if spans is not None:
                self._check_at = 0.0
                self._read_bulk(spans)
                return
        self._read_little(wait_s)

    def _backlog(self) -> dict[str, dict[int, Any]] | None:
        """Ranges to read by Spark, when there is more than is quickly read here."""
        cleaned = self._cleaned
        ends = self._offsets.stable_ends(cleaned.topics)
        cleaned.ends_at(ends)
        read_to, wanted = cleaned.read_to(), cleaned.wanted()
        listed = sorted(wanted)
        if sum(ends[place] - read_to[place] for place in listed) <= self._bulk:
            return None
        room = self._config.pipeline.batch_changes_max
        if any(topic not in cleaned.told_in for topic, _ in wanted):
            room = max(_POLL_RECORDS, room - cleaned.waiting)
        spans = fair_spans(
            {n: read_to[place] for n, place in enumerate(listed)},
            {n: ends[place] for n, place in enumerate(listed)},
            room,
        )
        ranges: dict[str, dict[int, Any]] = {}
        for number, span in spans.items():
            topic, partition = listed[number]
            ranges.setdefault(topic, {})[partition] = span
        return ranges

    def _read_little(self, wait_s: float) -> bool:
        """Read some records, here and now; whether there were any.

        Rows first, and then their ends, which are waited for when rows do.
        """
        wanted = self._cleaned.wanted()
        groups = [group for group in self._groups if any(topic in group for topic, _ in wanted)]
        found = False
        for number, group in enumerate(groups):
            is_patient = number == (len(groups) - 1 if self._cleaned.waiting else 0)
            patience_s = wait_s if is_patient and not found else 0.0
            follower = self._follower(group)
            follower.only(place for place in wanted if place[0] in group)
            found |= self._follow(follower, patience_s)
        return found

    def _follower(self, group: frozenset[str]) -> Follower:
        """Reader of some of the topics, from where they were read to."""
        if group not in self._followers:
            starts = {p: at for p, at in self._cleaned.read_to().items() if p[0] in group}
            client_id = f"everstate-clean-{self._cleaned.name}"
            self._followers[group] = Follower(self._config, starts, client_id=client_id)
        return self._followers[group]

    def _follow(self, follower: Follower, wait_s: float) -> bool:
        cleaned, read = self._cleaned, self._cleaned.reader.read
        found: dict[tuple[str, int], list[tuple[int, list[Any]]]] = {}
        for record in follower.poll(_POLL_RECORDS, wait_s):
            parsed = read(
                cleaned.topics[record.topic],
                record.key,
                record.value,
                record.headers,
                record.timestamp_ms,
            )
            place = (record.topic, record.partition)
            found.setdefault(place, []).append((record.offset, parsed))
        for place, (start, end) in follower.spans().items():
            cleaned.add(*place, found.get(place, ()), start, end)
        return bool(found)

    def _read_bulk(self, ranges: Mapping[str, Mapping[int, Any]]) -> None:
        cleaned = self._cleaned
        task = ParseTask.of(cleaned)
        self.bulk_jobs += 1
        with spark_errors(f"cleaning {cleaned.name}"):
            records = read_ranges(self._session(), self._config, ranges)
            columns = records.selectExpr(*_COLUMNS)
            table = columns.mapInArrow(task, _OUT_DDL).toArrow()
        places = table.select(["topic", "partition"]).to_pydict()
        offsets, parsed = table["offset"].to_pylist(), table["parsed"].to_pylist()
        by_place: dict[tuple[str, int], list[tuple[int, list[Any]]]] = {}
        for topic, partition, offset, value in zip(
            places["topic"], places["partition"], offsets, parsed, strict=True
        ):
            rows = by_place.setdefault((topic, partition), [])
            rows.append((offset, cleaned.codec.decode(value)))
        for topic, partitions in ranges.items():
            for partition, span in partitions.items():
                # A task gives its partition in order; tasks come back in any.
                rows = sorted(by_place.get((topic, partition), []), key=lambda row: row[0])
                cleaned.add(topic, partition, rows, span.start, span.end)
        self._unfollow()


def cleaning_part(config: Config, open_capture: Callable[[], Cleaned]) -> Run:
    """The part of a role that cleans one capture; ``open_capture`` is called at each start."""

    def clean(stop: threading.Event) -> None:
        cleaner = Cleaner(config, open_capture())
        try:
            log.info("cleaning %s", cleaner.name)
            cleaner.run(stop)
        finally:
            cleaner.close()

    return clean
