"""What MariaDB's connector does not see, by the events that the binlog has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from everstate.declarations.captures import Capture, Table
from everstate.sources.cdc import mariadb, mariadb_unseen
from everstate.sources.cdc.mariadb import BinlogEvent, MariaDatabase
from everstate.sources.cdc.mariadb_unseen import judged, look_at, written_tables
from everstate.sources.cdc.replaced import Mark
from tiers import counted

TABLES = ("shop.orders", "shop.stock")
CAPTURE = Capture(name="shop", kind="mariadb", tables={each: Table(entity="e") for each in TABLES})
XID = "X'78',X'',1"
STATEMENT = ("Query", "use `shop`; insert into orders values (55,'s')")
COMMAND = "`everstate cdc snapshot shop --new-epoch`"
Told = tuple[str, str]


MARK = Mark("m", looked_at="b1:4")


def events(*told: Told) -> list[BinlogEvent]:
    return [
        BinlogEvent(f"b.1:{at}", kind, info, f"b.1:{at + 1}")
        for at, (kind, info) in enumerate(told)
    ]


def found_in(told: list[BinlogEvent], capture: Capture = CAPTURE) -> dict[str, str]:
    return judged(capture, MARK, "b1:4", told).unseen


def prepared(*tables: str, xid: str = XID, gtid: str = "0-1-11") -> list[Told]:
    """A prepared transaction, as SHOW BINLOG EVENTS of MariaDB 11.4 has it."""
    mapped = [("Table_map", f"table_id: 18 ({table})") for table in tables]
    rows = [("Write_rows_v1", "table_id: 18 flags: STMT_END_F") for _ in tables]
    begun = ("Gtid", f"XA START {xid} GTID {gtid}")
    return [begun, *mapped, *rows, ("Query", f"XA END {xid}"), ("XA_prepare", f"XA PREPARE {xid}")]


def ended(how: str, xid: str = XID) -> list[Told]:
    said = f"use `shop`; set foreign_key_checks=1, unique_checks=1; XA {how} {xid}"
    return [("Gtid", "GTID 0-1-12"), ("Query", said)]


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("how", ["COMMIT", "ROLLBACK"])
def test_how_a_prepared_transaction_ended_is_found(is_cut: bool, how: str) -> None:
    first, last = prepared("shop.orders", "shop.other"), ended(how)
    told, mark = events(*first, *last), MARK
    for part in [told[: len(first)], told[len(first) :]] if is_cut else [told]:
        mark = judged(CAPTURE, mark, "b1:4", part)
        if len(part) == len(first):
            assert mark.look is not None
            assert mark.look.is_committed("0-1-11") is None
    assert (mark.looked_at, mark.xa, mark.unseen) == (told[-1].end, {}, {})
    assert mark.look is not None
    assert mark.look.is_committed("0-1-11") == (how == "COMMIT")
    assert mark.look.is_committed("0-1-13") is None, "it is later than the look"
    assert mark.look.is_committed("5-1-11") is None, "nothing of its domain was looked at"


def test_one_that_is_committed_or_of_other_tables_is_not_told() -> None:
    others = [*prepared("shop.other"), *ended("ROLLBACK"), *ended("ROLLBACK", "X'79',X'',1")]
    assert found_in(events(*prepared("shop.orders"), *ended("COMMIT"), *others)) == {}


def test_one_that_was_prepared_before_all_rows_were_read_may_be_of_each_table() -> None:
    found = found_in(events(*ended("COMMIT")))
    assert "prepared before the rows were read" in found["all tables"]


def test_a_write_in_the_format_statement_is_told_and_one_of_rows_is_not() -> None:
    mapped = ("Table_map", "table_id: 18 (shop.orders)")
    rows = [("Annotate_rows", "insert into orders values (1)"), mapped]
    found = found_in(events(("Gtid", "BEGIN GTID 0-1-9"), *rows, STATEMENT))
    assert found.keys() == {"shop.orders"}
    told = f"in the format STATEMENT (b.1:3), and its rows are not in the log; {COMMAND}"
    assert told in found["shop.orders"]


STEPS = st.tuples(
    st.sampled_from(["rows", "statement", "prepare", "COMMIT", "ROLLBACK"]),
    st.sampled_from([*TABLES, "shop.other"]),
    st.integers(1, 3),
)


@settings(max_examples=counted(100, full=1_000), deadline=None)
@given(steps=st.lists(STEPS, max_size=20), cuts=st.sets(st.integers(0, 20)))
def test_each_row_that_is_not_as_it_was_committed_is_told_however_the_looks_are_cut(
    steps: list[tuple[str, str, int]], cuts: set[int]
) -> None:
    """Sessions of three XA transactions, of rows and of statements, one after the other."""
    mark, waiting, wanted = MARK, dict[int, tuple[str, str]](), set[str]()
    undone, rolled_back = list[str](), list[str]()
    part = list[Told]()
    for number, (step, table, name) in enumerate(steps):
        xid = f"X'7{name}',X'',1"
        if step == "rows":
            part += [("Gtid", "BEGIN GTID 0-1-9"), ("Table_map", f"table_id: 18 ({table})")]
        elif step == "statement":
            part += [("Gtid", "BEGIN GTID 0-1-9"), ("Query", f"update {table} set a = 1")]
            wanted.add(table)
        elif step == "prepare" and name not in waiting:
            part += prepared(table, xid=xid, gtid=(gtid := f"0-1-{20 + number}"))
            waiting[name] = table, gtid
        elif step in ("COMMIT", "ROLLBACK") and name in waiting:
            part += ended(step, xid)
            known, gtid = waiting.pop(name)
            undone += [gtid] if step == "ROLLBACK" and known in TABLES else []
        if number in cuts or number + 1 == len(steps):
            mark, part = judged(CAPTURE, mark, "b1:4", events(*part)), []
            rolled_back += mark.rolled_back
    assert mark.unseen.keys() == wanted & set(TABLES)
    assert rolled_back == undone
    gtids = [gtid if table in TABLES else "" for table, gtid in waiting.values()]
    assert sorted(mark.xa.values()) == sorted(gtids)


@pytest.mark.parametrize(
    ("statement", "written"),
    [
        ("use `shop`; INSERT INTO orders (a) SELECT b FROM stock", ["shop.orders"]),
        ("use `shop`; insert ignore `orders` values (1)", ["shop.orders"]),
        ("use `shop`; replace orders set a = 1", ["shop.orders"]),
        ("use `shop`; /* app */ UPDATE orders o JOIN stock s SET o.a = 1", list(TABLES)),
        ("use `shop`; SET STATEMENT max_statement_time=9 FOR DELETE FROM stock", ["shop.stock"]),
        ("use `shop`; LOAD DATA INFILE 'x' INTO TABLE `stock`", ["shop.stock"]),
        ("use `hall`; insert into shop.orders values (1)", ["shop.orders"]),
        ("use `hall`; insert into `shop` . `orders` values (1)", ["shop.orders"]),
        ('use `shop`; insert into "orders" values (1)', ["shop.orders"]),
        ("use `shop`; delete from logs where id in (select id from orders)", []),
        ("insert into shop.orders values (1)", ["shop.orders"]),
        ("use `shop`; set foreign_key_checks=1; insert into orders values (1)", ["shop.orders"]),
        (
            "set foreign_key_checks=1, sql_auto_is_null, unique_checks=1; update shop.orders set a",
            ["shop.orders"],
        ),
        ("use `hall`; insert into orders values (1)", []),
        ("use `shop`; insert into hall.orders values (1)", []),
        ("use `shop`; insert into orders_old values ('orders')", []),
        ("use `percona`; REPLACE INTO sums SELECT crc FROM shop.orders", []),
        ("use `shop`; truncate table orders", []),
        ("use `shop`; CREATE TABLE orders (a int)", []),
        ("COMMIT", []),
    ],
)
def test_a_statement_writes_to_the_tables_that_it_names(statement: str, written: list[str]) -> None:
    assert written_tables(statement, TABLES) == written


class Binlog(MariaDatabase):
    """A server with these files of its binlog; each event is 10 bytes long."""

    def __init__(self, **files: list[Told]) -> None:
        self.files = files

    @contextmanager
    def _translated(self, doing: str) -> Iterator[None]:
        del doing
        yield

    def _rows(self, query: str, *arguments: object) -> list[dict[str, Any]]:
        if query == "SHOW BINARY LOGS":
            return [{"Log_name": name} for name in self.files]
        file, start, count = arguments
        first = (int(str(start)) - 4) // 10
        rows = [*enumerate(self.files[str(file)])][first : first + int(str(count))]
        return [
            {"Log_name": file, "Pos": 4 + at * 10, "Event_type": kind, "Info": info,
             "End_log_pos": 14 + at * 10}
            for at, (kind, info) in rows
        ]  # fmt: skip


def test_each_look_goes_on_where_the_last_one_ended_in_this_file_and_the_next() -> None:
    log = Binlog(b1=prepared("shop.orders"))
    mark = look_at(CAPTURE, log, {}, MARK)
    assert (mark.looked_at, mark.xa) == ("b1:54", {XID: "0-1-11"})
    log.files["b2"] = [STATEMENT, *ended("ROLLBACK")]
    mark = look_at(CAPTURE, log, {}, mark)
    assert (mark.looked_at, mark.xa, mark.rolled_back) == ("b2:34", {}, ["0-1-11"])
    assert mark.unseen.keys() == {"shop.orders"}
    assert "STATEMENT" in mark.unseen["shop.orders"], "the first problem of a table stays"
    assert look_at(CAPTURE, log, {}, mark) == replace(mark, rolled_back=[])


def test_a_look_ends_before_the_first_transaction_that_cleaning_has_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    undone = [*prepared("shop.orders"), *ended("ROLLBACK")]
    other = [("Gtid", "BEGIN GTID 5-1-1"), STATEMENT]
    log = Binlog(b1=[*undone, *other, ("Gtid", "BEGIN GTID 0-1-13"), ("Xid", "COMMIT")])

    def looked(**passed: int) -> tuple[str | None, list[str], bool]:
        domains = {name[1:]: number for name, number in passed.items()}
        mark = look_at(CAPTURE, log, {}, MARK, domains)
        return mark.looked_at, mark.rolled_back, bool(mark.unseen)

    assert looked() == ("b1:4", [], False)
    assert looked(_0=11) == ("b1:74", ["0-1-11"], False)
    assert looked(_0=12, _5=1) == ("b1:94", ["0-1-11"], True)
    assert looked(_0=13) == ("b1:114", ["0-1-11"], True), "one that the log has no BEGIN of"
    monkeypatch.setattr(mariadb_unseen, "_AHEAD", 0)
    assert looked(_0=13) == ("b1:74", ["0-1-11"], False)


def test_a_look_ends_before_a_transaction_once_it_has_read_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mariadb, "_EVENTS_MAX", 2)
    monkeypatch.setattr(mariadb_unseen, "_LOOKED_MAX", 3)
    log = Binlog(b1=[*prepared("shop.orders"), *ended("ROLLBACK")])
    mark = look_at(CAPTURE, log, {}, MARK)
    assert (mark.looked_at, mark.unseen) == ("b1:54", {})
    assert look_at(CAPTURE, log, {}, mark).rolled_back == ["0-1-11"]


def test_a_part_of_the_log_that_was_removed_before_the_look_is_told() -> None:
    mark = look_at(CAPTURE, Binlog(b2=[STATEMENT]), {}, MARK)
    assert mark.looked_at == "b2:14"
    assert "removed its binlog from b1:4 on" in mark.unseen["all tables"]
    assert mark.unseen.keys() == {"all tables", "shop.orders"}


def test_a_capture_of_an_earlier_version_is_looked_at_from_its_connectors_position_on() -> None:
    log, mark = Binlog(b1=[STATEMENT, STATEMENT]), Mark("m")
    assert look_at(CAPTURE, log, {"file": "b1", "pos": 4, "snapshot": True}, mark) == mark
    found = look_at(CAPTURE, log, {"file": "b1", "pos": 14}, mark)
    assert "(b1:14)" in found.unseen["shop.orders"]
