"""Bytes of the topics on the brokers' disks, and the room there (KIP-827)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

from everstate.config import Config
from everstate.errors import Unavailable
from everstate.log.attempt import TookTooLong, within
from everstate.log.client import ADMIN_TIMEOUT_S

_OPTIONS: Final = {
    "sasl.mechanism": "sasl_mechanism",
    "sasl.mechanisms": "sasl_mechanism",
    "sasl.password": "sasl_plain_password",
    "sasl.username": "sasl_plain_username",
    "security.protocol": "security_protocol",
    "ssl.ca.location": "ssl_cafile",
    "ssl.certificate.location": "ssl_certfile",
    "ssl.key.location": "ssl_keyfile",
    "ssl.key.password": "ssl_password",
}
"""Options of librdkafka, and their names in kafka-python. Without another one, such as a PEM text,
it makes no connection: its defaults are strict."""


@dataclass(frozen=True, slots=True)
class LogDisk:
    """One folder in which a broker keeps partitions."""

    broker: int
    folder: str
    usable_bytes: float
    """-1: brokers older than Kafka 3.3 do not report it."""
    topics: Mapping[str, list[int]]
    """Bytes of each partition that is here, by topic."""


def log_disks(config: Config) -> list[LogDisk]:
    """The disks of all brokers, with all topics; in 50 ms, and 0.2 s for the first import.

    librdkafka has no such request, so kafka-python sends it (decision 98). Raises Unavailable.
    """
    # Imported here: only who asks for sizes needs it.
    from kafka import KafkaAdminClient
    from kafka.errors import KafkaError

    given: dict[str, Any] = {
        _OPTIONS[name]: value.upper() if name in ("security.protocol", "sasl.mechanism") else value
        for name, value in config.log.options.items()
        if name in _OPTIONS
    }
    for name in ("bootstrap_timeout_ms", "request_timeout_ms"):
        given[name] = int(ADMIN_TIMEOUT_S * 1000)

    def ask() -> Any:
        servers = config.bootstrap_servers
        with closing(KafkaAdminClient(bootstrap_servers=servers, **given)) as admin:
            return admin.describe_log_dirs()

    try:
        # Its own time-outs do not hold for a broker that accepts a connection and says nothing.
        answers = within(2 * ADMIN_TIMEOUT_S, ask)
    except (KafkaError, OSError, ValueError, AssertionError, TookTooLong) as cause:
        raise Unavailable(f"the brokers do not report sizes of topics: {cause!r}") from cause
    disks = [(each["broker"], disk) for each in answers for disk in each["log_dirs"]]
    if not disks:
        raise Unavailable("sizes of topics need the right to DESCRIBE the cluster.")
    return [
        LogDisk(
            broker,
            disk["log_dir"],
            disk.get("usable_bytes", -1),
            {
                t["name"]: [part["partition_size"] for part in t["partitions"]]
                for t in disk["topics"]
            },
        )
        for broker, disk in disks
    ]
