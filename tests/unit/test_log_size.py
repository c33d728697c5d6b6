"""How large the log is, when it fills its disks, and who falls out of it: from planted numbers."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from everstate.attention.conditions import of_readers
from everstate.cli.log import _size_pieces
from everstate.cli.results import ResultTable
from everstate.config import Config, LogConfig
from everstate.errors import Unavailable
from everstate.log.disks import LogDisk, log_disks
from everstate.log.lag import LagRow
from everstate.sections import AlertsConfig
from everstate.serving.log_size import LogSize, TopicSize, full_in_s, topic_size
from everstate.serving.log_state import LogReader, PartitionState, TopicState
from everstate.serving.words import size_text

DAY_S = 86_400.0
NAME = "everstate.order.changes.g1"
EVEN = [[18_000 * hour] * 2 for hour in range(25)]
"""Ends of two partitions at each hour of a day with 10 changes a second."""
BUSY = [*[[0, 0]] * 12, *[[90_000_000, 90_000_000]] * 13]
"""50,000 changes a second in one hour."""


def topic(retention_s: float | None = 3 * DAY_S, **more: Any) -> TopicState:
    parts = tuple(PartitionState(number, 0, 432_000) for number in range(2))
    return TopicState(NAME, parts, retention_s, more.pop("is_compacted", False), **more)


def test_rate_and_bytes_of_a_day_follow_from_offsets_and_bytes() -> None:
    found = topic_size(topic(), EVEN, DAY_S, [4_320_000] * 4)
    assert found.changes_per_s == found.busiest_per_s == 10.0
    assert found.bytes == found.day_bytes == 17_280_000, "20 bytes a change, with both replicas"
    assert (found.keeps_s, found.partitions_needed) == (3 * DAY_S, 1)


def test_a_young_topic_is_measured_since_its_oldest_record() -> None:
    ends = [*[[0, 0]] * 24, [432_000, 432_000]]
    assert topic_size(topic(), ends, 600.0, []).changes_per_s == 1_440.0


def test_partitions_are_for_the_busiest_hour() -> None:
    found = topic_size(topic(), BUSY, 9 * DAY_S, [])
    assert (found.busiest_per_s, found.partitions_needed) == (50_000.0, 3)
    assert (found.bytes, found.day_bytes) == (None, None)


def test_a_limit_of_bytes_shortens_what_a_topic_keeps() -> None:
    # Two partitions of two replicas: 17,280,000 bytes a day.
    found = topic_size(topic(retention_bytes=2_160_000), EVEN, DAY_S, [4_320_000] * 4)
    assert found.keeps_s == DAY_S / 2
    for_ever = topic_size(topic(None, retention_bytes=8_640_000), EVEN, DAY_S, [4_320_000] * 4)
    assert for_ever.keeps_s == 2 * DAY_S
    # The limit is that of each partition: one that gets everything drops twice as early.
    uneven = [[36_000 * hour, 0] for hour in range(25)]
    found = topic_size(topic(retention_bytes=2_160_000), uneven, DAY_S, [8_640_000, 0] * 2)
    assert found.keeps_s == DAY_S / 4


def test_a_compacted_topic_grows_with_its_keys_and_not_with_time() -> None:
    found = topic_size(topic(None, is_compacted=True), EVEN, DAY_S, [250, 250])
    assert (found.bytes, found.day_bytes, found.keeps_s) == (500, None, None)


def sized(name: str, day_bytes: float, keeps_days: float | None) -> TopicSize:
    """A topic of 1,000 bytes."""
    return TopicSize(
        name=name,
        partitions=1,
        partitions_needed=1,
        bytes=1_000,
        changes_per_s=1.0,
        busiest_per_s=1.0,
        day_bytes=day_bytes,
        holds_s=1.0,
        keeps_s=None if keeps_days is None else keeps_days * DAY_S,
    )


def disk(usable: int, **topics: int) -> LogDisk:
    return LogDisk(1, "/kafka", usable, {name: [size] for name, size in topics.items()})


def test_a_disk_is_full_when_what_still_grows_has_taken_the_rest() -> None:
    # For two days 300 a day; then `a` has its 12 days, and `b` goes on with 200 a day.
    topics = {"a": sized("a", 100, 12), "b": sized("b", 200, None)}
    assert full_in_s(disk(300, a=1_000, b=1_000), topics) == pytest.approx(DAY_S)
    assert full_in_s(disk(1_000, a=1_000, b=1_000), topics) == pytest.approx(4 * DAY_S)
    # A half of each topic is here.
    assert full_in_s(disk(500, a=500, b=500), topics) == pytest.approx(4 * DAY_S)


def test_a_disk_with_room_for_all_retention_is_never_full() -> None:
    topics = {"a": sized("a", 100, 12), "b": sized("b", 50, 28), "idle": sized("idle", 0, 1)}
    assert full_in_s(disk(601, a=1_000, b=1_000, idle=1_000, foreign=7_000), topics) is None
    assert full_in_s(disk(599, a=1_000, b=1_000), topics) == pytest.approx(7.98 * DAY_S)
    # One that has more than it keeps grows no more.
    assert full_in_s(disk(1, a=1_000), {"a": sized("a", 100, 9)}) is None


def test_a_broker_that_does_not_report_its_disk_has_no_end() -> None:
    assert full_in_s(disk(-1, a=1_000), {"a": sized("a", 100, None)}) is None


class Admin:
    """Answers as kafka-python's client does."""

    given: ClassVar[dict[str, Any]] = {}
    log_dirs: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, **given: Any) -> None:
        Admin.given = given

    def describe_log_dirs(self) -> list[dict[str, Any]]:
        return [{"broker": 7, "log_dirs": self.log_dirs}]

    def close(self) -> None:
        return


def test_disks_are_asked_for_with_the_security_of_the_other_clients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kafka.KafkaAdminClient", Admin)
    options = {
        "security.protocol": "sasl_ssl",
        "sasl.mechanism": "scram-sha-512",
        "sasl.username": "u",
        "sasl.password": "p",
        "ssl.ca.location": "ca.pem",
        "socket.timeout.ms": "5",
    }
    config = Config(log=LogConfig(bootstrap_servers="a:1,b:2", options=options))
    parts = [{"partition_index": number, "partition_size": 10 + number} for number in range(2)]
    folder = {"log_dir": "/k", "topics": [{"name": NAME, "partitions": parts}]}
    monkeypatch.setattr(Admin, "log_dirs", [folder])
    assert log_disks(config) == [LogDisk(7, "/k", -1, {NAME: [10, 11]})]
    assert Admin.given == {
        "bootstrap_servers": "a:1,b:2",
        "security_protocol": "SASL_SSL",
        "sasl_mechanism": "SCRAM-SHA-512",
        "sasl_plain_username": "u",
        "sasl_plain_password": "p",
        "ssl_cafile": "ca.pem",
        "bootstrap_timeout_ms": 10_000,
        "request_timeout_ms": 10_000,
    }
    monkeypatch.setattr(Admin, "log_dirs", [])
    with pytest.raises(Unavailable, match="right to DESCRIBE the cluster"):
        log_disks(config)


def reader(name: str, late_s: float, lost: int = 0) -> LogReader:
    rows = (LagRow(NAME, 0, name, 5, 10, 5, late_s),)
    return LogReader(name, NAME, rows, 10 * 3600.0, lost)


@pytest.mark.parametrize("name", ["clean desk", "group everstate.commands", "group x"])
def test_every_role_and_group_near_the_end_of_retention_needs_attention(name: str) -> None:
    assert list(of_readers([reader(name, 4 * 3600)], AlertsConfig())) == []
    (found,) = of_readers([reader(name, 6 * 3600)], AlertsConfig())
    assert found.key == f"log-expires:{name}:{NAME}"
    assert "holds what it has not read for 4.0 h only" in found.why
    (lost, _) = of_readers([reader(name, 11 * 3600, lost=3)], AlertsConfig())
    assert lost.kind == "log-expired"


def test_the_tables_say_what_is_lost_when_and_how_many_partitions_are_needed() -> None:
    found = topic_size(topic(), BUSY, 9 * DAY_S, [2_500_000_000] * 2)
    size = LogSize({NAME: found}, [(disk(2_000_000_000), 7_200.0)], None)
    pieces = list(_size_pieces(Config(), size, [reader("clean desk", 5 * 3600)]))
    topics, readers = (each for each in pieces if isinstance(each, ResultTable))
    row = next(iter(topics.rows))
    assert row[:2] == ("order.changes.g1", "5.0 GB")
    assert f"{NAME}: 2 partitions, and its busiest hour needs about 3" in pieces
    assert list(readers.rows) == [
        ("clean desk", "order.changes.g1", 5, "5.0 h", "50%", "5.0 h"),
    ]
    assert "broker 1, /kafka: 2.0 GB free, full in 2.0 h at this rate" in pieces


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (None, "–"),
        (0, "0 B"),
        (999, "999 B"),
        (1_000, "1.0 kB"),
        (2.5e12, "2.5 TB"),
        (4e15, "4,000.0 TB"),
    ],
)
def test_bytes_are_told_in_their_largest_unit(size: float | None, text: str) -> None:
    assert size_text(size) == text
