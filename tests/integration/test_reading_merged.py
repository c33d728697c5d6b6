"""Changes of several entity types as one stream: in the order of recording, with one token."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

import pytest

from everstate.app import App
from everstate.errors import InvalidQuery, InvalidToken, UnknownEntity
from everstate.log.record import OutRecord
from everstate.log.topics import TopicNames, Topics
from everstate.serving import merged
from everstate.serving.changes import Delivery
from hand_archive import Seat
from log_cases import forget
from reading_cases import PARTITIONS, Orders, orders_app, versions_of

BOTH = ("seat", "order")


@dataclass
class Both:
    """Two changelogs of records that are read raw; each record has its own millisecond."""

    orders: Orders
    app: App
    clock_ms: int

    def send(self, count: int, seed: int) -> None:
        """Write records in the order of their times, to partitions and entity types by chance."""
        random, names = Random(seed), TopicNames(self.orders.config.log.prefix)
        records = []
        for _ in range(count):
            self.clock_ms += random.choice((1, 1, 1, 200))
            topic, number = names.changes(random.choice(BOTH)), random.randrange(PARTITIONS)
            records.append(
                OutRecord(topic, b"k", b"{}", partition=number, timestamp_ms=self.clock_ms)
            )
        self.orders.send(*records)

    def read(self, since: str, until: str = "now") -> list[Delivery]:
        config = self.orders.config
        with self.app.changes(BOTH, since=since, until=until, raw=True, config=config) as found:
            return list(found)


@pytest.fixture
def both(orders: Orders) -> Both:
    app = orders_app()
    app.entity("seat", key="seat_id")(Seat)
    with Topics(orders.config) as topics:
        topics.ensure(["seat"])
    return Both(orders, app, int(time.time() * 1000) - 3_600_000)


def times_of(found: Sequence[Delivery]) -> list[int]:
    return [each.record.timestamp_ms for each in found]


def test_the_past_comes_by_the_time_of_recording_and_goes_on_from_each_token(both: Both) -> None:
    both.send(60, seed=1)
    whole = both.read("beginning")
    assert len(whole) == 60
    assert times_of(whole) == sorted(times_of(whole))
    assert {each.entity for each in whole} == set(BOTH)
    for number, each in enumerate(whole):
        assert times_of(both.read(each.token)) == times_of(whole[number + 1 :])
    assert times_of(both.read("beginning", whole[29].token)) == times_of(whole[:30])


def test_a_token_of_what_was_read_ahead_is_found(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted defect: the token of the streams, which have read more than was delivered."""

    def ahead(self: merged.MergedChanges, delivery: Delivery) -> Delivery:
        name = delivery.entity
        self._spots = {each: stream.spots for each, stream in self._streams.items()}
        others = {each: self._position(each) for each in BOTH if each != name}
        stream = replace(delivery.stream, others=others)
        return replace(delivery, stream=stream, others=self._spots[name])

    both.send(60, seed=1)
    monkeypatch.setattr(merged.MergedChanges, "_delivered", ahead)
    whole = both.read("beginning")
    assert any(
        times_of(both.read(each.token)) != times_of(whole[number + 1 :])
        for number, each in enumerate(whole)
    )


def test_what_the_log_has_no_more_comes_first_from_the_archives(both: Both) -> None:
    both.send(60, seed=2)
    whole = both.read("beginning")
    cut = {
        p: sum(e.entity == "order" and e.record.partition == p for e in whole) // 2 for p in (0, 1)
    }
    both.orders.archive(cut)
    forget(both.orders.config, both.orders.topic, cut)
    archived = [
        e for e in whole if e.entity == "order" and e.record.offset < cut.get(e.record.partition, 0)
    ]
    again = both.read("beginning")
    first, rest = again[: len(archived)], again[len(archived) :]
    assert sorted(times_of(first)) == times_of(archived) != []
    assert times_of(rest) == sorted(set(times_of(whole)) - set(times_of(archived)))
    for number in (0, len(archived) - 1, len(archived) + 5):
        assert times_of(both.read(again[number].token)) == times_of(again[number + 1 :])


def test_accepted_changes_come_in_the_order_of_their_versions(orders: Orders) -> None:
    for version in range(5):
        orders.send(*(orders.change(f"k{n}", quantity=version) for n in range(8)))
    orders.keep()
    app, config = orders.app, orders.config
    whole = list(app.changes(["order"], since="beginning", until="now", config=config))
    assert versions_of(each.change for each in whole) == {
        f"k{n}": [1, 2, 3, 4, 5] for n in range(8)
    }
    for number, each in enumerate(whole):
        rest = list(app.changes(["order"], since=each.token, until="now", config=config))
        assert times_of(rest) == times_of(whole[number + 1 :])
    # The token is also one of the entity type alone.
    alone = list(app.changes("order", since=whole[-1].token, until="now", config=config))
    assert alone == []


def test_new_changes_come_as_they_arrive_and_closing_ends_the_wait(both: Both) -> None:
    came = list[int]()
    stream = both.app.changes(BOTH, since="now", raw=True, config=both.orders.config)

    def follow() -> None:
        came.extend(each.record.timestamp_ms for each in stream)

    thread = threading.Thread(target=follow)
    thread.start()
    both.send(50, seed=3)
    deadline = time.monotonic() + 30
    while both.read(stream.token) and time.monotonic() < deadline:
        time.sleep(0.02)
    stream.close()
    thread.join(5)
    assert not thread.is_alive()
    assert sorted(came) == times_of(both.read("beginning"))


def test_a_token_of_one_entity_type_is_not_enough(both: Both) -> None:
    config = both.orders.config
    one = both.app.changes("order", since="now", raw=True, config=config)
    with one, pytest.raises(InvalidToken, match="it has no position of seat"):
        both.app.changes(BOTH, since=one.token, raw=True, config=config)
    with pytest.raises(UnknownEntity):
        both.app.changes(["order", "chair"], since="now", config=config)
    with pytest.raises(InvalidQuery, match="no entity type is named"):
        both.app.changes([], since="now", config=config)
