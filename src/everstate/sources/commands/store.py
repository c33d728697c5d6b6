"""A handler's local state of one partition: entities and remembered answers, in a StateCopy."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from everstate.log.positions import Ends
from everstate.log.state_copy import StateCopy, open_copy

_STATE: Final = b"s"
_ANSWER: Final = b"a"
_TIME: Final = b"t"
_COMMANDS: Final = "commands"
"""Name of a position in the copy: all commands before that offset are answered."""
_VERSION = struct.Struct(">Q")
_STORED = struct.Struct(">Qq")
FORM: Final = "state-2 "
"""Form of the rows; a store of another form is rebuilt from the log."""
VERSION_MAX: Final = 2**63 - 1
"""The largest version that a column of the views has."""
NEVER: Final = datetime(1970, 1, 1, tzinfo=UTC)
"""`recordedAt` of an entity without a change."""
_US: Final = timedelta(microseconds=1)
_MOMENT = struct.Struct(">QQ")
_TRIM_MAX: Final = 4_000


@dataclass(slots=True)
class StoreBatch:
    """Rows that one transaction adds to a store."""

    states: dict[bytes, bytes] = field(default_factory=dict)
    """Key → :func:`state_row`."""
    answers: dict[bytes, bytes] = field(default_factory=dict)
    """:func:`answer_key` → the answer."""
    command_offset: int = -1
    """Offset of the newest command in the batch."""


def state_row(version: int, text: bytes | None, recorded_at: datetime = NEVER) -> bytes:
    """A stored state: version, `recordedAt`, then the JSON text; no text: the entity is deleted."""
    return _STORED.pack(version, (recorded_at - NEVER) // _US) + (text or b"")


def state_name(key: bytes) -> bytes:
    """Name of an entity's row in the copy."""
    return _STATE + key


def read_state_row(row: bytes) -> tuple[int, bytes | None, datetime]:
    """Version, JSON text and `recordedAt` of a stored state."""
    version, recorded_us = _STORED.unpack_from(row)
    return version, row[_STORED.size :] or None, NEVER + recorded_us * _US


def answer_key(key: bytes, command_id: bytes) -> bytes:
    """Name of a remembered answer: a command id belongs to one entity."""
    return key + b"\0" + command_id


class PartitionStore:
    """States and remembered answers of one partition; one process at a time.

    Every error is StateStoreFailed: delete the copy then; it is rebuilt from the log.
    """

    def __init__(self, copy: StateCopy) -> None:
        self.copy = copy
        self._moment = 0
        # Start of the search for the oldest answers, so that deleted ones are not scanned again.
        self._oldest = _TIME

    def close(self) -> None:
        """Close the files; they stay on disk."""
        self.copy.close()

    def destroy(self) -> None:
        """Delete the files."""
        self.copy.destroy()

    @property
    def command_next(self) -> int:
        """Offset before which all commands are answered."""
        return self.copy.meta.next.get(_COMMANDS, 0)

    def answered(self, command_next: int) -> None:
        """Record, from answers in the log, that all commands before an offset are answered."""
        meta = self.copy.meta
        known = max(command_next, self.command_next)
        self.copy.write({}, replace(meta, next={**meta.next, _COMMANDS: known}))

    def state(self, key: bytes) -> bytes | None:
        """Stored row of an entity."""
        return self.copy.get(_STATE + key)

    def answer(self, name: bytes) -> bytes | None:
        """Remembered answer; ``name`` is an :func:`answer_key`."""
        found = self.copy.get(_ANSWER + name)
        return None if found is None else found[8:]

    def write(self, batch: StoreBatch, now_ms: int) -> None:
        """Add rows from the log, or from one committed transaction."""
        self.copy.write(self._rows(batch, now_ms))

    def settle(self, batch: StoreBatch, now_ms: int, ends: Ends | None, command_next: int) -> None:
        """Add the rows of one committed transaction, which proves these ends (StateCopy)."""
        if ends is not None:
            self.copy.ask(ends)
        self.copy.settle(self._rows(batch, now_ms))
        if ends is not None:
            self.answered(command_next)

    def _rows(self, batch: StoreBatch, now_ms: int) -> dict[bytes, bytes | None]:
        rows: dict[bytes, bytes | None] = {_STATE + key: row for key, row in batch.states.items()}
        moment = _VERSION.pack(now_ms)
        for name, answer in batch.answers.items():
            rows[_ANSWER + name] = moment + answer
            # Time, then a counter: answers are deleted in this order.
            rows[_TIME + _MOMENT.pack(now_ms, self._moment)] = name
            self._moment += 1
        return rows

    def forget(self, before_ms: int) -> int:
        """Delete answers older than ``before_ms``, some thousand at most; returns how many."""
        rows: dict[bytes, bytes | None] = {}
        count = 0
        for moment, name in self.copy.scan(_TIME, start=self._oldest):
            if _MOMENT.unpack(moment[1:])[0] >= before_ms:
                break
            rows[moment] = None
            # An answer that was written again (by a replay) has a later entry too.
            answer = self.copy.get(_ANSWER + name)
            if answer is not None and _VERSION.unpack_from(answer)[0] < before_ms:
                rows[_ANSWER + name] = None
            self._oldest = moment
            count += 1
            if count >= _TRIM_MAX:
                break
        if rows:
            self.copy.write(rows)
        return count


def open_store(path: Path, fingerprint: str, topics: Mapping[str, str]) -> PartitionStore:
    """The store at ``path``; an unreadable or outdated one is deleted and begun again."""
    return PartitionStore(open_copy(path, FORM + fingerprint, topics))
