"""The decoder of pgoutput: what it reads, what it passes over, what it refuses."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from uuid import UUID

import pytest

from everstate.errors import ReplicationFailed
from everstate.sources.outbox.assemble import Assembler
from everstate.sources.outbox.compose import OutboxRow
from everstate.sources.outbox.pgoutput import Begin, Commit, Decoder, Insert, LogicalMessage

CHANGE_ID = "0199c8a2-7c11-7d3e-9a55-0d8f2f6b1c77"
ROW = {
    "id": "12",
    "xid": "744",
    "entity": "order",
    "key": "o-1",
    "version": "3",
    "kind": "updated",
    "change_id": CHANGE_ID,
    "schema_version": "1",
    "occurred_at": "2026-11-21T08:00:00+01:00",
    "recorded_at": "2026-11-21 07:00:00.123456+00",
    "provenance": "{}",
    "event": None,
    "before": '{"note":"née"}',
    "after": '{"note":"ü"}',
}
FACT = {
    "xid": "744",
    "entity": "click",
    "key": "c-1",
    "change_id": CHANGE_ID,
    "schema_version": 1,
    "occurred_at": "2026-11-21T08:00:00+01:00",
    "recorded_at": "2026-11-21T07:00:00.123456+00:00",
    "provenance": "{}",
    "event": None,
    "after": '{"a":1}',
}


def begin(xid: int = 744) -> bytes:
    return b"B" + struct.pack("!QqI", 1, 2, xid)


def commit(end_lsn: int = 99) -> bytes:
    return b"C" + struct.pack("!BQQq", 0, 90, end_lsn, 2)


def relation(
    columns: Sequence[str] = tuple(ROW), schema: str = "everstate_store", name: str = "outbox"
) -> bytes:
    cells = b"".join(struct.pack("!B", 0) + c.encode() + b"\0" + struct.pack("!Ii", 25, -1)
                     for c in columns)  # fmt: skip
    head = struct.pack("!I", 7) + schema.encode() + b"\0" + name.encode() + b"\0d"
    return b"R" + head + struct.pack("!H", len(columns)) + cells


def insert(values: Sequence[str | None] = tuple(ROW.values()), oid: int = 7) -> bytes:
    cells = b"".join(
        b"n" if v is None else b"t" + struct.pack("!i", len(v.encode())) + v.encode()
        for v in values
    )
    return b"I" + struct.pack("!I", oid) + b"N" + struct.pack("!H", len(values)) + cells


def message(content: bytes, prefix: str = "everstate", flags: int = 1) -> bytes:
    head = b"M" + struct.pack("!BQ", flags, 55) + prefix.encode() + b"\0"
    return head + struct.pack("!i", len(content)) + content


def test_each_kind_of_message_is_read() -> None:
    decoder = Decoder()
    assert decoder.decode(begin()) == Begin(744)
    assert decoder.decode(commit()) == Commit(99)
    assert decoder.decode(message(b"{}")) == LogicalMessage(True, 55, "everstate", b"{}")
    assert decoder.decode(relation(("id", "note"))) is None
    read = decoder.decode(insert(("1", None)))
    assert isinstance(read, Insert)
    assert (read.relation.columns, read.values) == (("id", "note"), (b"1", None))


@pytest.mark.parametrize("payload", [b"Oorigin", b"Ytype", b"Ttruncate"])
def test_what_says_nothing_about_changes_is_passed_over(payload: bytes) -> None:
    assert Decoder().decode(payload) is None


@pytest.mark.parametrize(
    "payload",
    [b"", b"Z", b"B", commit()[:-1], insert(oid=8), insert()[:-1], insert(("1",)),
     insert().replace(b"n", b"u", 1), message(b"{}")[:-1], relation()[:-1], relation() + b"x"],
)  # fmt: skip
def test_bytes_that_are_no_message_are_refused(payload: bytes) -> None:
    decoder = Decoder()
    decoder.decode(relation())
    with pytest.raises(ReplicationFailed):
        decoder.decode(payload)


def test_a_transaction_comes_whole_at_its_commit() -> None:
    assembler = Assembler(100_000, 2**30)
    second = {**ROW, "id": "13", "key": "o-2", "before": None}
    fed = [begin(), relation(), insert(), insert(list(second.values()))]
    assert [assembler.feed(each) for each in fed] == [None] * 4
    assert not assembler.is_between
    streamed = assembler.feed(commit(120))
    assert streamed is not None
    assert assembler.is_between
    assert streamed.end_lsn == 120
    assert streamed.transaction.xid == "744"
    assert [row.key for row in streamed.transaction.rows] == ["o-1", "o-2"]
    row = streamed.rows[12]
    assert isinstance(row, OutboxRow)
    assert (row.change_id, row.version, row.event) == (UUID(CHANGE_ID), 3, None)
    assert (row.before, row.after) == ('{"note":"née"}', '{"note":"ü"}')
    assert row.recorded_at.isoformat() == "2026-11-21T07:00:00.123456+00:00"


def test_of_a_transaction_that_is_too_large_only_the_facts_are_kept() -> None:
    for limits in [(2, 2**30), (100, 20)]:
        assembler = Assembler(*limits)
        rows = [insert(list({**ROW, "id": f"{number}"}.values())) for number in range(20, 24)]
        fact = message(json.dumps(FACT).encode())
        for payload in (begin(), relation(), fact, *rows):
            assembler.feed(payload)
        streamed = assembler.feed(commit())
        assert streamed is not None
        assert streamed.is_large
        assert [row.key for row in streamed.rows.values()] == ["c-1"]
        assert streamed.transaction.xid == "744"


def test_columns_are_found_by_name() -> None:
    assembler = Assembler(100_000, 2**30)
    names = ["added_later", *reversed(ROW)]
    values = ["x", *reversed(ROW.values())]
    for payload in (begin(), relation(names), insert(values)):
        assembler.feed(payload)
    streamed = assembler.feed(commit())
    assert streamed is not None
    assert streamed.rows[12].key == "o-1"


def test_a_fact_is_a_change_of_version_1_beside_the_rows() -> None:
    assembler = Assembler(100_000, 2**30)
    content = json.dumps(FACT).encode()
    foreign = message(b"theirs", prefix="other")
    for payload in (begin(), relation(), message(content), foreign, insert()):
        assembler.feed(payload)
    streamed = assembler.feed(commit())
    assert streamed is not None
    assert [row.key for row in streamed.transaction.rows] == ["c-1", "o-1"]
    (fact,) = streamed.facts
    assert fact.id < 0
    assert (fact.kind, fact.version, fact.before, fact.after) == ("event", 1, None, '{"a":1}')
    assert streamed.refused == []


def test_a_message_that_is_no_fact_is_kept_with_its_reason() -> None:
    assembler = Assembler(100_000, 2**30)
    for payload in (begin(), message(b"{")):
        assembler.feed(payload)
    streamed = assembler.feed(commit())
    assert streamed is not None
    assert streamed.transaction.rows == []
    (refused,) = streamed.refused
    assert (refused.lsn, refused.content) == (55, b"{")
    assert refused.reason


def test_a_message_outside_of_transactions_is_nobodys_promise() -> None:
    assembler = Assembler(100_000, 2**30)
    assert assembler.feed(message(json.dumps(FACT).encode(), flags=0)) is None
    assert assembler.is_between


@pytest.mark.parametrize(
    "told",
    [relation(name="other"), relation(schema="public"), relation(list(ROW)[:-1])],
)
def test_a_publication_of_another_table_is_refused(told: bytes) -> None:
    assembler = Assembler(100_000, 2**30)
    assembler.feed(begin())
    assembler.feed(told)
    width = len(ROW) - (told == relation(list(ROW)[:-1]))
    with pytest.raises(ReplicationFailed):
        assembler.feed(insert(list(ROW.values())[:width]))
