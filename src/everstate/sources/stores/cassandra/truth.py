"""The store in Cassandra as the drift job sees it, and how it sends entities again."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final
from uuid import uuid4

from everstate.cassandra import Database
from everstate.changes import Kind, new_change_id
from everstate.changes.drift import DRIFT_PROVENANCE, RESENT, Drifted, Heard, Stored, What
from everstate.config import Config
from everstate.sources.stores.cassandra.partition import BUCKET_S, Head, Partitions, WriteStep
from everstate.sources.stores.cassandra.schema import (
    TOKEN_MAX,
    TOKEN_MIN,
    CassandraStatements,
    IndexStatements,
)
from everstate.sources.stores.rows import PreparedRow, moment_text, provenance_text

_FETCH_ROWS: Final = 1_000


@dataclass(frozen=True)
class CassandraTruth:
    """The entities of one type in Cassandra; changes go to the log through its publisher."""

    config: Config
    entity: str
    schema_version: int

    def slices(self, count: int) -> Sequence[str]:
        """Equal parts of the token ring."""
        low, high = TOKEN_MIN, TOKEN_MAX
        cuts = [low + (high - low) * n // count for n in range(count)]
        return [
            json.dumps((cut, cuts[n + 1] - 1 if n + 1 < count else high))
            for n, cut in enumerate(cuts)
        ]

    def read(self, piece: str) -> Iterator[Stored]:
        """Entities of a part of the ring: the newest row of each partition."""
        with Database(self.config) as database:
            statement = CassandraStatements(database.keyspace, self.entity).slice
            for row in database.stream(statement, json.loads(piece), _FETCH_ROWS):
                if row.head_version is not None:
                    yield _stored(row)

    def look(self, logged: Mapping[str, Heard]) -> Mapping[str, tuple[Stored, bool]]:
        """Newest rows, and whether each has announced changes that are not yet published.

        The reads are SERIAL, which settles writes whose outcome is unknown.
        """
        with Database(self.config) as database:
            announced, again = self._announced(database)
            index = IndexStatements(database.keyspace)
            statement = CassandraStatements(database.keyspace, self.entity).newest
            found = database.execute_many(statement, ([key] for key in logged), serial=True)
            stored = [_stored(rows[0]) for rows in found if rows and rows[0].head_version]
            marks = database.execute_many(
                index.published, ([self.entity, each.key] for each in stored)
            )
        looked = {}
        for each, mark in zip(stored, marks, strict=True):
            published = mark[0].version if mark else 0
            waits = each.key in announced and published < each.version
            looked[each.key] = (each, waits or each.key in again)
        return looked

    def repair(self, drifted: Sequence[Drifted]) -> int:
        """Announce entities to send again; write new versions of different and extra ones."""
        done = 0
        with Database(self.config) as database:
            partitions = Partitions(database, self.entity, self.schema_version)
            again = [each for each in drifted if each.what in RESENT and _is_sendable(each)]
            done += self._resend(database, again)
            for each in drifted:
                if each.what not in RESENT and each.refused is None:
                    done += self._restate(partitions, each)
        return done

    def _resend(self, database: Database, drifted: Sequence[Drifted]) -> int:
        bucket = int(time.time()) // BUCKET_S
        database.execute_many(
            IndexStatements(database.keyspace).announce,
            (
                [bucket, uuid4(), self.entity, each.key, each.stored, _from(each)]
                for each in drifted
            ),
        )
        return len(drifted)

    def _restate(self, partitions: Partitions, drifted: Drifted) -> int:
        def plan(head: Head) -> Sequence[WriteStep]:
            before, after = drifted.logged_state, head.state
            if head.version != drifted.stored or (before is None and after is None):
                return ()
            row = PreparedRow(
                drifted.key,
                after,
                new_change_id(),
                moment_text(self.entity, drifted.key, datetime.now(UTC)),
                provenance_text(self.entity, drifted.key, DRIFT_PROVENANCE),
                None,
            )
            version = max(head.version, drifted.logged) + 1
            kind = Kind.between(before, after)
            return (WriteStep(version, kind, row, before, chained=False),)

        _, steps = partitions.move(drifted.key, plan)
        return len(steps)

    def _announced(self, database: Database) -> tuple[set[str], set[str]]:
        """Announced keys, and those of them whose changes are to be sent again."""
        index = IndexStatements(database.keyspace)
        buckets = [[row.bucket] for row in database.execute(index.buckets)]
        announced, again = set[str](), set[str]()
        for rows in database.execute_many(index.announced, buckets):
            for row in rows:
                if row.entity == self.entity:
                    announced.add(row.key)
                    if row.again_from is not None:
                        again.add(row.key)
        return announced, again


def _is_sendable(drifted: Drifted) -> bool:
    """Whether readers accept the newest row; a row of an older schema version may lack fields."""
    return drifted.refused is None or drifted.refused.startswith("missing:state.")


def _from(drifted: Drifted) -> int:
    """First version to be sent again."""
    return drifted.stored if drifted.what is What.SAME else drifted.logged + 1


def _stored(row: Any) -> Stored:
    return Stored(row.key, row.head_version, str(row.change_id), row.after)
