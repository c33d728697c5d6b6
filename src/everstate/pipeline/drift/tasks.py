"""The tasks of the drift job: read a source, decode the log, judge, repair.

Plain functions of Arrow batches; Spark pickles them together with the source of truth.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Final
from zlib import crc32

import msgspec
import pyarrow as pa

from everstate.changes.codec import decode_wire
from everstate.changes.drift import Drifted, Heard, Stored, Truth, What
from everstate.changes.entity import holds_nul
from everstate.changes.former import NONE, FormerNames
from everstate.changes.json_numbers import decode, sorted_text
from everstate.changes.keys import OwnKey, check_key
from everstate.changes.typed import fits
from everstate.errors import InvalidChange
from everstate.pipeline.spark.outcomes import outcome_rows

Task = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]

_ROWS: Final = 2_000
_REPAIR_ROWS: Final = 20_000
_TOMBSTONE: Final = -1
_VERSION_MAX: Final = 2**63 - 2
"""Largest version after which sources and log can hold another one."""

_TEXT: pa.DataType = pa.string()
_LONG: pa.DataType = pa.int64()

SIDE: Final = pa.schema(
    {
        "key": _TEXT,
        "number": pa.int32(),
        "version": _LONG,
        "change_id": _TEXT,
        "hash": _LONG,
        "state": _TEXT,
    }
)
LOGGED: Final = SIDE.append(pa.field("offset", _LONG))
SIDES: Final = (
    *("key", "stored_version", "stored_change_id", "stored_hash"),
    *("logged_version", "logged_change_id", "logged_hash", "logged_state"),
)
DRIFTED: Final = Drifted._fields
"""Columns of the rows to be repaired."""
FOUND: Final = pa.schema(
    {
        "key": _TEXT,
        "what": _TEXT,
        "stored": _LONG,
        "logged": _LONG,
        "logged_id": _TEXT,
        "logged_state": _TEXT,
        "why": _TEXT,
        "refused": _TEXT,
    }
)


def fingerprint(version: int, change_id: str, state: str | None) -> int:
    """A 64-bit hash of version, change id and state; the format of the state's JSON is ignored."""
    text = b"" if state is None else _canonical(state)
    content = b"%d\n%s\n%s" % (version, change_id.lower().encode(), text)
    digest = hashlib.blake2b(content, digest_size=8).digest()
    return int.from_bytes(digest, signed=True)


def _canonical(state: str) -> bytes:
    try:
        return sorted_text(state)
    except ValueError:
        return state.encode()  # no JSON: then the texts have to be equal


def reading(truth: Truth, pieces: Sequence[str], ranges: int, wanted: Sequence[int] | None) -> Task:
    """In: numbers of pieces. Out: their entities (:data:`SIDE`), of the wanted key ranges."""
    chosen = None if wanted is None else frozenset(wanted)

    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows: list[dict[str, Any]] = []
        for piece in chain.from_iterable(batch["id"].to_pylist() for batch in batches):
            for stored in truth.read(pieces[piece]):
                number = crc32(stored.key.encode()) % ranges
                if chosen is None or number in chosen:
                    rows.append(_side(number, stored, keep_state=False))
                if len(rows) >= _ROWS:
                    yield pa.RecordBatch.from_pylist(rows, schema=SIDE)
                    rows = []
        yield pa.RecordBatch.from_pylist(rows, schema=SIDE)

    return run


def decoding(ranges: int, wanted: Sequence[int] | None) -> Task:
    """In: records of `.state`. Out: their entities, with their offset (:data:`LOGGED`).

    A record that cannot be read, or has a version that no source has, counts as version 0, so that
    its entity is sent again; a tombstone counts as version -1.
    """
    chosen = None if wanted is None else frozenset(wanted)

    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            rows = []
            for key, value, offset in zip(
                batch.column("key").to_pylist(),
                batch.column("value").to_pylist(),
                batch.column("offset").to_pylist(),
                strict=True,
            ):
                if key is None:
                    continue
                number = crc32(key) % ranges
                if chosen is not None and number not in chosen:
                    continue
                logged = _logged(key.decode(errors="replace"), value)
                keep = chosen is not None
                rows.append({**_side(number, logged, keep_state=keep), "offset": offset})
            yield pa.RecordBatch.from_pylist(rows, schema=LOGGED)

    return run


def _logged(key: str, value: bytes | None) -> Stored:
    if value is None:
        return Stored(key, _TOMBSTONE, "", None)
    try:
        wire = decode_wire(value)
        state = bytes(wire.current_entity_state).decode()
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _unreadable(key)
    if not 1 <= wire.version <= _VERSION_MAX:
        return _unreadable(key)
    return Stored(key, wire.version, str(wire.id), None if state == "null" else state)


def _unreadable(key: str) -> Stored:
    return Stored(key, 0, "", None)


def _side(number: int, stored: Stored, *, keep_state: bool) -> dict[str, Any]:
    key, version, change_id, state = stored
    return {
        "key": key,
        "number": number,
        "version": version,
        "change_id": change_id,
        "hash": fingerprint(version, change_id, state),
        "state": state if keep_state else None,
    }


def judging(
    truth: Truth, own_key: OwnKey | None, columns: pa.Schema, former: FormerNames = NONE
) -> Task:
    """In: :data:`SIDES` of entities that differ. Out: how they differ, as :data:`FOUND`.

    The source is read once more: an entity that has changed in the source since is no drift, and
    a change that the source has yet to publish is lag. ``own_key``: where a state has its key; the
    state of another key is refused, and so is one that does not fit its typed ``columns``.
    ``former``: the former names of its fields.
    """

    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            rows = batch.to_pylist()
            logged = {
                row["key"]: Heard(max(0, row["logged_version"] or 0), row["logged_change_id"] or "")
                for row in rows
                if _may_have(row["key"], row["stored_version"])
            }
            now = truth.look(logged) if logged else {}
            found = []
            for row in rows:
                present, waits = now.get(row["key"], (None, False))
                if judged := _judge(row, present, waits=waits):
                    state = None if present is None else former.of_state(present.state)
                    fault = None if own_key is None else own_key.fault(state, row["key"])
                    if fault := fault or state_fault(columns, state):
                        judged["why"] += f"; its state does not fit the model: {fault}"
                    found.append({**judged, "refused": fault})
            yield pa.RecordBatch.from_pylist(found, schema=FOUND)

    return run


def _may_have(key: str, version: int | None) -> bool:
    """Whether the source has an entity or could have one: other writers may send any key."""
    try:
        return bool(version) or bool(check_key("", key))
    except InvalidChange:
        return False


def state_fault(columns: Iterable[pa.Field[Any]], text: str | None) -> str | None:
    """Why a state does not fit its columns, as ``wrong_type:state.lines``; ``None``: it does.

    What is ``missing`` is only told of a state in which nothing else is wrong: an older schema
    version may lack fields.
    """
    if text is None:
        return None
    if holds_nul(text.encode()):
        return "nul_character"
    try:
        state = decode(text)
    except ValueError:
        return "wrong_type:state"
    if not isinstance(state, dict):
        return "missing:state" if state is None else "wrong_type:state"
    faults = _faults(columns, state, "state")
    return min(faults, key=lambda fault: fault.startswith("missing:"), default=None)


def _faults(columns: Iterable[pa.Field[Any]], state: dict[str, Any], at: str) -> Iterator[str]:
    for column in columns:
        value, where = state.get(column.name), f"{at}.{column.name}"
        if value is None and not column.nullable:
            yield f"missing:{where}"
        elif isinstance(value, dict) and pa.types.is_struct(column.type):
            yield from _faults(column.type, value, where)
        elif not fits(column.type, value):
            yield f"wrong_type:{where}"


def _judge(row: dict[str, Any], present: Stored | None, *, waits: bool) -> dict[str, Any] | None:
    """How an entity differs, or ``None`` when the difference was only temporary."""
    then, logged = row["stored_version"] or 0, row["logged_version"] or 0
    stored = present.version if present is not None else 0
    if logged == _TOMBSTONE:
        if present is None or present.state is None:
            return None
        logged = 0
    if logged < then:
        # The log had time to receive the version that the source had then.
        what = What.PENDING if waits else What.STALE if logged else What.MISSING
        why = f"the source had version {then}, and the log " + (
            f"ends at version {logged}" if logged else "has no version"
        )
    elif stored > logged:
        return None
    elif not logged:
        what, why = What.EXTRA, "the log has a record that cannot be read, and the source no entity"
    elif stored < logged:
        what = What.EXTRA
        why = f"the log ends at version {logged}, and the source " + (
            f"has version {stored}" if stored else "never had the entity"
        )
    else:
        assert present is not None, "its version is that of the log, which has one"
        if fingerprint(stored, present.change_id, present.state) == row["logged_hash"]:
            return None
        same_id = present.change_id == row["logged_change_id"]
        what = What.PENDING if waits else What.DIFFERENT
        why = "another state" if same_id else f"another change ({row['logged_change_id']})"
        why = f"version {stored} has {why} in the log"
    return {
        "key": row["key"],
        "what": what.value,
        "stored": stored,
        "logged": logged,
        "logged_id": row["logged_change_id"],
        "logged_state": row["logged_state"],
        "why": why,
    }


def repairing(truth: Truth) -> Task:
    """In: :data:`DRIFTED`. Out: how many were repaired, one row for each call of the source."""

    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        waiting: list[Drifted] = []
        for batch in batches:
            for row in batch.to_pylist():
                if _may_have(row["key"], row["stored"]):
                    waiting.append(Drifted(**{**row, "what": What(row["what"])}))
                if len(waiting) >= _REPAIR_ROWS:
                    yield outcome_rows([{"done": truth.repair(waiting)}])
                    waiting = []
        if waiting:
            yield outcome_rows([{"done": truth.repair(waiting)}])

    return run
