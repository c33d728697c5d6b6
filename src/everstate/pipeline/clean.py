"""Clean: the raw log of a capture becomes changes; each step is one Spark job (decision 25).

A job reads a bounded range of the raw log in slices. Tasks parse, map, validate and encode their
slice and return Arrow columns, which Spark returns in the order of the log. While a batch is
numbered and published (by :class:`Cleaned`), the job of the next batch runs.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from itertools import groupby
from typing import Any, Final, NamedTuple, Protocol

import pyarrow as pa
from prometheus_client import Gauge
from pyspark.cloudpickle import dumps, loads
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from everstate.config import Config
from everstate.errors import EverstateError, Fenced
from everstate.log.collector import collector_paused
from everstate.log.positions import Offsets, Range, check_ends
from everstate.log.record import RawRecord
from everstate.parts import PartRun, stopped
from everstate.pipeline.spark.session import spark_errors, spark_session
from everstate.pipeline.spark.source import fair_spans, read_ranges
from everstate.runtime.worker import Worker

logger = logging.getLogger(__name__)

STOPPED = Gauge(
    "everstate_clean_stopped",
    "1 while a capture cannot be cleaned, with the reason",
    ["capture", "reason"],
)

_stopped_by: dict[str, str] = {}
"""Capture → the reason label that it has in :data:`STOPPED`."""
_SLICE_RECORDS: Final = 20_000
"""A range is divided into tasks of at least so many raw records."""
_STEP_RECORDS: Final = 60_000
_STEP_RECORDS_FIRST: Final = 5_000
_STEP_BYTES: Final = 64 * 1_048_576
"""Wanted size of a step's columns; the previous step's size decides how many records to read."""
_POOL: Final = "clean"
_POLL_S: Final = 0.02
_POLL_S_MAX: Final = 0.1
"""Where nothing is written: each poll asks the broker."""
_CONF: Final = {
    # A record may have megabytes: batches for Python are bounded by bytes, too.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "4000",
    "spark.sql.execution.arrow.maxBytesPerBatch": str(16 * 1_048_576),
    # There is nothing to adapt in a job of one stage, and planning it takes as long as the job.
    "spark.sql.adaptive.enabled": "false",
}


class SliceReader(Protocol):
    """Reads one slice."""

    def columns(self, records: Iterable[RawRecord]) -> pa.RecordBatch:
        """The records' content as columns, in the order of the records; never fails."""


class RawSlices(Protocol):
    """Reads slices of a raw log; pure, and can be sent to Spark's tasks."""

    @property
    def schema(self) -> pa.Schema:
        """Schema of the columns."""

    @property
    def header_names(self) -> Sequence[str]:
        """Names of the record headers to read."""

    def begin(self) -> SliceReader:
        """Begin a slice."""


class Cleaned(Protocol):
    """A capture that is cleaned (:class:`everstate.sources.cdc.cleaning.Cleaning` is one)."""

    name: str
    counting: Any
    is_cut: bool
    """Whether the last batch was cut: its rest is published before more is read."""
    is_in_order: bool
    """Whether each topic is read to its end before the next one; parents' topics are first."""
    read_to: dict[int, int]
    """Next offset to be read, by number of the part."""

    @property
    def parts(self) -> Sequence[tuple[str, int]]:
        """Topic and partition of its raw log, by number."""

    def slices(self, *, is_bare: bool = False) -> RawSlices:
        """The reader of its raw records; ``is_bare``: without rows, for :attr:`counting`."""

    def open(self) -> None:
        """Fence other processes, and read the position."""

    def close(self) -> None:
        """Close the connections."""

    def add(self, columns: pa.Table, spans: Mapping[int, Range]) -> None:
        """Add the columns that were read from these offsets, in order."""

    def add_counted(self, columns: pa.Table, end: int) -> None:
        """Add the columns that were read for :attr:`counting` up to an offset."""

    def step(self, *, has_read_all: bool = True) -> Any:
        """Publish the batch that is ready; ``None``: none was."""


_tasks: dict[str, RawSlices] = {}
"""Unpickled slices of this process by their digest: a worker runs many tasks."""


@dataclass(frozen=True)
class SliceTask:
    """Reads slices in a Spark task."""

    pickled: bytes
    """The :class:`RawSlices`; it may need the project's own modules."""
    digest: str
    paths: tuple[str, ...]
    """The driver's module search path; Spark's workers do not have it by themselves."""
    numbers: Mapping[tuple[str, int], int]
    """Topic and partition → number of the part."""

    @classmethod
    def of(cls, slices: RawSlices, parts: Sequence[tuple[str, int]]) -> SliceTask:
        """Task for a raw log."""
        pickled: bytes = dumps(slices)  # type: ignore[no-untyped-call]
        paths = tuple(path for path in sys.path if path)
        numbers = {place: number for number, place in enumerate(parts)}
        return cls(pickled, sha256(pickled).hexdigest(), paths, numbers)

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The columns of the slice, in the order of the input."""
        reading = self._slices().begin()
        for batch in batches:
            topic, partition, offset, at_ms, key, value, *headers = (
                column.to_pylist() for column in batch.columns
            )
            # A slice has records of one partition only.
            part = self.numbers[topic[0], partition[0]] if topic else 0
            header_rows = zip(*headers, strict=True)
            parts = [part] * len(offset)
            yield reading.columns(zip(parts, offset, key, value, header_rows, at_ms, strict=True))

    def _slices(self) -> RawSlices:
        found = _tasks.get(self.digest)
        if found is None:
            sys.path.extend(path for path in self.paths if path not in sys.path)
            _tasks.clear()
            found = _tasks[self.digest] = loads(self.pickled)
        return found


class _Job(NamedTuple):
    """The ranges of a step whose Spark job is running."""

    spans: Mapping[int, Range]
    columns: Future[pa.Table]


class Cleaner(Worker):
    """Reads the raw log of one capture and has it cleaned, until it is asked to stop.

    ``session`` returns the Spark session; captures that share it use a fair scheduler pool.
    """

    idle_s = 0.0  # A step waits for records itself.
    retry_s = (0.5, 10.0)

    def __init__(
        self,
        config: Config,
        cleaned: Cleaned,
        *,
        session: Callable[[], SparkSession] | None = None,
        step_records: int = _STEP_RECORDS,
    ) -> None:
        self._config, self._cleaned = config, cleaned
        self.doing = f"cleaning of {cleaned.name}"
        self._make_session = session or (lambda: spark_session(config, app_name="everstate clean"))
        self._session: SparkSession | None = None
        self._offsets = Offsets(config)
        self._records_max = step_records
        self._records = min(step_records, _STEP_RECORDS_FIRST)
        self._tasks: dict[bool, tuple[SliceTask, Any, Sequence[str]]] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._job: _Job | None = None
        self._is_open = False
        self._has_more = False
        """Whether the raw log has more records than the last job was asked to read."""
        self._poll_s = _POLL_S

    @property
    def name(self) -> str:
        """The capture's name."""
        return self._cleaned.name

    def open(self) -> None:
        """Fence other processes, and read the position; a step does so when necessary."""
        self._cleaned.open()
        self._tasks = {}
        self._is_open = True

    def close(self) -> None:
        """Close the connections; the Spark session is the caller's."""
        self._drop()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._cleaned.close()
        self._offsets.close()

    def step(self, wait_s: float = 0.2) -> Any:
        """Read once, publish once; ``None``: nothing was ready. Waits ``wait_s`` for records.

        After an error the next step reads position and records from the log again.
        """
        try:
            if not self._is_open:
                self.open()
            with collector_paused():
                if not self._cleaned.is_cut:
                    read = self._read if self._cleaned.counting is None else self._count
                    read(wait_s)
                return self._cleaned.step(has_read_all=self._job is None and not self._has_more)
        except BaseException:
            self._drop()
            raise

    def catch_up(self, timeout_s: float = 60.0) -> int:
        """Step until the raw log is read to its present end, and what is ready is published.

        Returns the number of batches, also when ``timeout_s`` ends first. Open transactions of the
        source, and held rows, stay unpublished.
        """
        deadline = time.monotonic() + timeout_s
        batches, cleaned = 0, self._cleaned
        if not self._is_open:
            self.open()
        ends = self._offsets.stable_ends({topic for topic, _ in cleaned.parts})
        while time.monotonic() < deadline:
            done = self.step(0.0)
            batches += done is not None
            parts = {place: number for number, place in enumerate(cleaned.parts)}
            if all(p in parts and cleaned.read_to[parts[p]] >= end for p, end in ends.items()):
                if done is None and cleaned.counting is None and self._job is None:
                    return batches
        return batches

    def _drop(self) -> None:
        self._is_open = self._has_more = False
        self._job = None

    def _read(self, wait_s: float) -> None:
        """Add the next range's columns, and start the job for the range after it."""
        job = self._job or self._launch(self._cleaned.read_to, wait_s)
        if job is None:
            return
        columns = job.columns.result()
        self._adapt(columns, job.spans)
        self._cleaned.add(columns, job.spans)
        self._job = None
        if self._cleaned.counting is None:
            self._job = self._launch(self._cleaned.read_to, 0.0)

    def _launch(
        self,
        read_to: Mapping[int, int],
        wait_s: float,
        records: int | None = None,
        *,
        is_bare: bool = False,
    ) -> _Job | None:
        """Start a Spark job over a bounded range of new records; ``None``: there are none.

        ``records``: at most so many; ``None``: as many as a step reads.
        """
        parts = self._cleaned.parts
        topics = {topic for topic, _ in parts}
        deadline = time.monotonic() + wait_s
        while True:
            ends = self._offsets.stable_ends(topics)
            there = {number: ends[place] for number, place in enumerate(parts)}
            for number, (topic, partition) in enumerate(parts):
                # Detects a topic that was deleted and created again; the next open reads it.
                at, end = {partition: read_to[number]}, {partition: there[number]}
                check_ends(f"clean {self.name}", topic, at, end)
            spans = self._spans(read_to, there, records or self._records)
            self._has_more = any(spans[n].end < there[n] for n in spans)
            if spans:
                self._poll_s = _POLL_S
                return _Job(spans, self._submit(spans, is_bare=is_bare))
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return None
            time.sleep(min(left_s, self._poll_s))
            self._poll_s = min(_POLL_S_MAX, 1.5 * self._poll_s)

    def _spans(
        self, read_to: Mapping[int, int], there: Mapping[int, int], records: int
    ) -> dict[int, Range]:
        """Ranges of the next step: shared fairly among the parts, or one topic after the other."""
        if not self._cleaned.is_in_order:
            return fair_spans(read_to, there, records)
        spans: dict[int, Range] = {}
        for _, part in groupby(enumerate(self._cleaned.parts), key=lambda one: one[1][0]):
            ends = {number: there[number] for number, _ in part}
            left = records - sum(map(len, spans.values()))
            if left > 0:
                spans |= fair_spans({number: read_to[number] for number in ends}, ends, left)
        return spans

    def _count(self, wait_s: float) -> None:
        """Read on, without rows, to find the end of a large transaction."""
        read_to = {0: self._cleaned.counting.counted_to}
        job = self._launch(read_to, wait_s, 4 * self._records_max, is_bare=True)
        if job is not None:
            self._cleaned.add_counted(job.columns.result(), job.spans[0].end)

    def _adapt(self, columns: pa.Table, spans: Mapping[int, Range]) -> None:
        """Set how many records the next step reads, so that it has the wanted bytes."""
        read = sum(len(span) for span in spans.values())
        fitting = int(_STEP_BYTES * read / max(1, columns.nbytes))
        least = min(1_000, self._records_max)
        self._records = max(least, min(fitting, 2 * self._records, self._records_max))

    def _submit(self, spans: Mapping[int, Range], *, is_bare: bool) -> Future[pa.Table]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix=f"clean-{self.name}")
        return self._pool.submit(self._run_job, spans, is_bare)

    def _run_job(self, spans: Mapping[int, Range], is_bare: bool) -> pa.Table:
        """One Spark job over these ranges; returns columns in the order of each part."""
        parts = self._cleaned.parts
        ranges: dict[str, dict[int, Range]] = {}
        for number, span in spans.items():
            topic, partition = parts[number]
            ranges.setdefault(topic, {})[partition] = span
        slices = sum(max(1, len(span) // _SLICE_RECORDS) for span in spans.values())
        with spark_errors(f"cleaning {self.name}"):
            task, schema, columns = self._task(is_bare)
            records = read_ranges(self._spark(), self._config, ranges, slices=slices)
            return records.selectExpr(*columns).mapInArrow(task, schema).toArrow()

    def _task(self, is_bare: bool) -> tuple[SliceTask, Any, Sequence[str]]:
        if is_bare not in self._tasks:
            slices = self._cleaned.slices(is_bare=is_bare)
            columns = ["topic", "partition", "offset", "unix_millis(timestamp) AS at_ms"]
            columns += ["key", "value"]
            for number, name in enumerate(slices.header_names):
                value = f"get(filter(headers, h -> h.key = '{name}'), 0).value"
                columns.append(f"{value} AS h{number}")
            task = SliceTask.of(slices, self._cleaned.parts)
            self._tasks[is_bare] = task, from_arrow_schema(slices.schema), columns
        return self._tasks[is_bare]

    def _spark(self) -> SparkSession:
        if self._session is None:
            shared = self._make_session()
            self._session = shared.newSession()
            for name, value in _CONF.items():
                self._session.conf.set(name, value)
            # Cleaning gets its share of the cores, however much other jobs have to do.
            shared.sparkContext.setLocalProperty("spark.scheduler.pool", _POOL)
        return self._session


def _tell_stopped(capture: str, reason: str | None) -> None:
    """Set the metric with the reason why a capture cannot proceed; ``None``: it is cleaned."""
    if (former := _stopped_by.pop(capture, None)) is not None:
        STOPPED.remove(capture, former)
    if reason is not None:
        _stopped_by[capture] = reason
        STOPPED.labels(capture, reason).set(1)


def cleaning_part(
    config: Config,
    open_capture: Callable[[], Cleaned],
    session: Callable[[], SparkSession] | None = None,
) -> PartRun:
    """The part of a role that cleans one capture; ``open_capture`` is called at each start.

    When another process fences the capture, this part stops, and no other part does.
    """

    def clean(stop: threading.Event) -> None:
        cleaner = Cleaner(config, open_capture(), session=session)
        _tell_stopped(cleaner.name, None)
        try:
            logger.info("cleaning %s", cleaner.name)
            cleaner.run(stop)
        except EverstateError as error:
            _tell_stopped(cleaner.name, error.message)
            if not isinstance(error, Fenced):
                raise
            stopped(error)
            stop.wait()
        finally:
            cleaner.close()

    return clean
