"""Compares a captured table with the newest states in the log: `everstate drift check`.

The table is read by a query of its own, and not by the connector. Each row is mapped as a captured
row is, and cleaning's own rules say whether it would change its entity. What differs counts when
the log has no newer change of the entity although the capture has come to a place in the database's
log behind the query: then the log had the same state before and after the table was read.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import islice
from typing import Any, Final

import msgspec

from everstate.changes.drift import DriftedKey, DriftReport, What
from everstate.changes.json_numbers import decode
from everstate.config import Config
from everstate.declarations.captures import Translation
from everstate.errors import EverstateError, InvalidQuery, LogError
from everstate.log.consumer import Consumer
from everstate.log.positions import Ends, Offsets
from everstate.log.record import Record
from everstate.log.slots import Slot
from everstate.log.state_copy import StateCopy, throw_away
from everstate.log.topics import TopicNames, Topics
from everstate.sources.cdc.balance import note_of
from everstate.sources.cdc.capturing import Capturing
from everstate.sources.cdc.completion import Completed, Known, complete
from everstate.sources.cdc.connectors import SourceColumn, TableShape
from everstate.sources.cdc.database import CapturedDatabase, PrintedRows
from everstate.sources.cdc.halted import tables_to_read
from everstate.sources.cdc.holding import REFUSED, read_held
from everstate.sources.cdc.mapping import CleanRow, TableMapping
from everstate.sources.cdc.printed import FORMS, of_two_forms
from everstate.sources.cdc.restoring import known_of, stateful
from everstate.sources.cdc.rows import SourceRow, Unreadable
from everstate.sources.cdc.states import known_row, state_row

_ROWS: Final = 2_000
_BYTES: Final = 16 * 1_048_576
"""Most rows, and about the most printed bytes, that are compared at once."""
_POLL_S: Final = 0.5
_STATE, _DIFFERS, _EQUAL = b"s", b"d", b""
"""How the value of an entity begins in the copy: with its state in the log until its row is read,
and then with how that differs."""
_CHANGING: Final = re.compile(r"handling\.mode|precision|converters|transforms|mask|truncate")
"""In the name of a connector's setting that may change values."""
_UNMADE: Final = "no entity can be made of its row: "
_HELD: Final = "rows of them wait, and `everstate cdc held` lists these"
_CopyRows = list[tuple[bytes, bytes | None]]


def compare_with_table(
    config: Config, capturing: Capturing, entity: str, *, wait_s: float = 120.0
) -> DriftReport:
    """Compare the log's newest states of a captured entity type with the rows of its tables.

    It reads as the connector's user, without locks, and writes a signal into our own table if
    something differs. What the capture has not come to after ``wait_s`` seconds is ``pending``.
    Raises InvalidQuery for an entity type without such tables, CaptureFailed, Unavailable. Cost:
    one pass over the log's states, which are stored below `data_dir` meanwhile, and one over the
    tables; some 20,000 rows a second.
    """
    capture = capturing.capture
    changing = [f"its capture has the setting {n}" for n in capture.settings if _CHANGING.search(n)]
    if capture.outbox is not None or entity not in stateful(capture):
        changing = ["its changes are facts"]
    if changing:
        raise InvalidQuery(f"{entity} cannot be compared with a table: {changing[0]}.")
    # Other comparisons of the type, which may run, have folders of their own.
    with Slot(config.project.data_dir / f"drift-{entity}") as slot:
        throw_away(slot.path)  # A run that was killed left its states.
        copy = StateCopy(slot.path, "drift")
        try:
            with capturing.database() as database:
                return _Comparison(config, capturing, entity, copy, database).run(wait_s)
        finally:
            copy.destroy()


@dataclass
class _Comparison:
    """One comparison of one entity type."""

    config: Config
    capturing: Capturing
    entity: str
    copy: StateCopy
    database: CapturedDatabase
    stored: int = 0
    not_compared: dict[str, str] = field(default_factory=dict)

    def run(self, wait_s: float) -> DriftReport:
        began, checked_at, pending_why = time.monotonic(), datetime.now(UTC), None
        capture, entity_type = self.capturing.capture, self.capturing.entities[self.entity]
        with Offsets(self.config) as offsets:
            ends = self._read_log(offsets, None, _states)
            shapes, held = self.database.shapes(capture.settings), dict[str, What]()
            for table, declared in capture.tables.items():
                if declared.entity == self.entity and table not in shapes:
                    raise InvalidQuery(f"{self.entity} cannot be compared: there is no {table}.")
                if declared.entity == self.entity:
                    mapping = TableMapping(capture, table, declared, entity_type)
                    self._read_table(mapping, shapes[table])
            if next(self._differences(), None) is not None:
                pending_why = self._wait_until_read(offsets, wait_s)
                held = self._held()
                # Of an entity that has changed since its row was read nothing is known.
                self._read_log(offsets, ends, lambda record: [(record.key or b"", None)])
        counts, keys, logged = Counter[str](), list[DriftedKey](), self.stored
        for each in self._differences():
            logged += (each.what == What.EXTRA) - (each.what == What.MISSING)
            what = What.PENDING if pending_why else _judged(each, held)
            counts[what] += 1
            if len(keys) < self.config.drift.keys_max:
                keys.append(replace(each, what=what.value))
        drifted = counts.total() - counts[What.PENDING] - counts[What.REFUSED]
        return DriftReport(
            entity=self.entity,
            checked_at=checked_at,
            stored=self.stored,
            logged=logged,
            missing=counts[What.MISSING],
            different=counts[What.DIFFERENT],
            extra=counts[What.EXTRA],
            pending=counts[What.PENDING],
            pending_why=(pending_why or _HELD) if counts[What.PENDING] else None,
            not_compared=self.not_compared,
            share=drifted / max(1, self.stored, logged),
            refused_rows=counts[What.REFUSED],
            keys=tuple(keys),
            seconds=time.monotonic() - began,
        )

    def _read_log(
        self, offsets: Offsets, starts: Ends | None, rows_of: Callable[[Record], _CopyRows]
    ) -> Ends:
        """Read the log's states into the copy, all or from there on; out: where they end now."""
        topics = [TopicNames(self.config.log.prefix).state(self.entity)]
        with Topics(self.config) as cluster:
            if not cluster.existing().issuperset(topics):
                return {}  # nothing was ever cleaned
        starts, ends = starts or offsets.beginnings(topics), offsets.stable_ends(topics)
        spans = {place: (starts[place], end) for place, end in ends.items()}
        with Consumer(self.config, client_id="everstate-drift") as consumer:
            self.copy.fill(consumer, spans, rows_of)
        return ends

    def _read_table(self, mapping: TableMapping, shape: TableShape) -> None:
        """Read a table, and store in the copy which of its rows differ."""
        table = TableRows(mapping, shape)
        for column, why in (table.not_compared | table.not_compared_fields).items():
            self.not_compared[f"{mapping.name}.{column}"] = why
        printed = self.database.printed_rows(mapping.name, table.columns)
        while rows := [table.row(each) for each in _batch(printed)]:
            self.stored += len(rows)
            names, writes = [key.encode() for key, _ in rows], dict[bytes, bytes | None]()
            for name, (_, row), state in zip(names, rows, self.copy.get_many(names), strict=True):
                known = known_row(state[1:]) if state and state.startswith(_STATE) else None
                differs = difference(known, row, mapping, table.not_compared_fields)
                if name in writes or (state is not None and known is None):
                    differs = What.DIFFERENT, "several rows have its key"
                told = (*(differs or ()), 0, known.version if known else 0)
                writes[name] = _DIFFERS + msgspec.json.encode(told) if differs else _EQUAL
            self.copy.write(writes)

    def _differences(self) -> Iterator[DriftedKey]:
        """What differs from its row, and what has none; by key."""
        for name, value in self.copy.scan():
            if value.startswith(_DIFFERS):
                yield DriftedKey(name.decode(), *msgspec.json.decode(value[1:]))
            elif value and not (known := known_row(value[1:])).is_deleted:
                what, why = What.EXTRA.value, "no row has its key"
                yield DriftedKey(name.decode(), what, why, 0, known.version)

    def _held(self) -> dict[str, What]:
        """Entities of which a row waits, or was refused and no whole row has come since."""
        try:
            listed = read_held(self.config, self.capturing.capture.name)
        except LogError:
            return {}  # there is no such topic, as the capture was never cleaned
        own = [one for one in listed if one.entity == self.entity]
        refused = {one.key: What.REFUSED for one in own if one.reason == REFUSED}
        return refused | {one.key: What.PENDING for one in own if one.rows}

    def _wait_until_read(self, offsets: Offsets, wait_s: float) -> str | None:
        """Wait until the log has all that the tables had; out: why it may not have it."""
        capturing, raw_log = self.capturing, self.capturing.names.raw_log
        place, deadline = self.database.log_place(), time.monotonic() + wait_s
        try:
            if capturing.runs():
                # Also where nothing else is written, it gets behind the place.
                capturing.nudge()
            position: Mapping[str, Any] = {}
            while (
                "snapshot" in position
                or tables_to_read(position)
                or not self.database.has_passed(position, place)
            ):
                if not capturing.runs():
                    return "its connector does not run"
                if time.monotonic() > deadline:
                    return "its connector has not come to what its tables have"
                time.sleep(_POLL_S)
                position = capturing.running_position()
            end = offsets.stable_ends([raw_log])[raw_log, 0]
            while (at := self._cleaned()) < end:
                if time.monotonic() > deadline:
                    return f"{end - at:,} records of its raw log are not cleaned yet"
                time.sleep(_POLL_S)
        except EverstateError as error:
            return error.message.removesuffix(".")
        return None

    def _cleaned(self) -> int:
        """Offset of the raw log before which all rows are published, held or refused."""
        note = note_of(self.config, self.capturing.capture)
        return 0 if note is None else note.at.get("", {}).get(0, 0)


class TableRows:
    """Maps the rows of a table, as the database prints them. Pure."""

    def __init__(self, mapping: TableMapping, shape: TableShape) -> None:
        """Raises InvalidQuery when a column of the key is not compared."""
        self._mapping, self._key = mapping, shape.key
        translations, forms = mapping.table.translations.items(), FORMS[mapping.capture.kind]
        codes = {name.lower() for name, by in translations if isinstance(by, Translation)}
        self.columns: list[SourceColumn] = []
        """Those that are read."""
        self.not_compared: dict[str, str] = {}
        self.not_compared_fields: dict[str, str] = {}
        for each in shape.columns:
            if each.is_generated or not (each.name in shape.key or mapping.reads(each.name)):
                continue
            read_by = mapping.field_of(each.name)
            types = mapping.model_fields[read_by].tree.types if read_by else set()
            why = each.absent
            if each.name.lower() in codes:
                why = "its codes get names of other entities"
            elif each.kind not in forms:
                why = f"its type is {each.kind}"
            elif forms[each.kind] is of_two_forms and "timestamp" not in types:
                why = f"its type is {each.kind}, and its field has no times"
            if why is None:
                self.columns.append(each)
                continue
            self.not_compared[each.name] = why
            if each.name in shape.key:
                raise InvalidQuery(f"{mapping.name} cannot be compared by its {each.name}: {why}.")
        if self.not_compared:
            # A state has no value that a column had before its field was computed of it.
            why = "it is computed, and may be made of what is not compared"
            self.not_compared_fields = dict.fromkeys(mapping.table.computed, why)
        self._convert = [(each.name, forms[each.kind]) for each in self.columns]

    def row(self, printed: Sequence[str | bytes | None]) -> tuple[str, CleanRow | str]:
        """The key of its entity, and the row as a captured one, or why it cannot be one."""
        image: dict[str, Any] = {}
        for (name, convert), value in zip(self._convert, printed, strict=True):
            try:
                image[name] = None if value is None else convert(value)
            except (TypeError, ValueError):
                image[name] = value  # such as an infinite time, which no field takes
        key = {name: image[name] for name in self._key}
        row = SourceRow(
            table=self._mapping.name,
            op="r",
            key=key,
            after=image,
            is_whole=not self.not_compared,
            unknown=tuple(self.not_compared),
        )
        try:
            clean = self._mapping.map(row)
        except Unreadable as cause:
            found = self._mapping.key_if_present(row)[0]
            return found or ", ".join(map(str, key.values())), str(cause)
        return clean.key, clean


def difference(
    known: Known | None,
    row: CleanRow | str,
    mapping: TableMapping,
    not_compared: Container[str] = (),
) -> tuple[What, str] | None:
    """How the newest state of an entity differs from its row; ``None``: it does not. Pure.

    A column that is not compared has the value of the state; so have the fields ``not_compared``.
    """
    what = What.MISSING if known is None or known.is_deleted else What.DIFFERENT
    if isinstance(row, str):
        return what, f"{_UNMADE}{row}"
    if known is not None:
        image = mapping.entity_type.restated(known.image)
        known = msgspec.structs.replace(known, image=image)
    if known is None or known.is_deleted:
        return what, "the log has no version of it" if known is None else "the log has it deleted"
    try:
        outcome = complete(row, known, mapping, lambda _entity, _key: None)
    except Unreadable as cause:
        return what, f"{_UNMADE}{cause}"
    if not isinstance(outcome, Completed):
        return None
    fields, logged = decode(outcome.steps[-1].current or b""), decode(known.image)
    # A state of an earlier model lacks the fields that it got since.
    unequal = [name for name, value in fields.items() if logged.get(name) != value]
    other = [name for name in unequal if name not in not_compared]
    return (what, f"other values of {', '.join(other)}") if other else None


def _judged(differs: DriftedKey, held: Mapping[str, What]) -> What:
    """What a difference is beside the list of entities whose rows wait, or were refused. Pure."""
    is_unmade = differs.why.startswith(_UNMADE)
    # Of too many refused rows only their entity type is listed.
    listed = held.get(differs.key, held.get("") if is_unmade else None)
    if listed is What.REFUSED and not is_unmade:
        listed = None  # its row fits now, or is gone: a snapshot repairs that
    return listed or What(differs.what)


def _batch(printed: PrintedRows) -> Iterator[Sequence[str | bytes | None]]:
    """The next rows, as many as fit into memory."""
    size = 0
    for row in islice(printed, _ROWS):
        yield row
        size += sum(map(len, filter(None, row)))
        if size > _BYTES:
            return


def _states(record: Record) -> _CopyRows:
    """The newest state of an entity; what cleaning does not read is skipped."""
    try:
        key, known = known_of(record.value or b"")
    except (msgspec.DecodeError, UnicodeDecodeError):
        return []
    return [(key.encode(), _STATE + state_row(known))]
