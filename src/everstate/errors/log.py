"""The log: delivery, identity, loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from everstate.errors.base import EverstateError

BEGIN_NEW_LOG: Final = (
    "Restore the old topic if you can. Otherwise begin a new log: `everstate log begin --help` "
    "lists the steps."
)
REPLAYED: Final = f"After `everstate replay`: `everstate log begin --again`. {BEGIN_NEW_LOG}"


class DeliveryFailed(EverstateError):
    """Kafka did not acknowledge a record; has its key and the broker's reason."""

    retryable = True
    http_status = 503

    def __init__(self, topic: str, key: str | None, reason: str) -> None:
        self.topic, self.key, self.reason = topic, key, reason
        super().__init__(f"{topic}: record with key {key!r} was not delivered: {reason}")


class RecordRefused(DeliveryFailed):
    """Kafka will never accept this record (too large, not allowed); a retry cannot help."""

    retryable = False
    http_status = 422


class LogError(EverstateError):
    """Kafka refused a request for a reason that does not pass by waiting."""


class LogIdentityChanged(EverstateError):
    """The topic is not the one that the stored positions belong to (C8); nothing was read."""

    exit_code = 9

    def __init__(self, message: str, *, advice: str = BEGIN_NEW_LOG) -> None:
        super().__init__(message, advice=advice)


class TopicResized(LogError):
    """The number of partitions of a topic changed, which everstate refuses (C8, V12)."""

    exit_code = 9

    def __init__(self, topic: str, stored: int, found: int) -> None:
        self.topic, self.stored, self.found = topic, stored, found
        super().__init__(
            f"topic {topic} has {found} partitions; the stored positions belong to {stored}. "
            "Nothing was read or written: a key's next change may be in another partition than "
            "its earlier ones.",
            advice="Kafka cannot remove partitions. Begin a new log: `everstate log begin "
            "--help` lists the steps.",
        )


class DataLoss(EverstateError):
    """The log no longer has offsets that were not read yet; nothing was skipped."""

    exit_code = 9


class LogTruncated(DataLoss):
    """The log ends before a position that was already read: it lost its newest records (C8).

    It is raised at once, and nothing is read or written: the next records of the log would get the
    offsets of the lost ones, and would be skipped.
    """

    def __init__(self, message: str, *, advice: str = BEGIN_NEW_LOG) -> None:
        super().__init__(message, advice=advice)


class StoreBehindLog(EverstateError):
    """The log has versions that the store never had: it was restored from an older backup.

    Nothing was published: the log has other changes of the versions that the store would send.
    """

    exit_code = 9

    def __init__(self, who: str, entities: Sequence[str]) -> None:
        self.who, self.entities = who, tuple(entities)
        commands = ", ".join(f"`everstate drift repair {each}`" for each in entities)
        super().__init__(
            f"{who}: the log has versions of {', '.join(entities)} that the store does not have: "
            "the store was restored from an older backup, or made anew. Nothing was published.",
            advice=f"Stop the writers, or restore a newer backup. {commands} gives each entity in "
            "which both differ a new version with the state of the store. After that, the relay "
            "goes on by itself.",
        )


class CorruptRecord(EverstateError):
    """A record of the log cannot be read as a change."""

    def __init__(self, topic: str, partition: int, offset: int, reason: str) -> None:
        self.topic, self.partition, self.offset, self.reason = topic, partition, offset, reason
        super().__init__(f"{topic}[{partition}]@{offset}: {reason}")
