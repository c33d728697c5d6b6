"""C8: a changelog that lost its newest records is noticed, though the progress is whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import confluent_kafka
import pytest

from clean_cases import CONFIG
from everstate.config import Config, load
from everstate.errors import LogTruncated
from everstate.log import consumer as consumer_module
from everstate.log import publisher as publisher_module
from everstate.log import tails
from everstate.log.client import consumer_settings
from everstate.log.publisher import OncePublisher, PublishedProgress
from everstate.log.record import OutRecord
from everstate.log.tails import Tail, check_tails, decode_tails, encode_tails, tails_with
from everstate.log.topics import TopicNames

Place = tuple[str, int]


class Log:
    """Topics of two partitions, as a broker has them; offsets without a record are markers."""

    def __init__(self, **records: tuple[list[int], list[int]]) -> None:
        self.records = {
            (topic, partition): offsets
            for topic, both in records.items()
            for partition, offsets in enumerate(both)
        }
        self.first, self.open = dict.fromkeys(self.records, 0), set[Place]()
        self.read_places: list[Place] = []

    def __call__(self, *_: Any, **__: Any) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def high_watermarks(self, topics: Iterable[str]) -> dict[Place, int]:
        # A marker of the transaction follows its records.
        wanted = set(topics)
        return {
            place: max(offsets, default=-2) + 2
            for place, offsets in self.records.items()
            if place[0] in wanted
        }

    def stable_ends(self, topics: Iterable[str]) -> dict[Place, int]:
        return {
            place: end - (place in self.open) for place, end in self.high_watermarks(topics).items()
        }

    def beginnings(self, topics: Iterable[str]) -> dict[Place, int]:
        wanted = set(topics)
        return {place: at for place, at in self.first.items() if place[0] in wanted}

    def read(self, topic: str, partition: int, start: int, end: int) -> Iterator[int]:
        self.read_places.append((topic, partition))
        yield from (at for at in self.records[topic, partition] if start <= at < end)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    found = Log(a=([0, 1, 3], [0, 2, 3]), b=([0], []))
    monkeypatch.setattr(tails, "Offsets", found)
    monkeypatch.setattr(tails, "Consumer", found)
    return found


def lost(known: dict[str, Tail]) -> str:
    """What is said to be lost; empty: nothing is."""
    try:
        check_tails(CONFIG, "relay main", known)
    except LogTruncated as error:
        return error.message
    return ""


def test_a_batch_has_the_ends_before_it_and_its_records_of_each_watched_topic(log: Log) -> None:
    records = [OutRecord(topic, b"k", b"v") for topic in ("a", "state", "a", "b")]
    found: Any = log
    known = tails_with(found, records, ["a", "b", "other"], {})
    assert known == {"a": Tail((5, 5), 2), "b": Tail((2, 0), 1)}
    assert decode_tails(encode_tails(known)) == known
    assert tails_with(found, [OutRecord("state", b"k", b"v")], ["a"], {}) == {}


def test_a_batch_is_counted_with_the_batches_shortly_before_it(log: Log) -> None:
    asked = list[str]()

    def high_watermarks(topics: Iterable[str]) -> dict[Place, int]:
        asked.extend(topics)
        return log.high_watermarks(topics)

    found: Any = SimpleNamespace(high_watermarks=high_watermarks)
    records = [OutRecord(topic, b"k", b"v") for topic in ("a", "b", "a")]
    recent = {"a": Tail((2, 1), 7), "c": Tail((1,), 1)}
    assert tails_with(found, records, ["a", "b", "c"], recent) == {
        "a": Tail((2, 1), 9),
        "b": Tail((2, 0), 1),
    }
    assert asked == ["b"]


def test_a_whole_log_is_taken_and_only_the_newest_batch_is_read(log: Log) -> None:
    assert lost({}) == ""
    assert log.read_places == []
    assert lost({"a": Tail((2, 1), 3), "b": Tail((2, 0), 0)}) == ""
    assert lost({"a": Tail((2, 1), 1)}) == ""


@pytest.mark.parametrize(
    ("tail", "said"),
    [
        (Tail((6, 5), 0), r"a[0] ends at 5, and ended at 6 before"),
        (Tail((5, 9), 2), r"a[1] ends at 5, and ended at 9 before"),
        (Tail((2, 1), 4), "a has 3 of the newest 4 records"),
        (Tail((5, 5), 1), "a has 0 of the newest 1 records"),
    ],
)
def test_what_is_lost_is_named(log: Log, tail: Tail, said: str) -> None:
    assert said in lost({"b": Tail((2, 0), 0), "a": tail})


def test_what_cannot_be_counted_is_not_called_lost(log: Log) -> None:
    """Old records were deleted, or another writer's transaction is open."""
    log.open.add(("a", 1))
    assert lost({"a": Tail((2, 1), 4)}) == ""
    log.open.clear()
    log.first["a", 0] = 3
    assert lost({"a": Tail((2, 1), 4)}) == ""
    assert lost({"a": Tail((3, 1), 4)}) != ""


@pytest.fixture
def mocked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Config]:
    """A log in this process: the pretended brokers that Kafka's client library has."""

    def without_sums(*given: Any, **more: Any) -> dict[str, Any]:
        """The settings of a reader of these brokers, which write no sums."""
        return {**consumer_settings(*given, **more), "check.crcs": False}

    monkeypatch.setattr(consumer_module, "consumer_settings", without_sums)
    given = {"bootstrap.servers": "none", "test.mock.num.brokers": 1, "log_level": 0}
    brokers = confluent_kafka.Producer(given)
    (broker,) = brokers.list_topics(timeout=10).brokers.values()
    config = load(tmp_path, log={"bootstrap_servers": f"{broker.host}:{broker.port}"})
    names = TopicNames(config.log.prefix)
    for topic in (names.progress, names.changes("order"), names.state("order")):
        brokers.list_topics(topic, timeout=10)
    yield config
    del brokers


@pytest.mark.parametrize(("again_s", "ended", "sent"), [(0.0, 4, 4), (1e9, 0, 7)])
def test_a_publisher_records_the_tails_of_its_batches_and_checks_them(
    mocked: Config, monkeypatch: pytest.MonkeyPatch, again_s: float, ended: int, sent: int
) -> None:
    """The ends before the last batch with records for the topic, or before both."""
    monkeypatch.setattr(publisher_module, "_ENDS_AGAIN_S", again_s)
    names = TopicNames(mocked.log.prefix)
    changes, state = names.changes("order"), names.state("order")

    def batch(count: int) -> list[OutRecord]:
        keys = [f"k{number}".encode() for number in range(count)]
        return [OutRecord(topic, key, b"v") for topic in (changes, state) for key in keys]

    def publisher() -> OncePublisher:
        # Topics have four partitions here, and the progress of this name is in the first.
        return OncePublisher(mocked, "relay-main", watched=[changes])

    with publisher() as first:
        first.open()
        first.check_tails("relay", 0)
        first.publish(1, batch(3), b"1")
        first.publish(2, batch(4), b"2")
        first.publish(3, [OutRecord(state, b"k", b"v")], b"3")
    with publisher() as second:
        progress = second.open()
        assert progress == PublishedProgress(3, b"3")
        second.check_tails("relay", 0)
        ((topic, tail),) = decode_tails(progress.tails if progress else b"").items()
        assert (topic, sum(tail.ends), tail.sent) == (changes, ended, sent)
        for wrong in (Tail(tuple(end + 9 for end in tail.ends), 0), Tail(tail.ends, sent + 1)):
            second._tails = {changes: wrong}
            with pytest.raises(LogTruncated, match="lost records that were published"):
                second.check_tails("relay", 2)
        # The log need not have the batches of an earlier one.
        second.check_tails("relay", 3)
        second.publish(4, batch(1), b"4")
    with publisher() as third:
        third.open()
        third.check_tails("relay", 3)
