"""What each capturing tool writes, read into source rows: every kind, and their traps."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import pytest

from cdc_shared import messages, outcomes, table_of
from clean_cases import FORMS, Database
from everstate.declarations.captures import CaptureForm
from everstate.sources.cdc.placeholders import DEFAULT_SETTING, OWN_SETTING, placeholder_of
from everstate.sources.cdc.rows import RawMessage, SourceRow, Unreadable, is_after, is_same
from everstate.sources.cdc.shapes import READERS, debezium
from everstate.sources.cdc.shapes.moves import moved
from everstate.sources.cdc.shapes.places import lacks_position, position_of, stream_place


def read(form: str, value: Any, key: Any = None, **headers: bytes) -> list[SourceRow]:
    encoded = None if key is None else json.dumps(key).encode()
    body = value if isinstance(value, bytes) or value is None else json.dumps(value).encode()
    return READERS[form](RawMessage("shop.item", encoded, body, headers))


def one(form: str, value: Any, key: Any = None, **headers: bytes) -> SourceRow:
    (row,) = read(form, value, key, **headers)
    return row


SOURCE = {"connector": "postgresql", "lsn": 26916144, "txId": 744, "ts_us": 1_559_033_904_863_769}


@pytest.mark.parametrize("wrap", [lambda m: m, lambda m: {"schema": None, "payload": m}])
@pytest.mark.parametrize("op", ["c", "u", "d", "r"])
def test_debezium_reads_every_operation_with_and_without_its_schema(op: str, wrap: Any) -> None:
    row = {"id": 3, "name": "a"}
    message = {
        "op": op, "source": SOURCE,
        "before": None if op in "cr" else row, "after": None if op == "d" else row,
        "transaction": {"id": "744:26916144", "total_order": 2, "data_collection_order": 1},
    }  # fmt: skip
    found = one("debezium", wrap(message), {"id": 3})
    assert (found.op, found.key, found.is_whole) == (op, {"id": 3}, op != "d")
    assert found.position == {"lsn": (26916144,)}
    assert found.time_us == 1_559_033_904_863_769
    assert found.transaction is not None
    assert (found.transaction.id, found.transaction.order) == ("744", 2)


def test_debezium_tombstones_are_no_rows_and_truncations_have_no_key() -> None:
    assert read("debezium", None, {"id": 3}) == []
    assert one("debezium", {"op": "t", "source": SOURCE}).op == "t"


@pytest.mark.parametrize(
    "value",
    [
        "__debezium_unavailable_value",
        "X19kZWJleml1bV91bmF2YWlsYWJsZV92YWx1ZQ==",
        ["__debezium_unavailable_value"],
        {"__debezium_unavailable_value": "__debezium_unavailable_value"},
    ],
)
def test_debezium_values_that_are_not_available_are_unknown(value: Any) -> None:
    found = one("debezium", {"op": "u", "after": {"id": 3, "note": value}, "source": SOURCE})
    assert (found.after, found.is_whole) == ({"id": 3}, False)


@pytest.mark.parametrize("setting", [DEFAULT_SETTING, OWN_SETTING])
@pytest.mark.parametrize("kind", ["int[]", "uuid[]", "bytea", "hstore"])
def test_debezium_values_that_are_not_available_are_unknown_in_columns_of_each_type(
    setting: str, kind: str
) -> None:
    text = placeholder_of(setting).text
    value: Any = {
        "int[]": list(text.encode()),
        "uuid[]": [str(uuid.UUID(bytes=hashlib.md5(text.encode()).digest(), version=3))],
        "bytea": base64.b64encode(text.encode()).decode(),
        "hstore": json.dumps({text: text}, separators=(",", ":")),
    }[kind]
    found = told({"op": "u", "after": {"id": 3, "note": value}, "source": SOURCE}, setting)
    assert (found.after, found.is_whole) == ({"id": 3}, False)


def told(event: Any, setting: str, **headers: bytes) -> SourceRow:
    """Row of an event, of a connector with this placeholder."""
    body = json.dumps(event, separators=(",", ":")).encode()
    (row,) = READERS["debezium"](RawMessage("shop.item", b'{"id":3}', body, headers, setting))
    return row


@pytest.mark.parametrize("op", ["c", "r", "u"])
def test_a_text_that_is_equal_to_debeziums_placeholder_is_a_text(op: str) -> None:
    after = {"id": 3, "note": DEFAULT_SETTING}
    event = {"op": op, "after": after, "source": SOURCE}
    found = told(event, OWN_SETTING)
    assert (found.after, found.is_whole) == (after, True)
    # Of a connector of somebody else, which has Debezium's own, only an update leaves it open.
    found = told(event, DEFAULT_SETTING)
    assert (found.after, found.is_whole) == (({"id": 3}, False) if op == "u" else (after, True))


def test_the_row_after_an_update_of_its_key_may_lack_values() -> None:
    event = {"op": "c", "after": {"id": 3, "note": DEFAULT_SETTING}, "source": SOURCE}
    found = told(event, DEFAULT_SETTING, **{"__debezium.oldkey": b'{"id":2}'})
    assert (found.after, found.is_whole) == ({"id": 3}, False)


def test_debezium_says_by_a_header_which_key_a_row_had() -> None:
    headers = {"__debezium.oldkey": b'{"id":3}'}
    found = one("debezium", {"op": "c", "after": {"id": 4}, "source": SOURCE}, {"id": 4}, **headers)
    assert found.moved_from == {"id": 3}


def test_debezium_keys_with_schemas_are_unwrapped() -> None:
    key = {"schema": {"type": "struct"}, "payload": {"id": 3}}
    assert one("debezium", {"op": "c", "after": {"id": 3}}, key).key == {"id": 3}


def test_debezium_keys_that_are_text_stay_text() -> None:
    found = one("debezium", {"op": "c", "after": {"id": "10"}, "source": SOURCE}, {"id": "10"})
    assert found.key == {"id": "10"}


def test_debezium_schemas_tell_how_values_are_to_be_read() -> None:
    columns = [
        {"field": "day", "name": "io.debezium.time.Date"},
        {"field": "at", "name": "io.debezium.time.MicroTimestamp"},
        {
            "field": "price",
            "name": "org.apache.kafka.connect.data.Decimal",
            "parameters": {"scale": "2"},
        },
        {"field": "name"},
    ]
    schema = {"type": "struct", "fields": [{"field": "after", "fields": columns}]}
    found = one("debezium", {"schema": schema, "payload": {"op": "c", "after": {"id": 1}}})
    assert found.types == {"day": "days", "at": "us", "price": "decimal:2"}


def test_cassandra_cells_that_were_not_written_are_unknown() -> None:
    cell = {"value": 7, "deletion_ts": None, "set": True}
    after = {"id": cell, "name": None, "gone": {"value": 1, "deletion_ts": 5, "set": True}}
    source = {"connector": "cassandra", "file": "commitlog-6-12.log", "pos": 5, "ts_us": 9}
    found = one("debezium", {"op": "u", "after": after, "source": source})
    assert (found.after, found.is_whole) == ({"id": 7, "gone": None}, False)
    assert found.position == {"commitlog": (9, 12, 5)}


def test_mongodb_documents_are_made_plain_and_updates_know_what_they_say() -> None:
    after = '{"_id": {"$numberLong": "1004"}, "at": {"$date": 5}, "tags": ["a"]}'
    source = {"connector": "mongodb", "ts_ms": 1558965508000, "ord": 6}
    found = one("debezium", {"op": "c", "after": after, "source": source})
    at = datetime(1970, 1, 1, 0, 0, 0, 5_000, UTC)
    assert (found.after, found.is_whole) == ({"_id": 1004, "at": at, "tags": ["a"]}, True)
    update = {"updatedFields": '{"name": "b"}', "removedFields": ["old"]}
    message = {"op": "u", "after": None, "updateDescription": update, "source": source}
    found = one("debezium", message, {"id": '{"$oid": "5b"}'})
    assert (found.after, found.is_whole) == ({"name": "b", "old": None}, False)
    assert found.key == {"_id": "5b", "id": "5b"}


def test_the_end_of_a_transaction_joins_its_events_on_what_is_stable_of_its_id() -> None:
    body = {"status": "END", "id": "744:269", "event_count": 2}
    assert debezium.ended_transaction(json.dumps(body).encode()) == "744"
    assert debezium.transaction_key("0-184054-13") == "0-184054-13"
    begin = json.dumps({"status": "BEGIN", "id": "744:268"}).encode()
    assert debezium.ended_transaction(begin) is None


def test_the_place_in_the_stream_follows_commits_and_not_the_positions_of_rows() -> None:
    def place(commit: str, lsn: int) -> bytes:
        source = {"sequence": f'[{commit},"{lsn}"]', "lsn": lsn}
        found = stream_place("postgresql", source)
        assert found is not None
        return found

    # The second transaction wrote its first row before the first one was committed.
    assert place("null", 100) < place("null", 120) < place('"140"', 110) < place('"140"', 150)
    binlog = [("b.000009", 900, 0), ("b.000010", 4, 0), ("b.000010", 4, 1), ("b.000010", 60, 0)]
    places = [
        stream_place("mariadb", {"file": file, "pos": pos, "row": row}) for file, pos, row in binlog
    ]
    assert places == sorted(places, key=lambda one: one or b"")


def test_a_row_behind_its_predecessor_that_seems_to_go_back_has_no_position() -> None:
    """MariaDB's default from 11.4 on: all events of a transaction are at its beginning."""

    def place(pos: int, row: int, order: int) -> bytes:
        found = stream_place("mariadb", {"file": "b.000010", "pos": pos, "row": row}, order)
        assert found is not None
        return found

    assert lacks_position(place(900, 68, 69), place(900, 0, 70))
    assert not lacks_position(place(900, 5, 6), place(900, 3, 1)), "a connector that began again"
    assert not lacks_position(place(900, 5, 6), place(880, 0, 7)), "another event"
    assert not lacks_position(place(900, 5, 0), place(900, 3, 1)), "nothing counts the rows"
    first = stream_place("postgresql", {"sequence": '[null,"9"]', "lsn": 9}, 1)
    assert first is not None
    assert not lacks_position(first, first)


def test_logical_messages_carry_bytes() -> None:
    content = base64.b64encode(b'{"actor":"ann"}').decode()
    body = {
        "op": "m", "source": SOURCE, "message": {"prefix": "everstate", "content": content},
    }  # fmt: skip
    found = debezium.read_message(RawMessage("", None, json.dumps(body).encode(), {}))
    assert found is not None
    assert (found.transaction, found.prefix, found.content) == (
        "744",
        "everstate",
        b'{"actor":"ann"}',
    )


MAXWELL = {"database": "shop", "table": "item", "ts": 1_700_000_000, "xid": 9, "xoffset": 1}
MAXWELL |= {"position": "bin.000007:484"}


def test_maxwell_gives_the_row_after_and_what_changed() -> None:
    created = one("maxwell", {**MAXWELL, "type": "insert", "data": {"id": 1, "a": 2}})
    assert (created.op, created.after, created.is_whole) == ("c", {"id": 1, "a": 2}, True)
    assert created.position == {"binlog": (7, 484, 0, 1)}
    assert created.time_us == 1_700_000_000_000_000
    message = {**MAXWELL, "type": "update", "data": {"id": 1, "a": 3}, "old": {"a": 2}}
    updated = one("maxwell", message)
    assert (updated.before, updated.after) == ({"id": 1, "a": 2}, {"id": 1, "a": 3})
    deleted = one("maxwell", {**MAXWELL, "type": "delete", "data": {"id": 1, "a": 3}})
    assert (deleted.op, deleted.before, deleted.after) == ("d", {"id": 1, "a": 3}, None)


def test_maxwell_bootstraps_are_snapshots_and_their_frame_is_nothing() -> None:
    row = one("maxwell", {**MAXWELL, "type": "bootstrap-insert", "data": {"id": 1}})
    assert (row.op, row.is_snapshot) == ("r", True)
    assert read("maxwell", {**MAXWELL, "type": "bootstrap-start", "data": {}}) == []


def test_maxwell_updates_of_the_key_end_one_row_and_begin_another() -> None:
    message = {
        **MAXWELL, "type": "update", "primary_key_columns": ["id"],
        "data": {"id": 2, "a": 3}, "old": {"id": 1},
    }  # fmt: skip
    gone, come = moved(one("maxwell", message), ())
    assert (gone.op, gone.key) == ("d", {"id": 1})
    assert (come.op, come.key, come.moved_from) == ("c", {"id": 2}, {"id": 1})


CANAL = {"id": 5, "table": "item", "es": 1_700_000_000_000, "isDdl": False, "pkNames": ["id"]}


def test_canal_gives_lists_of_rows_with_changed_columns_only() -> None:
    message = {
        **CANAL, "type": "UPDATE",
        "data": [{"id": "1", "a": "3"}, {"id": "2", "a": "4"}], "old": [{"a": "2"}, {"a": "3"}],
    }  # fmt: skip
    first, second = read("canal", message)
    assert (first.op, first.key, first.after) == ("u", {"id": "1"}, {"id": "1", "a": "3"})
    assert first.before == {"id": "1", "a": "2"}
    assert not first.is_whole
    assert second.position == {}, "as its neighbours in the topic"


@pytest.mark.parametrize(
    ("form", "event"),
    [
        ("canal", {**CANAL, "type": "INSERT", "data": [{"id": "1"}], "table": "other"}),
        ("canal", {**CANAL, "type": "TRUNCATE", "isDdl": True, "table": "other"}),
        ("maxwell", {"type": "insert", "data": {"id": 1}, "table": "other"}),
        ("goldengate", {"op_type": "I", "after": {"ID": 1}, "table": "SHOP.OTHER"}),
        ("dms", {"data": {"id": 1}, "metadata": {"operation": "insert", "table-name": "other"}}),
    ],
)
def test_rows_of_another_table_than_their_topics_are_refused(form: str, event: Any) -> None:
    with pytest.raises(Unreadable, match=r"(?i)of table .*other, .* for rows of shop\.item"):
        read(form, event)


@pytest.mark.parametrize(("kind", "op"), [("INSERT", "c"), ("DELETE", "d")])
def test_canal_inserts_are_whole_and_deletes_are_before(kind: str, op: str) -> None:
    row = one("canal", {**CANAL, "type": kind, "data": [{"id": "1"}], "old": None})
    assert (row.op, row.is_whole) == (op, op == "c")


def test_canal_truncations_are_told_and_other_definitions_are_nothing() -> None:
    assert one("canal", {**CANAL, "type": "TRUNCATE", "isDdl": True}).op == "t"
    assert read("canal", {**CANAL, "type": "ALTER", "isDdl": True}) == []


GOLDEN = {"table": "SHOP.ITEM", "pos": "00000000000000000000143", "primary_keys": ["id"]}


def test_goldengate_keys_differ_in_case_and_updates_may_lack_columns() -> None:
    created = one("goldengate", {**GOLDEN, "op_type": "I", "after": {"ID": 1, "NAME": "a"}})
    assert (created.key, created.is_whole, created.position) == ({"id": 1}, True, {"pos": (143,)})
    message = {**GOLDEN, "op_type": "U", "before": {"id": 1}, "after": {"id": 1, "name": "b"}}
    assert not one("goldengate", message).is_whole
    deleted = one("goldengate", {**GOLDEN, "op_type": "D", "before": {"id": 1}, "after": None})
    assert (deleted.op, deleted.key) == ("d", {"id": 1})


def test_dms_has_data_and_metadata() -> None:
    about = {"record-type": "data", "operation": "update", "timestamp": "2026-11-21T08:00:00Z"}
    message = {"data": {"id": 1, "a": 2}, "metadata": about, "before-image": {"a": 1}}
    found = one("dms", message)
    assert (found.op, found.before, found.is_whole) == ("u", {"a": 1}, False)
    assert read("dms", {"metadata": {"record-type": "control"}}) == []
    emptied = {"record-type": "control", "operation": "truncate-table", "table-name": "item"}
    assert one("dms", {"metadata": emptied}).op == "t"


@pytest.mark.parametrize(
    ("form", "value", "reason"),
    [
        ("debezium", b"{", "not JSON"),
        ("debezium", {"id": 1}, "no field op"),
        ("debezium", {"op": "x"}, "'x' is none of"),
        ("debezium", {"op": ["c"]}, "Expected `str"),
        ("debezium", {"op": "c", "after": {"id": 1}, "source": "shop"}, "Expected `object"),
        ("debezium", {"op": "c", "after": 5}, "after is no row"),
        ("debezium", {"op": "d", "source": SOURCE}, "neither key nor image"),
        ("maxwell", {"type": "table-create"}, "'table-create' is none of"),
        ("maxwell", {"type": "insert", "data": None}, "data is no row"),
        ("canal", {**CANAL, "type": "UPDATE", "data": [{}], "old": [{}, {}]}, "one length"),
        ("canal", {**CANAL, "type": "INSERT", "data": None}, "INSERT without rows: data is None"),
        ("canal", {**CANAL, "type": "UPDATE", "data": None}, "UPDATE without rows: data is None"),
        ("canal", {**CANAL, "type": "DELETE", "data": []}, r"DELETE without rows: data is \[\]"),
        ("goldengate", {"op_type": "U"}, "no row after"),
        ("dms", b"[]", "not a JSON object"),
    ],
)
def test_what_cannot_be_read_says_why(form: str, value: Any, reason: str) -> None:
    with pytest.raises(Unreadable, match=reason):
        read(form, value)


@pytest.mark.parametrize(
    ("connector", "earlier", "later"),
    [
        ("postgresql", {"lsn": 99}, {"lsn": 100}),
        ("mysql", {"file": "b.000009", "pos": 900}, {"file": "b.000010", "pos": 4}),
        ("mysql", {"file": "b.1", "pos": 9, "row": 0}, {"file": "b.1", "pos": 9, "row": 1}),
        (
            "mariadb",
            {"gtid": "0-1-12", "file": "b.9", "pos": 9},
            {"gtid": "0-2-13", "file": "b.1", "pos": 1},
        ),
        (
            "sqlserver",
            {"commit_lsn": "0000001f:00000758:0005", "change_lsn": "1:1:1"},
            {"commit_lsn": "00000020:00000001:0001", "change_lsn": "1:1:1"},
        ),
        ("informix", {"commit_lsn": "99", "change_lsn": "1"}, {"commit_lsn": "100"}),
        ("db2", {"commit_lsn": "1:2:3", "change_lsn": "1:2:1"}, {"commit_lsn": "1:2:a"}),
        ("oracle", {"scn": "999", "ssn": 1}, {"scn": "1000", "ssn": 0}),
        (
            "oracle",
            {"scn": "9", "rs_id": "000e2.037c.0010"},
            {"scn": "9", "rs_id": "000e2.037c.01a0"},
        ),
        (
            "oracle",
            {"scn": "9", "rs_id": " 0x0000e2.0000037c.0010 "},
            {"scn": "9", "rs_id": " 0x0000e2.0000037c.01a0 "},
        ),
        ("mongodb", {"ts_ms": 5000, "ord": 2}, {"ts_ms": 5000, "ord": 3}),
    ],
)
def test_places_in_the_logs_of_the_connectors_are_ordered_as_their_databases_wrote(
    connector: str, earlier: dict[str, Any], later: dict[str, Any]
) -> None:
    old, new = position_of(connector, earlier), position_of(connector, later)
    assert is_after(new, old) is True
    assert is_after(old, new) is False
    assert is_same(old, old)
    assert not is_same(old, new)


def test_places_of_different_servers_without_shared_numbers_cannot_be_compared() -> None:
    old = position_of("mysql", {"gtid": "aa:5", "file": "b.9", "pos": 8})
    new = position_of("mysql", {"gtid": "bb:2", "file": "b.1", "pos": 3})
    assert is_after(new, old) is None
    assert is_after(old, new) is None
    # A replica of MariaDB continues the numbers of its primary.
    old = position_of("mariadb", {"gtid": "0-1-5", "file": "b.9", "pos": 8})
    new = position_of("mariadb", {"gtid": "0-2-6", "file": "b.1", "pos": 3})
    assert is_after(new, old) is True


@pytest.mark.parametrize("form", FORMS)
def test_messages_are_changes_or_refused_with_a_reason(form: str) -> None:
    """What is asked of other systems' messages below, asked of messages that are here."""
    database = Database(form)
    database.write(1, {"name": "a", "amount": 1})
    database.write(1, {"name": "b"})
    database.write(1, None)
    broken: list[Any] = [{"op": "u", "table": "item", "type": "update", "op_type": "U"}]
    listed = [value for _key, value in database.log] + broken
    reader = "debezium" if form.startswith("debezium") else form
    told = outcomes("own", cast("CaptureForm", reader), listed)
    assert [each.outcome for each in told] == ["change", "change", "change", "refused"]
    assert [each.reason for each in told][:3] == ["created", "updated", "deleted"]
    assert told[3].reason


SHARED = Path(os.environ.get("EVERSTATE_BENCH_DATA") or "nowhere")
"""Folder of other systems' messages (acceptance 6), which are no part of the project."""

if (SHARED / "cdc_messages.jsonl").is_file():

    def test_messages_of_other_systems_are_changes_or_held_or_refused_with_a_reason() -> None:
        told = [each for group in messages(SHARED) for each in outcomes(*group)]
        print(table_of(told))
        assert len(told) > 100
        assert [each for each in told if not (each.outcome and each.reason)] == []
