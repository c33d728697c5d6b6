"""The index of unpublished changes: announcements by the second in which they were made.

Writers announce before they write, so every write is announced. An announcement is only a hint: the
key's partition and its published version decide what is sent. The announcements of one second (a
bucket) are deleted together when all of them are settled and no writer can add more.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Final, NamedTuple
from uuid import UUID

from everstate.cassandra import Database
from everstate.sources.stores.cassandra.partition import BUCKET_S
from everstate.sources.stores.cassandra.schema import IndexStatements

_AHEAD_S: Final = 2
"""How far a writer's clock may be ahead without delaying the publication of its changes."""
_HOT_S: Final = 2
_GRACE_S: Final = 30
"""Longer than a late insert can be delayed in Cassandra: older buckets get no more announcements,
unless a writer's clock is late."""
_RELOOK: Final = 0.5
_RELOOK_S_MAX: Final = 10.0
_DISCOVER_EVERY_S: Final = 20.0


class Announcement(NamedTuple):
    """A writer's announcement of a write; ``again_from``: send again from that version on."""

    bucket: int
    attempt: UUID
    entity: str
    key: str
    version: int
    again_from: int | None
    made_at: float
    """When the server stored it, in seconds since the epoch."""
    age_s: float = 0.0
    """Seconds since ``made_at``."""


@dataclass
class _Bucket:
    """Announcements of one second that this process has read."""

    open: dict[UUID, Announcement] = field(default_factory=dict)
    settled: set[UUID] = field(default_factory=set)
    late: set[UUID] = field(default_factory=set)
    """Announcements stored too late for the bucket's deletion; they are deleted one by one."""
    looked_at: float = 0.0


class Unpublished:
    """Reads the index; each publisher has one."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._sql = IndexStatements(database.keyspace)
        self._buckets: dict[int, _Bucket] = {}
        self._discovered_at = -_DISCOVER_EVERY_S
        self._ahead_s = 0.0
        """Seconds by which the server's clock is ahead of the local one."""

    def open(self) -> list[Announcement]:
        """Announcements that are not settled, oldest bucket first. Cost: a few small reads."""
        self._discover()
        now = time.time() + self._ahead_s
        current = int(now) // BUCKET_S
        for bucket in range(current - _HOT_S, current + _AHEAD_S + 1):
            self._buckets.setdefault(bucket, _Bucket())
        due = [b for b, known in self._buckets.items() if self._is_due(b, known, now)]
        answers = self._database.execute_many(self._sql.announced, ([b] for b in due))
        for bucket, rows in zip(due, answers, strict=True):
            known = self._buckets[bucket]
            known.looked_at = now
            for row in rows:
                if row.written_at > _deleted_until(bucket):
                    known.late.add(row.attempt)
                if row.attempt not in known.settled:
                    known.open[row.attempt] = Announcement(
                        bucket,
                        row.attempt,
                        row.entity,
                        row.key,
                        row.version,
                        row.again_from,
                        row.written_at / 1_000_000,
                    )
            # Twice the grace time: every announcement that the deletion hides was read before.
            if not known.open and now > (bucket + 1) * BUCKET_S + 2 * _GRACE_S:
                self._forget(bucket, known)
        return [
            each._replace(age_s=max(0.0, now - each.made_at))
            for _, known in sorted(self._buckets.items())
            for each in known.open.values()
        ]

    def settle(self, announcement: Announcement) -> None:
        """Record that this announcement needs no more work."""
        known = self._buckets[announcement.bucket]
        known.open.pop(announcement.attempt, None)
        known.settled.add(announcement.attempt)

    def _is_due(self, bucket: int, known: _Bucket, now: float) -> bool:
        """Whether to read a bucket now: new ones every time, others after half of their age.

        So each announcement is read some ten times. One that a suspended writer made late is
        found with a delay of at most that interval.
        """
        age_s = now - (bucket + 1) * BUCKET_S
        waited_s = now - known.looked_at
        return age_s < _HOT_S or waited_s >= min(_RELOOK * age_s, _RELOOK_S_MAX)

    def _forget(self, bucket: int, known: _Bucket) -> None:
        """Delete a bucket whose announcements are all settled.

        The deletion's timestamp is older than later inserts into this bucket (by a writer whose
        clock is late, or that was suspended between reading its clock and writing), because the
        server sets timestamps by its own clock. Such inserts are found by the next search for
        buckets, and deleted one by one.
        """
        if known.settled:
            self._database.execute(self._sql.forget_bucket, [_deleted_until(bucket), bucket])
            late = known.late & known.settled
            self._database.execute_many(self._sql.forget, ([bucket, each] for each in late))
        del self._buckets[bucket]

    def _discover(self) -> None:
        now = time.monotonic()
        if now - self._discovered_at < _DISCOVER_EVERY_S:
            return
        for row in self._database.execute(self._sql.buckets):
            self._buckets.setdefault(row.bucket, _Bucket())
        self._ahead_s = self._database.clock_s() - time.time()
        self._discovered_at = now


def _deleted_until(bucket: int) -> int:
    """Timestamp of a bucket's deletion, in microseconds."""
    return int(((bucket + 1) * BUCKET_S + _GRACE_S) * 1_000_000)
