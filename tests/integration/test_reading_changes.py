"""Snapshots and changes on real servers: no gap, no double, from the archive and from the log."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from everstate.errors import (
    DataLoss,
    InvalidToken,
    NotCaughtUp,
    NotFound,
    UnknownEntity,
    UnknownView,
)
from everstate.log.consumer import Consumer
from everstate.log.positions import Offsets
from everstate.log.record import OutRecord, Record
from everstate.serving.changes import Delivery
from everstate.views.source import RecordSource
from kit.view_orders import START
from log_cases import forget
from reading_cases import PARTITIONS, Orders, orders_app, versions_of


def by_partition(found: Iterable[Delivery]) -> dict[int, list[Record]]:
    """Records of each partition in their order; partitions have none between them."""
    records: dict[int, list[Record]] = defaultdict(list)
    for delivery in found:
        records[delivery.record.partition].append(delivery.record)
    return dict(records)


def woven(orders: Orders, keys: int = 6, versions: int = 4) -> list[OutRecord]:
    """Some versions of some keys; one waits for its second, one comes twice, one is no JSON."""
    records = []
    for version in range(versions):
        for key in range(keys):
            quantity = 10 * key + version
            records.append(orders.change(f"k{key}", quantity=quantity, region="north"))
    early = records.pop(keys)  # version 2 of k0 comes last
    records.insert(keys + 2, records[2])
    records.insert(3, OutRecord(orders.topic, b"k1", b"not json"))
    return [*records, early]


def test_changes_from_the_beginning_are_dense_and_end_where_they_are_told_to(
    orders: Orders,
) -> None:
    orders.send(*woven(orders))
    while orders.keep(3):
        pass
    with orders.app.changes("order", since="beginning", until="now", config=orders.config) as found:
        changes = [item.change for item in found]
    assert versions_of(changes) == {f"k{key}": [1, 2, 3, 4] for key in range(6)}
    raw = orders.app.changes(
        "order", since="beginning", until="now", raw=True, config=orders.config
    )
    assert len(list(raw)) == 26


def test_a_stream_goes_on_from_each_of_its_tokens(orders: Orders) -> None:
    """Also from those among changes that one change has released."""
    orders.send(*woven(orders))
    orders.keep()
    app, config = orders.app, orders.config
    whole = list(app.changes("order", since="beginning", until="now", config=config))
    for number, item in enumerate(whole):
        rest = app.changes("order", since=item.token, until="now", config=config)
        seen = [*whole[: number + 1], *rest]
        assert versions_of(each.change for each in seen) == versions_of(i.change for i in whole)
        assert len(seen) == len(whole)
    assert list(app.changes("order", since=whole[-1].token, until="now", config=config)) == []
    middle = list(app.changes("order", since="beginning", until=whole[9].token, config=config))
    assert len(middle) == 10


@pytest.mark.parametrize("mixed", [False, True])
def test_what_the_log_has_no_more_comes_from_the_archive(orders: Orders, mixed: bool) -> None:
    orders.send(*woven(orders))
    orders.keep()
    app, config = orders.app, orders.config
    whole = list(app.changes("order", since="beginning", until="now", config=config))
    ends = orders.kept.vector()
    archive = orders.archive(ends)
    if mixed:
        archive.mix()
    forget(orders.config, orders.topic, {p: end - 1 for p, end in ends.items()})
    again = list(app.changes("order", since="beginning", until="now", config=config))
    assert by_partition(again) == by_partition(whole)
    for number in (3, 20):
        rest = list(app.changes("order", since=whole[number].token, until="now", config=config))
        assert by_partition(rest) == by_partition(whole[number + 1 :])


@pytest.mark.parametrize("expires", [False, True])
def test_a_reader_begins_at_a_time(orders: Orders, expires: bool) -> None:
    """By the time at which the log has it; what the log has no more is found in the archive."""
    orders.send(*(orders.change(f"k{n}", quantity=n) for n in range(12)))
    orders.keep()
    app, config = orders.app, orders.config
    early = list(app.changes("order", since="beginning", until="now", config=config))
    time.sleep(0.05)
    moment = datetime.now(UTC).isoformat()
    orders.send(*(orders.change(f"k{n}", quantity=n) for n in range(8, 20)))
    orders.keep()
    whole = list(app.changes("order", since="beginning", until="now", config=config))
    if expires:
        orders.archive(orders.kept.vector())
        forget(orders.config, orders.topic, orders.kept.vector())
    found = list(app.changes("order", since=moment, until="now", config=config))
    assert len(found) == 12
    known = {(each.record.partition, each.record.offset) for each in early}
    late = [e for e in whole if (e.record.partition, e.record.offset) not in known]
    assert by_partition(found) == by_partition(late)
    tomorrow = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    assert list(app.changes("order", since=tomorrow, until="now", config=config)) == []


def test_a_time_whose_changes_are_lost_is_no_shorter_answer(orders: Orders) -> None:
    orders.send(*woven(orders))
    orders.keep()
    ends, since = orders.kept.vector(), "yesterday 00:00"
    forget(orders.config, orders.topic, {number: end - 1 for number, end in ends.items()})
    with pytest.raises(DataLoss, match="neither in the log nor in the archive"):
        list(orders.app.changes("order", since=since, config=orders.config))
    # Where retention has taken everything, the archive has nothing, and nothing came since.
    forget(orders.config, orders.topic, ends)
    found = orders.app.changes("order", since=since, until="now", config=orders.config)
    assert list(found) == []


def test_a_reader_whose_next_offset_expires_goes_on_in_the_archive(orders: Orders) -> None:
    orders.send(*woven(orders))
    orders.keep()
    app, config = orders.app, orders.config
    stream = iter(app.changes("order", since="beginning", until="now", config=config))
    first = next(stream)
    orders.archive(orders.kept.vector())
    forget(orders.config, orders.topic, orders.kept.vector())
    rest = list(app.changes("order", since=first.token, until="now", config=config))
    assert len(rest) == 23
    assert len(list(stream)) == 23


def test_what_neither_log_nor_archive_has_is_loss_and_not_a_shorter_answer(orders: Orders) -> None:
    orders.send(*woven(orders))
    orders.keep()
    forget(orders.config, orders.topic, orders.kept.vector())
    with pytest.raises(DataLoss, match="neither in the log nor in the archive"):
        list(orders.app.changes("order", since="beginning", config=orders.config))


def test_held_changes_that_are_near_each_other_are_read_together(
    orders: Orders, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders.send(*(orders.change("k0", quantity=number) for number in range(900)))
    orders.keep()
    (partition,) = (p for p, end in orders.kept.vector().items() if end)
    wanted = [2, *range(300, 340, 2), 899]
    asked: list[tuple[int, int]] = []
    read = Consumer.read

    def counted(consumer: Consumer, topic: str, at: int, start: int, end: int) -> Any:
        asked.append((start, end))
        return read(consumer, topic, at, start, end)

    monkeypatch.setattr(Consumer, "read", counted)
    with closing(RecordSource(orders.config, "order")) as source:
        found = source.fetch(partition, wanted)
    assert [record.offset for record in found] == wanted
    assert asked == [(899, 900), (300, 339), (2, 3)]

    orders.archive({partition: 400})
    forget(orders.config, orders.topic, {partition: 310})
    with closing(RecordSource(orders.config, "order")) as source:
        assert source.fetch(partition, wanted) == found
        forget(orders.config, orders.topic, {partition: 401})
        assert source.fetch(partition, wanted) == found
        with pytest.raises(DataLoss, match="offsets 400 to 410"):
            source.fetch(partition, [400, 410])


def test_a_change_comes_when_the_core_has_accepted_it_and_closing_ends_the_wait(
    orders: Orders,
) -> None:
    app, config = orders.app, orders.config
    changes = app.changes("order", since="now", config=config)
    came: list[str] = []

    def follow() -> None:
        for item in changes:
            came.append(item.change.key)

    thread = threading.Thread(target=follow)
    thread.start()
    with orders.keeping():
        orders.send(orders.change("a", quantity=1), orders.change("b", quantity=1))
        orders.wait_until_kept()
        snapshot = app.snapshot("order_latest", config=config)
        last = app.changes("order", since=snapshot.token, config=config)
        deadline = threading.Event()
        while len(came) < 2 and not deadline.wait(0.02):
            pass
    assert sorted(came) == ["a", "b"]
    assert last.token == changes.token == snapshot.token
    changes.close()
    thread.join(5)
    assert not thread.is_alive()


def test_a_snapshot_has_the_rows_of_its_token(orders: Orders) -> None:
    app, config = orders.app, orders.config
    orders.send(*woven(orders))
    orders.keep(5)
    totals = app.snapshot("totals", config=config)
    assert totals.columns == ("orders", "quantity")
    after = app.changes("order", since=totals.token, config=config)
    orders.keep()
    count, quantity = totals.rows[0]
    changed = app.changes("order", since=totals.token, until="now", config=config)
    for item in changed:
        now, before = item.change.current, item.change.original
        count += (now is not None) - (before is not None)
        quantity = (quantity or 0) + (now or {"quantity": 0})["quantity"]
        quantity -= (before or {"quantity": 0})["quantity"]
    assert app.snapshot("totals", config=config).records() == [
        {"orders": count, "quantity": quantity}
    ]
    assert after.token == totals.token
    assert {row["_key"] for row in app.snapshot("order", config=config).records()} == {
        f"k{key}" for key in range(6)
    }


def test_a_reader_waits_for_a_write_and_for_a_position(orders: Orders) -> None:
    app, config = orders.app, orders.config
    orders.send(orders.change("a", quantity=1))
    written = app.token("order", "a", 1)
    with pytest.raises(
        NotCaughtUp, match=r"order 'a' version 1 is not accepted yet.*no version of it"
    ):
        app.snapshot("totals", wait_for=written, wait_s=0.1, config=config)
    orders.keep()
    assert app.snapshot("totals", wait_for=written, config=config).rows == [(1, 1)]
    token = app.snapshot("order_latest", config=config).token
    behind = orders.kept.without("totals")
    orders.send(orders.change("a", quantity=5))
    with orders.keeping():
        found = app.snapshot("totals", wait_for=app.token("order", "a", 2), config=config)
    assert found.rows == [(1, 5)]
    assert behind.riders
    with app.reader(config) as reader:
        assert reader.get("order", "a", wait_for=token).state["quantity"] == 5
        assert reader.rows("totals", wait_for=found.token)[1] == [(1, 5)]
        with pytest.raises(NotCaughtUp, match="version 9 is not accepted yet"):
            reader.history("order", "a", wait_for=app.token("order", "a", 9), wait_s=0.05)


@pytest.mark.parametrize("behind", [0, 2, "ahead"])
def test_a_history_that_the_views_do_not_keep_is_found_in_the_lake(
    orders: Orders, behind: int | str
) -> None:
    """And in the log, as far as the lake is behind it; what the core has not judged is not."""
    orders.send(*woven(orders), orders.change("k2"))
    while orders.keep(7):
        pass
    if isinstance(behind, str):
        orders.send(*(orders.change(f"k{n}", quantity=99) for n in (0, 1, 2, 3, 4, 5, 0)))
        with Offsets(orders.config) as offsets:
            ends = {p: end for (_, p), end in offsets.stable_ends([orders.topic]).items()}
    else:
        ends = {p: end - behind for p, end in orders.kept.vector().items()}
    orders.archive(ends)
    with (
        orders.app.reader(orders.config) as hot,
        orders_app(history=False).reader(orders.config) as cold,
    ):
        for key in (f"k{number}" for number in range(6)):
            wanted, found = hot.history("order", key), cold.history("order", key)
            assert [replace(version, cold=None) for version in found] == wanted
            read = found[0].cold
            assert read is not None
            assert 0 <= read.files_read <= read.files == PARTITIONS
            assert cold.history("order", key, limit=2)[0].version == wanted[-2:][0].version
            assert cold.version("order", key, 2).differences == wanted[1].differences
            third = cold.get("order", key, version=3)
            assert replace(third, cold=None) == hot.get("order", key, version=3)
        moment = START + timedelta(days=1)
        assert cold.get("order", "k0", at=moment).version == 4
        with pytest.raises(NotFound, match="was deleted by desk at version 5"):
            cold.get("order", "k2", at=moment)
        with pytest.raises(NotFound, match=r"'k0' did not exist at .*; it was first seen"):
            cold.get("order", "k0", recorded_at=START - timedelta(days=1))
        with pytest.raises(NotFound, match="has no version 9; it has 1 to 4"):
            cold.get("order", "k0", version=9)
        with pytest.raises(NotFound, match="has no version 9; it has 1 to 4"):
            cold.version("order", "k0", 9)


def test_a_token_of_another_project_or_log_is_refused(orders: Orders) -> None:
    app, config = orders.app, orders.config
    token = app.snapshot("totals", config=config).token
    with pytest.raises(InvalidToken, match="of project 'hotel', and this is 'orders'"):
        app.snapshot("totals", wait_for=_of_hotel(), config=config)
    with pytest.raises(InvalidToken, match="it has no position of order"):
        app.changes("order", since=app.token("order", "a", 1), config=config)
    orders.kept.connection.execute("UPDATE topic_identity SET topic_id = 'another'")
    with pytest.raises(InvalidToken, match="of another log"):
        app.snapshot("totals", wait_for=token, config=config)
    with pytest.raises(UnknownView):
        app.snapshot("nothing", config=config)
    with pytest.raises(UnknownEntity):
        app.changes("nothing", since="now", config=config)


def _of_hotel() -> str:
    from everstate.app import App
    from kit.view_orders import ViewedOrder

    hotel = App("hotel")
    hotel.entity("order", key="order_id")(ViewedOrder)
    return hotel.token("order", "a", 1)
