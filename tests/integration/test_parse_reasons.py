"""What a record says, or why it cannot be read: one table for archive, keeper and proofs."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Literal

import pyarrow as pa
import pytest
from pydantic import AwareDatetime, BaseModel, Field, NaiveDatetime
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from everstate.changes import EntityType
from everstate.pipeline.spark.parse import parse, parsed_schema
from everstate.pipeline.spark.plain_bytes import plain_bytes
from everstate.pipeline.spark.source import SOURCE_SCHEMA


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Place(BaseModel):
    street: str
    number: int | None = None


class Stop(BaseModel):
    at: AwareDatetime | None = None


class Parcel(BaseModel):
    parcel_id: str
    size: Literal["small", "large"]
    colour: Colour | None = None
    weight: float
    price: Annotated[Decimal, Field(max_digits=10, decimal_places=2)]
    pieces: int
    fragile: bool = False
    due: date | None = None
    seen: AwareDatetime | None = None
    places: list[Place] = []
    home: Place | None = None
    labels: dict[str, str] = {}
    stops: list[Stop] = []
    moves: dict[str, NaiveDatetime] = {}


PARCEL = EntityType("parcel", Parcel, "parcel_id")
TOPIC = "p.parcel.changes.g3"
STATE: dict[str, Any] = {
    "parcel_id": "p1",
    "size": "small",
    "colour": "red",
    "weight": 1.5,
    "price": "12.50",
    "pieces": 3,
    "fragile": True,
    "due": "2013-02-03",
    "seen": "2013-02-03T04:05:06.123456-05:00",
    "places": [{"street": "a", "number": 1}, {"street": "b", "number": None}],
    "home": {"street": "c", "number": 2},
    "labels": {"x": "y"},
    "stops": [{"at": "9999-12-31T23:59:59.999999Z"}, {"at": None}, None],
    "moves": {"in": "2013-02-03T00:00:00", "out": None},
}
MESSAGE: dict[str, Any] = {
    "id": "0199c8a2-7c11-7d3e-9a55-0d8f2f6b1c77",
    "entity": "parcel",
    "schemaVersion": 1,
    "key": "p1",
    "version": 2,
    "kind": "updated",
    "event": {"type": "Moved", "data": {"by": [1, 2]}},
    "occurredAt": "2013-01-01T05:17:00.000001-05:00",
    "recordedAt": "2026-11-21T08:00:00.123456Z",
    "provenance": {
        "apiVersion": "v2",
        "serviceName": "depot",
        "identifier": "clerk:7",
        "actor": None,
        "transaction": {"id": "pg:744", "index": 1, "count": 2},
    },
    "currentEntityState": STATE,
    "originalEntityState": {**STATE, "pieces": 2},
}


def changed(path: str, value: Any) -> bytes:
    """The good message with one field replaced, or taken out (``...``)."""
    message: dict[str, Any] = json.loads(json.dumps(MESSAGE))
    *parents, last = path.split(".")
    place = message
    for parent in parents:
        place = place[parent]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return json.dumps(message).encode()


def without_states(kind: str, **states: Any) -> bytes:
    message = {**MESSAGE, "kind": kind, "currentEntityState": None, "originalEntityState": None}
    return json.dumps({**message, **states}).encode()


GOOD = json.dumps(MESSAGE).encode()
BOTH = {"currentEntityState": STATE, "originalEntityState": STATE}
TABLE: list[tuple[str, bytes | None, bytes | None, str | None]] = [
    ("good", b"p1", GOOD, None),
    ("spaces around", b"p1", b" \n" + GOOD + b"\r\n", None),
    ("unknown fields", b"p1", changed("more", {"a": 1}), None),
    ("unknown state field", b"p1", changed("currentEntityState.more", 5), None),
    ("no event", b"p1", changed("event", ...), None),
    ("no transaction", b"p1", changed("provenance.transaction", ...), None),
    ("optional left out", b"p1", changed("currentEntityState.due", ...), None),
    ("decimal as number", b"p1", changed("currentEntityState.price", 12.5), None),
    ("zeros after it", b"p1", changed("currentEntityState.price", "12.5000"), None),
    ("integer as float field", b"p1", changed("currentEntityState.weight", 2), None),
    ("number as text", b"p1", changed("currentEntityState.parcel_id", 5), None),
    ("text of an escaped backslash", b"p1", changed("event", {"type": "\\u0000"}), None),
    ("created", b"p1", without_states("created", currentEntityState=STATE), None),
    ("deleted", b"p1", without_states("deleted", originalEntityState=STATE), None),
    ("event kind", b"p1", without_states("event", currentEntityState=STATE), None),
    ("no key", None, GOOD, "no_key"),
    ("tombstone", b"p1", None, "tombstone"),
    ("no key and no value", None, None, "no_key"),
    ("empty", b"p1", b"", "malformed"),
    ("not json", b"p1", b"hello", "malformed"),
    ("cut", b"p1", GOOD[:-5], "malformed"),
    ("cut at a brace", b"p1", GOOD[: GOOD.index(b"}") + 1], "malformed"),
    ("array", b"p1", b"[" + GOOD + b"]", "malformed"),
    ("json text", b"p1", b'"x"', "malformed"),
    ("json null", b"p1", b"null", "malformed"),
    ("rubbish after", b"p1", GOOD + b" x", "malformed"),
    ("a brace after", b"p1", GOOD + b"}", "malformed"),
    ("an object after", b"p1", GOOD + b"{}", "malformed"),
    ("another after", b"p1", GOOD + b"\n" + GOOD + b"\n", "malformed"),
    ("a field after", b"p1", GOOD + b',"more":{}', "malformed"),
    ("an end of its own", b"p1", GOOD + b',"_everstate_end":1}', "malformed"),
    ("closed twice", b"p1", GOOD + b"]}", "malformed"),
    ("nothing in it", b"p1", b"{}", "malformed"),
    ("a comma at the end", b"p1", GOOD[:-1] + b",}", "malformed"),
    ("braces in text", b"p1", changed("provenance.actor", "}{}}"), None),
    ("single quotes", b"p1", GOOD.replace(b'"', b"'"), "malformed"),
    ("not utf-8", b"p1", GOOD.replace(b"depot", b"d\xff\xfet"), "malformed"),
    ("key not utf-8", b"\xff", GOOD, "malformed"),
    ("escaped nul", b"p1", changed("provenance.actor", "a\0b"), "nul_character"),
    ("nul in the key", b"p\x001", GOOD, "nul_character"),
    ("raw nul", b"p1", GOOD.replace(b"depot", b"d\0t"), "malformed"),
    ("other entity", b"p1", changed("entity", "order"), "unknown_entity"),
    ("no entity", b"p1", changed("entity", ...), "missing:entity"),
    ("key differs", b"p2", GOOD, "key_mismatch"),
    ("key empty", b"", changed("key", ""), "missing:key"),
    ("id no uuid", b"p1", changed("id", "17"), "wrong_type:id"),
    ("id with newline", b"p1", changed("id", MESSAGE["id"] + "\n"), "wrong_type:id"),
    ("id number", b"p1", changed("id", 17), "wrong_type:id"),
    ("version text", b"p1", changed("version", "2"), "wrong_type:version"),
    ("version float", b"p1", changed("version", 2.5), "wrong_type:version"),
    ("version zero", b"p1", changed("version", 0), "invalid:version"),
    ("version null", b"p1", changed("version", None), "missing:version"),
    ("version huge", b"p1", changed("version", 2**70), "wrong_type:version"),
    ("schema version", b"p1", changed("schemaVersion", 0), "invalid:schemaVersion"),
    ("kind unknown", b"p1", changed("kind", "moved"), "invalid:kind"),
    ("time rubbish", b"p1", changed("occurredAt", "yesterday"), "wrong_type:occurredAt"),
    ("time number", b"p1", changed("occurredAt", 1357000000), "wrong_type:occurredAt"),
    ("time date only", b"p1", changed("recordedAt", "2013-01-01"), "wrong_type:recordedAt"),
    (
        "time without offset",
        b"p1",
        changed("recordedAt", "2013-01-01T05:17:00.123456"),
        "wrong_type:recordedAt",
    ),
    ("no such day", b"p1", changed("occurredAt", "2013-02-30T05:17:00Z"), "wrong_type:occurredAt"),
    *(
        (f"time {text}", b"p1", changed("occurredAt", text), "wrong_type:occurredAt")
        for text in (
            *("0001-01-01T00:00:00+12:00", "9999-12-31T23:59:59-01:00", "0000-12-31T23:00:00Z"),
            *("10000-01-01T00:00:00Z", "-0001-01-01T00:00:00Z", "T10:00:00.0000000000Z"),
        )
    ),
    *(
        (f"time {text}", b"p1", changed(field, text), f"too_fine:{field}")
        for field in ("occurredAt", "recordedAt")
        for text in (
            *("2013-01-01T05:17:00.1234567Z", "2013-01-01T05:17:00.000000001+02:00"),
            *("2013-01-01T05:17:00.12345678901234567890-05:00", "2013-01-01T05:17:00.9999999z"),
        )
    ),
    *(
        (f"time {text}", b"p1", changed("occurredAt", text), None)
        for text in ("2013-01-01T05:17:00.123456000Z", "2013-01-01T05:17:00.1230000000+02:00")
    ),
    ("a time as text", b"p1", changed("currentEntityState.labels", {"x": "10:00"}), None),
    ("no provenance", b"p1", changed("provenance", ...), "missing:provenance"),
    ("provenance text", b"p1", changed("provenance", "x"), "wrong_type:provenance"),
    (
        "service empty",
        b"p1",
        changed("provenance.serviceName", ""),
        "missing:provenance.serviceName",
    ),
    ("no api", b"p1", changed("provenance.apiVersion", ...), "missing:provenance.apiVersion"),
    (
        "transaction incomplete",
        b"p1",
        changed("provenance.transaction", {"id": "x", "index": 1}),
        "missing:provenance.transaction.count",
    ),
    (
        "transaction text",
        b"p1",
        changed("provenance.transaction", "x"),
        "wrong_type:provenance.transaction",
    ),
    ("state text", b"p1", changed("currentEntityState", "x"), "wrong_type:currentEntityState"),
    ("state array", b"p1", changed("currentEntityState", [STATE]), "wrong_type:currentEntityState"),
    ("weight NaN", b"p1", changed("currentEntityState.weight", float("nan")), "wrong_type:state"),
    (
        "updated without original",
        b"p1",
        changed("originalEntityState", None),
        "missing:originalEntityState",
    ),
    (
        "updated without current",
        b"p1",
        changed("currentEntityState", ...),
        "missing:currentEntityState",
    ),
    (
        "created with original",
        b"p1",
        without_states("created", **BOTH),
        "unexpected:originalEntityState",
    ),
    (
        "deleted with current",
        b"p1",
        without_states("deleted", **BOTH),
        "unexpected:currentEntityState",
    ),
    ("deleted empty", b"p1", without_states("deleted"), "missing:originalEntityState"),
    (
        "event with original",
        b"p1",
        without_states("event", **BOTH),
        "unexpected:originalEntityState",
    ),
]

MISFITS: list[tuple[str, bytes, list[str]]] = [
    *(
        (f"{field} {value}", changed(f"currentEntityState.{field}", value), [field])
        for field, value in (
            ("seen", "0001-01-01T00:00:00+12:00"),
            ("seen", "10000-01-01T00:00:00Z"),
            ("seen", "10:00"),
            ("seen", " T10:00:00Z"),
            ("stops", [{"at": "10:00"}]),
            ("stops", [{"at": "2013-02-03T00:00:00Z"}, {"at": "soon"}]),
            ("stops", [{"at": "2013-02-03T00:00:00Z"}, {"at": "9999-12-31T23:00:00-02:00"}]),
            ("stops", "none"),
            ("moves", {"in": "10000-01-01T00:00:00"}),
            ("moves", [1]),
            ("due", "10000-01-01"),
            ("due", "0000-12-31"),
            ("due", "soon"),
            ("pieces", "3"),
            ("pieces", True),
            ("pieces", [1, {"a": 2}]),
            ("pieces", 2**70),
            ("pieces", 2.5),
            ("weight", "NaN"),
            ("fragile", "yes"),
            ("price", "dear"),
            ("price", "12.505"),
            ("price", 12.505),
            ("price", "1e-3"),
            ("price", "12,5"),
            ("due", "2026-01-01T10:00:00"),
            ("due", "2013-02-03Tanything"),
            ("seen", "2013-02-03T04:05:06.1234567-05:00"),
            ("stops", [{"at": "2013-02-03T00:00:00.0000001Z"}]),
            ("moves", {"in": "2013-02-03T00:00:00.0000001"}),
            ("price", {"amount": 5}),
            ("home", "c"),
            ("home.number", "two"),
            # Missing, and required.
            ("size", ...),
            ("price", None),
            ("home.street", ...),
        )
    ),
    ("too large", GOOD.replace(b'"weight": 1.5', b'"weight": 1e999', 1), ["weight"]),
    (
        "more digits than a float",
        GOOD.replace(b'"12.50"', b"12.50000000000000000000000000000001", 1),
        ["price"],
    ),
    (
        "another spelling of the name",
        changed("currentEntityState.price", "12.505").replace(b'"price"', b'"pric\\u0065"'),
        ["price"],
    ),
    (
        "two",
        changed("currentEntityState", {**STATE, "pieces": "3", "home": {"number": "two"}}),
        ["home.number", "home.street", "pieces"],
    ),
]


def records(spark: SparkSession, rows: list[tuple[bytes | None, bytes | None]]) -> DataFrame:
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    return spark.createDataFrame(
        [
            (
                None if key is None else bytearray(key),
                None if value is None else bytearray(value),
                TOPIC,
                1,
                offset,
                moment,
                0,
                [("ce_id", bytearray(b"x"))],
            )
            for offset, (key, value) in enumerate(rows)
        ],
        SOURCE_SCHEMA,
    )


@pytest.fixture(scope="module")
def parsed(spark: SparkSession) -> list[Row]:
    source = records(spark, [(key, value) for _, key, value, _ in TABLE])
    return parse(source, PARCEL).orderBy("offset").collect()


@pytest.mark.parametrize("index", range(len(TABLE)), ids=[row[0] for row in TABLE])
def test_each_record_is_readable_or_has_its_reason(parsed: list[Row], index: int) -> None:
    _, key, value, reason = TABLE[index]
    row = parsed[index]
    assert row.reason == reason
    assert (row.raw_key, row.raw_value) == (key, value)
    assert (row.partition, row.offset, row.generation, row.timestamp_type) == (1, index, 3, 0)
    typed = ("key", "id", "version", "kind", "current", "original", "provenance", "recorded_at")
    if reason is not None:
        assert [row[name] for name in typed] == [None] * len(typed)


@pytest.fixture(scope="module")
def misfits(spark: SparkSession) -> list[Row]:
    source = records(spark, [(b"p1", value) for _, value, _ in MISFITS])
    return parse(source, PARCEL).orderBy("offset").collect()


@pytest.mark.parametrize("index", range(len(MISFITS)), ids=[row[0] for row in MISFITS])
def test_a_state_that_does_not_fit_is_accepted_and_only_what_does_not_fit_is_null(
    misfits: list[Row], index: int
) -> None:
    _, value, fields = MISFITS[index]
    row = misfits[index]
    assert row.reason is None
    assert sorted(row.misfits) == fields
    assert (row.key, row.version, row.kind, row.raw_value) == ("p1", 2, "updated", value)
    whole = Row(**{**row.original.asDict(), "pieces": 3})
    for name, kept in whole.asDict().items():
        parts = [field.partition(".")[2] for field in fields if field.split(".")[0] == name]
        if "" in parts:
            assert row.current[name] is None
        elif parts:
            assert [row.current[name][part] for part in parts] == [None] * len(parts)
        else:
            assert row.current[name] == kept


@pytest.mark.parametrize(
    ("field", "value", "read"),
    [
        ("price", "12.500000000000", Decimal("12.50")),
        ("price", 12, Decimal("12.00")),
        ("price", "1250e-2", Decimal("12.50")),
        ("due", " 2013-02-03\t", date(2013, 2, 3)),
        (
            "moves",
            {"in": "2013-02-03T00:00:00.1234560"},
            {"in": datetime.fromisoformat("2013-02-03T00:00:00.123456")},
        ),
    ],
)
def test_an_equal_value_fits_however_it_is_written(
    spark: SparkSession, field: str, value: Any, read: Any
) -> None:
    written = changed(f"currentEntityState.{field}", value)
    (row,) = parse(records(spark, [(b"p1", written)]), PARCEL).collect()
    assert (row.reason, row.misfits, row.current[field]) == (None, None, read)


def test_the_key_of_a_map_may_look_like_a_time_of_day(spark: SparkSession) -> None:
    moves = {"10:00": "2013-02-03T10:00:00"}
    written = changed("currentEntityState", {**STATE, "price": "1250e-2", "moves": moves})
    (row,) = parse(records(spark, [(b"p1", written)]), PARCEL).collect()
    assert (row.reason, row.misfits) == (None, None)
    assert row.current.moves == {"10:00": datetime.fromisoformat("2013-02-03T10:00:00")}


def test_what_is_read_exactly_needs_no_second_look_and_nothing_else_passes(
    spark: SparkSession,
) -> None:
    plain = [
        changed("currentEntityState.price", "12.5000"),
        changed("currentEntityState.price", -12.5),
        changed("currentEntityState.due", None),
        changed("currentEntityState.seen", "2013-02-03 04:05:06Z"),
        changed("currentEntityState.moves", {}),
        changed("currentEntityState.labels", {"x": "10:00 é", "y": "2013-02-03T04:05:06.1234567Z"}),
    ]
    values = [*plain, *(value for _, value, _ in MISFITS)]
    rows: list[tuple[bytes | None, bytes | None]] = [(b"p1", value) for value in values]
    found = parse(records(spark, rows), PARCEL, unjudged="unjudged").orderBy("offset").collect()
    assert [row.reason for row in found] == [None] * len(plain) + ["unjudged"] * len(MISFITS)


def test_what_does_not_fit_in_an_original_is_null_and_not_counted_again(
    spark: SparkSession,
) -> None:
    values = [
        changed("originalEntityState.pieces", True),
        changed("originalEntityState.price", None),
        without_states("deleted", originalEntityState={**STATE, "pieces": "x"}),
    ]
    rows = parse(records(spark, [(b"p1", value) for value in values]), PARCEL).collect()
    assert [(row.reason, row.misfits) for row in rows] == [(None, None)] * 3
    assert [row.original.pieces for row in rows] == [None, 2, None]
    assert [row.original.due for row in rows] == [date(2013, 2, 3)] * 3


def test_the_first_and_the_last_times_can_be_read(spark: SparkSession) -> None:
    times = {
        "occurredAt": "0001-01-01T12:00:00+12:00",
        "recordedAt": "9999-12-31T22:59:59.999999-01:00",
        "currentEntityState": {**STATE, "seen": "0001-01-01T00:00:00Z", "due": "9999-12-31"},
    }
    value = json.dumps({**MESSAGE, **times}).encode()
    (row,) = parse(records(spark, [(b"p1", value)]), PARCEL).select("reason").collect()
    assert row.reason is None


def test_without_the_rules_a_record_is_as_with_them_or_unjudged(
    spark: SparkSession, parsed: list[Row]
) -> None:
    upper = GOOD.replace(MESSAGE["id"].encode(), MESSAGE["id"].upper().encode())
    assert upper != GOOD
    rows = [*((key, value) for _, key, value, _ in TABLE), (b"p1", upper)]
    quick = parse(records(spark, rows), PARCEL, unjudged="unjudged").orderBy("offset")
    found, left = quick.collect(), []
    for number, row in enumerate(found):
        # As a task does: Spark looks at what a message says, Arrow at its bytes.
        record = pa.RecordBatch.from_pylist(
            [{"raw_value": row.raw_value and bytes(row.raw_value), "id": row.id}],
            schema=pa.schema({"raw_value": pa.binary(), "id": pa.string()}),
        )
        assert row.reason in (None, "unjudged")
        if row.reason is None and plain_bytes(record):
            left.append(number)
    assert len(found) == len(parsed) + 1
    assert len(parsed) not in left, "readable, and only the rules can tell"
    assert len(left) > 10
    for number in left:
        assert found[number] == parsed[number]
    plain = parse(records(spark, [(b"p1", GOOD)]), PARCEL, unjudged="unjudged").collect()
    assert plain == parse(records(spark, [(b"p1", GOOD)]), PARCEL).collect()


def test_a_readable_record_has_every_typed_value(spark: SparkSession) -> None:
    row = parse(records(spark, [(b"p1", GOOD)]), PARCEL).select(
        "*", F.unix_micros("occurred_at").alias("occurred_us"), "current.seen"
    ).collect()[0]  # fmt: skip
    current = row.current
    assert (row.key, row.version, row.kind, row.schema_version) == ("p1", 2, "updated", 1)
    at = datetime(2013, 1, 1, 10, 17, 0, 1, tzinfo=UTC)
    assert row.occurred_us == round(at.timestamp()) * 1_000_000 + 1
    assert current.price == Decimal("12.50")
    assert current.due == date(2013, 2, 3)
    assert row.seen.astimezone(UTC) == datetime(2013, 2, 3, 9, 5, 6, 123456, tzinfo=UTC)
    assert current.places == [Row(street="a", number=1), Row(street="b", number=None)]
    assert (current.home.street, current.labels, current.fragile) == ("c", {"x": "y"}, True)
    assert (current.pieces, row.original.pieces) == (3, 2)
    assert json.loads(row.event) == MESSAGE["event"]
    assert row.transaction.asDict() == {"id": "pg:744", "index": 1, "count": 2}
    assert row.provenance.serviceName == "depot"
    assert row.provenance.actor is None


def test_columns_are_those_of_the_archive(spark: SparkSession) -> None:
    found = parse(records(spark, []), PARCEL).schema
    assert [(f.name, f.dataType) for f in found] == [
        (f.name, f.dataType) for f in parsed_schema(PARCEL)
    ]


def test_json_is_parsed_once_whatever_is_filtered_and_selected(spark: SparkSession) -> None:
    parsed = parse(records(spark, [(b"p1", GOOD)]), PARCEL)
    for query in (
        parsed.filter("reason IS NULL AND current.pieces > 1").select("key", "current.home.street"),
        parsed.filter("version = 2").groupBy("kind").count(),
        parsed.select("version"),
    ):
        plan = query._jdf.queryExecution().executedPlan().toString()
        whole = [line for line in plan.splitlines() if "SPARK_PARTITION_ID" in line]
        assert len(whole) == 1
        assert whole[0].count("SPARK_PARTITION_ID") == 1


def test_fields_that_came_with_a_later_schema_are_not_missed_in_older_messages(
    spark: SparkSession,
) -> None:
    newer = EntityType("parcel", Parcel, "parcel_id", schema_version=2)
    old = changed("currentEntityState.size", ...)
    new = changed("currentEntityState.size", ...).replace(
        b'"schemaVersion": 1', b'"schemaVersion": 2'
    )
    older_original = changed("originalEntityState.size", ...).replace(
        b'"schemaVersion": 1', b'"schemaVersion": 2'
    )
    rows = parse(
        records(spark, [(b"p1", old), (b"p1", new), (b"p1", older_original)]), newer
    ).orderBy("offset").collect()  # fmt: skip
    assert [(row.reason, row.misfits) for row in rows] == [
        (None, None),
        (None, ["size"]),
        (None, None),
    ]
