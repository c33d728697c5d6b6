"""A handler's local state of one partition, in RocksDB: a cache of the log, never ahead of it."""

from __future__ import annotations

import json
import logging
import shutil
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from rocksdict import Options, Rdict, WriteBatch, WriteOptions

from everstate.errors import StateStoreFailed
from everstate.private import private_folder

log = logging.getLogger(__name__)

_META: Final = b"m"
_STATE: Final = b"s"
_ANSWER: Final = b"a"
_TIME: Final = b"t"
_VERSION = struct.Struct(">Q")
_MOMENT = struct.Struct(">QQ")
_BUFFER_BYTES: Final = 16 * 1_048_576
_TRIM_MAX: Final = 4_000


@dataclass(frozen=True, slots=True)
class Meta:
    """What a store was made of, and how far of the log it holds for certain.

    ``state_next`` and ``replies_next``: everything of `.state` and `.replies` before these
    offsets is in the store; it may hold more. ``command_next``: commands before it are answered.
    """

    fingerprint: str
    topic_ids: Sequence[str] = ()
    state_next: int = 0
    replies_next: int = 0
    command_next: int = 0


@dataclass(slots=True)
class Batch:
    """What one transaction adds to a store."""

    states: dict[bytes, bytes] = field(default_factory=dict)
    """Key → :func:`state_row`."""
    answers: dict[bytes, bytes] = field(default_factory=dict)
    """:func:`answer_key` → the answer."""
    command_offset: int = -1
    """Newest command among them."""


def state_row(version: int, text: bytes | None) -> bytes:
    """A state as stored: version, then the JSON text; no text: the entity is deleted."""
    return _VERSION.pack(version) + (text or b"")


def read_state_row(row: bytes) -> tuple[int, bytes | None]:
    """Version and JSON text of a stored state."""
    return _VERSION.unpack_from(row)[0], row[8:] or None


def answer_key(key: bytes, command_id: bytes) -> bytes:
    """Name of a remembered answer: a command id belongs to one entity."""
    return key + b"\0" + command_id


class PartitionStore:
    """States and remembered answers of one partition; one process at a time.

    A write is atomic, and what survives a crash is a prefix of the writes, so that reading the
    log again from ``meta`` on completes it. Every error is StateStoreFailed: throw it away then.
    """

    def __init__(self, path: Path, fingerprint: str) -> None:
        self.path = path
        self._fingerprint = fingerprint
        private_folder(path.parent)
        with _translated(path):
            # Its types say that keys may be numbers and text; in raw mode all is bytes.
            self._db: Any = Rdict(str(path), _options())
        # The log is the truth: no write needs to be on the disk at once.
        self._quick = WriteOptions()
        with _translated(path):
            stored = self._db.get(_META)
        self.meta = Meta(fingerprint) if stored is None else Meta(**json.loads(stored))
        self._moment = 0
        # Where to look for the oldest answers: what was deleted before is not passed again.
        self._oldest = _TIME

    def close(self) -> None:
        """Give up the files; they stay."""
        self._db.close()

    def destroy(self) -> None:
        """Throw the files away."""
        self._db.close()
        throw_away(self.path)

    def state(self, key: bytes) -> bytes | None:
        """Stored row of an entity."""
        return self._get(_STATE + key)

    def answer(self, name: bytes) -> bytes | None:
        """Remembered answer; ``name`` is an :func:`answer_key`."""
        found = self._get(_ANSWER + name)
        return None if found is None else found[8:]

    def _get(self, name: bytes) -> bytes | None:
        # Once a command: a context manager would cost as much as the look-up.
        try:
            found: bytes | None = self._db.get(name)
        except Exception as cause:
            raise _failed(self.path, cause) from cause
        return found

    def write(self, batch: Batch, now_ms: int) -> None:
        """Add what one committed transaction brought."""
        rows = WriteBatch(raw_mode=True)
        for key, row in batch.states.items():
            rows.put(_STATE + key, row)
        moment = _VERSION.pack(now_ms)
        for name, answer in batch.answers.items():
            rows.put(_ANSWER + name, moment + answer)
            # Time, then a counter: answers are forgotten in this order.
            rows.put(_TIME + _MOMENT.pack(now_ms, self._moment), name)
            self._moment += 1
        with _translated(self.path):
            self._db.write(rows, self._quick)

    def save(self, meta: Meta) -> None:
        """Note how far the store is; everything of the log before it must be written."""
        with _translated(self.path):
            self._db.put(_META, json.dumps(asdict(meta)).encode())
        self.meta = meta

    def forget(self, before_ms: int) -> int:
        """Forget answers older than that, some thousand at most; says how many."""
        rows, count = WriteBatch(raw_mode=True), 0
        with _translated(self.path):
            for moment, name in self._db.items(from_key=self._oldest):
                if moment[:1] != _TIME or _MOMENT.unpack(moment[1:])[0] >= before_ms:
                    break
                rows.delete(moment)
                # An answer given again (a replay's) has a younger moment too.
                answer = self._db.get(_ANSWER + name)
                if answer is not None and _VERSION.unpack_from(answer)[0] < before_ms:
                    rows.delete(_ANSWER + name)
                self._oldest = moment
                count += 1
                if count >= _TRIM_MAX:
                    break
            if count:
                self._db.write(rows, self._quick)
        return count

    def states(self) -> Iterator[tuple[bytes, bytes]]:
        """Every stored entity: key and row."""
        with _translated(self.path):
            for name, row in self._db.items(from_key=_STATE):
                if name[:1] != _STATE:
                    return
                yield name[1:], row

    @property
    def fits(self) -> bool:
        """Whether it was made with the same schema and code."""
        return self.meta.fingerprint == self._fingerprint


def open_store(path: Path, fingerprint: str, topic_ids: Sequence[str]) -> PartitionStore:
    """The store at ``path``; an unreadable or unfitting one is thrown away and begun anew."""
    try:
        store = PartitionStore(path, fingerprint)
    except StateStoreFailed as error:
        log.warning("%s It is made again from the log.", error.message)
        throw_away(path)
        store = PartitionStore(path, fingerprint)
    known = list(store.meta.topic_ids)
    if store.fits and known in ([], list(topic_ids)):
        return store
    log.info("%s: made by other code, schema or topics; it is made again from the log", path)
    store.destroy()
    return PartitionStore(path, fingerprint)


def throw_away(path: Path) -> None:
    """Delete a store's files."""
    shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    # rocksdict raises plain Exceptions; DbClosedError and OSError are among them.
    try:
        yield
    except StateStoreFailed:
        raise
    except Exception as cause:
        raise _failed(path, cause) from cause


def _failed(path: Path, cause: Exception) -> StateStoreFailed:
    return StateStoreFailed(f"local state {path}: {cause}.")


def _options() -> Options:
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_write_buffer_size(_BUFFER_BYTES)
    options.set_max_background_jobs(2)
    options.set_keep_log_file_num(2)
    return options
