"""From versioned changes of a capture to the records of the log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, Final, NamedTuple
from uuid import UUID

import msgspec

from everstate.changes import (
    Change,
    ChangeCodec,
    DomainEvent,
    EntityType,
    Kind,
    Provenance,
    SourceTransaction,
    derived_change_id,
)
from everstate.config import Config
from everstate.errors import EverstateError
from everstate.log.client import record_bytes_max
from everstate.log.record import OutRecord
from everstate.log.topics import TopicNames
from everstate.sources.cdc.declaration import Capture, Table
from everstate.sources.cdc.rows import Unreadable
from everstate.sources.cdc.versioning import Entity, RawPlace, Versioned

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_SHORT: Final = {"postgresql": "pg"}
API_VERSION: Final = "cdc"
FIRST_SEEN: Final = "first seen by the capture"
_REASON_MAX: Final = 4_000
_NOTHING: Final[Mapping[str, str]] = {}
_UNSENDABLE: Final = (EverstateError, ArithmeticError, LookupError, TypeError, ValueError)
"""What is said of a change that no message can be made of; composing does nothing else."""
_decode = msgspec.json.decode
_encode = msgspec.json.Encoder().encode


class _Way(NamedTuple):
    """What the changes of one table have in common."""

    table: Table
    codec: ChangeCodec
    schema_version: int
    changes: str
    state: str
    """Topics of its entity type."""
    source: str
    """What the ids of its changes are derived from begins with this."""


class CaptureComposer:
    """Makes the records of one capture's entity types; counts how much provenance was told."""

    def __init__(
        self, config: Config, capture: Capture, entities: Mapping[str, EntityType]
    ) -> None:
        self._capture = capture
        self._short = _SHORT.get(capture.kind, capture.kind)
        self._names = TopicNames(config.log.prefix)
        self._entities = entities
        self._codecs = {
            name: ChangeCodec(entities[name], message_bytes_max=config.log.message_bytes_max)
            for name in capture.entities
        }
        self._ways = {name: self._way(name, table) for name, table in capture.tables.items()}
        self._dead_bytes_max = record_bytes_max(config)
        self.told, self.composed = 0, 0
        """Changes whose service, identifier or actor the source told, of how many."""

    def _way(self, name: str, table: Table) -> _Way:
        entity = table.entity
        return _Way(
            table,
            self._codecs[entity],
            self._entities[entity].schema_version,
            self._names.changes(entity),
            self._names.state(entity),
            f"{self._capture.name}/{name}/",
        )

    def batch(
        self,
        now_s: float,
        block: Callable[[str], int | None],
        notes: Callable[[str], Mapping[str, str]],
    ) -> ComposedBatch:
        """Records of one batch, which are made change by change.

        ``block`` tells how many rows a transaction has, ``notes`` what provenance it told.
        """
        recorded_at = _EPOCH + timedelta(microseconds=int(now_s * 1_000_000))
        return ComposedBatch(self._records, recorded_at, block, notes)

    def _records(
        self,
        one: Versioned,
        recorded_at: datetime,
        count: int | None,
        notes: Mapping[str, str],
    ) -> list[OutRecord]:
        """Record of `.state`, and then those of the other topics, of one change."""
        way = self._ways[one.row.table]
        change = self._change(one, way, recorded_at, count, notes)
        key, value, headers = way.codec.encode(change)
        records = [
            OutRecord(way.state, key, value, headers),
            OutRecord(way.changes, key, value, headers),
        ]
        if way.table.partials or way.table.events is not None:
            records += self._others(way.table, change, headers)
        return records

    def dead(
        self, entity: str | None, reason: str, place: RawPlace, key: bytes | None, value: Any
    ) -> OutRecord:
        """Dead letter of a raw record: its bytes, the reason, and where it was.

        Bytes that no dead letter takes stay where they are, as long as the raw topic keeps them.
        """
        topic = self._names.dead_unknown if entity is None else self._names.dead(entity)
        size = len(key or b"") + len(value or b"")
        if size > self._dead_bytes_max:
            reason = f"its {size:,} bytes are in the raw topic only: {reason}"
            key = value = None
        headers = [
            ("everstate_reason", reason[:_REASON_MAX].encode(errors="replace")),
            ("everstate_topic", place.topic.encode()),
            ("everstate_partition", str(place.partition).encode()),
            ("everstate_offset", str(place.offset).encode()),
        ]
        return OutRecord(topic, key, value, headers)

    def _change(
        self,
        one: Versioned,
        way: _Way,
        recorded_at: datetime,
        count: int | None,
        notes: Mapping[str, str],
    ) -> Change[bytes]:
        row, step, table = one.row, one.step, way.table
        occurred_at = recorded_at if row.time_us is None else _time(row.time_us)
        if table.occurred_at is not None and step.current is not None:
            occurred_at = _world_time(step.current, table.occurred_at, occurred_at)
        block = None
        if row.transaction is not None and row.index is not None and count is not None:
            name = f"{self._short}:{row.transaction}"
            block = SourceTransaction(id=name, index=row.index, count=max(count, row.index))
        event = None
        if table.event is not None:
            event = _event(table, step.original, step.current)
        return Change(
            id=_id(way, one),
            entity=one.entity,
            schema_version=way.schema_version,
            key=one.key,
            version=one.version,
            kind=step.kind,
            occurred_at=occurred_at,
            recorded_at=recorded_at,
            provenance=self._provenance(one, notes),
            current=step.current,
            original=step.original,
            event=event,
            transaction=block,
            extra={
                "source": {
                    "capture": self._capture.name,
                    "table": row.table,
                    "position": row.position,
                }
            },
        )

    def _provenance(self, one: Versioned, notes: Mapping[str, str]) -> Provenance:
        row = one.row
        self.composed += 1
        if row.user is not None:
            identifier = row.user
        elif row.transaction is not None:
            identifier = f"{self._short}:{row.transaction}"
        else:
            identifier = "snapshot" if row.is_snapshot else self._capture.kind
        reason = FIRST_SEEN if one.step.is_baseline else None
        if not row.provenance and not notes:
            self.told += row.user is not None
            name = self._capture.name
            return _provenance(API_VERSION, name, identifier, None, reason, None, None)
        self.told += 1
        found = {**row.provenance, **notes}
        return _provenance(
            found.get("api_version", API_VERSION),
            found.get("service_name", self._capture.name),
            found.get("identifier", identifier),
            found.get("actor"),
            found.get("reason") or reason,
            found.get("correlation_id"),
            found.get("causation_id"),
        )

    def _others(self, table: Table, change: Change[bytes], headers: Any) -> list[OutRecord]:
        """The changed fields only, and the domain event by itself, where they are declared."""
        found = []
        if table.partials:
            found.append(self._partial(change, headers))
        if table.events is not None and change.event is not None:
            found.append(self._event_change(table.events, change))
        return found

    def _partial(self, change: Change[bytes], headers: Any) -> OutRecord:
        before = {} if change.original is None else _decode(change.original)
        after = {} if change.current is None else _decode(change.current)
        changed = {
            name: value
            for name, value in after.items()
            if name not in before or before[name] != value
        }
        value = _encode(
            {
                "id": str(change.id),
                "entity": change.entity,
                "key": change.key,
                "version": change.version,
                "kind": change.kind.value,
                "occurredAt": change.occurred_at.isoformat(),
                "recordedAt": change.recorded_at.isoformat(),
                "changedFields": changed,
            }
        )
        return OutRecord(self._names.partials(change.entity), change.key.encode(), value, headers)

    def _event_change(self, entity: str, change: Change[bytes]) -> OutRecord:
        assert change.event is not None
        entity_type = self._entities[entity]
        name = derived_change_id(f"{self._capture.name}/{entity}", str(change.id), 0)
        data = change.event.data if isinstance(change.event.data, dict) else {}
        state = {**data, entity_type.key: str(name)}
        own: Change[Any] = Change(
            id=name,
            entity=entity,
            schema_version=entity_type.schema_version,
            key=str(name),
            version=1,
            kind=Kind.EVENT,
            occurred_at=change.occurred_at,
            recorded_at=change.recorded_at,
            provenance=change.provenance,
            current=state,
            original=None,
            event=change.event,
            transaction=change.transaction,
            extra=change.extra,
        )
        key, value, headers = self._codecs[entity].encode(own)
        return OutRecord(self._names.changes(entity), key, value, headers)


class ComposedBatch:
    """Makes the records of a batch; a change that no message can be made of is told at once."""

    def __init__(
        self,
        make: Callable[..., list[OutRecord]],
        recorded_at: datetime,
        block: Callable[[str], int | None],
        notes: Callable[[str], Mapping[str, str]],
    ) -> None:
        self._make, self._recorded_at = make, recorded_at
        self._block, self._told_of = block, notes
        self._records: list[OutRecord] = []
        self._newest: dict[Entity, OutRecord] = {}
        # Rows of one transaction are neighbours: what is told of it is asked for once.
        self._asked: str | None = None
        self._count: int | None = None
        self._notes = _NOTHING

    def take(self, changes: Iterable[Versioned]) -> None:
        """Take the changes of one row, all of them or none; raises Unreadable with the reason."""
        made = []
        for one in changes:
            transaction = one.row.transaction
            if transaction != self._asked:
                self._count = None if transaction is None else self._block(transaction)
                self._notes = _NOTHING if transaction is None else self._told_of(transaction)
                self._asked = transaction
            count = self._count if one.row.count is None else one.row.count
            try:
                made.append((one, self._make(one, self._recorded_at, count, self._notes)))
            except _UNSENDABLE as cause:
                raise Unreadable(str(cause)) from cause
        for one, (state, *records) in made:
            self._newest[one.entity, one.key] = state
            self._records += records

    def records(self) -> list[OutRecord]:
        """Records of `.changes` in order, then the newest of each entity for `.state`."""
        return [*self._records, *self._newest.values()]


@lru_cache(maxsize=4096)
def _provenance(
    api_version: str,
    service_name: str,
    identifier: str,
    actor: str | None,
    reason: str | None,
    correlation_id: str | None,
    causation_id: str | None,
) -> Provenance:
    return Provenance(
        api_version=api_version,
        service_name=service_name,
        identifier=identifier,
        actor=actor,
        reason=reason,
        correlation_id=correlation_id,
        causation_id=causation_id,
    )


@lru_cache(maxsize=1024)
def _time(us: int) -> datetime:
    """Commit time, which the rows of a transaction share."""
    return _EPOCH + timedelta(microseconds=us)


def _id(way: _Way, one: Versioned) -> UUID:
    row = one.row
    if row.position:
        scheme, place = next(iter(row.position.items()))
        at = f"{scheme} {_encode(place).decode()} {row.op}"
    else:
        # A record of many rows may end one row of a key and begin the next one.
        at = f"{one.place.topic} {one.place.partition} {one.place.offset} {row.op}"
    return derived_change_id(way.source + one.key, at, one.part)


def _event(table: Table, before: bytes | None, after: bytes | None) -> DomainEvent | None:
    assert table.event is not None
    try:
        return table.event(
            None if before is None else _decode(before), None if after is None else _decode(after)
        )
    except EverstateError:
        raise
    except Exception as cause:
        raise ValueError(f"the event function failed: {type(cause).__name__} {cause}") from cause


def _world_time(state: bytes, field: str, otherwise: datetime) -> datetime:
    value = _decode(state).get(field)
    try:
        at = datetime.fromisoformat(value) if isinstance(value, str) else otherwise
    except ValueError:
        return otherwise
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC)
