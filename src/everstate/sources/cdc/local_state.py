"""The newest state of each captured entity on local disk: a copy of what the log has.

It is never the truth: it carries the offsets of the topics it was made from, and whatever the
log has behind them is read before any row is cleaned. A copy that is lost, old, or of other
topics is made again.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from everstate.errors import LocalStateError
from everstate.private import private_folder
from everstate.sources.cdc.completion import Known

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS state (
    entity TEXT NOT NULL, key TEXT NOT NULL, version INTEGER NOT NULL, image BLOB NOT NULL,
    is_deleted INTEGER NOT NULL, position BLOB NOT NULL, PRIMARY KEY (entity, key)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS held (
    entity TEXT NOT NULL, key TEXT NOT NULL, value BLOB NOT NULL, PRIMARY KEY (entity, key)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS place (
    topic TEXT NOT NULL, partition INTEGER NOT NULL, next INTEGER NOT NULL,
    PRIMARY KEY (topic, partition)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS topic (name TEXT PRIMARY KEY, identity TEXT NOT NULL) WITHOUT ROWID;
"""
_UPSERT: Final = """
INSERT INTO state VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (entity, key) DO UPDATE
SET version = excluded.version, image = excluded.image, is_deleted = excluded.is_deleted,
    position = excluded.position
WHERE excluded.version >= state.version
"""
_FORMAT: Final = 1
_KEYS_MAX: Final = 500
_PAGE_BYTES: Final = 16_384
"""Some fifty states lie in a page; with the default of 4,096 a write costs a fifth more."""
_WAL_PAGES: Final = 4_096
Places = dict[tuple[str, int], int]


class LocalState:
    """A SQLite file with the newest states, held rows, and how far the log was read into it.

    One process at a time: the publisher's fencing sees to that. A file that is damaged or of
    another format is put aside and begun anew.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        private_folder(path.parent)
        try:
            self._database = self._open()
        except sqlite3.DatabaseError:
            self._remove()
            self._database = self._open()
        self._cache: dict[tuple[str, str], Known | None] = {}

    def _open(self) -> sqlite3.Connection:
        database = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        database.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
        database.execute("PRAGMA journal_mode = WAL")
        # A crash of the machine may lose the last commits, never the file: the log has them.
        database.execute("PRAGMA synchronous = NORMAL")
        database.execute("PRAGMA cache_size = -65536")
        # A page that many batches write goes to the file once, not with each of them.
        database.execute(f"PRAGMA wal_autocheckpoint = {_WAL_PAGES}")
        if database.execute("PRAGMA user_version").fetchone()[0] not in (0, _FORMAT):
            database.close()
            raise sqlite3.DatabaseError("another format")
        database.executescript(_SCHEMA)
        database.execute(f"PRAGMA user_version = {_FORMAT}")
        return database

    def _remove(self) -> None:
        for suffix in ("", "-wal", "-shm"):
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)

    def close(self) -> None:
        """Give up the file."""
        self._database.close()

    def forget(self) -> None:
        """Begin anew, without states and places."""
        self._cache.clear()
        with self._transaction():
            for table in ("state", "held", "place", "topic"):
                self._database.execute(f"DELETE FROM {table}")

    def identities(self) -> dict[str, str]:
        """Topic → which topic it was (C8)."""
        return dict(self._database.execute("SELECT name, identity FROM topic").fetchall())

    def places(self) -> Places:
        """(topic, partition) → next offset that is not in this file."""
        rows = self._database.execute("SELECT topic, partition, next FROM place").fetchall()
        return {(topic, partition): offset for topic, partition, offset in rows}

    def load(self, entity: str, keys: Iterable[str]) -> None:
        """Take entities into the cache before they are asked for; two lookups a thousand."""
        wanted = [key for key in set(keys) if (entity, key) not in self._cache]
        for start in range(0, len(wanted), _KEYS_MAX):
            part = wanted[start : start + _KEYS_MAX]
            marks = ",".join("?" * len(part))
            rows = self._database.execute(
                "SELECT key, version, image, is_deleted, position FROM state "
                f"WHERE entity = ? AND key IN ({marks})",
                [entity, *part],
            ).fetchall()
            self._cache.update(dict.fromkeys(((entity, key) for key in part), None))
            for key, version, image, is_deleted, position in rows:
                self._cache[entity, key] = _known(version, image, is_deleted, position)

    def get(self, entity: str, key: str) -> Known | None:
        """Newest state of an entity; ``None``: it was never seen."""
        try:
            return self._cache[entity, key]
        except KeyError:
            self.load(entity, [key])
        return self._cache[entity, key]

    def put(self, entity: str, key: str, known: Known) -> None:
        """A newer state; seen by `get` at once, kept by `commit`."""
        self._cache[entity, key] = known

    def held(self) -> Iterator[tuple[str, str, bytes]]:
        """Entity, key and value of all that is held."""
        yield from self._database.execute("SELECT entity, key, value FROM held").fetchall()

    def commit(
        self,
        changed: Iterable[tuple[str, str]],
        held: Mapping[tuple[str, str], bytes | None],
        places: Mapping[tuple[str, int], int],
    ) -> None:
        """Keep what was put for these entities, what is held now, and how far the log is."""
        with self._transaction():
            rows = []
            # In the order in which they lie in the file: neighbours share their pages.
            for entity, key in sorted(changed):
                known = self._cache[entity, key]
                assert known is not None
                rows.append((entity, key, *_row(known)))
            self._write(rows, held, places)
        self._cache.clear()

    def restore(
        self,
        states: Mapping[tuple[str, str], Known],
        held: Mapping[tuple[str, str], bytes | None],
        places: Mapping[tuple[str, int], int],
    ) -> None:
        """Take states over as the log has them; an older version never replaces a newer one."""
        with self._transaction():
            rows = [(entity, key, *_row(known)) for (entity, key), known in states.items()]
            self._write(rows, held, places)
        self._cache.clear()

    def identify(self, identities: Mapping[str, str]) -> None:
        """Remember which topics the states are of."""
        with self._transaction():
            self._database.executemany(
                "INSERT OR REPLACE INTO topic VALUES (?, ?)", list(identities.items())
            )

    def discard(self) -> None:
        """Forget what was put since the last commit."""
        self._cache.clear()

    def count(self, entity: str) -> int:
        """How many entities are known of a type, deleted ones included."""
        row = self._database.execute("SELECT count(*) FROM state WHERE entity = ?", [entity])
        return int(row.fetchone()[0])

    def alive(self, entity: str) -> Iterator[str]:
        """Keys of a type's entities that are not deleted, as far as committed."""
        rows = self._database.execute(
            "SELECT key FROM state WHERE entity = ? AND is_deleted = 0 ORDER BY key", [entity]
        )
        yield from (row[0] for row in rows.fetchall())

    def _write(
        self,
        rows: list[tuple[str, str, int, bytes, bool, bytes]],
        held: Mapping[tuple[str, str], bytes | None],
        places: Mapping[tuple[str, int], int],
    ) -> None:
        many = self._database.executemany
        many(_UPSERT, rows)
        many(
            "DELETE FROM held WHERE entity = ? AND key = ?",
            [place for place, value in held.items() if value is None],
        )
        many(
            "INSERT OR REPLACE INTO held VALUES (?, ?, ?)",
            [(*place, value) for place, value in held.items() if value is not None],
        )
        many(
            "INSERT OR REPLACE INTO place VALUES (?, ?, ?)",
            [(*place, offset) for place, offset in places.items()],
        )

    def _transaction(self) -> _Transaction:
        return _Transaction(self._database, self.path)


class _Transaction:
    def __init__(self, database: sqlite3.Connection, path: Path) -> None:
        self._database, self._path = database, path

    def __enter__(self) -> None:
        self._database.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: type[BaseException] | None, error: object, _: object) -> None:
        self._database.execute("COMMIT" if kind is None else "ROLLBACK")
        if isinstance(error, sqlite3.Error):
            raise LocalStateError(f"{self._path}: {error}") from error


def _row(known: Known) -> tuple[int, bytes, bool, bytes]:
    position = msgspec.json.encode(known.position)
    return known.version, known.image, known.is_deleted, position


def _known(version: int, image: bytes, is_deleted: int, position: bytes) -> Known:
    return Known(version, image, bool(is_deleted), msgspec.json.decode(position))
