"""The entities of a type in memory, on a real Kafka: from `.state`, and then from `.changes`."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from typing import Any

import msgspec
import pytest

from everstate.changes.tokens import written_token
from everstate.errors import DataLoss, InvalidToken, NotCaughtUp
from everstate.log.record import OutRecord
from everstate.log.topics import TopicNames
from everstate.serving.changes import Changes
from everstate.serving.table import EntityTable
from kit.view_orders import ViewedOrder
from log_cases import forget
from reading_cases import Orders

KEYS = [f"k{number}" for number in range(8)]


def written(orders: Orders, random: Random, many: int) -> list[OutRecord]:
    """Random changes, deletions and creations after them included."""
    found = []
    for _ in range(many):
        key = random.choice(KEYS)
        is_there = orders.versions.get(key, (0, None))[1] is not None
        fields = {"quantity": random.randrange(100), "region": random.choice(["north", "süd"])}
        is_deleted = is_there and random.random() < 0.3
        found.append(orders.change(key) if is_deleted else orders.change(key, **fields))
    return found


def publish(orders: Orders, records: Iterable[OutRecord]) -> None:
    """Send changes to both topics, as a publisher does."""
    state = TopicNames(orders.config.log.prefix).state("order")
    orders.send(
        *(each for one in records for each in (one, msgspec.structs.replace(one, topic=state)))
    )


def present(orders: Orders) -> dict[str, ViewedOrder]:
    return {key: order for key, (_, order) in orders.versions.items() if order is not None}


def is_equal(table: EntityTable, orders: Orders) -> bool:
    """Whether the table has exactly what was written; by each of its calls."""
    expected = present(orders)
    return (
        dict(table) == expected
        and len(table) == len(expected)
        and [key in table for key in KEYS] == [key in expected for key in KEYS]
        and [table.version(key) for key in KEYS]
        == [orders.versions.get(key, (0, None))[0] for key in KEYS]
    )


def test_a_table_has_every_entity_and_every_change_after_it_was_made(orders: Orders) -> None:
    random = Random(7)
    publish(orders, written(orders, random, 60))
    with Changes(orders.config, orders.app, "order", since="now", raw=True) as changes:
        ends = {at[1]: spot.next_offset for at, spot in changes.spots.items()}
    forget(orders.config, orders.topic, ends)
    with orders.app.table("order", orders.config) as table:
        assert is_equal(table, orders)
        for _ in range(5):
            more = written(orders, random, 20)
            # One comes twice, one is no JSON, and one is older than what the table has.
            publish(orders, [*more, more[-1], OutRecord(orders.topic, b"k1", b"not json"), more[0]])
            with orders.app.changes("order", since="now", raw=True, config=orders.config) as found:
                table.wait_for(found.token)
            assert is_equal(table, orders)
        last = written(orders, random, 1)
        publish(orders, last)
        key = (last[0].key or b"").decode()
        table.wait_for(orders.app.token("order", key, orders.versions[key][0]))
        assert is_equal(table, orders)
        since = table.token
    again = orders.app.changes("order", since=since, until="now", raw=True, config=orders.config)
    assert list(again) == []
    with orders.app.table("order", orders.config) as table:
        assert is_equal(table, orders)
        with pytest.raises(KeyError):
            table["absent"]


def test_a_change_between_the_two_topics_reads_is_not_missed(
    orders: Orders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changes come after `.state` was read, and before `.changes` is followed."""
    random = Random(11)
    publish(orders, written(orders, random, 20))
    take = EntityTable._take

    def late(table: EntityTable, *given: Any) -> None:
        monkeypatch.setattr(EntityTable, "_take", take)
        publish(orders, written(orders, random, 20))
        take(table, *given)

    monkeypatch.setattr(EntityTable, "_take", late)
    with orders.app.table("order", orders.config) as table:
        with orders.app.changes("order", since="now", raw=True, config=orders.config) as found:
            table.wait_for(found.token)
        assert is_equal(table, orders)


def test_a_table_says_what_it_lacks_and_why_it_ended(orders: Orders) -> None:
    publish(orders, [orders.change("k1", quantity=1, region="north")])
    with orders.app.table("order", orders.config) as table:
        with pytest.raises(NotCaughtUp, match=r"'k1' version 2 is not in the log yet"):
            table.wait_for(orders.app.token("order", "k1", 2), wait_s=0.2)
        with pytest.raises(InvalidToken, match="it is of project 'other'"):
            table.wait_for(str(written_token("other", "order", "k1", 1)))

        def expired(*_: object) -> list[object]:
            raise DataLoss("offsets are gone")

        table._source.poll = expired  # type: ignore[method-assign, assignment]
        with pytest.raises(DataLoss):
            table.wait_for(orders.app.token("order", "k1", 2))
        for call in (lambda: table["k1"], lambda: len(table), lambda: "k1" in table):
            with pytest.raises(DataLoss):
                call()
