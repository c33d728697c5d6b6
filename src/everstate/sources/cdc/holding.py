"""Held rows: they wait for a snapshot of their key, for a parent, or for the name of a code.

All held rows of one entity are one record of a compacted topic, written in the Kafka transaction
that moves the raw position past them. The record also has the key whose snapshot is needed.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from msgspec import structs

from everstate.changes.keys import EntityKey
from everstate.config import Config
from everstate.declarations.captures import Capture
from everstate.log.consumer import Consumer
from everstate.log.state_copy import StateCopy
from everstate.log.topics import TopicNames
from everstate.sources.cdc.columns import PREPARED
from everstate.sources.cdc.completion import (
    NEW_EPOCH,
    PRIOR_UNKNOWN,
    ROLLED_BACK,
    SUPERSEDED,
    WAITS_CODE,
    WAITS_PARENT,
    Known,
    Lookup,
    is_settling,
    was_read,
)
from everstate.sources.cdc.mapping import CleanRow
from everstate.sources.cdc.packing import packed, unpacker
from everstate.sources.cdc.reading import BinlogLook, RefusedRow, SourceIdentity
from everstate.sources.cdc.rows import SNAPSHOT, behind, is_after
from everstate.sources.cdc.states import known_row, state_name

REFUSED: Final = "a row was refused"
LOST: Final = "raw rows were deleted before they were cleaned"
_UNPLACED: Final = "unplaced"
"""Scheme of the position of states that came without one: 1 for the oldest; 0 is before all."""
_NONE: Final[Mapping[str, list[int | str]]] = {_UNPLACED: [0]}
RowPosition = Mapping[str, list[int | str]]
HELD = "held"
"""Last part of the topic's name, ``<prefix>.capture.<source>.held``."""

_decode_row = unpacker(CleanRow)


class HeldEntity(msgspec.Struct, rename="camel"):
    """The held rows of one entity, oldest first, and why the first one waits.

    Without rows: a row of the entity was refused, and its state is uncertain until a whole row
    comes.
    """

    table: str
    entity: str
    key: str
    columns: dict[str, Any]
    """Key columns, as the source has them."""
    reason: str
    since_s: float
    """Seconds since 1970 when the first row began to wait."""
    rows: list[CleanRow] = []
    waits_for: tuple[str, str] | None = None
    is_unsure: bool = False
    """Whether the state before the oldest of its rows is uncertain; without rows: its state."""
    position: dict[str, list[int | str]] = {}
    """Only in an entry for a whole entity type (its key is ""): see :class:`Doubts`."""
    doubts: list[int] = []
    """Of each row that was refused or lost behind held ones: how many of these come after it."""

    @property
    def needs_snapshot(self) -> bool:
        """Whether a snapshot of its key would make its state certain again."""
        return self.is_unsure or bool(self.doubts) or self.reason == PRIOR_UNKNOWN

    def append(self, row: CleanRow) -> None:
        """Hold one more row, the newest."""
        self.rows.append(row)
        self.doubts = [newer + 1 for newer in self.doubts]

    def doubt(self, newer: int) -> None:
        """Record that a row was refused or lost; ``newer``: how many held rows come after it."""
        if newer < len(self.rows):
            self.doubts = sorted({*self.doubts, newer})
        else:
            self.is_unsure = True

    def reach_doubts(self) -> None:
        """Make the state uncertain once all rows before a refused or lost one are released."""
        left = [newer for newer in self.doubts if newer < len(self.rows)]
        if left != self.doubts:
            self.doubts, self.is_unsure = left, True
            self.reason = PRIOR_UNKNOWN

    @property
    def waits_for_state(self) -> bool:
        """Whether rows of it wait because the state before is unknown, and for nothing else.

        The clean role requests snapshots for these. It requests none for an entity of which a row
        was refused: the snapshot would have the same row.
        """
        return bool(self.rows) and self.reason == PRIOR_UNKNOWN

    @property
    def waits_for_other(self) -> bool:
        """Whether rows of it wait for a parent or the name of a code, and for nothing else."""
        return bool(self.rows) and self.reason in (WAITS_PARENT, WAITS_CODE)

    def end_prepared(self, look: BinlogLook | None) -> bool:
        """Decide on rows of prepared transactions; out: whether there are any that have ended.

        ``look``: ``None``: a new epoch begins, whose snapshot has what was committed before it.
        """
        has_ended, before = False, list[bytes | None]()
        for row in self.rows:
            if row.prepared is not None:
                is_committed = None if look is None else look.is_committed(row.prepared)
                if look is None or is_committed is not None:
                    row.skipped = NEW_EPOCH if look is None else None
                    if is_committed is False:
                        row.skipped = ROLLED_BACK
                    row.prepared, has_ended = None, True
                    before += [row.before] if is_settling(row) else []
            elif row.op == "r" and not row.position and row.state in before:
                # A snapshot of its key that was taken before the transaction was committed.
                row.skipped = SUPERSEDED
        return has_ended

    def encode(self) -> bytes:
        """The record's value: fields as above, each row packed, and the time as text."""
        fields = msgspec.to_builtins(structs.replace(self, rows=[]))
        fields["since"] = datetime.fromtimestamp(fields.pop("sinceS"), UTC).isoformat()
        fields["rows"] = [base64.b64encode(packed(row)).decode() for row in self.rows]
        return msgspec.json.encode(fields)

    @classmethod
    def decode(cls, value: bytes) -> HeldEntity:
        """The held entity, from the record's value."""
        fields = msgspec.json.decode(value)
        rows = [_decode_row(base64.b64decode(row)) for row in fields.pop("rows")]
        fields["sinceS"] = datetime.fromisoformat(fields.pop("since")).timestamp()
        return structs.replace(msgspec.convert(fields, cls), rows=rows)


def end_prepared(
    held: Mapping[EntityKey, HeldEntity], source: SourceIdentity, epoch: int
) -> list[EntityKey]:
    """The entities with rows of prepared transactions of which a record says that they ended.

    They come in the order of their rows in the raw log. ``epoch``: the one before the record.
    """
    look = None if source.epoch > epoch else source.look
    if look is None and source.epoch <= epoch:
        return []
    ended = [entity for entity, one in held.items() if one.end_prepared(look)]
    return sorted(ended, key=lambda entity: held[entity].rows[0].at or ("", 0, 0))


def limited(held: Mapping[EntityKey, HeldEntity]) -> int:
    """Number of held rows, to be compared with ``held_max``.

    Ten rows that wait for XA COMMIT count as one: they wait for seconds, however many they are.
    """
    rows = Counter[bool]()
    for one in held.values():
        rows[one.reason == PREPARED] += len(one.rows)
    return rows[False] + rows[True] // 10


def waits_for_itself(held: Mapping[EntityKey, HeldEntity], entity: EntityKey) -> bool:
    """Whether entities wait for each other in a cycle, so that none would ever be released."""
    seen, at = {entity}, held[entity].waits_for
    while at is not None and at not in seen:
        seen.add(at)
        other = held.get(at)
        at = None if other is None else other.waits_for
    return at == entity


class Doubts:
    """Entities of which a row was refused: their state is uncertain until a whole row comes.

    Each is a held entry without rows. When an entity type has too many of them, one entry with the
    key "" replaces them. It has the newest position of their states: every state of the type that
    is not newer is uncertain then.
    """

    def __init__(self, held: dict[EntityKey, HeldEntity], keys_max: int) -> None:
        self._held, self._keys_max = held, max(1, keys_max)
        self._count = Counter(entity for (entity, _), one in held.items() if not one.rows)
        """Entity type → entries without rows; those that were settled since are still counted."""

    def is_clear(self, entity: str, key: str) -> bool:
        """Whether nothing of an entity is held, and its entity type is not in doubt."""
        return (entity, key) not in self._held and (entity, "") not in self._held

    def is_unsure(self, entity: EntityKey, known: Known | None) -> bool:
        """Whether the state of an entity without a held entry of its own is uncertain."""
        whole = self._held.get((entity[0], ""))
        if whole is None or known is None:
            return False
        later = is_after(_newest([known.position]), whole.position)  # type: ignore[arg-type]
        # Of states without a position, none is newer than a state that has one.
        return later is False or (later is None and _UNPLACED not in whole.position)

    def settled_at(self, entity: EntityKey, known: Known | None) -> bytes:
        """Position for a state that came without one: newer than those that are uncertain.

        While rows are held behind its row, it is not: these may be older than another's state.
        """
        whole, own = self._held.get((entity[0], "")), self._held.get(entity)
        if whole is None or (own is not None and len(own.rows) > 1):
            return b"" if known is None else known.place
        last = _newest([whole.position, *([known.position] if known else [])])
        turn = last.get(_UNPLACED)
        newer = behind([last]) if turn is None else {_UNPLACED: [int(turn[0]) + 1]}
        return msgspec.json.encode(newer)

    def add(
        self,
        entity: EntityKey,
        row: CleanRow | RefusedRow,
        now_s: float,
        lookup: Lookup,
        newer: int = 0,
    ) -> set[EntityKey]:
        """Record that a row of an entity was refused; out: the changed held entries.

        A row that is older than the entity's state was read before and changes nothing.
        ``newer``: how many of its held rows come after it, or more where their positions say so.
        """
        known, held, position = lookup(*entity), self._held.get(entity), row.position
        if known is not None and was_read(position, known):
            return set()
        whole = self._held.get((entity[0], ""))
        if held is None and whole is not None:
            if known is None or self.is_unsure(entity, known):
                return set()
            whole.position = _newest([whole.position, known.position])
            return {(whole.entity, whole.key)}
        if held is None:
            held = HeldEntity(row.table, *entity, row.columns, REFUSED, now_s)
            self._held[entity] = held
        rows = held.rows
        while newer < len(rows) and is_after(rows[-1 - newer].position, position):  # type: ignore[arg-type]
            newer += 1
        held.doubt(newer)
        if not rows:
            held.reason = REFUSED
        self._count[entity[0]] += 1
        if self._count[entity[0]] <= self._keys_max:
            return {entity}
        return self._merge(row.table, entity[0], now_s, lookup) | {entity}

    def _merge(self, table: str, entity: str, now_s: float, lookup: Lookup) -> set[EntityKey]:
        """Replace all entries of an entity type that have no rows by one, if they are too many."""
        merged = {each for each, one in self._held.items() if each[0] == entity and not one.rows}
        self._count[entity] = len(merged)
        if len(merged) <= self._keys_max:
            return set()
        states = [known.position for each in merged if (known := lookup(*each)) is not None]
        before = [self._held.pop(each).position for each in merged]
        # The entries of single entities have no position.
        newest = [*filter(None, before), *states]
        self._held[entity, ""] = _whole(table, entity, REFUSED, now_s, newest)
        self._count[entity] = 1
        return {*merged, (entity, "")}


def _whole(
    table: str, entity: str, reason: str, now_s: float, positions: Iterable[RowPosition]
) -> HeldEntity:
    """The entry for a whole entity type whose uncertain states have these positions."""
    newest = _newest(positions)
    return HeldEntity(table, entity, "", {}, reason, now_s, is_unsure=True, position=newest)


def _newest(positions: Iterable[RowPosition]) -> dict[str, list[int | str]]:
    """The newest of these positions, of rows of the log and of snapshots taken at a place in it.

    An empty one is the oldest of those that are no place in the log.
    """
    newest: dict[str, list[int | str]] = {**_NONE}
    for position in positions:
        for scheme, place in (position or {_UNPLACED: [1]}).items():
            name = scheme.removeprefix(SNAPSHOT)
            newest[name] = max(newest.get(name, []), place)
    if len(newest) > 1:
        del newest[_UNPLACED]
    return newest


def doubt_all(
    held: dict[EntityKey, HeldEntity],
    copy: StateCopy,
    capture: Capture,
    tables: Iterable[str],
    now_s: float,
) -> set[EntityKey]:
    """After raw rows were lost, all states of these tables are uncertain; out: changed entries.

    One entry for each entity type. Cost: one pass over its states. Of an outbox none is uncertain:
    each of its rows is whole.
    """
    changed = set[EntityKey]()
    for table in () if capture.outbox is not None else tables:
        entity = capture.tables[table].entity
        for name, one in held.items():
            if name[0] == entity and one.rows:
                one.doubt(0)
                changed.add(name)
        states, whole = copy.scan(state_name(entity, "")), (entity, "")
        newest = _newest(known_row(row).position for _, row in states)
        if newest != _NONE:
            before = [held[whole].position] if whole in held else []
            held[whole] = _whole(table, entity, LOST, now_s, [*before, newest])
            changed.add(whole)
    return changed


def held_key(entity: str, key: str) -> bytes:
    """Key of the record of one entity."""
    return f"{entity}\n{key}".encode()


def read_held(config: Config, source: str) -> list[HeldEntity]:
    """The held entities of a capture, oldest first.

    Cost: the whole compacted topic is read. Raises LogError when the capture was never cleaned.
    """
    found: dict[bytes, HeldEntity] = {}
    with Consumer(config, client_id="everstate-held") as consumer:
        for record in consumer.read_topic(TopicNames(config.log.prefix).capture(source, HELD)):
            if record.key is None or record.key.startswith(b"\n"):
                continue  # of an earlier version, see `held_name`
            found.pop(record.key, None)
            if record.value is not None:
                found[record.key] = HeldEntity.decode(record.value)
    return sorted(found.values(), key=lambda held: held.since_s)
