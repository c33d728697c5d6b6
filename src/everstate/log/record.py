"""Records of the log: one as it was read, and one to be written."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

RawRecord = tuple[int, int, bytes | None, bytes | None, Sequence[bytes | None], int]
"""Part, offset, key, value, the headers that the reader wants, milliseconds since 1970."""

Header = tuple[str, bytes | None]

CREATE_TIME = 0
LOG_APPEND_TIME = 1


class Record(msgspec.Struct, frozen=True, gc=False):
    """One record of the log, byte-exact. ``key`` or ``value`` ``None`` is Kafka's null."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[Header, ...]
    timestamp_type: int = CREATE_TIME
    """With the numbers of Java and Spark: -1 none, 0 create time, 1 log append time."""


class OutRecord(msgspec.Struct, frozen=True, gc=False):
    """One record to be written.

    ``partition`` ``None``: by the key, like Java's client. ``timestamp_ms`` ``None`` (or 0, which
    librdkafka treats the same): now.
    """

    topic: str
    key: bytes | None
    value: bytes | None
    headers: Sequence[Header] = ()
    partition: int | None = None
    timestamp_ms: int | None = None
