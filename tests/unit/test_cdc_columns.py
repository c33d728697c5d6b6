"""Fields and columns of a capture: each field has its column, each row an entity of its own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import date, datetime
from typing import Annotated, Any

import pytest
from pydantic import AfterValidator, BaseModel, NaiveDatetime, create_model
from typing_extensions import TypeAliasType

from everstate.app import App
from everstate.changes import EntityType
from everstate.declarations.captures import Capture, DatabaseKind, ProvenanceFrom, Table
from everstate.errors import InvalidCapture
from everstate.sources.cdc.connectors import ColumnUnit, OwnTables, SourceColumn, TableShape
from everstate.sources.cdc.database import Finding
from everstate.sources.cdc.mapping import CleanRow, TableMapping
from everstate.sources.cdc.mariadb import source_column
from everstate.sources.cdc.mariadb_checks import MariaChecks
from everstate.sources.cdc.placeholders import DEFAULT_SETTING
from everstate.sources.cdc.postgres_types import ColumnType
from everstate.sources.cdc.reading import RawReader, RefusedRow
from everstate.sources.cdc.refusing import name_findings, shape_findings

T = "public.t"


class Person(BaseModel):
    """A row whose every field but its key has a default, which must never be taken."""

    user_id: int
    city: str | None = None
    note: str = "none"


class Line(BaseModel):
    """A row of a table with a key of two columns."""

    order_id: int
    line_no: int

    @property
    def name(self) -> str:
        """Key made of both."""
        return f"{self.order_id}-{self.line_no}"

    @property
    def half(self) -> str:
        """Key made of one of them."""
        return f"{self.order_id}"


def reader(kind: DatabaseKind = "postgresql", **options: Any) -> RawReader:
    table = Table(entity="person", key_columns=("user_id",), **options)
    capture = Capture(name="shop", kind=kind, tables={T: table})
    return RawReader(capture, {"person": EntityType("person", Person, "user_id")})


def read(row: dict[str, Any], op: str = "c", **options: Any) -> CleanRow | RefusedRow:
    """What one row that a connector wrote comes to."""
    sides = {"before": row} if op == "d" else {"after": row}
    message = {"op": op, "source": {"connector": "postgresql"}, **sides}
    (parsed,) = reader(**options).read("t", b'{"user_id":1}', json.dumps(message).encode())
    assert isinstance(parsed, CleanRow | RefusedRow)
    return parsed


def state(found: CleanRow | RefusedRow) -> Any:
    assert isinstance(found, CleanRow), found
    return json.loads(found.state or b"null")


WHOLE = {"user_id": 1, "city": "Wien", "note": "a"}


@pytest.mark.parametrize("missing", ["city", "note"])
def test_a_field_whose_column_is_gone_refuses_the_row_and_gets_no_default(missing: str) -> None:
    assert state(read(WHOLE)) == WHOLE
    row = {name: value for name, value in WHOLE.items() if name != missing}
    found = read({**row, "renamed": "Wien"})
    assert isinstance(found, RefusedRow)
    assert found.reason == f"{missing}: public.t has no column for this field"
    assert found.key == "1"
    assert isinstance(read({"user_id": 1}, op="d"), CleanRow), "a delete needs the key only"


def test_a_column_that_the_log_left_out_is_unknown_and_another_one_that_is_gone_is_not() -> None:
    found = read({**WHOLE, "note": DEFAULT_SETTING}, op="u")
    assert isinstance(found, CleanRow)
    assert (found.state, found.known) == (None, {"user_id": 1, "city": "Wien"})
    gone = read({"user_id": 1, "note": DEFAULT_SETTING}, op="u")
    assert isinstance(gone, RefusedRow)
    assert gone.reason.startswith("city: ")


def test_a_field_that_is_computed_or_whose_column_is_dropped_needs_no_column() -> None:
    computed = read({"user_id": 1, "note": "a"}, computed={"city": lambda _: "Graz"})
    assert state(computed)["city"] == "Graz"
    assert state(read(WHOLE, drop=("city",)))["city"] is None
    assert state(read({"user_id": 1}, kind="mongodb"))["note"] == "none", (
        "documents have no columns"
    )


def test_of_two_columns_that_differ_by_spelling_the_exact_name_has_the_field() -> None:
    assert state(read({**WHOLE, "userId": 9, "City": "Linz"})) == WHOLE
    named = {"town": "city"}
    assert state(read({**WHOLE, "town": "Graz"}, columns=named))["city"] == "Graz"
    row = {"user_id": 1, "note": "a", "City": "Linz", "CITY": "Graz"}
    found = read(row)
    assert isinstance(found, RefusedRow)
    assert found.reason == "city: the columns City and CITY both become it"


def found(
    columns: Sequence[SourceColumn | str],
    key: Sequence[str] = ("user_id",),
    settings: dict[str, str] | None = None,
    entity: EntityType | None = None,
    **options: Any,
) -> dict[str, Finding]:
    """What is wrong with a table of these columns."""
    entity = entity or EntityType("person", Person, "user_id")
    capture = Capture(
        name="shop", kind="postgresql", tables={T: Table(entity=entity.name, **options)}
    )
    listed = tuple(SourceColumn(each) if isinstance(each, str) else each for each in columns)
    shapes = {T: TableShape(listed, tuple(key))}
    findings = shape_findings(capture, {entity.name: entity}, shapes, settings or {})
    return {each.name: each for each in findings if each.outcome == "fail"}


def test_a_table_is_refused_for_a_field_without_a_column_or_whose_column_is_not_told() -> None:
    assert found(list(WHOLE)) == {}
    assert "this field city" in found(["user_id", "note"])[f"columns of {T}"].found
    gone = SourceColumn("city", absent="Debezium carries no values of type pair")
    assert (
        "of type pair, so field city" in found([gone, "user_id", "note"])[f"column {T}.city"].found
    )
    assert found([gone, "user_id", "note"], drop=("city",)) == {}
    assert found([*WHOLE, SourceColumn("other", absent="none")]) == {}, "no field needs it"
    excluded = {"column.exclude.list": r"public\.t\.city,public.t.x"}
    assert "exclude.list" in found(list(WHOLE), settings=excluded)[f"column {T}.city"].found
    included = {"column.include.list": "public.t.(user_id|note)"}
    assert "include.list" in found(list(WHOLE), settings=included)[f"column {T}.city"].found
    both = found(["user_id", "note", "City", "CITY"])[f"columns of {T}"]
    assert "both become it" in both.found


@pytest.mark.parametrize(
    ("annotation", "numbers", "types", "taken_for"),
    [
        (datetime, "days", {}, "times"),
        (date, "times", {}, "days"),
        (list[NaiveDatetime], "days", {}, "times"),
        (datetime | None, "times of day", {}, "times"),
        (date, "numbers", {}, "days"),
        (datetime, "days", {"at": "us"}, "times"),
        (date, "days", {}, None),
        (list[date], "days", {}, None),
        (datetime, "times", {}, None),
        (int, "times of day", {}, None),
        (int, "days", {}, None),
        (datetime, "numbers", {"at": "s"}, None),
        (date, "times", {"at": "us"}, None),
        (date, "times of day", {"at": str}, None),
    ],
)
def test_a_field_that_would_take_days_for_times_is_refused(
    annotation: Any, numbers: ColumnUnit, types: dict[str, Any], taken_for: str | None
) -> None:
    made = create_model("Row", user_id=(int, ...), at=(annotation, ...))
    columns: list[SourceColumn | str] = ["user_id", SourceColumn("at", numbers=numbers)]
    wrong = found(columns, entity=EntityType("row", made, "user_id"), types=types)
    if taken_for is None:
        assert wrong == {}
    else:
        told = f"its values are {numbers}, and field at would take them for {taken_for}"
        assert wrong[f"column {T}.at"].found == told


def test_a_table_that_debezium_cannot_read_is_refused_and_a_uuid_that_it_changes() -> None:
    left_out = {"column.exclude.list": r"public\.t\.address"}
    for kind in ("inet4", "inet6"):
        columns: list[SourceColumn | str] = [*WHOLE, source_column("address", kind)]
        wrong = found(columns, settings=left_out)
        assert f"a column of type {kind}" in wrong[f"column {T}.address"].found
    wrong = found(["user_id", "note", source_column("city", "uuid")])
    assert "another uuid for a change than the table has" in wrong[f"column {T}.city"].found
    assert found([*WHOLE, source_column("other", "uuid")]) == {}, "no field has it"


def test_a_long_value_that_nobody_can_tell_from_null_refuses_its_table() -> None:
    sql = ("ALTER TABLE t REPLICA IDENTITY FULL;",)
    city = SourceColumn("city", unmarked="it is stored apart", sql=sql)
    finding = found([city, "user_id", "note"])[f"column {T}.city"]
    assert finding.sql == sql
    assert "would write null" in finding.found
    other = SourceColumn("other", unmarked="it is stored apart", is_required=True)
    assert found([*WHOLE, other]) == {}, "no field has it, so it is left out"
    chosen = {"column.include.list": r"public\.t\..*"}
    wrong = found([*WHOLE, other], settings=chosen)[f"column {T}.other"]
    assert "fail because" in wrong.found, "a list of columns is the user's own"
    left_out = {"column.exclude.list": r"public\.t\.other"}
    assert found([*WHOLE, other], settings=left_out) == {}
    audit = ProvenanceFrom(columns={"actor": "Other"})
    lost = found([*WHOLE, other], provenance=audit)[f"column {T}.Other"]
    assert lost.found == "it is stored apart, so actor of the provenance would be its default"


def test_an_entitys_key_depends_on_every_column_that_names_a_row() -> None:
    columns, key = ["order_id", "line_no"], ("order_id", "line_no")
    one = found(columns, key, entity=EntityType("line", Line, "order_id"))[f"key of {T}"]
    assert "does not depend on line_no" in one.found
    assert found(columns, key, entity=EntityType("line", Line, "name")) == {}
    half = found(columns, key, entity=EntityType("line", Line, "half"))[f"key of {T}"]
    assert "does not depend on line_no" in half.found
    computed = {"order_id": lambda row: row["order_id"] * 1000 + row["line_no"]}
    entity = EntityType("line", Line, "order_id")
    assert found(columns, key, entity=entity, computed=computed) == {}
    other = found([*WHOLE, "id"], ("id",))[f"key of {T}"]
    assert "key user_id of person does not depend on id" in other.found


@pytest.mark.parametrize(
    ("made", "key_columns", "outcome"),
    [
        ("PRIMARY KEY (`order_id`,`line_no`)", (), "ok"),
        ("PRIMARY KEY (`order_id`,`line_no`)", ("order_id",), "fail"),
        ("PRIMARY KEY (`order_id`,`line_no`)", ("line_no", "order_id"), "ok"),
        ("PRIMARY KEY (`id`), UNIQUE KEY `u` (`order_id`)", ("order_id",), "ok"),
        ("PRIMARY KEY (`id`,`day`) PARTITION BY RANGE (`day`)", ("id",), "warn"),
        ("`u` uuid DEFAULT uuid(), `n` uuid DEFAULT NULL, PRIMARY KEY (`id`)", (), "ok"),
    ],
)
def test_declared_key_columns_of_mariadb_cover_a_unique_key(
    made: str, key_columns: tuple[str, ...], outcome: str
) -> None:
    told: dict[str, list[dict[str, Any]]] = {
        "SHOW GLOBAL VARIABLES": [],
        "SELECT current_user": [{"name": "u@h"}],
        "SHOW GRANTS": [{"g": "GRANT ALL PRIVILEGES ON *.* TO `u`@`h`"}],
        "SET character_set_results": [],
        "SHOW CREATE TABLE": [{"Create Table": made.encode()}],
        "SELECT column_name": [{"name": "id", "place": 1, "is_keyed": 1}],
        "SELECT index_name": [],
    }

    def rows(query: str, *_arguments: object) -> list[dict[str, Any]]:
        return next(answer for begin, answer in told.items() if query.startswith(begin))

    tables = {"shop.lines": Table(entity="line", key_columns=key_columns)}
    capture = Capture(name="shop", kind="mariadb", tables=tables)

    def check_tables() -> list[Finding]:
        return MariaChecks(rows, capture, OwnTables("shop.s")).tables()

    named = {each.name: each.outcome for each in check_tables()}
    assert named["key of shop.lines"] == outcome
    assert "default of shop.lines.u" not in named
    for default in ("uuid NOT NULL DEFAULT 'a-b'", "blob DEFAULT X''"):
        told["SHOW CREATE TABLE"] = [{"Create Table": f"`u` {default}, {made}"}]
        found = check_tables()
        assert {each.name: each.outcome for each in found}["default of shop.lines.u"] == "fail"
    told["SHOW CREATE TABLE"] = [{"Create Table": f"`b` int WITHOUT SYSTEM VERSIONING, {made}"}]
    named = {each.name: each.outcome for each in check_tables()}
    assert named["table shop.lines"] == "fail"


@pytest.mark.parametrize(
    ("table", "is_refused"),
    [
        ("public.order items", False),
        ("public.größen", False),
        ('public.a"b', True),
        ("public.a,b", True),
        ("public.a(b", True),
        ("public.a:b", True),
        ("public.a ", True),
        ("public.a\nb", True),
    ],
)
def test_a_table_is_refused_when_a_list_in_settings_cannot_hold_its_name(
    table: str, is_refused: bool
) -> None:
    dsn = "postgresql://db/shop"
    capture = Capture(name="shop", kind="postgresql", tables={table: Table(entity="t")}, dsn=dsn)
    assert [each.name for each in name_findings(capture)] == [f"name of {table}"] * is_refused


@pytest.mark.parametrize("table", ["shop.order items", "shop.größen", "a,b"])
def test_a_table_of_another_tool_is_refused_when_no_topic_can_have_its_name(table: str) -> None:
    with pytest.raises(InvalidCapture, match="a topic's name cannot have"):
        Capture(name="shop", kind="mysql", form="maxwell", tables={table: Table(entity="t")})


class Lists(BaseModel):
    """A row with arrays."""

    id: int
    texts: list[str | None]
    numbers: list[int | None]


@pytest.mark.parametrize(
    ("texts", "numbers", "reason"),
    [
        (["a", None], [1, None], None),
        ([], [], None),
        (["[Ljava.lang.String;@ab8c84a"], [1], "texts: it is a nested array"),
        (["[[I@7813a9ad"], [1], "texts: it is a nested array"),
        (["a"], [None, None], "numbers: [None, None] may have been a nested array"),
    ],
)
def test_a_nested_array_is_refused_and_is_no_array_of_nulls(
    texts: list[Any], numbers: list[Any], reason: str | None
) -> None:
    entity = EntityType("p", Lists, "id")
    capture = Capture(name="shop", kind="postgresql", tables={T: Table(entity="p")})
    row = {"id": 1, "texts": texts, "numbers": numbers}
    message = {"op": "c", "source": {"connector": "postgresql"}, "after": row}
    (parsed,) = RawReader(capture, {"p": entity}).read(
        "t", b'{"id":1}', json.dumps(message).encode()
    )
    if reason is None:
        assert state(parsed) == row  # type: ignore[arg-type]
    else:
        assert isinstance(parsed, RefusedRow)
        assert parsed.reason.startswith(reason)


_RAISED = Annotated[int, AfterValidator(lambda number: number + 100)]
Raised: Any = TypeAliasType("Raised", _RAISED)
Upper: Any = Annotated[str, AfterValidator(str.upper)]


@pytest.mark.parametrize(
    ("annotation", "value", "key", "quick"),
    [
        (int, 5, "5", "5"),
        (Raised, 5, "105", None),
        (Raised | None, 5, "105", None),
        (Upper | None, "ab", "AB", None),
    ],
    ids=["plain", "alias", "alias or null", "rule within Optional"],
)
def test_a_key_has_the_rules_of_its_declared_type_also_when_it_is_read_quickly(
    annotation: Any, value: Any, key: str, quick: str | None
) -> None:
    entity = EntityType("p", create_model("P", id=(annotation, ...)), "id")
    capture = Capture(name="shop", kind="postgresql", tables={T: Table(entity="p")})
    mapping = TableMapping(capture, T, capture.tables[T], entity)
    assert mapping.key_of({"id": value}) == key
    assert mapping.quick_key(json.dumps({"id": value}, separators=(",", ":")).encode()) == quick


def test_a_declared_key_of_two_columns_is_no_key_of_one_field() -> None:
    app = App("shop")
    app.entity("line", key="order_id", source="capture")(Line)
    table = Table(entity="line", key_columns=("order_id", "line_no"))
    with pytest.raises(InvalidCapture, match="different rows would become one entity"):
        app.capture("shop", kind="other", tables={"lines": table})


def test_what_a_connector_marks_depends_on_its_settings() -> None:
    kind = ColumnType("bytea", "bytea", "b", False, False, False, 0, -1)
    assert kind.is_marked({})
    assert not kind.is_marked({"binary.handling.mode": "base64"}), "as earlier versions made it"
    bits = ColumnType("bit(128)", "bit", "b", False, False, False, 0, 128)
    assert bits.is_marked({}), "so small a value is never stored apart"
