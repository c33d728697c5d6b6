"""The log: delivery, identity, loss."""

from __future__ import annotations

from typing import Final

from everstate.errors.base import EverstateError

BEGIN_NEW_LOG: Final = (
    "Bring the old topic back if you can. Otherwise begin a new log: `everstate log begin --help` "
    "lists the steps."
)


class DeliveryFailed(EverstateError):
    """Kafka did not take a record; carries its key and the broker's reason."""

    retryable = True
    http_status = 503

    def __init__(self, topic: str, key: str | None, reason: str) -> None:
        self.topic, self.key, self.reason = topic, key, reason
        super().__init__(f"{topic}: record with key {key!r} was not delivered: {reason}")


class RecordRefused(DeliveryFailed):
    """Kafka will never take this record (too large, not allowed); sending it again cannot help."""

    retryable = False
    http_status = 422


class LogError(EverstateError):
    """The log refused a request for a reason that waiting does not mend."""


class LogIdentityChanged(EverstateError):
    """The topic is not the one the stored positions belong to (C8); nothing was read."""

    exit_code = 9

    def __init__(self, message: str, *, advice: str = BEGIN_NEW_LOG) -> None:
        super().__init__(message, advice=advice)


class TopicResized(LogError):
    """A topic has another number of partitions than the stored positions know (C8, V12)."""

    exit_code = 9

    def __init__(self, topic: str, stored: int, found: int) -> None:
        self.topic, self.stored, self.found = topic, stored, found
        super().__init__(
            f"topic {topic} has {found} partitions; the stored positions belong to {stored}. "
            "Nothing was read or written: a key's next change may lie in another partition than "
            "its earlier ones.",
            advice="Kafka cannot take partitions away. Begin a new log: `everstate log begin "
            "--help` lists the steps.",
        )


class DataLoss(EverstateError):
    """The log no longer holds offsets that were not yet read; nothing was skipped."""

    exit_code = 9


class LogTruncated(DataLoss):
    """The log ends before a position that was read: it lost its newest records (C8).

    It is raised at once, and nothing is read or written: what the log takes next would get the
    offsets of what it lost, and would be passed over.
    """

    def __init__(self, message: str, *, advice: str = BEGIN_NEW_LOG) -> None:
        super().__init__(message, advice=advice)


class CorruptRecord(EverstateError):
    """A record of the log cannot be read as a change."""

    def __init__(self, topic: str, partition: int, offset: int, reason: str) -> None:
        self.topic, self.partition, self.offset, self.reason = topic, partition, offset, reason
        super().__init__(f"{topic}[{partition}]@{offset}: {reason}")
