"""Makes the records of the log from the numbered changes of a capture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, Final, NamedTuple

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
from everstate.changes.codec import ReadySource, ready_source, ready_time
from everstate.changes.depth import TOO_DEEP
from everstate.changes.ids import derived_id_text
from everstate.changes.moments import ahead_fault, check_moment
from everstate.changes.values import UNSTORABLE, storable
from everstate.config import Config
from everstate.declarations.captures import Capture, Table
from everstate.errors import EverstateError
from everstate.log.client import record_bytes_max
from everstate.log.dead_letters import place_headers
from everstate.log.record import OutRecord
from everstate.log.topics import TopicNames
from everstate.sources.cdc.completion import ChangeStep
from everstate.sources.cdc.mapping import USER, CleanRow
from everstate.sources.cdc.rows import Unreadable

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_SHORT: Final = {"postgresql": "pg"}
API_VERSION: Final = "cdc"
FIRST_SEEN: Final = "first seen by the capture"
READ_AGAIN: Final = "a snapshot read the row again"
_REASON_MAX: Final = 4_000
_SOURCES_MAX: Final = 10_000
_NOTHING: Final[Mapping[str, str]] = {}
_UNSENDABLE: Final = (EverstateError, ArithmeticError, LookupError, TypeError, ValueError)
"""Errors that mean that no message can be made of a change."""
_decode = msgspec.json.decode
_encode = msgspec.json.Encoder().encode


class RawPlace(NamedTuple):
    """Where a record of a raw topic is."""

    topic: str
    partition: int
    offset: int


class RefusedRecord(msgspec.Struct, gc=False):
    """A record that no change is made of, and why; ``raw``: its key and value, when at hand."""

    entity: str | None
    reason: str
    place: RawPlace
    raw: tuple[bytes | None, bytes | None] | None = None


class Origin(msgspec.Struct, frozen=True, gc=False):
    """The facts about one row that its changes contain."""

    key: str
    op: str
    place: RawPlace | None
    """Where its record is; only needed without a position."""
    position: bytes | None
    """In the source's log, as JSON, the epoch first; ``None``: unknown."""
    time_us: int | None
    tx: str | None
    order: int | None
    rows: int | None
    """Id of its transaction, the row's place in it, and number of its rows; ``None``: no block."""
    who: bytes | None
    """Provenance from the row, as JSON."""
    notes: Mapping[str, str]
    """Provenance from its transaction."""
    is_snapshot: bool
    repeats: int = 0
    """How many rows of its record before it have its key and operation."""


def origin_of(row: CleanRow, position: bytes | None) -> Origin:
    """The facts about a row that its changes contain; the row may have been held before."""
    assert row.at is not None
    provenance = row.who
    return Origin(
        row.key,
        row.op,
        RawPlace(*row.at),
        position,
        row.time_us,
        row.transaction,
        row.index,
        None if row.count is None or row.index is None else max(row.count, row.index),
        _encode(provenance) if provenance else None,
        _NOTHING,
        row.is_snapshot,
        row.order[0] if row.order else 0,
    )


class TableTarget:
    """What the changes of one table have in common."""

    def __init__(
        self, capture: str, name: str, table: Table, codec: ChangeCodec, names: TopicNames
    ) -> None:
        self.name, self.table, self.codec, self.entity = name, table, codec, table.entity
        self.changes, self.state = names.changes(table.entity), names.state(table.entity)
        """Topics of its entity type."""
        self.partials = names.partials(table.entity)
        self.source = f"{capture}/{name}/"
        """Prefix of the text from which the ids of its changes are derived."""
        self.prefix = f"{table.entity}\0"
        """Prefix of the names of its entities' states (:class:`States`)."""
        block = _encode({"capture": capture, "table": name, "position": None})
        self.extra = b'"source":' + block.removesuffix(b"null}")
        self.is_plain = table.event is None and not table.partials and table.occurred_at is None


class CaptureComposer:
    """Makes the records of one capture's entity types; counts the changes with provenance."""

    def __init__(
        self, config: Config, capture: Capture, entities: Mapping[str, EntityType]
    ) -> None:
        self._capture = capture
        self._short = _SHORT.get(capture.kind, capture.kind)
        self._names = TopicNames(config.log.prefix)
        self._entities = entities
        self._ahead_hours = config.log.occurred_ahead_hours
        self._codecs = {
            name: ChangeCodec(
                entities[name],
                message_bytes_max=config.log.message_bytes_max,
                ahead_hours=self._ahead_hours,
            )
            for name in capture.entities
        }
        self.targets = [
            TableTarget(capture.name, name, table, self._codecs[table.entity], self._names)
            for name, table in capture.tables.items()
        ]
        """One for each table, in the order of the declaration."""
        self._sources: dict[Any, tuple[ReadySource, bool]] = {}
        self.with_provenance, self.composed = 0, 0
        """Number of changes for which the source gave provenance, and number of all changes."""
        self.begin(0.0)

    @property
    def coverage_percent(self) -> float:
        """Percent of the changes since the start for which the source gave provenance."""
        return 100.0 * self.with_provenance / self.composed if self.composed else 100.0

    def begin(self, now_s: float) -> None:
        """Begin a batch; its changes are recorded at this moment (seconds since 1970)."""
        self._recorded_at = _EPOCH + timedelta(microseconds=int(now_s * 1_000_000))
        self._recorded = ready_time(self._recorded_at)
        self._recorded_bytes = self._recorded.encode()
        self._latest_us = int((now_s + self._ahead_hours * 3600) * 1_000_000)
        self._records: list[OutRecord] = []
        self._newest: dict[str, OutRecord] = {}
        if len(self._sources) > _SOURCES_MAX:
            self._sources.clear()

    def records(self) -> list[OutRecord]:
        """Records of `.changes` in order, then the newest of each entity for `.state`."""
        return [*self._records, *self._newest.values()]

    def make(
        self, target: TableTarget, origin: Origin, version: int, step: ChangeStep, part: int = 0
    ) -> list[OutRecord]:
        """Record of `.state`, and then those of the other topics, of one change.

        ``part``: its place among the changes of its row. Raises Unreadable with the reason. The
        batch gets the records only by :meth:`take`.
        """
        try:
            source, has_provenance = self._source(target, origin, is_baseline=step.is_baseline)
            self.composed += 1
            self.with_provenance += has_provenance
            name, us, event = _id_text(target, origin, part), origin.time_us, None
            occurred = self._recorded if us is None else _time_text(us)
            if not target.is_plain:
                occurred, event = self._declared(target, origin, step, occurred)
            elif us is not None and us > self._latest_us:
                raise ValueError(ahead_fault(self._ahead_hours))
            block = None
            if origin.rows is not None and origin.order is not None:
                block = (f"{self._short}:{origin.tx}", origin.order, origin.rows)
            key, value, headers = target.codec.finish(
                target.codec.head(
                    name, origin.key, version, step.kind.value, occurred, self._recorded
                ),
                origin.key,
                step.kind,
                name.encode(),
                self._recorded_bytes,
                source,
                block,
                step.current,
                step.original,
                b"%b%b}" % (target.extra, origin.position or b"{}"),
                event,
            )
            made = [
                OutRecord(target.state, key, value, headers),
                OutRecord(target.changes, key, value, headers),
            ]
            if target.table.partials:
                made.append(_partial(target, value, headers))
            if target.table.events is not None and event is not None:
                facts = (target, origin, name, occurred, source.provenance, block)
                made.append(self._event_change(*facts, event))
            return made
        except _UNSENDABLE as cause:
            raise Unreadable(str(cause)) from cause

    def take(self, target: TableTarget, key: str, made: Sequence[OutRecord]) -> None:
        """Add the records of one change to the batch."""
        state, *records = made
        self._newest[target.prefix + key] = state
        self._records += records

    def _source(
        self, target: TableTarget, origin: Origin, *, is_baseline: bool
    ) -> tuple[ReadySource, bool]:
        """The provenance of a change, and whether the source gave any of it."""
        has_block = origin.rows is not None
        named = (origin.who, origin.tx, has_block, is_baseline, origin.is_snapshot)
        if not origin.notes:
            found = self._sources.get(named)
            if found is not None:
                return found
        given: Mapping[str, str] = _NOTHING if origin.who is None else _decode(origin.who)
        user = given.get(USER)
        transaction = None if origin.tx is None else f"{self._short}:{origin.tx}"
        otherwise = "snapshot" if origin.is_snapshot else self._capture.kind
        why = READ_AGAIN if origin.is_snapshot else None
        if is_baseline:
            why = FIRST_SEEN
        given = {**given, **origin.notes}
        provenance = Provenance(
            api_version=given.get("api_version", API_VERSION),
            service_name=given.get("service_name", self._capture.name),
            identifier=given.get("identifier") or user or transaction or otherwise,
            actor=given.get("actor"),
            reason=given.get("reason") or why,
            # Without a block, the changes of a transaction can still be found by its id.
            correlation_id=given.get("correlation_id") or (None if has_block else transaction),
            causation_id=given.get("causation_id"),
        )
        # A reason alone does not tell who wrote the change.
        made = ready_source(target.entity, origin.key, provenance), bool(given.keys() - {"reason"})
        if not origin.notes:
            self._sources[named] = made
        return made

    def _declared(
        self, target: TableTarget, origin: Origin, step: ChangeStep, occurred: str
    ) -> tuple[str, DomainEvent | None]:
        """When a change of a table with declarations of its own occurred, and its event."""
        table, at = target.table, datetime.fromisoformat(occurred)
        if table.occurred_at is not None and step.current is not None:
            at = _world_time(step.current, table.occurred_at, at)
        check_moment(target.entity, origin.key, at, self._ahead_hours, self._recorded_at)
        event = None if table.event is None else _event(table.event, step.original, step.current)
        return ready_time(at), event

    def _event_change(
        self,
        target: TableTarget,
        origin: Origin,
        change_id: str,
        occurred: str,
        provenance: Provenance,
        block: tuple[str, int, int] | None,
        event: DomainEvent,
    ) -> OutRecord:
        """The record of a change's event as an entity of its own."""
        entity = str(target.table.events)
        entity_type = self._entities[entity]
        name = derived_change_id(f"{self._capture.name}/{entity}", change_id, 0)
        data = event.data if isinstance(event.data, dict) else {}
        own: Change[Any] = Change(
            id=name,
            entity=entity,
            schema_version=entity_type.schema_version,
            key=str(name),
            version=1,
            kind=Kind.EVENT,
            occurred_at=datetime.fromisoformat(occurred),
            recorded_at=self._recorded_at,
            provenance=provenance,
            current={**data, entity_type.key: str(name)},
            original=None,
            event=event,
            transaction=None if block is None else SourceTransaction(*block),
            extra=_decode(b"{%b%b}}" % (target.extra, origin.position or b"{}")),
        )
        key, value, headers = self._codecs[entity].encode(own)
        return OutRecord(self._names.changes(entity), key, value, headers)


def dead_letter(
    config: Config, refused: RefusedRecord, key: bytes | None, value: bytes | None
) -> OutRecord:
    """Dead letter of a raw record: its bytes, the reason, and its topic, partition and offset.

    Bytes that are too large for a dead letter are only in the raw topic, until its retention ends.
    """
    names, place, reason = TopicNames(config.log.prefix), refused.place, refused.reason
    topic = names.dead_unknown if refused.entity is None else names.dead(refused.entity)
    size = len(key or b"") + len(value or b"")
    if size > record_bytes_max(config):
        reason = f"its {size:,} bytes are in the raw topic only: {reason}"
        key = value = None
    why = reason[:_REASON_MAX].encode(errors="replace")
    return OutRecord(topic, key, value, place_headers(why, *place))


def _partial(target: TableTarget, message: bytes, headers: Any) -> OutRecord:
    """The changed fields only."""
    change = _decode(message)
    before, after = change["originalEntityState"] or {}, change["currentEntityState"] or {}
    changed = {n: value for n, value in after.items() if n not in before or before[n] != value}
    kept = {name: change[name] for name in ("id", "entity", "key", "version", "kind")}
    for name in ("occurredAt", "recordedAt"):
        kept[name] = datetime.fromisoformat(change[name]).isoformat()
    value = _encode({**kept, "changedFields": changed})
    return OutRecord(target.partials, change["key"].encode(), value, headers)


def _id_text(target: TableTarget, origin: Origin, part: int) -> str:
    """Id of a change, derived from the row's source position, so that a re-read gives the same id.

    Only the first scheme is used: positions in binlog files differ between servers.
    """
    position = origin.position
    if position is not None:
        at = f"{position[: position.index(93) + 1].decode()} {origin.op}"  # 93: the first "]"
    else:
        # One record of many rows may delete a row and create another one with the same key.
        place = origin.place
        assert place is not None
        at = f"{place.topic} {place.partition} {place.offset} {origin.op}"
    if origin.repeats:
        at = f"{at} {origin.repeats}"
    return derived_id_text(target.source + origin.key, at, part)


@lru_cache(maxsize=1024)
def _time_text(us: int) -> str:
    """Commit time, which the rows of a transaction share."""
    return ready_time(_EPOCH + timedelta(microseconds=us))


def _event(
    event: Callable[[Any, Any], DomainEvent | None], before: bytes | None, after: bytes | None
) -> DomainEvent | None:
    try:
        found = event(
            None if before is None else _decode(before), None if after is None else _decode(after)
        )
    except EverstateError:
        raise
    except Exception as cause:
        raise ValueError(f"the event function failed: {type(cause).__name__} {cause}") from cause
    if not isinstance(found, DomainEvent | None):
        raise ValueError(f"the event function returned {type(found).__name__}, no DomainEvent")
    try:
        is_storable = found is None or storable(found.data)
    except RecursionError as cause:
        raise ValueError(TOO_DEEP) from cause
    if not is_storable:
        raise ValueError(UNSTORABLE)
    return found


def _world_time(state: bytes, field: str, otherwise: datetime) -> datetime:
    try:
        at = datetime.fromisoformat(_decode(state).get(field))
    except (TypeError, ValueError):
        return otherwise
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC)
