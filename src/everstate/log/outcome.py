"""The only translation of librdkafka's errors to everstate's."""

# librdkafka's own error codes are public, and spelled with a leading underscore.
# ruff: noqa: SLF001

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from confluent_kafka import KafkaError, KafkaException

from everstate.errors import EverstateError, Fenced, LogError, Unavailable

TOO_LARGE: Final = frozenset({KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE})
# Sending the same record again cannot help.
PERMANENT: Final = frozenset(
    {
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.RECORD_LIST_TOO_LARGE,
        KafkaError.INVALID_RECORD,
        KafkaError.POLICY_VIOLATION,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError._UNKNOWN_PARTITION,
        KafkaError._INVALID_ARG,
    }
)
# Errors of the records queued after the one that failed.
CONSEQUENCES: Final = frozenset(
    {
        KafkaError._PURGE_QUEUE,
        KafkaError._PURGE_INFLIGHT,
        KafkaError._FATAL,
        KafkaError._GAPLESS_GUARANTEE,
    }
)
_LOOK: Final = (
    "`everstate status` shows the servers. `everstate up` starts a local one, and not your own."
)
END_OF_PARTITION: Final = KafkaError._PARTITION_EOF
OFFSET_GONE: Final = frozenset({KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE})
_TRANSPORT: Final = frozenset(
    {
        KafkaError._TRANSPORT,
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._TIMED_OUT,
        KafkaError._TIMED_OUT_QUEUE,
        KafkaError._MSG_TIMED_OUT,
        KafkaError._RESOLVE,
        KafkaError._WAIT_COORD,
        KafkaError._DESTROY,
        # "No leaders found": offsets were requested while the only broker was unreachable.
        KafkaError._NOENT,
        KafkaError.BROKER_NOT_AVAILABLE,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        # A broker that has just started may have older metadata on leaders than its client.
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.UNKNOWN_LEADER_EPOCH,
        KafkaError.KAFKA_STORAGE_ERROR,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.NETWORK_EXCEPTION,
        KafkaError.NOT_CONTROLLER,
        KafkaError.NOT_COORDINATOR,
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.OFFSET_NOT_AVAILABLE,
        KafkaError.REPLICA_NOT_AVAILABLE,
        KafkaError.REQUEST_TIMED_OUT,
    }
)
FENCING: Final = frozenset(
    {KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH}
)


def is_transport(error: KafkaError) -> bool:
    """Whether the error means only that a broker does not answer now."""
    return error.code() in _TRANSPORT or bool(error.retriable())


def translate(error: KafkaError, doing: str, expired: str | None = None) -> EverstateError:
    """The everstate error for librdkafka's; its message begins with ``doing`` (reading x).

    ``expired``: how long the transaction was open, if the broker has ended it for that.
    """
    if error.code() in FENCING:
        return Fenced(
            f"{doing}: {expired or 'another process took over this role'}.",
            advice="Start it again."
            if expired
            else "Stop this one; start it again only when the other one is gone.",
        )
    if is_transport(error):
        return Unavailable(f"{doing}: Kafka does not answer ({error.str()}).", advice=_LOOK)
    return LogError(f"{doing}: {error.str()} ({error.name()}).")


@contextmanager
def translated(doing: str) -> Iterator[None]:
    """Translate a KafkaException (or a future's time-out) of the block into an everstate error."""
    try:
        yield
    except KafkaException as cause:
        raise translate(cause.args[0], doing) from cause
    except TimeoutError as cause:
        raise Unavailable(f"{doing}: Kafka does not answer.", advice=_LOOK) from cause
