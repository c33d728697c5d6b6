"""Cleaning: turns the records of a capture's raw log into changes, each exactly once.

All state is stored in Kafka: the changes of a batch, the newest states, the held rows and the
position in the raw log are published in one Kafka transaction. The local disk has only a copy.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

import msgspec
import pyarrow as pa

from everstate.changes import EntityType
from everstate.changes.keys import EntityKey
from everstate.config import Config
from everstate.declarations.captures import Capture
from everstate.errors import DataLoss, EverstateError, LogError
from everstate.log.client import record_bytes_max
from everstate.log.consumer import Consumer
from everstate.log.positions import Offsets, Range
from everstate.log.publisher import OncePublisher
from everstate.log.record import OutRecord
from everstate.log.slots import Slot
from everstate.log.state_copy import StateCopy
from everstate.log.topics import Topics
from everstate.sources.cdc.asking import Asker, asker_of
from everstate.sources.cdc.balance import (
    COVERAGE,
    CaptureNote,
    Cut,
    NumberedBatch,
    RowCounts,
    counted,
    decode_note,
    encode_note,
    held_rows,
    publisher_name,
    show_balance,
)
from everstate.sources.cdc.columns import SOURCE, STOPPED, Block, Rows, Slices
from everstate.sources.cdc.composing import RawPlace, RefusedRecord, dead_letter
from everstate.sources.cdc.gone import AbsentRows, FirstSnapshots, read_absent, too_many
from everstate.sources.cdc.holding import HELD, HeldEntity, doubt_all, held_key
from everstate.sources.cdc.kinds import kind_of
from everstate.sources.cdc.raw_log import Parts, ensure_topics, parts_of
from everstate.sources.cdc.restoring import Restoring
from everstate.sources.cdc.states import States, held_name, held_rows_of
from everstate.sources.cdc.stream import EndedSnapshot, Stream, StreamStanding
from everstate.views.project import Project

logger = logging.getLogger("everstate.sources.cdc")

_PUBLISH_S: Final = 60.0
_PROVE_EVERY_S: Final = 5.0
_CUT_ROWS: Final = 50_000
"""Most rows of an open transaction that wait in memory; the rows of a larger one are counted first,
and then published in several batches."""

Spans = Mapping[int, Range]
"""Number of a raw partition → offsets that were read of it."""


@dataclass(frozen=True, slots=True)
class CleanedBatch:
    """The outcome of one published batch."""

    rows: int
    changes: int
    held: int
    """Rows that wait now, of all batches."""
    refused: int
    skipped: Mapping[str, int]
    seconds: float


class Cleaning:
    """Cleans one capture; :meth:`open` it, :meth:`add` what was read, :meth:`step` to publish.

    One thread at a time; a second process on the same capture and prefix fences the first. After
    any error call `open` again, which restores the state from the log.
    """

    def __init__(
        self,
        config: Config,
        capture: Capture,
        entities: Mapping[str, EntityType],
        *,
        asker: Asker | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``asker`` gets the held entities and requests snapshots; ``None``: none are requested."""
        self.name = capture.name
        self._asker = asker
        self._kind = kind_of(config, capture, entities)
        self.reader = self._kind.reader
        self._config, self._capture, self._clock = config, capture, clock
        tables = capture.tables.values()
        self.is_in_order = capture.parents_first or any(table.translations for table in tables)
        self._topics = Topics(config)
        self._held_topic = self._topics.names.capture(self.name, HELD)
        self._held_bytes_max = record_bytes_max(config)
        self._publisher = OncePublisher(config, publisher_name(self.name))
        self._folder = config.project.data_dir / "clean" / f"{config.log.prefix}.{self.name}"
        self._slot: Slot | None = None
        self._restoring = Restoring(config, capture, self._topics)
        self._offsets = Offsets(config)
        self._snapshots = FirstSnapshots(config, capture, self._offsets)
        self._copy: StateCopy | None = None
        self._held: dict[EntityKey, HeldEntity] = {}
        self._numbering = self._kind.numbering(self._held)
        self._in_doubt: set[EntityKey] = set()
        """Held entries that were made because raw rows were lost, until they are published."""
        self._parts = Parts((), ())
        self.read_to: dict[int, int] = {}
        """Next offset to be read in each of :attr:`parts`."""
        self._stream: Stream | None = None
        self._rows = Rows.none()
        """Rows that were read and are not published, where there is no stream; with a stream, the
        rest of a batch that was cut."""
        self._absent: AbsentRows | None = None
        """The snapshot whose comparison was cut."""
        self._kept: dict[str, str] = {}
        """Table → why the entities that it lacks stay."""
        self._news_s = 0.0
        """When the open transaction got its last row."""
        self.counting: Stream | None = None
        """A count of a large transaction that must be completed before more is read."""
        self._released: Block | None = None
        """The transaction whose rows were released before its END, until they are published."""
        self.is_cut = False
        """Whether the last batch was cut: the next steps publish its rest, before more is read."""
        self._note = CaptureNote({}, {})
        """The position record that was published last."""
        self._batch = 0
        self._prove_at = 0.0

    def close(self) -> None:
        """Close the connections; rows that are not published will be read again."""
        if self._asker is not None:
            self._asker.close()
        self._publisher.close()
        self._shut()
        if self._slot is not None:
            self._slot.close()
            self._slot = None
        self._topics.close()
        self._offsets.close()

    def _shut(self) -> None:
        copy, self._copy = self._copy, None
        if copy is not None:
            with suppress(EverstateError):
                copy.close()

    def open(self) -> None:
        """Begin to clean: fence an older process, restore the states, find the position.

        Makes the topics that are missing. Raises Unavailable, Fenced, DataLoss, LocalStateError.
        """
        self._shut()
        ensure_topics(self._config, self._capture, self._topics)
        progress = self._publisher.open()
        self._batch = 0 if progress is None else progress.batch
        self._note = CaptureNote({}, {}) if progress is None else decode_note(progress.note)
        if self._slot is None:
            # A process that was fenced may still run, and have its copy open.
            self._slot = Slot(self._folder)
        self._copy, read = self._restoring.open(self._slot.path, self._batch)
        copy = self._copy
        for entity in self._restoring.lost(copy):
            for records in self._restoring.refill(copy, entity):
                self._publish(records, self._note)
                copy.settle({}, batch=self._batch)
        held = map(HeldEntity.decode, held_rows_of(copy))
        self._held = {(each.entity, each.key): each for each in held}
        self._position(copy)
        rows = dict(self._note.rows)
        for table, count in held_rows(self._held.values()).items():
            # The counts of a table begin with its held rows.
            rows.setdefault(table, RowCounts(read=count, held=count))
        self._note.rows = rows
        show_balance(self.name, rows)
        if self._asker is not None:
            self._asker.renew(self._held)
            self._asker.begin()
        if read:
            logger.info("capture %s: %d records were read into its states", self.name, read)

    @property
    def parts(self) -> Sequence[tuple[str, int]]:
        """Topic and partition of the raw log, by number; tables that others refer to come first."""
        return self._parts.places

    def slices(self, *, is_bare: bool = False) -> Slices:
        """The reader of raw records into columns; ``is_bare``: only keys and places, no states."""
        reader = replace(self.reader, is_bare=True) if is_bare else self.reader
        tables = {name: number for number, name in enumerate(self._capture.tables)}
        return Slices(reader, self._parts.names, tables)

    def add(self, columns: pa.Table, spans: Spans) -> None:
        """Add the rows that were read from these offsets, in the order of each part.

        Raises LogError when offsets before them are missing: the position must never pass over
        records that were not read.
        """
        for part, span in spans.items():
            if span.start != self.read_to[part]:
                topic, partition = self._parts.places[part]
                raise LogError(
                    f"{topic}[{partition}]: records from offset {span.start:,} were read, and "
                    f"those from {self.read_to[part]:,} are next. Nothing was passed over.",
                    advice="Start the capture again: it reads from its position.",
                )
        ends = {part: span.end for part, span in spans.items()}
        rows = _unstopped(Rows.of(columns), ends)
        self.read_to.update(ends)
        stream = self._stream
        if stream is None:
            rows.index, rows.block = [None] * len(rows), [None] * len(rows)
            self._rows.extend(rows)
            return
        for offset, is_empty in self._snapshots.ended(Range(spans[0].start, ends[0])):
            rows.insert_snapshot_end(offset, is_empty=is_empty)
        before = stream.first_offset, stream.count
        stream.scan(rows)
        if (stream.first_offset, stream.count) != before or not stream.is_waiting:
            self._news_s = self._clock()
        if stream.is_waiting and stream.waits > _CUT_ROWS:
            self.counting = stream.counting()

    def add_counted(self, columns: pa.Table, end: int) -> None:
        """Add the rows that were read for :attr:`counting`, up to the offset ``end``."""
        counting = self.counting
        assert counting is not None
        ends = {0: end}
        rows, before = _unstopped(Rows.of(columns), ends), counting.count
        ended, counting.counted_to = counting.scan(rows, keep=False), ends[0]
        if counting.count != before:
            self._news_s = self._clock()
        if ended is not None:
            self._release_open(ended.count, ended.notes, ended.fate)

    def _release_open(self, count: int | None, notes: Mapping[str, str], fate: str = "") -> None:
        assert self._stream is not None
        self._released = self._stream.release(count, notes, fate)
        self.counting = None

    def step(self, *, has_read_all: bool = True) -> CleanedBatch | None:
        """Publish the rows that are ready, as one batch; ``None``: there is nothing to publish.

        ``has_read_all``: no record is left to read, so that overdue rows are released. Raises
        SourceReplaced, HeldOverflow, Unavailable and other errors of the log: `open` it again
        before the next step.
        """
        started = time.perf_counter()
        now_s, copy = self._clock(), self._copy
        assert copy is not None, "open() comes first"
        if has_read_all and not self.is_cut:
            self._release_late(now_s)
        if now_s >= self._prove_at:
            # Read before the transaction: if it commits, no other writer wrote before these ends.
            copy.ask(self._restoring.ends(self._offsets))
            self._prove_at = now_s + _PROVE_EVERY_S
        states, stream = States(copy, self.reader.entities), self._stream
        # A snapshot is compared when all rows before its end are published.
        compared = None if stream is None or stream.ready or len(self._rows) else stream.ended
        self._kind.records.begin(now_s)
        if compared is not None:
            rows, cut = Rows.none(), None
            batch = self._compare(compared, states, now_s)
        else:
            rows = self._take()
            # The cut of a former process's batch, if these rows do not reach its record.
            cut = None if self.is_cut else self._note.cut
            if cut is not None and len(rows) and rows.offset[-1] >= cut.offset:
                cut = None
            batch, rows = self._number(rows, states, now_s, has_read_all=has_read_all)
        note = self._next_note(batch, rows, batch.cut or cut)
        if note == self._note:
            if has_read_all and stream is not None:
                stream.raise_replaced()
            return None
        records = self._kind.records.records()
        batch.held_changed |= self._in_doubt
        held = self._held_values(batch)
        kept = {held_key(*entity): value for entity, value in sorted(held.items())}
        records += [OutRecord(self._held_topic, key, value) for key, value in kept.items()]
        records += self._dead_letters(batch.refused)
        # Counted again: rows may have been refused because a held record was too large.
        note.rows = self._counts(batch)
        try:
            self._publish(records, note)
        except BaseException:
            copy.forget_asked()
            raise
        if self._asker is not None:
            for changed in held:
                self._asker.note(changed, self._held.get(changed))
        more = {held_name(key): value for key, value in kept.items()}
        copy.settle({**states.rows(), **more}, batch=self._batch)
        self._in_doubt.clear()
        self.is_cut = batch.cut is not None
        if compared is not None and stream is not None and not self.is_cut:
            stream.resume()
        return self._report(batch, len(rows), time.perf_counter() - started)

    def _take(self) -> Rows:
        """The rows of the next batch."""
        if self._stream is None or self.is_cut:
            rows, self._rows = self._rows, Rows.none()
            return rows
        rows, cut = self._stream.take(), self._note.cut
        if cut is None:
            return rows
        # A process that ended within a batch: its rows before the cut are published.
        placed = zip(rows.offset, rows.what, strict=True)
        return rows.where([at >= cut.offset or what == SOURCE for at, what in placed])

    def _number(
        self, rows: Rows, states: States, now_s: float, *, has_read_all: bool
    ) -> tuple[NumberedBatch, Rows]:
        """Number rows: they become changes, or are skipped, held or refused.

        Out: the batch and its rows; if it was cut, the others are kept for the next step.
        """
        places, stream, cut = self._parts.places, self._stream, self._note.cut
        batch = self._numbering.run(rows, places, states, now_s, cut, has_read_all=has_read_all)
        if batch.left:
            done = rows.split(len(rows) - batch.left)
            self._rows, rows = rows, done
        if stream is not None and batch.cut is None:
            names = list(self._capture.tables)
            for table, count in stream.passed.items():
                batch.read[names[table]] += count
                batch.skip(names[table], "of a database that was replaced", count)
            stream.passed.clear()
        for name, count in rows.undeclared().items():
            batch.read[name] += count
            batch.skip(name, "of a table that is not declared", count)
        return batch, rows

    def _compare(self, ended: EndedSnapshot, states: States, now_s: float) -> NumberedBatch:
        """Deletes of entities that are missing in a first snapshot that was taken again."""
        assert self._stream is not None
        if self._absent is None:
            place = RawPlace(*self._parts.places[0], ended.end - 1)
            with self._consumer() as consumer:
                self._absent = read_absent(self.reader, consumer, ended, place)
            self._kept = too_many(
                *(self.name, self._absent, states, self._held),
                percent=self._config.capture.deletes_max_percent,
                may_delete=self._stream.standing().may_delete,
            )
        batch = self._numbering.delete_absent(self._absent, states, now_s, self._note.cut)
        if batch.cut is None:
            self._stream.compared(self._kept)
            self._absent = None
        logger.warning(
            "capture %s: a first snapshot was taken again; %d entities that it does not have are "
            "deleted",
            *(self.name, batch.changes),
        )
        return batch

    def _release_late(self, now_s: float) -> None:
        """Release an open transaction without a block after ``transaction_wait_s`` without rows."""
        stream, wait_s = self._stream, self._capture.transaction_wait_s
        if stream is not None and stream.is_waiting and now_s - self._news_s > wait_s:
            logger.warning(
                "capture %s: a transaction goes on without its block: its end was not written "
                "within %.0f s after its last row",
                *(self.name, wait_s),
            )
            self._release_open(None, {} if self.counting is None else self.counting.notes)

    def _publish(self, records: Sequence[OutRecord], note: CaptureNote) -> None:
        self._publisher.publish(self._batch + 1, records, encode_note(note), timeout_s=_PUBLISH_S)
        self._batch += 1
        self._note, self._released = note, None

    def _next_note(self, batch: NumberedBatch, rows: Rows, cut: Cut | None) -> CaptureNote:
        if batch.left and self._stream is not None:
            # Only the stream's standing before the batch is known, and not the one at its cut.
            before = self._note.stream or StreamStanding(epoch=self._capture.epoch)
            if self._released is not None:
                before = msgspec.structs.replace(before, open=self._released)
            return CaptureNote(self._note.at, self._note.topics, self._counts(batch), before, cut)
        read_to, standing = dict(self.read_to), self._note.stream
        if self._stream is None:
            left = zip(self._rows.part, self._rows.offset, strict=True)
            read_to |= dict(reversed(list(left)))
        else:
            first, standing = self._stream.first_offset, self._stream.standing()
            if first is not None:
                read_to[0] = first
        at = {name: dict(places) for name, places in self._note.at.items()}
        for number, (_, partition) in enumerate(self._parts.places):
            at.setdefault(self._parts.names[number], {})[partition] = read_to[number]
        return CaptureNote(at, self._note.topics, self._counts(batch), standing, cut)

    def _counts(self, batch: NumberedBatch) -> dict[str, RowCounts]:
        waits = held_rows(self._held.values())
        return counted(self._note.rows, batch.read, batch.added, batch.outcomes, waits)

    def _held_values(self, batch: NumberedBatch) -> dict[EntityKey, bytes | None]:
        """Values of the held entities that changed; ``None``: nothing of it is held any more.

        All held rows of an entity are one record. When they exceed the size of a record, the
        oldest are refused, and the entity's state is uncertain until a whole row comes.
        """
        found: dict[EntityKey, bytes | None] = {}
        for entity in batch.held_changed:
            held = self._held.get(entity)
            value = None if held is None else held.encode()
            while held and held.rows and value and len(value) > self._held_bytes_max:
                given_up = held.rows[: len(held.rows) // 2 + 1]
                del held.rows[: len(given_up)]
                held.is_unsure = True
                reason = f"the rows that wait with it have more than {self._held_bytes_max:,} bytes"
                for row in given_up:
                    batch.refuse_row(row, entity[0], reason)
                value = held.encode()
            found[entity] = value
        return found

    def _consumer(self) -> Consumer:
        return Consumer(self._config, client_id=f"everstate-clean-{self.name}")

    def _dead_letters(self, refused: Sequence[RefusedRecord]) -> list[OutRecord]:
        """Dead letters with the bytes of the raw records.

        The bytes of records that the driver refused, and no task, are read again: each partition
        once, from the first to the last of them.
        """
        wanted: dict[tuple[str, int], set[int]] = {}
        for one in refused:
            if one.raw is None:
                wanted.setdefault(one.place[:2], set()).add(one.place.offset)
        raw: dict[RawPlace, tuple[bytes | None, bytes | None]] = {}
        if wanted:
            with self._consumer() as consumer:
                for place, offsets in wanted.items():
                    with suppress(DataLoss):
                        for record in consumer.read(*place, min(offsets), max(offsets) + 1):
                            if record.offset in offsets:
                                at = RawPlace(*place, record.offset)
                                raw[at] = record.key, record.value
        if refused:
            logger.warning(
                "capture %s refuses %d records, the first at %s: %s",
                *(self.name, len(refused), refused[0].place, refused[0].reason),
            )
        return [
            dead_letter(self._config, one, *(one.raw or raw.get(one.place) or (None, None)))
            for one in refused
        ]

    def _report(self, batch: NumberedBatch, rows: int, seconds: float) -> CleanedBatch:
        show_balance(self.name, self._note.rows)
        held = sum(one.held for one in self._note.rows.values())
        COVERAGE.labels(self.name).set(self._kind.records.coverage_percent)
        if batch.overdue:
            logger.warning(
                "capture %s: %d rows went on without their parent or the name of a code: it was "
                "not written for %.0f s, waits for them itself, or more than %d rows waited",
                *(self.name, batch.overdue, self._capture.parent_wait_s),
                self._config.pipeline.held_max,
            )
        return CleanedBatch(rows, batch.changes, held, len(batch.refused), batch.skipped, seconds)

    def _position(self, copy: StateCopy) -> None:
        """Begin at the stored position; a topic that was made anew is read from its start (C8)."""
        note = self._note
        self._parts = parts_of(self._capture, self._topics, self._offsets, note.at)
        names = {topic: name for (topic, _), name in zip(*self._parts, strict=True)}
        found = self._topics.identities(sorted(names)).items()
        identities = {names[topic]: f"{one.cluster_id}/{one.topic_id}" for topic, one in found}
        starts = self._offsets.beginnings(names)
        self.read_to, lost = {}, set[str]()
        for number, (topic, partition) in enumerate(self._parts.places):
            name = self._parts.names[number]
            at, start = note.at.get(name, {}).get(partition), starts[topic, partition]
            if note.topics.get(name, identities[name]) != identities[name]:
                logger.warning("capture %s: %s was made anew; it is read whole", self.name, topic)
                at = note.cut = None
            if at is not None and at < start:
                at = self._lost(topic, partition, at, start)
                lost |= {self._capture.by_topic()[name]} if name else set(self._capture.tables)
            self.read_to[number] = start if at is None else at
        note.topics = {**note.topics, **identities}
        self._in_doubt = doubt_all(self._held, copy, self._capture, sorted(lost), self._clock())
        self._rows, self._stream, self.counting = Rows.none(), None, None
        self._absent, self._released, self.is_cut = None, None, False
        standing = note.stream or StreamStanding()
        has_states = next(copy.scan(b"s"), None) is not None
        is_trusted = self._capture.is_ours and (not has_states or note.stream is not None)
        if self._capture.epoch > standing.epoch:
            # The declaration has a higher epoch: the positions of the database start over.
            standing = StreamStanding(epoch=self._capture.epoch)
        if self._capture.is_ours:
            self._stream = Stream(self.name, standing)
            self._news_s = self._clock()
        else:
            note.cut = None  # The position is at its record; the deletes are made from the first.
        self._numbering = self._kind.numbering(
            self._held, epoch=standing.epoch, is_trusted=is_trusted
        )

    def _lost(self, topic: str, partition: int, at: int, start: int) -> int:
        """Handle raw records that were deleted before they were cleaned; out: where to resume."""
        what = (
            f"capture {self.name}: {topic}[{partition}] begins at {start}, and clean had come to "
            f"{at}: what was between is gone."
        )
        if self._capture.on_loss == "stop":
            raise DataLoss(
                what,
                advice="Declare on_loss='resume' for the capture, start again, and take a "
                f"snapshot with `everstate cdc snapshot {self.name}`.",
            )
        logger.error(
            "%s It goes on behind it. Rows without all columns wait, since the states before are "
            "uncertain: take a snapshot.",
            what,
        )
        return start


def _unstopped(rows: Rows, ends: dict[int, int]) -> Rows:
    """Rows before the offset where a slice was cut; ``ends`` become the offsets that were read."""
    if STOPPED not in rows.what:
        return rows
    for part, offset, what in zip(rows.part, rows.offset, rows.what, strict=True):
        if what == STOPPED:
            ends[part] = min(ends[part], offset)
    return rows.where([ends[p] > o for p, o in zip(rows.part, rows.offset, strict=True)])


def cleaning_of(config: Config, project: Project, name: str) -> Cleaning:
    """The cleaning of a declared capture; the caller closes it. Raises UnknownCapture."""
    capture = project.capture_of(name)
    asker = asker_of(config, capture) if capture.outbox is None else None
    return Cleaning(config, capture, project.entities, asker=asker)
