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

from prometheus_client import Counter as Metric
from prometheus_client import Gauge

from everstate.changes import EntityType
from everstate.config import Config
from everstate.errors import DataLoss, EverstateError
from everstate.log.client import raw_bytes_max, record_bytes_max
from everstate.log.consumer import Consumer
from everstate.log.positions import Offsets
from everstate.log.publisher import OncePublisher
from everstate.log.record import OutRecord
from everstate.log.topics import Topics
from everstate.sources.cdc.asking import Asker
from everstate.sources.cdc.backlog import SINGLE, Backlog, SourceRows
from everstate.sources.cdc.balance import (
    DEAD,
    PUBLISHED,
    SKIPPED,
    Counts,
    Note,
    counted,
    decode_note,
    encode_note,
    held_rows,
    publisher_name,
)
from everstate.sources.cdc.composing import CaptureComposer
from everstate.sources.cdc.declaration import Capture
from everstate.sources.cdc.gate import Place
from everstate.sources.cdc.holding import HELD, HeldEntity, held_key
from everstate.sources.cdc.local_state import LocalState
from everstate.sources.cdc.reading import MESSAGES, TRANSACTIONS, Parsed, ParsedCodec, RawReader
from everstate.sources.cdc.restoring import refill, restore
from everstate.sources.cdc.versioning import Batch, Entity, RawPlace, Refused, Versioner

LOGGER = logging.getLogger("everstate.sources.cdc")

ROWS = Metric(
    "everstate_clean_rows",
    "Rows of raw topics since the capture was cleaned first: read, and what became of them",
    ["capture", "table", "outcome"],
)
HELD_ROWS = Gauge("everstate_clean_held_rows", "Rows that wait", ["capture", "table"])
VANISHED_ROWS = Gauge(
    "everstate_clean_vanished_rows", "Rows that were read and became nothing", ["capture", "table"]
)
COVERAGE = Gauge(
    "everstate_clean_provenance_percent", "Changes whose writer the source told", ["capture"]
)
_shown: Counter[tuple[str, str, str]] = Counter()
"""What this process has told the metrics, by capture, table and outcome."""

_BATCH_ROWS_MAX: Final = 20_000
_PUBLISH_S: Final = 60.0
_REMEMBER_EVERY_S: Final = 5.0
_HOUR_MS: Final = 3_600_000


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
        self._has_messages = MESSAGES in listed
        self._held_topic = names.capture(self.name, HELD)
        self._held_bytes_max = record_bytes_max(config)
        self._publisher = OncePublisher(config, publisher_name(self.name))
        self._composer = CaptureComposer(config, capture, self.reader.entities)
        path = config.project.data_dir / "clean" / f"{config.log.prefix}.{self.name}.sqlite"
        self._path = path
        self._state: LocalState | None = None
        self._backlog = Backlog(capture, self.topics, {})
        self._held: dict[tuple[str, str], HeldEntity] = {}
        self._identities: dict[str, str] = {}
        self._published: dict[str, dict[int, int]] = {}
        self._rows: dict[str, Counts] = {}
        """What the log says of each table."""
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
        note = Note({}, {}) if progress is None else decode_note(progress.note)
        self._position(note)
        self._rows = note.rows
        read, empty = restore(self._config, self._capture, state, self._topics)
        for entity in empty:
            for records in refill(self._config, state, self._topics, entity):
                self._publish(records)
        self._is_behind = False
        self._held = {(e, k): HeldEntity.decode(value) for e, k, value in state.held()}
        for table, rows in held_rows(self._held.values()).items():
            # Counting begins with what waits.
            self._rows.setdefault(table, Counts(read=rows, held=rows))
        self._show_balance()
        if self._asker is not None:
            self._asker.renew(self._held)
            self._asker.begin()
        if read:
            LOGGER.info("capture %s: %d states were read from the log", self.name, read)

    @property
    def asks_for_ends(self) -> bool:
        """Whether it has to know where the topics end before what waits goes on."""
        return self._has_messages or self._backlog.is_ordered

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
        self,
        topic: str,
        partition: int,
        records: Iterable[tuple[int, list[Parsed]]],
        start: int,
        end: int,
    ) -> None:
        """Take over what was read of one partition: offset and rows of each record, in order.

        They are all records from offset ``start`` up to ``end``, the next one to be read. Those
        that were taken over before are passed over; raises LogError when some before are missing.
        """
        self._backlog.add((topic, partition), records, start, end, self._clock())

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
        taken = self._backlog.ready(_BATCH_ROWS_MAX)
        if not taken and not self.wanted():
            taken = self._backlog.ready(_BATCH_ROWS_MAX, is_full=True)
        rows = self._backlog.in_source_order(taken)
        batch, records = self._made(rows, state, now_s)
        gone = self._backlog.forget(taken)
        at = self._note_positions()
        is_idle = not (gone or records or batch.held_changed or batch.refused)
        if is_idle and at == self._published:
            return None
        self._keep_told(batch)
        held = self._held_values(batch)
        for (entity, key), value in sorted(held.items()):
            records.append(OutRecord(self._held_topic, held_key(entity, key), value))
        records += self._dead_letters(batch.refused)
        waits = held_rows(self._held.values())
        counts = counted(self._rows, gone + batch.made, batch.outcomes, waits)
        self._publish(records, at, counts, meanwhile)
        if self._asker is not None:
            for changed in held:
                self._asker.note(changed, self._held.get(changed))
        state.commit(batch.touched, held, {})
        self._is_behind = False
        return self._told(batch, len(rows), time.perf_counter() - started)

    def _made(
        self, rows: SourceRows, state: LocalState, now_s: float
    ) -> tuple[Batch, list[OutRecord]]:
        """What becomes of rows: changes, held rows, refusals; and the records of the changes."""
        gate = self._backlog.gate
        composed = self._composer.batch(now_s, gate.count, gate.notes)
        versioner = Versioner(
            self.reader,
            state,
            self._held,
            held_max=self._config.pipeline.held_max,
            compose=composed.take,
        )
        batch = versioner.run(rows, now_s, self._backlog.rows_until_s)
        return batch, composed.records()

    def _publish(
        self,
        records: Sequence[OutRecord],
        at: dict[str, dict[int, int]] | None = None,
        counts: dict[str, Counts] | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> None:
        at = self._note_positions() if at is None else at
        counts = self._rows if counts is None else counts
        note = encode_note(Note(at, self._identities, self._backlog.begun(), counts))
        self._is_behind = True
        self._publisher.publish(
            self._batch + 1, records, note, timeout_s=_PUBLISH_S, meanwhile=meanwhile
        )
        self._batch += 1
        self._published, self._rows = at, counts

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

    def _held_values(self, batch: Batch) -> dict[Entity, bytes | None]:
        """What is held now of the entities whose waiting rows changed; ``None``: nothing.

        All rows of an entity are one record. When they are more than a record takes, the oldest
        are refused, and the entity is known again by a whole row.
        """
        found: dict[Entity, bytes | None] = {}
        for entity in batch.held_changed:
            held = self._held.get(entity)
            value = None if held is None else held.encode()
            while held and held.rows and value and len(value) > self._held_bytes_max:
                given_up = held.rows[: len(held.rows) // 2 + 1]
                del held.rows[: len(given_up)]
                held.is_unsure = True
                reason = f"the rows that wait with it have more than {self._held_bytes_max:,} bytes"
                for row in given_up:
                    assert row.at is not None
                    batch.refuse(row.table, entity[0], reason, RawPlace(*row.at))
                value = held.encode()
            found[entity] = value
        return found

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
        self._show_balance()
        held = sum(one.held for one in self._rows.values())
        if self._composer.composed:
            COVERAGE.labels(self.name).set(self.coverage_percent)
        if batch.overdue:
            LOGGER.warning(
                "capture %s: %d rows went on without their parent or the name of a code: it was "
                "not written for %.0f s, waits for them itself, or more than %d rows waited",
                *(self.name, batch.overdue, self._capture.parent_wait_s),
                self._config.pipeline.held_max,
            )
        gate = self._backlog.gate
        if gate.overdue:
            LOGGER.warning(
                "capture %s: %d transactions went on before all of them was there, after %.0f s",
                *(self.name, gate.overdue, self._capture.transaction_wait_s),
            )
            gate.overdue = 0
        return CleanedBatch(rows, len(batch.changes), held, len(batch.refused), told, seconds)

    def _show_balance(self) -> None:
        """Tell the metrics what the log says of the rows, over all restarts."""
        for table, one in self._rows.items():
            shown = {"read": one.read, PUBLISHED: one.published, SKIPPED: one.skipped}
            for outcome, rows in {**shown, DEAD: one.dead}.items():
                more = rows - _shown[self.name, table, outcome]
                if more > 0:
                    ROWS.labels(self.name, table, outcome).inc(more)
                    _shown[self.name, table, outcome] = rows
            HELD_ROWS.labels(self.name, table).set(one.held)
            VANISHED_ROWS.labels(self.name, table).set(one.vanished)
            if one.vanished != _shown[self.name, table, "vanished"]:
                _shown[self.name, table, "vanished"] = one.vanished
                LOGGER.error(
                    "capture %s: %d rows of %s were read and became nothing",
                    *(self.name, one.vanished, table),
                )

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

    def _position(self, note: Note) -> None:
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
        entities = sorted({t.entity for t in self._capture.tables.values() if t.partials})
        partials = [topics.names.partials(entity) for entity in entities]
        topics.ensure_raw(
            partials,
            partitions=config.log.partitions,
            settings={
                "retention.ms": str(int(config.log.changes_retention_hours * _HOUR_MS)),
                **size,
            },
        )
        topics.ensure_raw(
            [self._held_topic], partitions=1, settings={"cleanup.policy": "compact", **size}
        )
        # What the connectors write to is theirs, or was made by `everstate cdc add`.
        topics.raise_sizes([*partials, self._held_topic], raw_bytes_max(config))
