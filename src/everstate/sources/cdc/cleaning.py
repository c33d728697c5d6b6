"""Cleaning: what was read of a capture's raw topics becomes changes, each once.

The log itself is the memory: a batch of changes, its newest states, what is held and the position
in the raw topics go out in one Kafka transaction. What is kept on local disk is a copy of that.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import msgspec
from prometheus_client import Counter as Metric
from prometheus_client import Gauge

from everstate.changes import EntityType
from everstate.config import Config
from everstate.errors import DataLoss, EverstateError
from everstate.log.client import raw_bytes_max
from everstate.log.consumer import Consumer
from everstate.log.positions import Offsets
from everstate.log.publisher import OncePublisher
from everstate.log.record import OutRecord
from everstate.log.topics import Topics
from everstate.sources.cdc.asking import Asker
from everstate.sources.cdc.backlog import SINGLE, Backlog, SourceRows
from everstate.sources.cdc.composing import CaptureComposer, Unsendable
from everstate.sources.cdc.declaration import Capture
from everstate.sources.cdc.gate import Place, Told
from everstate.sources.cdc.holding import HELD, HeldEntity, held_key
from everstate.sources.cdc.local_state import LocalState
from everstate.sources.cdc.reading import MESSAGES, TRANSACTIONS, Parsed, ParsedCodec, RawReader
from everstate.sources.cdc.restoring import refill, restore
from everstate.sources.cdc.versioning import Batch, RawPlace, Refused, Versioner

LOGGER = logging.getLogger("everstate.sources.cdc")

ROWS = Metric("everstate_clean_rows", "Rows of raw topics, by outcome", ["capture", "outcome"])
HELD_ROWS = Gauge("everstate_clean_held_rows", "Rows that wait", ["capture"])
COVERAGE = Gauge(
    "everstate_clean_provenance_percent", "Changes whose writer the source told", ["capture"]
)

_BATCH_ROWS_MAX: Final = 20_000
_PUBLISH_S: Final = 60.0
_REMEMBER_EVERY_S: Final = 5.0
_HOUR_MS: Final = 3_600_000


class _Note(msgspec.Struct):
    """What the publisher's progress says: raw positions, and which topics they are of.

    And of transactions that are partly published what the source told of them.
    """

    at: dict[str, dict[int, int]]
    topics: dict[str, str]
    begun: dict[str, Told] = {}


_decode_note = msgspec.json.Decoder(_Note).decode


@dataclass(frozen=True, slots=True)
class CleanedBatch:
    """What one published batch came to."""

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
    any error, `open` again: everything is as the log says.
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
        """``asker`` is told what is held, and asks for it; ``None``: nobody asks."""
        self.name = capture.name
        self._asker = asker
        self.codec = ParsedCodec()
        self.reader = RawReader(capture, {name: entities[name] for name in capture.entities})
        self._config, self._capture, self._clock = config, capture, clock
        self._topics = Topics(config)
        names = self._topics.names
        listed = [*capture.by_topic()]
        if capture.transactions and capture.form == "debezium":
            listed.append(TRANSACTIONS)
        if any(table.provenance.message_prefix for table in capture.tables.values()):
            listed.append(MESSAGES)
        self.topics: dict[str, str] = {names.raw(self.name, part): part for part in listed}
        """Raw topic → its name's last part, which :attr:`reader` wants."""
        self.told_in = frozenset(topic for topic, part in self.topics.items() if part in SINGLE)
        """Raw topics that tell of transactions, and have no rows."""
        self.asks_for_ends = MESSAGES in listed
        self._held_topic = names.capture(self.name, HELD)
        self._publisher = OncePublisher(config, f"clean-{self.name}")
        self._composer = CaptureComposer(config, capture, self.reader.entities)
        path = config.project.data_dir / "clean" / f"{config.log.prefix}.{self.name}.sqlite"
        self._path = path
        self._state: LocalState | None = None
        self._backlog = Backlog(capture, self.topics, {})
        self._held: dict[tuple[str, str], HeldEntity] = {}
        self._excluded: dict[tuple[RawPlace, str], str] = {}
        self._identities: dict[str, str] = {}
        self._published: dict[str, dict[int, int]] = {}
        self._batch = 0
        self._remember_at = 0.0
        self._is_behind = True
        """Whether the log may have what the local state has not: from publishing to committing."""

    def close(self) -> None:
        """Give up the connections; what is not published will be read again."""
        if self._asker is not None:
            self._asker.close()
        self._publisher.close()
        if self._state is not None:
            with suppress(EverstateError):
                self._remember(self._state)
            self._state.close()
            self._state = None
        self._topics.close()

    def open(self) -> None:
        """Take over: fence an older process, restore the states, find the position.

        Makes the topics that are missing. Raises Unavailable, Fenced, DataLoss, LocalStateError.
        """
        self._ensure_topics()
        progress = self._publisher.open()
        if self._state is None:
            self._state = LocalState(self._path)
        state = self._state
        state.discard()
        self._batch = 0 if progress is None else progress.batch
        note = _Note({}, {}) if progress is None else _decode_note(progress.note)
        self._position(note)
        read, empty = restore(self._config, self._capture, state, self._topics)
        for entity in empty:
            for records in refill(self._config, state, self._topics, entity):
                self._publish(records)
        self._is_behind = False
        self._held = {(e, k): HeldEntity.decode(value) for e, k, value in state.held()}
        if self._asker is not None:
            self._asker.renew(self._held)
            self._asker.begin()
        if read:
            LOGGER.info("capture %s: %d states were read from the log", self.name, read)

    def read_to(self) -> dict[Place, int]:
        """Next offset to be read of each partition of the raw topics."""
        return self._backlog.read_to()

    @property
    def waiting(self) -> int:
        """Records that were read and are not published, those of open transactions included."""
        return self._backlog.waiting

    def ends_at(self, ends: Mapping[Place, int]) -> None:
        """Take over where the raw topics end now: what is told by then, and what is missing."""
        self._backlog.ends_at(ends, self._clock())

    def wanted(self) -> frozenset[Place]:
        """Partitions to be read next; none: so much waits that it has to go on first."""
        return self._backlog.wanted(self._config.pipeline.batch_changes_max)

    def add(
        self, topic: str, partition: int, records: Iterable[tuple[int, list[Parsed]]], end: int
    ) -> None:
        """Take over what was read of one partition: offset and rows of each record, in order.

        ``end`` is the next offset to be read. Records that were taken over before are passed over.
        """
        self._backlog.add((topic, partition), records, end, self._clock())

    def step(self, meanwhile: Callable[[], object] | None = None) -> CleanedBatch | None:
        """Publish what is ready, as one batch; ``None``: there is nothing.

        ``meanwhile`` is run once while the batch is on its way to the broker; it may :meth:`add`.
        Raises HeldOverflow, Unavailable and other errors of the log: `open` again, then go on.
        """
        started = time.perf_counter()
        now_s = self._clock()
        state = self._state
        assert state is not None, "open() comes first"
        if now_s >= self._remember_at:
            self._remember(state)
            self._remember_at = now_s + _REMEMBER_EVERY_S
        taken = self._backlog.ready(_BATCH_ROWS_MAX, is_full=not self.wanted())
        rows = self._backlog.in_source_order(taken)
        batch = self._versioned(rows, state, now_s)
        try:
            records = self._composed(batch, now_s)
        except Unsendable as refusal:
            one = refusal.versioned
            LOGGER.error("capture %s: %s %r: %s", self.name, one.entity, one.key, refusal.reason)
            self._excluded[one.place, one.row.key] = refusal.reason
            self.open()
            return None
        self._backlog.forget(taken)
        at = self._note_positions()
        if not records and not batch.held_changed and not batch.refused and at == self._published:
            return None
        self._keep_told(batch)
        records += self._held_records(batch) + self._dead_letters(batch.refused)
        self._publish(records, at, meanwhile)
        held = {}
        for entity in batch.held_changed:
            waiting = self._held.get(entity)
            held[entity] = None if waiting is None else waiting.encode()
            if self._asker is not None:
                self._asker.note(entity, waiting)
        state.commit(batch.touched, held, {})
        self._is_behind = False
        return self._told(batch, len(rows), time.perf_counter() - started)

    def _versioned(self, rows: SourceRows, state: LocalState, now_s: float) -> Batch:
        """What becomes of rows: changes, held rows, refusals."""
        versioner = Versioner(
            self.reader,
            state,
            self._held,
            held_max=self._config.pipeline.held_max,
            excluded=self._excluded,
        )
        return versioner.run(rows, now_s)

    def _composed(self, batch: Batch, now_s: float) -> list[OutRecord]:
        """Records of a batch's changes and newest states; raises Unsendable."""
        gate = self._backlog.gate
        return self._composer.compose(batch.changes, now_s, gate.count, gate.notes)

    def _publish(
        self,
        records: Sequence[OutRecord],
        at: dict[str, dict[int, int]] | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> None:
        at = self._note_positions() if at is None else at
        note = msgspec.json.encode(_Note(at, self._identities, self._backlog.begun()))
        self._is_behind = True
        self._publisher.publish(
            self._batch + 1, records, note, timeout_s=_PUBLISH_S, meanwhile=meanwhile
        )
        self._batch += 1
        self._published = at

    def _note_positions(self) -> dict[str, dict[int, int]]:
        """For each partition the first offset that is still needed."""
        at: dict[str, dict[int, int]] = {}
        for (topic, partition), first in self._backlog.needed_from().items():
            at.setdefault(self.topics[topic], {})[partition] = first
        return at

    def _keep_told(self, batch: Batch) -> None:
        """Note with held rows what their transaction told; it is forgotten before they go on."""
        gate = self._backlog.gate
        for entity in batch.held_changed & self._held.keys():
            for row in self._held[entity].rows:
                if row.transaction is not None and row.count is None:
                    row.count = gate.count(row.transaction)
                    row.provenance = {**row.provenance, **gate.notes(row.transaction)}

    def _held_records(self, batch: Batch) -> list[OutRecord]:
        records = []
        for entity, key in sorted(batch.held_changed):
            held = self._held.get((entity, key))
            value = None if held is None else held.encode()
            records.append(OutRecord(self._held_topic, held_key(entity, key), value))
        return records

    def _dead_letters(self, refused: Sequence[Refused]) -> list[OutRecord]:
        """Dead letters with the bytes of the raw records, which are read again: there are few."""
        if not refused:
            return []
        records = []
        with Consumer(
            self._config, client_id=f"everstate-clean-{self.name}", read_ahead=False
        ) as consumer:
            for one in refused:
                place = one.place
                LOGGER.warning("capture %s refuses %s: %s", self.name, place, one.reason)
                key = value = None
                with suppress(DataLoss):
                    for record in consumer.read(*place, place.offset + 1):
                        key, value = record.key, record.value
                records.append(self._composer.dead(one.entity, one.reason, place, key, value))
        return records

    def _told(self, batch: Batch, rows: int, seconds: float) -> CleanedBatch:
        told = Counter(batch.skipped)
        for outcome, count in told.items():
            ROWS.labels(self.name, outcome).inc(count)
        ROWS.labels(self.name, "changed").inc(len(batch.changes))
        ROWS.labels(self.name, "refused").inc(len(batch.refused))
        held = sum(len(one.rows) for one in self._held.values())
        HELD_ROWS.labels(self.name).set(held)
        if self._composer.composed:
            COVERAGE.labels(self.name).set(self.coverage_percent)
        if batch.overdue:
            LOGGER.warning(
                "capture %s: %d rows went on without their parent or the name of a code, after "
                "%.0f s",
                *(self.name, batch.overdue, self._capture.parent_wait_s),
            )
        gate = self._backlog.gate
        if gate.overdue:
            LOGGER.warning(
                "capture %s: %d transactions went on before all of them was there, after %.0f s",
                *(self.name, gate.overdue, self._capture.transaction_wait_s),
            )
            gate.overdue = 0
        return CleanedBatch(rows, len(batch.changes), held, len(batch.refused), told, seconds)

    @property
    def coverage_percent(self) -> float:
        """Changes since the start whose service, identifier or actor the source told."""
        composed = self._composer.composed
        return 100.0 * self._composer.told / composed if composed else 100.0

    def _remember(self, state: LocalState) -> None:
        """Note how far the log is that the local state holds: only we write these topics."""
        if self._is_behind:
            return
        with Offsets(self._config) as offsets:
            names = self._topics.names
            listed = [names.state(entity) for entity in self._capture.entities]
            ends = offsets.stable_ends([*listed, self._held_topic])
        state.restore({}, {}, ends)

    def _position(self, note: _Note) -> None:
        """Begin where the log says, each topic at its beginning when it is another one (C8)."""
        found = self._topics.identities(list(self.topics))
        self._identities = {
            part: f"{found[topic].cluster_id}/{found[topic].topic_id}"
            for topic, part in self.topics.items()
        }
        self._published = note.at
        with Offsets(self._config) as offsets:
            starts = offsets.beginnings(self.topics)
        begins: dict[Place, int] = {}
        for (topic, partition), start in sorted(starts.items()):
            part = self.topics[topic]
            at = note.at.get(part, {}).get(partition)
            if note.topics.get(part, self._identities[part]) != self._identities[part]:
                LOGGER.warning("capture %s: %s was made anew; it is read whole", self.name, topic)
                at = None
            if at is not None and at < start:
                at = self._lost(topic, partition, at, start)
            begins[topic, partition] = start if at is None else at
        self._backlog = Backlog(self._capture, self.topics, begins, note.begun)

    def _lost(self, topic: str, partition: int, at: int, start: int) -> int:
        """What to do about raw records that are gone before they were cleaned."""
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
        LOGGER.error("%s It goes on behind it; take a snapshot.", what)
        return start

    def _ensure_topics(self) -> None:
        topics, config = self._topics, self._config
        topics.ensure(self._capture.entities)
        size = {"max.message.bytes": str(raw_bytes_max(config))}
        kept = {"retention.ms": str(int(config.capture.retention_hours * _HOUR_MS)), **size}
        tables = sorted(self.topics.keys() - self.told_in)
        topics.ensure_raw(tables, partitions=config.log.partitions, settings=kept)
        topics.ensure_raw(sorted(self.told_in), partitions=1, settings=kept)
        partials = {t.entity for t in self._capture.tables.values() if t.partials}
        topics.ensure_raw(
            [topics.names.partials(entity) for entity in sorted(partials)],
            partitions=config.log.partitions,
            settings={
                "retention.ms": str(int(config.log.changes_retention_hours * _HOUR_MS)),
                **size,
            },
        )
        topics.ensure_raw(
            [self._held_topic], partitions=1, settings={"cleanup.policy": "compact", **size}
        )
