"""A local copy of topics of the log, in RocksDB: a cache, never ahead of the log.

The writer of a compacted topic (cleaning, a command handler, a process manager) keeps the newest
rows on local disk, so that it need not read them from the log at each start. One rule keeps such a
copy correct: **only a transaction that was committed after the topics' ends were read proves that
no other process wrote before these ends.** A process that was fenced meanwhile cannot commit, and
so never counts records of its successor as its own. Therefore call :meth:`StateCopy.ask` before a
transaction and :meth:`StateCopy.settle` after it.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from rocksdict import Options, Rdict, WriteBatch, WriteOptions

from everstate.errors import StateStoreFailed
from everstate.log.consumer import Consumer
from everstate.log.positions import Ends, check_ends
from everstate.log.record import Record
from everstate.private import private_folder

logger = logging.getLogger(__name__)

StateRows = Mapping[bytes, bytes | None]
"""Name → value; ``None``: the row is deleted."""

_META: Final = b"m"
_ROW: Final = b"r"
_BUFFER_BYTES: Final = 32 * 1_048_576
_FILL_ROWS: Final = 5_000


@dataclass(frozen=True, slots=True)
class CopyMeta:
    """What a copy was made from, and up to which offsets it is complete."""

    fingerprint: str
    """Hash of the format of its rows, and of the code that made them."""
    topics: Mapping[str, str] = field(default_factory=dict)
    """Topic → its id (C8)."""
    next: Mapping[str, int] = field(default_factory=dict)
    """``topic[partition]`` → offset before which everything is in the copy; it may hold more."""
    batch: int | None = None
    """Newest transaction of its owner in the copy, if these are numbered."""


class StateCopy:
    """Rows by name; one process at a time.

    A write is atomic, and a prefix of the writes survives a crash, so that reading the log from
    :attr:`meta` on completes the copy. RocksDB compares all that it reads with its own sums. Every
    error is StateStoreFailed; :meth:`close` deletes a copy that was found damaged. Cost: about 3 µs
    for a row that is read and written again.
    """

    def __init__(self, path: Path, fingerprint: str) -> None:
        self.path = path
        self._is_damaged = False
        private_folder(path.parent)
        with self._translated():
            # Its type hints allow numbers and text as keys; in raw mode all keys are bytes.
            self._db: Any = Rdict(str(path), _options())
            # No WAL: rows that a crash loses are read from the log again.
            quick: Any = WriteOptions()
            quick.disable_wal = True
            self._quick = quick
            try:
                stored = self._db.get(_META)
                meta_fields = {"fingerprint": fingerprint} if stored is None else json.loads(stored)
                self.meta = CopyMeta(**meta_fields)
            except BaseException:
                self._db.close()
                raise
        self._asked: Ends | None = None

    def close(self) -> None:
        """Close the files; they stay on disk, unless their bytes are not those that were written.

        Such a copy would fail again at each start; the next one is made anew from the log.
        """
        with self._translated():
            self._db.close()
        if self._is_damaged:
            logger.warning("%s: its files are damaged; it is rebuilt from the log", self.path)
            throw_away(self.path)

    def destroy(self) -> None:
        """Delete the files."""
        self.close()
        throw_away(self.path)

    def get(self, name: bytes) -> bytes | None:
        """One row."""
        # Called for each command: a context manager would cost as much as the look-up.
        try:
            found: bytes | None = self._db.get(_ROW + name)
        except Exception as cause:
            raise self._failed(cause) from cause
        return found

    def get_many(self, names: Sequence[bytes]) -> list[bytes | None]:
        """Rows in the order of their names; quickest when these are sorted."""
        with self._translated():
            found: list[bytes | None] = self._db.get([_ROW + name for name in names])
        return found

    def scan(
        self, prefix: bytes = b"", start: bytes | None = None
    ) -> Iterator[tuple[bytes, bytes]]:
        """Rows whose names begin with ``prefix``, in the order of their names."""
        wanted = _ROW + prefix
        with self._translated():
            for name, row in self._db.items(from_key=_ROW + (prefix if start is None else start)):
                if not name.startswith(wanted):
                    return
                yield name[1:], row

    def write(self, rows: StateRows, meta: CopyMeta | None = None) -> None:
        """Write rows, and ``meta`` atomically with them."""
        batch = WriteBatch(raw_mode=True)
        for name in sorted(rows):
            row = rows[name]
            if row is None:
                batch.delete(_ROW + name)
            else:
                batch.put(_ROW + name, row)
        if meta is not None:
            batch.put(_META, json.dumps(asdict(meta)).encode())
        with self._translated():
            self._db.write(batch, self._quick)
        if meta is not None:
            self.meta = meta

    def ask(self, ends: Ends) -> None:
        """Record the topics' ends, read before the owner's next transaction begins."""
        self._asked = ends

    def settle(self, rows: StateRows, *, batch: int | None = None, proves: bool = True) -> None:
        """The transaction was committed: store its rows, and the ends that were read before it.

        ``proves``: the partitions whose ends were read took part in the transaction, so that it
        proves these ends.
        """
        meta = self.meta if batch is None else replace(self.meta, batch=batch)
        asked, self._asked = self._asked, None
        if asked is not None and proves:
            meta = replace(meta, next=_later(meta.next, asked))
        self.write(rows, None if meta == self.meta else meta)

    def prove(self, ends: Ends) -> None:
        """Record that everything before these ends was read into the copy."""
        self.write({}, replace(self.meta, next=_later(self.meta.next, ends)))

    def forget_asked(self) -> None:
        """The transaction was not committed, or its outcome is unknown: it proves nothing."""
        self._asked = None

    def next_of(self, place: tuple[str, int]) -> int:
        """Offset of a partition before which everything is in the copy."""
        return self.meta.next.get(_named(place), 0)

    def is_ahead(self, ends: Ends) -> bool:
        """Whether the copy is ahead of the log's ends, because the log was truncated."""
        return any(self.next_of(place) > end for place, end in ends.items())

    def check(self, who: str, ends: Ends) -> None:
        """Raise LogTruncated when the log's ends are before the copy's (C8): it is no copy then."""
        for (topic, partition), end in ends.items():
            known = {partition: self.next_of((topic, partition))}
            check_ends(who, topic, known, {partition: end})

    def fill(
        self,
        consumer: Consumer,
        spans: Mapping[tuple[str, int], tuple[int, int]],
        rows_of: Callable[[Record], Iterable[tuple[bytes, bytes | None]]],
        alive: Callable[[], None] = lambda: None,
    ) -> int:
        """Read ranges of partitions, [start, end), into the copy.

        Out: number of records. ``rows_of`` gives the rows of a record; a later row of a name
        replaces an earlier one. ``alive`` is called now and then.
        """
        count = 0
        for (topic, partition), (start, end) in sorted(spans.items()):
            rows: dict[bytes, bytes | None] = {}
            for record in consumer.read(topic, partition, start, end):
                count += 1
                rows.update(rows_of(record))
                if len(rows) >= _FILL_ROWS:
                    self.write(rows)
                    rows = {}
                    alive()
            done = _later(self.meta.next, {(topic, partition): end})
            self.write(rows, replace(self.meta, next=done))
        return count

    @contextmanager
    def _translated(self) -> Iterator[None]:
        # rocksdict raises plain Exceptions; DbClosedError and OSError are among them.
        try:
            yield
        except StateStoreFailed:
            raise
        except Exception as cause:
            raise self._failed(cause) from cause

    def _failed(self, cause: Exception) -> StateStoreFailed:
        self._is_damaged = self._is_damaged or "Corruption" in str(cause)
        return StateStoreFailed(f"local state {self.path}: {cause}.")


def open_copy(path: Path, fingerprint: str, topics: Mapping[str, str]) -> StateCopy:
    """The copy at ``path``; an unreadable or outdated one is deleted and begun again.

    ``topics``: topic → its id now.
    """
    try:
        copy = StateCopy(path, fingerprint)
    except StateStoreFailed as error:
        logger.warning("%s It is rebuilt from the log.", error.message)
        throw_away(path)
        copy = StateCopy(path, fingerprint)
    known = copy.meta.topics
    if copy.meta.fingerprint != fingerprint or known not in ({}, dict(topics)):
        logger.info(
            "%s was made by another release, schema or set of topics; it is rebuilt from the log",
            path,
        )
        copy.destroy()
        copy = StateCopy(path, fingerprint)
    if not copy.meta.topics:
        copy.write({}, replace(copy.meta, topics=dict(topics)))
    return copy


def throw_away(path: Path) -> None:
    """Delete a copy's files."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _named(place: tuple[str, int]) -> str:
    return f"{place[0]}[{place[1]}]"


def _later(known: Mapping[str, int], ends: Ends) -> dict[str, int]:
    """The later of the known and the new position of each partition."""
    found = dict(known)
    for place, end in ends.items():
        name = _named(place)
        found[name] = max(found.get(name, 0), end)
    return found


def _options() -> Options:
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_write_buffer_size(_BUFFER_BYTES)
    options.set_max_background_jobs(2)
    options.set_keep_log_file_num(2)
    return options
