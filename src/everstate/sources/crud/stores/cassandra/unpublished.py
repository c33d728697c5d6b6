"""The index of unpublished changes: announcements by the second in which they were made.

Writers announce before they write, so whatever was written is announced. An announcement is a
hint: what a key's partition and its published version say decides. A second's announcements are
deleted together when all of them are settled and nobody can add to them any more.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Final, NamedTuple
from uuid import UUID

from everstate.sources.crud.stores.cassandra.partition import BUCKET_S
from everstate.sources.crud.stores.cassandra.schema import IndexStatements
from everstate.sources.crud.stores.cassandra.session import Database

_AHEAD_S: Final = 2
"""How far a writer's clock may be ahead and its changes still go out at once."""
_HOT_S: Final = 2
_GRACE_S: Final = 30
"""Longer than Cassandra keeps a late insert alive: older buckets get no more of them, unless its
writer's clock is behind."""
_RELOOK: Final = 0.5
_RELOOK_S_MAX: Final = 10.0
_DISCOVER_EVERY_S: Final = 20.0


class Announcement(NamedTuple):
    """What a writer said before it wrote; ``again_from``: send from that version on again."""

    bucket: int
    attempt: UUID
    entity: str
    key: str
    version: int
    again_from: int | None
    made_at: float
    """When the server took it, in seconds since the epoch."""
    age_s: float = 0.0
    """Seconds since then."""


@dataclass
class _Bucket:
    """Announcements of one second, as far as they are known here."""

    open: dict[UUID, Announcement] = field(default_factory=dict)
    settled: set[UUID] = field(default_factory=set)
    late: set[UUID] = field(default_factory=set)
    """Those that deleting the bucket spares, because they were written after its time."""
    looked_at: float = 0.0


class Unpublished:
    """Reads the index; one publisher has one."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._sql = IndexStatements(database.keyspace)
        self._buckets: dict[int, _Bucket] = {}
        self._discovered_at = -_DISCOVER_EVERY_S
        self._ahead_s = 0.0
        """How far the server's clock is ahead of ours."""

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
            # Twice: what the deletion will hide had the time to be seen before.
            if not known.open and now > (bucket + 1) * BUCKET_S + 2 * _GRACE_S:
                self._forget(bucket, known)
        return [
            each._replace(age_s=max(0.0, now - each.made_at))
            for _, known in sorted(self._buckets.items())
            for each in known.open.values()
        ]

    def settle(self, announcement: Announcement) -> None:
        """Remember that nothing has to be done for it any more."""
        known = self._buckets[announcement.bucket]
        known.open.pop(announcement.attempt, None)
        known.settled.add(announcement.attempt)

    def _is_due(self, bucket: int, known: _Bucket, now: float) -> bool:
        """New buckets are looked at every time, others after half of their age.

        So each announcement is read some ten times, whatever comes later. One that its writer
        made late (it was halted in between) is found that much later at most.
        """
        age_s = now - (bucket + 1) * BUCKET_S
        waited_s = now - known.looked_at
        return age_s < _HOT_S or waited_s >= min(_RELOOK * age_s, _RELOOK_S_MAX)

    def _forget(self, bucket: int, known: _Bucket) -> None:
        """Delete a bucket whose announcements are all settled.

        The timestamp spares what a writer inserts later under this bucket (its clock is behind,
        or it was halted between reading it and writing): the server dates each insert by its own
        clock. That is found by the next look for buckets, and deleted one by one.
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
