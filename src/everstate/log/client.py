"""Settings of all Kafka clients in everstate.

Size limits, smallest first. A change may have ``log.message_bytes_max`` bytes, counting only the
larger of its two states (checked at the write), so its message may have twice as many. A producer
takes such a message and :data:`RECORD_ROOM_BYTES` for key, headers and framing. A changelog topic
takes twice that room, so that no record of a producer is refused because of its framing. A
dead-letter topic takes four times that room, because a dead letter is the record and its reason. A
raw topic takes much more: a row that is too large for a change must not stop its connector.
"""

from __future__ import annotations

import logging
import time
from typing import Any, Final

from everstate.config import Config
from everstate.errors import HIDDEN, InvalidConfig
from everstate.log.java import java_options

logger = logging.getLogger(__name__)
"""librdkafka's lines: for the log of a role. A command without a log raises its own errors."""

_REPEAT_AFTER_S: Final = 10.0
_last_logged_s: dict[str, float] = {}


def _worth_logging(record: logging.LogRecord) -> bool:
    """Drop repeated messages of librdkafka, which logs each attempt to connect to a broker.

    CONFWARN comes at every start, because librdkafka marks a setting that everstate uses (gapless,
    C4) as experimental.
    """
    kind = record.getMessage().partition(" ")[0]
    if kind == "CONFWARN":
        return False
    if kind not in ("FAIL", "GETPID"):
        return True
    now = time.monotonic()
    if now - _last_logged_s.get(kind, -_REPEAT_AFTER_S) < _REPEAT_AFTER_S:
        return False
    _last_logged_s[kind] = now
    return True


logger.addFilter(_worth_logging)
logger.addHandler(logging.NullHandler())  # else Python prints them where no log is configured

READ_COMMITTED: Final = "read_committed"
"""Isolation of every reader in everstate (C5); Java clients and Spark default to the other one."""
READ_UNCOMMITTED: Final = "read_uncommitted"
"""Only for an audit that must see the records of aborted transactions."""

RECORD_ROOM_BYTES: Final = 65_536
_RAW_BYTES_MIN: Final = 8 * 1_048_576
TRANSACTION_TIMEOUT_MS: Final = 300_000
ADMIN_TIMEOUT_S: Final = 10.0
_TRANSACTION_LINGER_MS: Final = 25.0

_GUARANTEES: Final = {
    "bootstrap.servers": "set log.bootstrap_servers",
    "acks": "all",
    "request.required.acks": "all",
    "enable.idempotence": "true",
    "enable.gapless.guarantee": "true",
    "enable.auto.commit": "false",
    "isolation.level": READ_COMMITTED,
    "check.crcs": "true",
    "partitioner": "murmur2_random",
    "transactional.id": "the publisher's",
    "group.id": "the reader's",
}
_READERS: Final = frozenset({"auto.offset.reset", "key.deserializer", "value.deserializer"})


def record_bytes_max(config: Config) -> int:
    """Bytes of the largest record a producer takes: value, key, headers and framing."""
    return 2 * config.log.message_bytes_max + RECORD_ROOM_BYTES


def changelog_bytes_max(config: Config) -> int:
    """``max.message.bytes`` of `.changes` and `.state`."""
    return 2 * config.log.message_bytes_max + 2 * RECORD_ROOM_BYTES


def dead_bytes_max(config: Config) -> int:
    """``max.message.bytes`` of the dead-letter topics: any record and its reason."""
    return 2 * config.log.message_bytes_max + 4 * RECORD_ROOM_BYTES


def raw_bytes_max(config: Config) -> int:
    """``max.message.bytes`` of raw topics, which also take rows that cleaning rejects later."""
    return max(_RAW_BYTES_MIN, dead_bytes_max(config))


def client_settings(config: Config, client_id: str) -> dict[str, Any]:
    """Settings that all clients share: addresses, configured options, quick reconnects.

    Raises InvalidConfig when an option would weaken a guarantee of the log.
    """
    for name in config.log.options:
        if name in _GUARANTEES:
            wanted = f"no such option, because the log's guarantees need {_GUARANTEES[name]}"
            raise InvalidConfig(f"log.options[{name!r}]", HIDDEN, wanted)
    return {
        "bootstrap.servers": config.bootstrap_servers,
        "client.id": client_id,
        # A broker that comes back is used within a second, not after librdkafka's default of ten.
        "reconnect.backoff.ms": 50,
        "reconnect.backoff.max.ms": 1_000,
        "socket.keepalive.enable": True,
        "socket.nagle.disable": True,
        **config.log.options,
    }


def admin_settings(config: Config) -> dict[str, Any]:
    """Settings of an AdminClient; it does not log, because its futures report all errors."""
    return {**client_settings(config, "everstate-admin"), "log_level": 0}


def producer_settings(
    config: Config,
    client_id: str,
    *,
    transactional_id: str | None = None,
    transaction_timeout_ms: int = TRANSACTION_TIMEOUT_MS,
) -> dict[str, Any]:
    """Settings of a producer that never loses, duplicates or reorders records (C4).

    A plain producer has no delivery time-out: a later record must not overtake a lost batch. In a
    transaction the broker's own time-out bounds delivery, and an abort discards all its records.
    """
    # The dead-letter sender is transactional and sends records with their reason added.
    room = 0 if transactional_id is None else 2 * RECORD_ROOM_BYTES
    settings = {
        **client_settings(config, client_id),
        "acks": "all",
        "enable.idempotence": True,
        "partitioner": "murmur2_random",
        "allow.auto.create.topics": False,
        "linger.ms": config.log.linger_ms,
        "compression.type": "lz4",
        "batch.size": min(1_000_000, config.log.message_bytes_max),
        "message.max.bytes": record_bytes_max(config) + room,
        "queue.buffering.max.messages": config.log.queue_messages_max,
        # The next transaction waits for this whole time when the last one has just ended
        # (100 ms by default).
        "retry.backoff.ms": 5,
        "retry.backoff.max.ms": 500,
        "delivery.report.only.error": True,
        "logger": logger,
    }
    if transactional_id is None:
        return {**settings, "message.timeout.ms": 0, "enable.gapless.guarantee": True}
    return {
        **settings,
        # Readers see a record only after its transaction's commit, which flushes. Until then
        # records are collected into few large requests (one batch for each partition).
        "linger.ms": max(config.log.linger_ms, _TRANSACTION_LINGER_MS),
        "transactional.id": transactional_id,
        "transaction.timeout.ms": transaction_timeout_ms,
        "message.timeout.ms": transaction_timeout_ms,
    }


def consumer_settings(
    config: Config, client_id: str, *, isolation: str = READ_COMMITTED, read_ahead: bool = True
) -> dict[str, Any]:
    """Settings of a reader of explicit ranges: no group, no commits, partition ends reported.

    ``read_ahead=False`` fetches as little as the broker allows, for reading a single record.
    """
    return {
        **client_settings(config, client_id),
        # Required by the library; nothing joins or commits to it.
        "group.id": f"{config.log.prefix}-reader",
        "isolation.level": isolation,
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "enable.partition.eof": True,
        # The Java client compares sums by default, this one does not.
        "check.crcs": True,
        "auto.offset.reset": "error",
        "allow.auto.create.topics": False,
        "fetch.wait.max.ms": 50,
        "fetch.error.backoff.ms": 50,
        # A batch larger than this is still served whole (KIP-74).
        "fetch.message.max.bytes": 1_048_576 if read_ahead else 4_096,
        "queued.max.messages.kbytes": 32_768 if read_ahead else 1,
        "logger": logger,
    }


def member_settings(
    config: Config, client_id: str, *, group: str, instance: str, session_timeout_ms: int
) -> dict[str, Any]:
    """Settings of a member of a consumer group whose offsets go into transactions (KIP-447).

    The member is static: a process that was killed and restarted takes its partitions back at
    once, instead of waiting until the session of its former instance has timed out.
    """
    return {
        **consumer_settings(config, client_id),
        "group.id": group,
        "group.instance.id": instance,
        "session.timeout.ms": session_timeout_ms,
        "heartbeat.interval.ms": min(3_000, session_timeout_ms // 3),
        "partition.assignment.strategy": "range",
        "enable.partition.eof": False,
        # A shorter wait would cause a request for every few records under load. A member that
        # lags fetches again when its queue is nearly empty, not after every few records.
        "fetch.wait.max.ms": 100,
        "queued.min.messages": 500,
        "fetch.queue.backoff.ms": 10,
    }


def spark_options(config: Config) -> dict[str, str]:
    """Options of a Spark Kafka reader of this log: read_committed, and loss is an error (C5, C8).

    Out: ``spark.read.format("kafka").options(**…)``. The security settings of ``log.options`` are
    translated to those of the Java client. Raises InvalidConfig for one that Java does not have.
    """
    own = config.log.java_options
    for name in own:
        if name in _GUARANTEES or name in _READERS:
            wanted = "no such option, because everstate sets it for its own readers"
            raise InvalidConfig(f"log.java_options[{name!r}]", HIDDEN, wanted)
    client_settings(config, "everstate-spark")  # raises for options that weaken the log
    kafka = {
        "bootstrap.servers": config.bootstrap_servers,
        "isolation.level": READ_COMMITTED,
        "allow.auto.create.topics": "false",
        "max.partition.fetch.bytes": str(max(4_194_304, dead_bytes_max(config))),
        "reconnect.backoff.max.ms": "1000",
        **java_options(config.log.options, own),
    }
    return {f"kafka.{name}": value for name, value in kafka.items()} | {"failOnDataLoss": "true"}
