"""What each capturing tool writes, read into source rows: every kind, and their traps."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
from pydantic import create_model

from clean_cases import CONFIG, FORMS, Database, Numbered
from everstate.changes import EntityType
from everstate.declarations.captures import Capture, CaptureForm, Table
from everstate.sources.cdc.balance import NumberedBatch
from everstate.sources.cdc.placeholders import DEFAULT_SETTING, OWN_SETTING, placeholder_of
from everstate.sources.cdc.reading import RawReader
from everstate.sources.cdc.rows import RawMessage, SourceRow, Unreadable, is_after
from everstate.sources.cdc.shapes import READERS, debezium
from everstate.sources.cdc.shapes.places import lacks_position, position_of, stream_place

_KEYS = ("id", "ID", "pk", "_id", "field1")


class Told(NamedTuple):
    """What became of one message."""

    group: str
    number: int
    outcome: str
    """``change`` (with its kind), ``held``, ``refused`` or ``no change``."""
    reason: str


def messages(folder: Path) -> Iterator[tuple[str, CaptureForm, list[Any]]]:
    """Groups of messages that belong together: a file of another system, or one connector."""
    groups: dict[tuple[str, CaptureForm], list[Any]] = defaultdict(list)
    for line in (folder / "cdc_messages.jsonl").read_text("utf-8").splitlines():
        found = json.loads(line)
        form: CaptureForm = "goldengate" if found["format"] == "ogg" else "debezium"
        groups[found["file"].removeprefix("kafka/"), form].append(found["message"])
    for line in (folder / "debezium_envelopes.jsonl").read_text("utf-8").splitlines():
        found = json.loads(line)
        # Documents show a transaction's block with rows of another table than the rest.
        other = " of pk" if '"pk"' in json.dumps(found["event"]) else ""
        groups[f"docs/{found['connector']}{other}", "debezium"].append(found["event"])
    for (group, form), listed in groups.items():
        yield group, form, listed


def outcomes(group: str, form: CaptureForm, listed: list[Any]) -> list[Told]:
    """What becomes of each message of a group, taken in order by one capture."""
    columns = columns_of(form, listed)
    fields = {name: "c_" + name.lower() for name in columns}
    column = next(name for name in (*_KEYS, *sorted(columns)) if name in columns)
    model: Any = create_model(
        "Row", **dict.fromkeys(sorted(set(fields.values())), (str | None, None))
    )  # type: ignore[call-overload]
    entity = EntityType("row", model, fields[column])
    table = Table(
        entity="row",
        key_columns=(column,),
        columns=fields,
        types=dict.fromkeys(columns, "text"),
    )
    capture = Capture(
        name="shared", kind="other", form=form, tables={"rows": table}, transactions=False
    )
    numbered = Numbered(RawReader(capture, {"row": entity}), CONFIG)
    told = []
    for number, message in enumerate(listed):
        before = sum(len(one.rows) for one in numbered.held.values())
        numbered.changes = []
        body = json.dumps(_of_any_table(message)).encode()
        batch = numbered.run(numbered.read(("rows", None, body)))
        told.append(_told(group, number, batch, numbered, before))
    return told


def _told(group: str, number: int, batch: NumberedBatch, numbered: Numbered, before: int) -> Told:
    if batch.refused:
        return Told(group, number, "refused", batch.refused[0].reason)
    if numbered.changes:
        kinds = " + ".join(one.kind.value for one in numbered.changes)
        return Told(group, number, "change", kinds)
    held = numbered.held
    if sum(len(one.rows) for one in held.values()) > before:
        return Told(group, number, "held", next(iter(held.values())).reason)
    return Told(group, number, "no change", ", ".join(batch.skipped) or "nothing to read")


def _of_any_table(message: Any) -> Any:
    """The message without its table's name: those of a group are taken as rows of one table."""
    if not isinstance(message, dict):
        return message
    return {name: value for name, value in message.items() if name != "table"}


def columns_of(form: CaptureForm, listed: list[Any]) -> set[str]:
    """All columns that any message of a group names."""
    columns: set[str] = set()
    for message in listed:
        try:
            value = json.dumps(_of_any_table(message)).encode()
            rows = READERS[form](RawMessage("rows", None, value, {}))
        except Unreadable:
            continue
        for row in rows:
            columns |= {*(row.before or {}), *(row.after or {})}
    return columns or {"id"}


def table_of(told: Iterable[Told]) -> str:
    """Outcomes by reason, as a table to be read."""
    counted = Counter((one.outcome, one.reason.split(" 0x")[0][:70]) for one in told)
    lines = [
        f"{count:4} {outcome:10} {reason}" for (outcome, reason), count in sorted(counted.items())
    ]
    return "\n".join(lines)


def read(form: str, value: Any, key: Any = None, **headers: bytes) -> list[SourceRow]:
    encoded = None if key is None else json.dumps(key).encode()
    body = value if isinstance(value, bytes) or value is None else json.dumps(value).encode()
    return READERS[form](RawMessage("shop.item", encoded, body, headers))


def one(form: str, value: Any, key: Any = None, **headers: bytes) -> SourceRow:
    (row,) = read(form, value, key, **headers)
    return row


SOURCE = {"connector": "postgresql", "lsn": 26916144, "txId": 744, "ts_us": 1_559_033_904_863_769}
MAXWELL = {"database": "shop", "table": "item", "ts": 1_700_000_000, "xid": 9, "xoffset": 1}
MAXWELL |= {"position": "bin.000007:484"}
CANAL = {"id": 5, "table": "item", "es": 1_700_000_000_000, "isDdl": False, "pkNames": ["id"]}
GOLDEN = {"table": "SHOP.ITEM", "pos": "00000000000000000000143", "primary_keys": ["id"]}
MONGODB = {"connector": "mongodb", "ts_ms": 1558965508000, "ord": 6}
MARK = "__debezium_unavailable_value"
CELLS = {
    "id": {"value": 7, "deletion_ts": None, "set": True}, "name": None,
    "gone": {"value": 1, "deletion_ts": 5, "set": True},
}  # fmt: skip
LOGGED = {"connector": "cassandra", "file": "commitlog-6-12.log", "pos": 5, "ts_us": 9}
CHANGED = {"updatedFields": '{"name": "b"}', "removedFields": ["old"]}
DMS = {"record-type": "data", "operation": "update", "timestamp": "2026-11-21T08:00:00Z"}
AT = datetime(1970, 1, 1, 0, 0, 0, 5_000, UTC)
READ: list[tuple[str, Any, Any, list[dict[str, Any]]]] = [
    # Values of Debezium that are not available.
    *(
        ("debezium", {"op": "u", "after": {"id": 3, "note": value}, "source": SOURCE}, None,
         [{"after": {"id": 3}, "is_whole": False}])
        for value in (MARK, "X19kZWJleml1bV91bmF2YWlsYWJsZV92YWx1ZQ==", [MARK], {MARK: MARK})
    ),
    # Keys with schemas are unwrapped; those that are text stay text.
    ("debezium", {"op": "c", "after": {"id": 3}}, {"schema": {"type": "s"}, "payload": {"id": 3}},
     [{"key": {"id": 3}}]),
    ("debezium", {"op": "c", "after": {"id": "10"}, "source": SOURCE}, {"id": "10"},
     [{"key": {"id": "10"}}]),
    # Cells that Cassandra did not write are unknown.
    ("debezium", {"op": "u", "after": CELLS, "source": LOGGED}, None,
     [{"after": {"id": 7, "gone": None}, "is_whole": False,
       "position": {"commitlog": (9, 12, 5)}}]),
    # MongoDB's documents are made plain, and its updates give what they change.
    ("debezium", {"op": "c", "source": MONGODB, "after":
     '{"_id": {"$numberLong": "1004"}, "at": {"$date": 5}, "tags": ["a"]}'}, None,
     [{"after": {"_id": 1004, "at": AT, "tags": ["a"]}, "is_whole": True}]),
    ("debezium", {"op": "u", "after": None, "updateDescription": CHANGED, "source": MONGODB},
     {"id": '{"$oid": "5b"}'},
     [{"after": {"name": "b", "old": None}, "is_whole": False, "key": {"_id": "5b", "id": "5b"}}]),
    # Maxwell gives the row after, and what changed; the frame of its bootstraps is nothing.
    ("maxwell", {**MAXWELL, "type": "insert", "data": {"id": 1, "a": 2}}, None,
     [{"op": "c", "after": {"id": 1, "a": 2}, "is_whole": True,
       "position": {"binlog": (7, 484, 0, 1)}, "time_us": 1_700_000_000_000_000}]),
    ("maxwell", {**MAXWELL, "type": "update", "data": {"id": 1, "a": 3}, "old": {"a": 2}}, None,
     [{"before": {"id": 1, "a": 2}, "after": {"id": 1, "a": 3}}]),
    ("maxwell", {**MAXWELL, "type": "delete", "data": {"id": 1, "a": 3}}, None,
     [{"op": "d", "before": {"id": 1, "a": 3}, "after": None}]),
    ("maxwell", {**MAXWELL, "type": "bootstrap-insert", "data": {"id": 1}}, None,
     [{"op": "r", "is_snapshot": True}]),
    ("maxwell", {**MAXWELL, "type": "bootstrap-start", "data": {}}, None, []),
    # Canal gives lists of rows, with changed columns only; no position distinguishes them.
    ("canal", {**CANAL, "type": "UPDATE", "old": [{"a": "2"}, {"a": "3"}],
     "data": [{"id": "1", "a": "3"}, {"id": "2", "a": "4"}]}, None,
     [{"op": "u", "key": {"id": "1"}, "after": {"id": "1", "a": "3"}, "is_whole": False,
       "before": {"id": "1", "a": "2"}}, {"position": {}}]),
    ("canal", {**CANAL, "type": "INSERT", "data": [{"id": "1"}], "old": None}, None,
     [{"op": "c", "is_whole": True}]),
    ("canal", {**CANAL, "type": "DELETE", "data": [{"id": "1"}], "old": None}, None,
     [{"op": "d", "is_whole": False}]),
    ("canal", {**CANAL, "type": "TRUNCATE", "isDdl": True}, None, [{"op": "t"}]),
    ("canal", {**CANAL, "type": "ALTER", "isDdl": True}, None, []),
    # GoldenGate's keys differ in case, and its updates may lack columns.
    ("goldengate", {**GOLDEN, "op_type": "I", "after": {"ID": 1, "NAME": "a"}}, None,
     [{"key": {"id": 1}, "is_whole": True, "position": {"pos": (143,)}}]),
    ("goldengate",
     {**GOLDEN, "op_type": "U", "before": {"id": 1}, "after": {"id": 1, "name": "b"}}, None,
     [{"is_whole": False}]),
    ("goldengate", {**GOLDEN, "op_type": "D", "before": {"id": 1}, "after": None}, None,
     [{"op": "d", "key": {"id": 1}}]),
    # DMS has data and metadata.
    ("dms", {"data": {"id": 1, "a": 2}, "metadata": DMS, "before-image": {"a": 1}}, None,
     [{"op": "u", "before": {"a": 1}, "is_whole": False}]),
    ("dms", {"metadata": {"record-type": "control"}}, None, []),
    ("dms", {"metadata": {"record-type": "control", "operation": "truncate-table",
     "table-name": "item"}}, None, [{"op": "t"}]),
]  # fmt: skip
"""Form, message, key, and attributes of the rows that it has."""


@pytest.mark.parametrize(("form", "value", "key", "wanted"), READ)
def test_a_message_is_read_as_its_tool_means_it(
    form: str, value: Any, key: Any, wanted: list[dict[str, Any]]
) -> None:
    pairs = zip(read(form, value, key), wanted, strict=True)
    found = [{name: getattr(row, name) for name in attributes} for row, attributes in pairs]
    assert found == wanted


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
    assert found.transaction == "744"


def test_debezium_tombstones_are_no_rows_and_truncations_have_no_key() -> None:
    assert read("debezium", None, {"id": 3}) == []
    assert one("debezium", {"op": "t", "source": SOURCE}).op == "t"


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


def test_the_end_of_a_transaction_joins_its_events_on_what_is_stable_of_its_id() -> None:
    body = {"status": "END", "id": "744:269", "event_count": 2}
    assert debezium.ended_transaction(json.dumps(body).encode()) == "744"
    assert debezium.transaction_key("0-184054-13") == "0-184054-13"
    begin = json.dumps({"status": "BEGIN", "id": "744:268"}).encode()
    assert debezium.ended_transaction(begin) is None


@pytest.mark.parametrize(
    ("status", "begun", "closed"),
    [
        ("BEGIN", "0-1-12", "0-1-11"),
        ("BEGIN", "0-2-100", "0-1-99"),
        ("END", "0-1-11", "0-1-11"),
        ("BEGIN", "0-1-11", None),
        ("BEGIN", "0-1-10", None),
        ("BEGIN", "1-1-12", None),
        ("END", "0-1-12", None),
        ("BEGIN", "744:268", None),
    ],
)
def test_the_begin_of_a_later_transaction_of_mariadb_ends_one_that_got_no_end(
    status: str, begun: str, closed: str | None
) -> None:
    told = debezium.ended_transaction(json.dumps({"status": status, "id": begun}).encode())
    open_one = closed or "0-1-11"
    assert debezium.ends(told, open_one) is (closed is not None)


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
