"""Values of columns arrive exactly, or their row is refused with the field and the reason."""

from __future__ import annotations

import base64
import json
from datetime import date, datetime
from decimal import Decimal
from typing import Annotated, Any, cast

import pytest
from pydantic import BaseModel, Field, NaiveDatetime, PastDate, RootModel, create_model

from everstate.changes import EntityType
from everstate.declarations.captures import Capture, CaptureForm, DatabaseKind, Table
from everstate.sources.cdc.mapping import CleanRow
from everstate.sources.cdc.reading import RawReader, RefusedRow

Amount = Annotated[Decimal, Field(max_digits=38, decimal_places=10)]
DIGITS = "12345678901234567890.1234567890"


class Money(BaseModel):
    amount: Amount | None = None


def read(
    annotation: Any, value: str, form: str = "debezium", kind: str = "postgresql", **table: Any
) -> CleanRow | RefusedRow:
    """What a row says whose column ``v`` has this JSON."""
    model = create_model("Row", id=(int, ...), v=(annotation, ...))
    capture = Capture(
        name="shop",
        kind=cast("DatabaseKind", kind if form == "debezium" else "other"),
        form=cast("CaptureForm", form),
        tables={"public.item": Table(entity="item", key_columns=("id",), **table)},
    )
    row = f'{{"id": 1, "v": {value}}}'
    message = {
        "debezium": f'{{"op": "c", "after": {row}, "source": {{"connector": "postgresql"}}}}',
        "maxwell": f'{{"type": "insert", "table": "item", "data": {row}}}',
        "canal": f'{{"type": "INSERT", "table": "item", "data": [{row}]}}',
        "goldengate": f'{{"op_type": "I", "table": "S.ITEM", "after": {row}}}',
        "dms": f'{{"data": {row}, "metadata": {{"operation": "insert"}}}}',
    }[form]
    reader = RawReader(capture, {"item": EntityType("item", model, "id")})
    (found,) = reader.read("item", None, message.encode())
    assert isinstance(found, CleanRow | RefusedRow)
    return found


def state(annotation: Any, value: str, form: str = "debezium", **table: Any) -> Any:
    """The field's value in the changelog."""
    found = read(annotation, value, form, **table)
    assert isinstance(found, CleanRow), found
    return json.loads(found.state or b"")["v"]


@pytest.mark.parametrize("form", ["maxwell", "canal", "goldengate", "dms"])
def test_numbers_of_flat_forms_keep_all_digits(form: str) -> None:
    assert state(Amount, DIGITS, form) == DIGITS
    assert state(str, DIGITS, form) == DIGITS
    assert state(str | None, "1.50", form) == "1.50"
    assert state(float, "0.1", form) == 0.1
    assert state(list[float], "[0.1, 2]", form) == [0.1, 2.0]
    assert state(list[Amount], f"[{DIGITS}]", form) == [DIGITS]
    assert state(int, str(2**63 - 1), form) == 2**63 - 1


@pytest.mark.parametrize("scale", [38, 10, 0])
def test_a_decimal_in_bytes_keeps_all_digits_and_its_scale(scale: int) -> None:
    unscaled = -12345678901234567890123456789012345678
    column = {"field": "v", "name": "org.apache.kafka.connect.data.Decimal"}
    columns = [{"field": "id"}, {**column, "parameters": {"scale": str(scale)}}]
    content = base64.b64encode(unscaled.to_bytes(17, "big", signed=True)).decode()
    row = {"op": "c", "after": {"id": 1, "v": content}, "source": {"connector": "mysql"}}
    schema = {"fields": [{"field": "after", "fields": columns}]}
    wide = Annotated[Decimal, Field(max_digits=38, decimal_places=scale)]
    model = create_model("Row", id=(int, ...), v=(wide, ...))
    table = Table(entity="item", key_columns=("id",))
    capture = Capture(name="shop", kind="mysql", tables={"s.item": table})
    reader = RawReader(capture, {"item": EntityType("item", model, "id")})
    (found,) = reader.read("item", None, json.dumps({"schema": schema, "payload": row}).encode())
    assert isinstance(found, CleanRow), found
    value = Decimal(json.loads(found.state or b"")["v"])
    assert value.as_tuple() == Decimal(f"{unscaled}E{-scale}").as_tuple()


def mongodb(annotation: Any, value: Any) -> CleanRow | RefusedRow:
    """What a document says whose field ``at`` has this value."""
    model = create_model("Document", id=(str, ...), at=(annotation, ...))
    table = Table(entity="item", key_columns=("id",), columns={"_id": "id"})
    capture = Capture(name="shop", kind="mongodb", tables={"db.item": table})
    reader = RawReader(capture, {"item": EntityType("item", model, "id")})
    document = json.dumps({"_id": "x", "at": value, "other": {"$date": 2**62}})
    message = {"op": "c", "after": document, "source": {"connector": "mongodb"}}
    key = json.dumps({"id": '"x"'}).encode()
    (found,) = reader.read("item", key, json.dumps(message).encode())
    assert isinstance(found, CleanRow | RefusedRow)
    return found


@pytest.mark.parametrize(
    ("annotation", "value", "wanted"),
    [
        (datetime, {"$date": 1_700_000_000_000}, "2023-11-14T22:13:20Z"),
        (datetime, {"$date": {"$numberLong": "-1"}}, "1969-12-31T23:59:59.999000Z"),
        (datetime, {"$date": "2023-11-14T22:13:20Z"}, "2023-11-14T22:13:20Z"),
        (NaiveDatetime, {"$date": 1_700_000_000_000}, "2023-11-14T22:13:20"),
        (date, {"$date": 1_699_920_000_000}, "2023-11-14"),
        (list[datetime], [{"$date": 1_700_000_000_000}], ["2023-11-14T22:13:20Z"]),
        (list[date], [{"$date": 1_699_920_000_000}], ["2023-11-14"]),
        (dict[str, datetime], {"a": {"$date": 0}}, {"a": "1970-01-01T00:00:00Z"}),
        (str, {"$oid": "5b"}, "5b"),
    ],
)
def test_a_date_of_mongodb_is_a_time(annotation: Any, value: Any, wanted: Any) -> None:
    found = mongodb(annotation, value)
    assert isinstance(found, CleanRow), found
    assert json.loads(found.state or b"")["at"] == wanted


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (datetime, {"$date": 2**62}),
        (datetime, {"$date": "tomorrow"}),
        (date, {"$date": 1_700_000_000_000}),
        (int, {"$date": 1_700_000_000_000}),
    ],
)
def test_a_date_of_mongodb_that_a_field_cannot_hold_is_refused(annotation: Any, value: Any) -> None:
    found = mongodb(annotation, value)
    assert isinstance(found, RefusedRow), found
    assert found.reason.startswith("at: ")


def test_numbers_within_json_keep_all_digits() -> None:
    assert state(Money, json.dumps(f'{{"amount": {DIGITS}}}')) == {"amount": DIGITS}
    assert state(dict[str, float], '"{\\"a\\": 0.1}"') == {"a": 0.1}


def test_arrays_of_days_and_times_have_the_units_of_their_columns() -> None:
    assert state(list[date], "[86197, -719162]") == ["2206-01-01", "0001-01-01"]
    assert state(PastDate, "1977") == state(RootModel[date], "1977") == "1975-06-01"
    assert state(list[date | None] | None, "[1977, null]") == ["1975-06-01", None]
    times = state(list[NaiveDatetime], "[157766400123456]")
    assert times == ["1975-01-01T00:00:00.123456"]
    aware = state(list[datetime], '["0001-01-01T00:00:00.000000Z"]')
    assert datetime.fromisoformat(aware[0]) == datetime.fromisoformat("0001-01-01T00:00:00Z")


def test_the_first_and_the_last_time_arrive_and_those_beyond_are_refused_in_words() -> None:
    assert state(NaiveDatetime, "-62135596800000000") == "0001-01-01T00:00:00"
    assert state(datetime, '"0001-01-01T00:00:00.000000Z"').startswith("0001-01-01T00:00:00")
    assert state(NaiveDatetime, "253402300799999999") == "9999-12-31T23:59:59.999999"
    beyond = ['"-0043-03-15T12:00:00.000000Z"', '"+10000-01-01T00:00:00.000000Z"', '"infinity"']
    for value in (*beyond, "-62135596800000001", "253402300800000000"):
        found = read(datetime, value)
        assert isinstance(found, RefusedRow)
        assert "or a time outside of the years 1 to 9999" in found.reason


def test_a_time_in_an_array_that_another_calendar_has_is_refused() -> None:
    found = read(list[NaiveDatetime], "[-14825764800000000]")
    assert isinstance(found, RefusedRow)
    assert found.reason.startswith("v: -14825764800000000 is a time before 15 October 1582")
    found = read(list[date], "[2932897]")
    assert isinstance(found, RefusedRow)
    assert found.reason.startswith("v: 2932897 is infinity, or a time outside of the years 1")


def test_a_number_beyond_64_bits_is_a_decimal_or_a_text_or_is_refused() -> None:
    largest = str(2**64 - 1)
    assert state(Annotated[Decimal, Field(max_digits=20, decimal_places=0)], largest) == largest
    assert state(str, largest, types={"v": "text"}) == largest
    found = read(int, largest)
    assert isinstance(found, RefusedRow)
    assert found.reason == "v: NaN, infinity and integers beyond 64 bits are refused"


@pytest.mark.parametrize(
    ("annotation", "value", "unit"),
    [
        (date, "0", "days"),
        (NaiveDatetime, "0", "us"),
        (datetime, '"1970-01-01T00:00:00Z"', "us"),
        (list[date], "[0]", None),
    ],
)
def test_the_epoch_of_mariadb_may_be_a_date_of_no_calendar(
    annotation: Any, value: str, unit: str | None
) -> None:
    plain = state(annotation, value)
    assert json.dumps(plain).strip('[]"').startswith("1970-01-01")
    found = read(annotation, value, kind="mariadb")
    if unit is None:
        assert isinstance(found, CleanRow), "MariaDB has no arrays"
        return
    assert isinstance(found, RefusedRow)
    assert "is 1970-01-01, or a date with month 0 or day 0" in found.reason
    assert state(annotation, value, kind="mariadb", types={"v": unit}) == plain


NUMBERS_OF_FLOATS = ["0.1", "5e-324", "1.7976931348623157e308", "1.000000000000000056e-01"]
NO_FLOATS = ["9007199254740993", "9007199254740993.0", "12345678901234567890.12", "1e-400"]


@pytest.mark.parametrize("form", ["debezium", "maxwell"])
def test_a_number_that_a_float_cannot_hold_is_no_float(form: str) -> None:
    for number in NUMBERS_OF_FLOATS:
        assert state(float, number, form) == float(number)
        assert state(float, f'"{number}"', form) == float(number)
    for number in [*NO_FLOATS, *(f'"{number}"' for number in NO_FLOATS)]:
        for annotation, value in ((float, number), (list[float], f"[0.5, {number}]")):
            found = read(annotation, value, form)
            assert isinstance(found, RefusedRow), value
            assert "is a number that a float cannot hold exactly" in found.reason


@pytest.mark.parametrize(
    ("annotation", "value", "unit", "reason"),
    [
        (datetime, "1500000000000000001", "ns", "v: 1500000000000000001 has parts of a microsec"),
        (datetime, '"2026-01-01T00:00:00.1234567Z"', None, "v: '2026-01-01T00:00:00.1234567Z' has"),
        (date, "1500000000000", "ms", "v: 2017-07-14T02:40:00+00:00 has a time of day"),
        (int, '"1_000"', None, "v: '1_000' is no number"),
        (Amount, '"NAN"', None, "v: Input should be"),
    ],
)
def test_what_a_field_cannot_hold_is_not_cut_off(
    annotation: Any, value: str, unit: str | None, reason: str
) -> None:
    found = read(annotation, value, types={} if unit is None else {"v": unit})
    assert isinstance(found, RefusedRow)
    assert found.reason.startswith(reason)


def test_a_time_at_midnight_is_a_day_and_whole_microseconds_are_a_time() -> None:
    assert state(date, "1499990400000", types={"v": "ms"}) == "2017-07-14"
    found = state(NaiveDatetime, "1500000000000001000", types={"v": "ns"})
    assert found == "2017-07-14T02:40:00.000001"


@pytest.mark.parametrize(
    ("word", "number"),
    [("NAN", "NaN"), ("POSITIVE_INFINITY", "Infinity"), ("NEGATIVE_INFINITY", "-Infinity")],
)
def test_a_number_that_debezium_spells_in_its_own_way_is_no_text(word: str, number: str) -> None:
    found = read(str | None, f'"{word}"')
    assert isinstance(found, RefusedRow)
    assert found.reason.startswith(f"v: '{word}' is a text, or what Debezium writes for {number}")
    assert state(str, f'"{word}"', types={"v": "numeric"}) == number
    assert state(str, f'"{word}"', types={"v": "text"}) == word
    assert state(str, f'"a {word}"') == f"a {word}"
    other = read(str, f'"{word}"', kind="mariadb")
    assert isinstance(other, CleanRow)
