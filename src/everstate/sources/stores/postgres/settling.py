"""What the rows of a file become over the states that are stored: decided under the rows' locks.

A row may lack fields that the stored entity has, and a key may come several times in one file.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Collection, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Final, Literal, TypeAlias

from pydantic import BaseModel

from everstate.changes import EntityType
from everstate.changes.json_numbers import decode, encode
from everstate.changes.keys import key_text
from everstate.errors import InvalidChange
from everstate.sources.stores.postgres.files import (
    Chunk,
    UnreadableRow,
    columns_of,
    read_raw,
    read_rows,
)
from everstate.sources.stores.rows import PreparedRow, Settle

Missing: TypeAlias = Literal["refuse", "keep", "reset"]
"""What becomes of fields that a row does not have, where the stored entity has other values than
the model's defaults."""

_RAW_KEYS: Final = frozenset({"text", "integer"})
"""JSON types of keys whose text in a file is the key itself."""


_DIGITS_MAX: Final = 32


class Settling:
    """Decides for each row of a file which state is written."""

    def __init__(
        self, entity_type: EntityType, missing: Missing, last: Mapping[str, bytes]
    ) -> None:
        """``last``: see :func:`repeated_keys`."""
        self._entity_type, self._missing, self._last = entity_type, missing, last
        self._columns = columns_of(entity_type)
        self._is_stored: dict[str, bool] = {}

    def of_chunk(self, chunk: Chunk) -> Settle:
        """The states that other texts are written for; see :class:`Settle`."""
        decided_here: set[str] = set()

        def settle(stored: Mapping[str, str], rows: Sequence[PreparedRow]) -> dict[int, str]:
            for key in {row.key for row in rows} & self._last.keys():
                # A call that is repeated decides again.
                if key in decided_here or key not in self._is_stored:
                    decided_here.add(key)
                    self._is_stored[key] = self._ends_as(key, stored.get(key))
            before, changed = dict(stored), dict[int, str]()
            for n, row in enumerate(rows):
                old, state = before.get(row.key), row.state or ""
                if old is not None and self._is_stored.get(row.key):
                    changed[n] = old
                    continue
                if old is not None:
                    state = self._whole(chunk.rows[n], chunk.entities[n], state, old, row.key)
                if state != row.state:
                    changed[n] = state
                before[row.key] = state
            return changed

        return settle

    def _ends_as(self, key: str, stored: str | None) -> bool:
        """Whether the file's last state of a key is stored, so that it was imported before."""
        if stored is None:
            return False
        last = self._last[key]
        if self._missing == "keep":
            last = encode(decode(self._entity_type.today(stored)) | decode(last))
        whole = self._entity_type.carry(key, stored, last).decode()
        return self._entity_type.is_equal(stored, whole)

    def _whole(self, number: int, entity: BaseModel, state: str, stored: str, key: str) -> str:
        """The state with the fields that its row does not have; raises UnreadableRow."""
        absent = self._columns.keys() - entity.model_fields_set
        if not absent or self._missing == "reset":
            return state
        new, old = decode(state), decode(self._entity_type.today(stored))
        kept = {name: old[name] for name in map(self._columns.__getitem__, absent) if name in old}
        merged = encode(new | kept).decode()
        if self._entity_type.is_equal(state, merged):
            return state
        if self._missing == "refuse":
            lost = sorted(name for name, value in kept.items() if value != new.get(name))
            raise UnreadableRow(
                number,
                f"{', '.join(lost)}: the row does not have it, and {key!r} is stored with a value; "
                "--missing keep leaves it, --missing reset writes the model's default",
            )
        try:
            model = self._entity_type.validate_json(merged)
        except InvalidChange as error:
            raise UnreadableRow(number, f"{error.field}: {error.reason}") from error
        return self._entity_type.encode(model, "made").decode()


def repeated_keys(
    path: Path,
    entity_type: EntityType,
    first_row: int,
    ignored: Collection[str],
    missing: Missing,
) -> dict[str, bytes]:
    """The last state of each key that comes several times in a file.

    With ``keep`` it has only the fields that a row of the key has, each with its last value.
    Cost: the keys are read once more than the rows, and all rows if a key comes several times.
    Memory: 8 bytes for each row, and a state for each such key.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    counts = pc.value_counts(pa.array(_hashes(path, entity_type, first_row, ignored), pa.int64()))
    twice = frozenset(
        found["values"]
        for found in counts.filter(pc.greater(counts.field("counts"), 1)).to_pylist()
    )
    last: dict[str, bytes] = {}
    columns = columns_of(entity_type)
    if twice:
        for found in read_rows(path, entity_type, first_row, ignored):
            if found.entity is not None:
                key = entity_type.key_of(found.entity)
                if hash(key) not in twice:
                    continue
                state = entity_type.encode(found.entity)
                if missing == "keep":
                    names = {
                        columns[name] for name in found.entity.model_fields_set & columns.keys()
                    }
                    given = {name: v for name, v in decode(state).items() if name in names}
                    last[key] = encode(decode(last.get(key, b"{}")) | given)
                else:
                    last[key] = state
    return last


def _hashes(
    path: Path, entity_type: EntityType, first_row: int, ignored: Collection[str]
) -> array[int]:
    found = array("q")
    own = entity_type.own_key
    if own is None or own.type not in _RAW_KEYS:
        for read in read_rows(path, entity_type, first_row, ignored):
            if read.entity is not None:
                found.append(hash(entity_type.key_of(read.entity)))
        return found
    next(read_rows(path, entity_type, first_row, ignored), None)  # raises ImportFailed
    for row, state, _ in read_raw(path, entity_type):
        if row >= first_row and (key := _raw_key(state, (own.column, entity_type.key))):
            found.append(hash(_integer_key(key) if own.type == "integer" else key))
    return found


def _raw_key(state: object, names: Sequence[str]) -> str:
    """The key of a row as it is in the file; empty: it has none, which is reported later."""
    if isinstance(state, bytes):
        try:
            state = json.loads(state) if b"NaN" in state else decode(state)
        except (ValueError, RecursionError):
            return ""
    if not isinstance(state, Mapping):
        return ""
    value = next((state[name] for name in names if name in state), None)
    return "" if value is None else str(value)


def _integer_key(text: str) -> str:
    """The key of an integer that a file has as `007` or `7.0`."""
    try:
        number = Decimal(text)
        # No integer that is stored is as long; Python would be busy with a larger one.
        return key_text(int(number)) if number.adjusted() < _DIGITS_MAX else text
    except (ArithmeticError, ValueError):
        return text  # the row is refused
