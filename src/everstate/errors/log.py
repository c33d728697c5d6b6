"""The log: delivery, identity, loss."""

from __future__ import annotations

from everstate.errors.base import EverstateError


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


class DataLoss(EverstateError):
    """The log no longer holds offsets that were not yet read; nothing was skipped."""

    exit_code = 9


class CorruptRecord(EverstateError):
    """A record of the log cannot be read as a change."""

    def __init__(self, topic: str, partition: int, offset: int, reason: str) -> None:
        self.topic, self.partition, self.offset, self.reason = topic, partition, offset, reason
        super().__init__(f"{topic}[{partition}]@{offset}: {reason}")
