"""Clean begins again on a real broker: within a transaction, and behind raw rows that are gone."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from capture_cases import eventually
from clean_cases import DSN, ITEM, Database, capture_of
from clean_role import changelog, newest, send_raw
from everstate.config import Config
from everstate.declarations.captures import Capture
from everstate.errors import DataLoss
from everstate.log.consumer import Consumer
from everstate.log.positions import Offsets, Range
from everstate.log.producer import Producer
from everstate.log.topics import TopicNames, Topics
from everstate.sources.cdc.balance import read_balance
from everstate.sources.cdc.cleaning import Cleaning
from everstate.sources.cdc.holding import LOST, read_held
from kit.settings import cleaning
from log_cases import forget

pytestmark = cleaning(log={"partitions": 1}, topics=["item"])

Message = tuple[dict[str, Any], dict[str, Any] | None]


class Rig:
    """Writes raw records, and cleans them in the batches that a test says."""

    def __init__(self, config: Config, capture: Capture) -> None:
        self.config, self.capture = config, capture
        self.names = TopicNames(config.log.prefix)
        self._write_to(self.names.raw_prefix("shop"))

    def _write_to(self, topic: str) -> None:
        self.raw = topic
        with Topics(self.config) as topics:
            topics.ensure_raw([topic], partitions=1, settings={})

    def use_topic_of_table(self) -> None:
        """Write where another connector writes, which has a topic for each table."""
        (table,) = self.capture.by_topic()
        self._write_to(self.names.raw("shop", table))

    def send(self, log: list[Message]) -> None:
        send_raw(self.config, self.raw, log)

    def filled(self, count: int) -> Database:
        """A database whose rows, with the keys from 1 on, are in the changelog."""
        database = Database("debezium, full")
        for key in range(1, count + 1):
            database.write(key, {"name": "a"})
        self.send(database.log)
        self.clean(100)
        database.log.clear()
        return database

    def clean(self, *sizes: int, is_whole: bool = False) -> int:
        """Read what there is, in batches of these sizes; each is that of a new process.

        ``is_whole``: a batch that is cut is published to its end. Out: how many were published.
        """
        count = 0
        for size in sizes:
            with closing(Cleaning(self.config, self.capture, {"item": ITEM})) as cleaning:
                cleaning.open()
                self._add(cleaning, size)
                count += cleaning.step() is not None
                while is_whole and cleaning.is_cut:
                    count += cleaning.step() is not None
        return count

    def _add(self, cleaning: Cleaning, size: int) -> None:
        with Offsets(self.config) as offsets, Consumer(self.config) as consumer:
            start = cleaning.read_to[0]
            no_headers = (None,) * len(cleaning.slices().header_names)
            end = min(start + size, offsets.stable_ends([self.raw])[self.raw, 0])
            records = [
                (0, one.offset, one.key, one.value, no_headers, 0)
                for one in consumer.read(self.raw, 0, start, end)
            ]
        columns = cleaning.slices().begin().columns(records)
        cleaning.add(pa.Table.from_batches([columns]), {0: Range(start, end)})

    def states(self) -> dict[str, Any]:
        return newest(self.config, "item")

    def histories(self) -> dict[str, list[str]]:
        """Kinds of each entity's changes, in the order of its versions."""
        found: dict[str, list[str]] = {}
        for change in changelog(self.config, "item"):
            found.setdefault(change["key"], []).append(change["kind"])
            assert change["version"] == len(found[change["key"]])
        return found


@pytest.fixture
def make_rig(config: Config) -> Callable[[Capture], Rig]:
    return lambda capture: Rig(config, capture)


def test_records_of_an_earlier_version_in_the_held_topic_are_ignored(
    make_rig: Callable[[Capture], Rig],
) -> None:
    """Until decision 109 they had the rows whose key another row of their transaction had got."""
    rig = make_rig(capture_of("debezium", dsn=DSN))
    database = rig.filled(1)
    older = {"entity": "item", "key": "1", "index": 0, "transaction": "7", "timeUs": 7}
    value = json.dumps({**older, "part": ["raw", 0], "state": {"id": 1}}).encode()
    with Producer(rig.config) as producer:
        producer.send_raw(rig.names.capture("shop", "held"), b"\nitem\n1\n0", value)
    database.write(1, {"name": "b"})
    rig.send(database.log)
    rig.clean(100)
    assert rig.states()["1"]["name"] == "b"
    assert read_held(rig.config, "shop") == []


def test_behind_raw_rows_that_are_gone_a_partial_row_waits_for_a_snapshot(
    make_rig: Callable[[Capture], Rig],
) -> None:
    database = Database("debezium, default")
    rig = make_rig(capture_of("debezium", dsn=DSN))
    for key in (1, 2):
        database.write(key, {"name": "a", "amount": 1, "note": "old"})
    rig.send(database.log)
    rig.clean(100)
    database.log.clear()
    database.write(1, {"note": "new"})
    rig.send(database.log)
    forget(rig.config, rig.raw)
    database.log.clear()
    database.write(1, {"amount": 2})
    rig.send(database.log)
    with pytest.raises(DataLoss, match="on_loss='resume'"):
        rig.clean(100)
    rig.capture = replace(rig.capture, on_loss="resume")
    rig.clean(0)
    assert [(one.key, one.reason) for one in read_held(rig.config, "shop")] == [("", LOST)]
    rig.clean(100)
    assert rig.states()["1"]["amount"] == 1
    assert [(one.key, len(one.rows)) for one in read_held(rig.config, "shop")] == [
        ("", 0),
        ("1", 1),
    ]
    database.log.clear()
    database.read(1)
    database.write(1, {"amount": 3})
    rig.send(database.log)
    rig.clean(100)
    assert rig.states()["1"] == database.rows[1]
    assert [one.key for one in read_held(rig.config, "shop")] == [""]


OURS = {"dsn": DSN}
OTHERS: dict[str, Any] = {}
"""A topic for each table, which another connector writes."""


@pytest.mark.parametrize("is_one_process", [True, False])
@pytest.mark.parametrize("options", [OURS, OTHERS])
def test_the_deletes_of_a_truncation_are_published_in_cuts(
    make_rig: Callable[[Capture], Rig],
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    is_one_process: bool,
) -> None:
    monkeypatch.setattr("everstate.sources.cdc.gone._DELETES_MAX", 3)
    rig = make_rig(capture_of("debezium", table={"truncate": "delete"}, **options))
    if options is OTHERS:
        rig.use_topic_of_table()
    database = rig.filled(8)
    database.write(2, {"name": "before"})
    database.truncate()
    for key in (2, 9):
        database.write(key, {"name": "after"})
    rig.send(database.log)
    batches = rig.clean(100, is_whole=is_one_process) + rig.clean(100, 100, 100, 100)
    assert batches == 3, "3 + 3 + 2 deletes; the update is with the first, the new rows last"
    wanted = {str(key): ["created", "deleted"] for key in range(1, 9)}
    wanted["2"] = ["created", "updated", "deleted", "created"]
    assert rig.histories() == {**wanted, "9": ["created"]}
    assert rig.states() == {str(key): row for key, row in database.rows.items()}
    (balance,) = (one for one in read_balance(rig.config, rig.capture).tables)
    assert (balance.read, balance.added, balance.published) == (12, 8, 19)
    assert (balance.skipped, balance.vanished) == (1, 0), "the truncation's own record"


def test_a_position_before_a_cut_does_not_pass_over_its_rest(
    make_rig: Callable[[Capture], Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everstate.sources.cdc.gone._DELETES_MAX", 3)
    rig = make_rig(capture_of("debezium", table={"truncate": "delete"}, dsn=DSN))
    database = rig.filled(5)
    for name in "bcd":
        database.write(1, {"name": name})
    database.truncate()
    rig.send(database.log)
    # The next processes read less at once than the one that made the cut.
    assert rig.clean(100, 0, 1, 0, 2, 1, 0) == 4
    wanted = {str(key): ["created", "deleted"] for key in range(1, 6)}
    wanted["1"][1:1] = ["updated"] * 3
    assert rig.histories() == wanted


def test_a_cut_in_a_raw_log_that_was_made_anew_passes_over_no_row(
    make_rig: Callable[[Capture], Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everstate.sources.cdc.gone._DELETES_MAX", 3)
    rig = make_rig(capture_of("debezium", table={"truncate": "delete"}, dsn=DSN))
    database = rig.filled(5)
    database.truncate()
    rig.send(database.log)
    rig.clean(100)
    with Topics(rig.config) as topics:
        topics.delete([rig.raw])
        assert eventually(lambda: rig.raw not in topics.existing(), 10)
        topics.ensure_raw([rig.raw], partitions=1, settings={})
    database.log.clear()
    database.write(9, {"name": "new"})
    rig.send(database.log)
    rig.clean(100)
    assert rig.histories()["9"] == ["created"]


@pytest.mark.settings(
    log={"partitions": 1}, topics=["item"], database=False, capture={"deletes_max_percent": 100}
)
@pytest.mark.parametrize("is_one_process", [True, False])
def test_what_a_snapshot_taken_again_lacks_is_deleted_in_cuts(
    make_rig: Callable[[Capture], Rig], monkeypatch: pytest.MonkeyPatch, is_one_process: bool
) -> None:
    monkeypatch.setattr("everstate.sources.cdc.gone._DELETES_MAX", 3)
    rig = make_rig(capture_of("debezium", dsn=DSN))
    database = rig.filled(8)
    for key in range(1, 8):
        database.rows.pop(key)
    database.read(8, snapshot="true")
    database.write(8, {"name": "b"})
    rig.send(database.log)
    batches = rig.clean(100, is_whole=is_one_process) + rig.clean(100, 100, 100, 100, 100)
    assert batches == 5, "its row, 3 + 3 + 1 deletes, and the row behind it"
    wanted = {str(key): ["created", "deleted"] for key in range(1, 8)}
    assert rig.histories() == {**wanted, "8": ["created", "updated"]}
