"""Reads a changelog from given offsets on, from the archive and then from the log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from everstate.changes.tokens import log_mark
from everstate.config import Config
from everstate.errors import DataLoss
from everstate.log.consumer import Consumer, Follower
from everstate.log.positions import Offsets, check_ends
from everstate.log.record import Record
from everstate.log.topics import TopicNames, Topics

if TYPE_CHECKING:
    from everstate.archive import ArchiveReader

GENERATION: Final = 1
_RECORDS_MAX: Final = 5_000
_BEGIN_AGAIN: Final = "Begin again with a snapshot of a view, and continue from its token."
_PLACE: Final = ("partition", "offset")
_GAP_MAX: Final = 256
"""Reading so many records that nobody wants costs less than another request."""


@dataclass(frozen=True, slots=True)
class Run:
    """All records of a partition that the log served with offsets ``[start, end)``."""

    partition: int
    start: int
    end: int
    records: list[Record]


class RecordSource:
    """Reads one entity type's changelog; :meth:`begin` it, then :meth:`poll`, and close it."""

    def __init__(
        self,
        config: Config,
        entity: str,
        *,
        client_id: str = "everstate-changes",
        is_one_of_many: bool = True,
        advice: str = _BEGIN_AGAIN,
    ) -> None:
        """``is_one_of_many``: it reads less ahead. ``advice``: what helps when changes are lost."""
        self._config, self._entity, self._advice = config, entity, advice
        self._client_id, self._is_one_of_many = client_id, is_one_of_many
        self.topic = TopicNames(config.log.prefix).changes(entity, GENERATION)
        with Topics(config) as topics:
            self._identity = topics.identity(self.topic)
        self.mark = log_mark(self.topic, self._identity.cluster_id, self._identity.topic_id)
        self.partitions = range(self._identity.partitions)
        self._at: dict[int, int] = {}
        """Next offset to read, by partition."""
        self._ends: Mapping[int, int] = {}
        self._archived: Iterator[Run] | None = None
        self._next: Run | None = None
        """The next run from the archive, which no call has wanted yet."""
        self._follower: Follower | None = None
        self._ranged: Consumer | None = None
        self._followed: frozenset[int] = frozenset()
        self._gone: dict[int, int] = {}
        """The highest offset of each partition that the log was seen to have deleted.

        Asking the broker for a deleted record takes half a second.
        """

    def close(self) -> None:
        """Close the connections, and drop the iterator over the archive with its local files."""
        self._leave()
        if self._ranged is not None:
            self._ranged.close()
            self._ranged = None

    @property
    def reads_archive(self) -> bool:
        """Whether the next records come from the archive."""
        return self._archived is not None

    def ends(self) -> dict[int, int]:
        """The stable end of each partition."""
        with Offsets(self._config) as offsets:
            return {
                partition: end for (_, partition), end in offsets.stable_ends([self.topic]).items()
            }

    def since(self, moment: datetime) -> dict[int, int]:
        """The offset in each partition of the first record that was written then or later.

        The end if there is none. What the log no longer has is looked up in the archive, unless
        neither has a record of the partition. It is 0, which raises DataLoss when it is read, where
        records of that time may be lost. Cost: four requests, and two columns of the archived
        records up to that one.
        """
        at_ms = int(moment.timestamp() * 1000)
        with Offsets(self._config) as offsets:
            found = offsets.at_time([self.topic], at_ms)
            begins = offsets.beginnings([self.topic])
            log_ends = offsets.stable_ends([self.topic])
        starts = {partition: offset for (_, partition), offset in found.items()}
        if expired := [p for p, at in starts.items() if 0 < at <= begins[self.topic, p]]:
            from pyarrow import dataset

            from everstate.archive.ordered import Where

            ends, firsts = self._archive.position(), self._archive.begins(GENERATION)
            time = pa.scalar(at_ms, pa.timestamp("ms", "UTC"))
            where = Where(dataset.field("timestamp") >= time, ("timestamp",))
            for p in expired:
                end, place = min(ends.get(GENERATION, {}).get(p, 0), starts[p]), (self.topic, p)
                first = firsts.get(p, 0)
                if end <= first and begins[place] == log_ends[place]:
                    continue  # nothing tells that a record is missing
                starts[p], spans = end, {p: (0, end)}
                for table in self._archive.records(GENERATION, spans, _PLACE, where) if end else ():
                    if table.num_rows:
                        starts[p] = table["offset"][0].as_py()
                        break
                if starts[p] <= first:
                    starts[p] = 0  # what was before may be of that time, too
        return starts

    def begin(self, starts: Mapping[int, int], ends: Mapping[int, int]) -> None:
        """Begin to read some partitions at these offsets; up to ``ends``, where given.

        Raises LogTruncated when the log ends before one of them, DataLoss when neither log nor
        archive has it.
        """
        check_ends(f"the changes of {self._entity}", self.topic, starts, self.ends())
        self._at, self._ends = dict(starts), ends
        self._plan()

    def poll(self, wait_s: float, only: Iterable[int], most: int = _RECORDS_MAX) -> list[Run]:
        """The next runs of some partitions; waits at most ``wait_s`` for the first record.

        They have about ``most`` records at most.
        """
        wanted = frozenset(only)
        if self._archived is not None:
            return self._read_archive(self._archived, wanted, most)
        try:
            return self._follow(wait_s, wanted, most)
        except DataLoss:
            # The next records expired meanwhile: the archive has them, or `_plan` raises DataLoss.
            self._leave()
            self._plan()
            return []

    def fetch(self, partition: int, offsets: Iterable[int]) -> list[Record]:
        """Earlier records, of held changes, by their offsets; what is near is read together.

        Raises DataLoss when neither log nor archive has one of them. Cost: that of :meth:`between`
        for each group of offsets with at most 256 others between two of them.
        """
        found: list[Record] = []
        # The newest first: when it has expired, so have the others, and nobody asks for them.
        for wanted in reversed(_near(offsets)):
            missing = set(wanted)
            for record in self._range(partition, wanted[0], wanted[-1] + 1):
                if record.offset in missing:
                    missing.remove(record.offset)
                    found.append(record)
            if missing:
                raise self._lost(partition, min(missing), max(missing) + 1)
        return sorted(found, key=lambda record: record.offset)

    def between(self, partition: int, start: int, end: int) -> list[Record]:
        """All records with offsets ``[start, end)``; ``end`` must not exceed the stable end.

        What the log no longer has comes from the archive. Raises DataLoss when neither has all of
        it. Cost: some milliseconds; from the archive, the files that may hold the range.
        """
        return list(self._range(partition, start, end))

    def _range(self, partition: int, start: int, end: int) -> Iterator[Record]:
        if self._ranged is None:
            self._ranged = Consumer(self._config, client_id="everstate-changes-range", at_once=1)
        if start > self._gone.get(partition, -1):
            at = start
            try:
                for record in self._ranged.read(self.topic, partition, start, end):
                    yield record
                    at = record.offset + 1
                return
            except DataLoss:
                self._gone[partition], start = at, at
        archived = self._archive_position({partition: start}).get(partition, 0)
        if archived <= start:
            raise self._lost(partition, start, end)
        meets = min(archived, end)
        for table in self._archive.records(GENERATION, {partition: (start, meets)}):
            yield from records_of(self.topic, table)
        yield from self._ranged.read(self.topic, partition, meets, end)

    def _plan(self) -> None:
        """Read records that the log no longer has from the archive, else follow the log."""
        with Offsets(self._config) as offsets:
            found = offsets.beginnings([self.topic])
        begins = {partition: offset for (_, partition), offset in found.items()}
        expired = {
            p: at for p, at in self._at.items() if at < min(begins[p], self._ends.get(p, begins[p]))
        }
        if not expired:
            return
        archived = self._archive_position(self._at)
        spans = {}
        for partition, at in expired.items():
            end = self._ends.get(partition)
            needed = begins[partition] if end is None else min(end, begins[partition])
            spans[partition] = (at, archived.get(partition, 0) if end is None else needed)
            if archived.get(partition, 0) < needed:
                raise self._lost(partition, at, begins[partition])
        self._archived = self._from_archive(spans)

    def _read_archive(
        self, archived: Iterator[Run], wanted: frozenset[int], most: int
    ) -> list[Run]:
        """The next run from the archive, once its partition is wanted."""
        run = self._next or next(archived, None)
        if run is None:
            self._archived = None
            self._plan()
            return []
        self._next = None if run.partition in wanted else run
        if self._next is not None:
            return []
        if len(run.records) > most:
            cut = run.records[most].offset
            self._next = Run(run.partition, cut, run.end, run.records[most:])
            run = Run(run.partition, run.start, cut, run.records[:most])
        self._at[run.partition] = run.end
        return [run]

    @cached_property
    def _archive(self) -> ArchiveReader:
        # Imported here: most readers need only the log, and the lake's reader is an extra.
        from everstate.archive import ArchiveReader

        return ArchiveReader(self._config, self._entity)

    def _archive_position(self, starts: Mapping[int, int]) -> Mapping[int, int]:
        """Where the archive ends, for the partitions of which it has everything from a start on."""
        position = self._archive.position().get(GENERATION, {})
        if not position:
            return {}
        begins = self._archive.begins(GENERATION)
        return {
            partition: end
            for partition, end in position.items()
            if begins.get(partition, 0) <= starts.get(partition, 0)
        }

    def _from_archive(self, spans: Mapping[int, tuple[int, int]]) -> Iterator[Run]:
        at = {partition: start for partition, (start, _) in spans.items()}
        for table in self._archive.records(GENERATION, spans):
            records = list(records_of(self.topic, table))
            partition, end = records[0].partition, records[-1].offset + 1
            yield Run(partition, at[partition], end, records)
            at[partition] = end
        for partition, (_, end) in spans.items():
            yield Run(partition, at[partition], end, [])

    def _follow(self, wait_s: float, only: frozenset[int], most: int) -> list[Run]:
        follower = self._follower
        if follower is None:
            starts = {(self.topic, partition): at for partition, at in self._at.items()}
            follower = Follower(
                self._config, starts, client_id=self._client_id, is_one_of_many=self._is_one_of_many
            )
            self._follower, self._followed = follower, frozenset(self._at)
        if only != self._followed:
            follower.only((self.topic, partition) for partition in only)
            self._followed = only
        found: dict[int, list[Record]] = {}
        for record in follower.poll(most, wait_s):
            found.setdefault(record.partition, []).append(record)
        runs = []
        for (_, partition), (start, end) in follower.spans().items():
            runs.append(Run(partition, start, end, found.get(partition, [])))
            self._at[partition] = end
        return runs

    def _leave(self) -> None:
        if self._follower is not None:
            self._follower.close()
            self._follower = None
        self._archived = self._next = None

    def _lost(self, partition: int, start: int, end: int) -> DataLoss:
        return DataLoss(
            f"{self.topic}[{partition}]: offsets {start:,} to {end - 1:,} are neither in the log "
            "nor in the archive; nothing was skipped.",
            advice=self._advice,
        )


def _near(offsets: Iterable[int]) -> list[list[int]]:
    """Groups of ascending offsets, of which each is near the one before it."""
    groups: list[list[int]] = []
    for offset in sorted(offsets):
        if groups and offset - groups[-1][-1] <= _GAP_MAX:
            groups[-1].append(offset)
        else:
            groups.append([offset])
    return groups


def records_of(topic: str, archived: pa.Table) -> Iterator[Record]:
    """The log's records from their rows in the archive."""
    from everstate.archive import record_parts  # an extra, too

    return (Record(topic, *parts) for parts in record_parts(archived))
