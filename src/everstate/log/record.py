"""What is in the log: one record as it was read, and one as it is to be written."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

Header = tuple[str, bytes | None]

CREATE_TIME = 0
LOG_APPEND_TIME = 1
NO_TIMESTAMP = -1


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
    """As Java and Spark number them: -1 none, 0 create time, 1 log append time."""


class OutRecord(msgspec.Struct, frozen=True, gc=False):
    """One record to be written.

    ``partition`` ``None``: by the key, as Java's client does it. ``timestamp_ms`` ``None`` (or 0,
    which librdkafka cannot tell from it): now.
    """

    topic: str
    key: bytes | None
    value: bytes | None
    headers: Sequence[Header] = ()
    partition: int | None = None
    timestamp_ms: int | None = None
