"""A trigger fires for the same changes in Python as in Spark, whatever the states have."""

from __future__ import annotations

import json
from datetime import date, datetime
from decimal import Decimal
from itertools import product
from typing import Annotated

from pydantic import BaseModel, Field, NaiveDatetime
from pyspark.sql import SparkSession
from test_parse_reasons import MESSAGE, records

from everstate.changes import EntityType
from everstate.changes.json_numbers import decode
from everstate.changes.triggers import when
from everstate.pipeline.batch.rules import fires
from everstate.pipeline.spark.parse import parse


class Place(BaseModel):
    city: str | None = None
    number: int | None = None


Price = Annotated[Decimal, Field(max_digits=6, decimal_places=2)]


class Stay(BaseModel):
    id: str
    note: str | None = None
    rooms: int | None = None
    paid: bool | None = None
    score: float | None = None
    price: Price | None = None
    day: date | None = None
    at: datetime | None = None
    clock: NaiveDatetime | None = None
    place: Place | None = None
    counts: list[int] = []
    prices: list[Price] = []
    seen: list[datetime] = []
    stops: list[Place] = []
    tags: list[str] = []


STAY = EntityType("stay", Stay, "id")
_TIMES = [
    json.dumps(text)
    for text in (
        *("2026-01-01T12:00:00Z", "2026-01-01T13:00:00+01:00", "2026-01-01T12:00:00.1234567Z"),
        *("2026-01-01T12:00:00", " 2026-1-1 12:00", "2026-01-01T12:00Z", "2026-01-01", "2026"),
        *("2026-01-01T12:00:00.5UTC+01:30", "2026-01-01T12:00:00z", "20260101T120000Z", "10:00"),
        *("0001-01-01T00:00:00+12:00", "2026-02-30", "2026-01-01T24:00:00Z", "10000-01-01"),
        *("2026-01-01T12:00:00.1234560Z", "2026-01-01T12:00:00.123456Z", "2026-01-01Tanything"),
        *("2026-01-01 \x7f", "\t2026-01-01", "2026-01-01T", "2026-01-01T12:00:00.1234567 UTC"),
    )
] + ["1767268800", "true"]
TEXTS: dict[str, list[str]] = {
    "note": [
        *('"5"', "5", "5.0", '"5.0"', "1e7", "12345678901234567890.12", "0.0001", '"1.0E7"'),
        *("true", '"true"', '{"b": 2, "a": 1.50}', '{"a":1.5,"b":2}', "[1, 2]", '"[1,2]"', '""'),
    ],
    "rooms": ["5", "5.0", '"5"', "1e2", "true", str(2**63), str(2**63 - 1), "-0", "0", "[5]"],
    "paid": ["true", "false", '"true"', "1"],
    "score": ["1", "1.0", "1e400", '"1.5"', "12345678901234567890", "0.0", "-0.0", "true"],
    "price": [
        *('"2.5"', "2.50", '"2.505"', "2.504", '"12345.6"', '"9999.995"', '"1e2"', "100", '" 1"'),
        *('"+2.5"', '".5"', '"5."', '"1_0"', "true", '"NaN"', '"2,5"', "25", "-0.001", "0"),
        *('"12.505"', "12.505", "12.50", '"12.500"', "12.5000", "12.50000000000000000000000001"),
        *("1e-2", '"1e-3"', "150e-2", '"1500E-3"', "1.50", "0e-9", '"-0.000"', '"\u0661.5"', "1e9"),
    ],
    "day": _TIMES,
    "at": _TIMES,
    "clock": _TIMES,
    "place": [
        *('{"city": "W", "number": 1}', '{"number": 1, "city": "W"}', '{"city": "W"}', "{}"),
        *('{"city": "W", "number": null, "more": 1}', '{"city": "W", "number": "x"}', '"x"', "[]"),
    ],
    "counts": ["[1, 2]", "[2, 1]", '[1, "x"]', "[1, null]", "[]", "1", "[1, 2.0]", "{}"],
    "prices": [
        *('["2.5", 2.50]', '["2.50", "2.5"]', "[2.504, 2.505]", '["x"]', "[2.50, null]", "[2.5]"),
        *('[2.50, "2.505"]', "[2.5000]", "[ ]", "[2.5000000000000000000001]", "[25e-1]"),
    ],
    "seen": [
        *('["2026-01-01T12:00:00Z"]', '["2026-01-01T13:00:00+01:00"]', '["10:00"]', "[5]"),
        *('["2026-01-01T12:00:00.0000001Z"]', '["2026-01-01T12:00:00.0000000Z"]'),
    ],
    "stops": ['[{"city": "W"}]', '[{"number": null, "city": "W"}]', '[{"number": "x"}]', "[null]"],
    "tags": ['["5", "1.5"]', "[5, 1.50]", "[[1]]", '["[1]"]'],
}
"""JSON texts of each field: some have one value, and some do not fit the model."""


def test_python_and_spark_agree_on_which_changes_fire(spark: SparkSession) -> None:
    pairs = [
        (field, before, after)
        for field, texts in TEXTS.items()
        for before, after in product([*texts, "null"], repeat=2)
        if before != after
    ]
    message = json.dumps(
        {**MESSAGE, "entity": "stay", "originalEntityState": "@1", "currentEntityState": "@2"}
    )
    rows: list[tuple[bytes | None, bytes | None]] = []
    for field, before, after in pairs:
        states = [f'{{"id": "a", "{field}": {text}}}' for text in (before, after)]
        made = message.replace('"@1"', states[0]).replace('"@2"', states[1])
        rows.append((b"p1", made.encode()))
    asked = [
        trigger
        for field in TEXTS
        for trigger in (when(field).changes(), when(field).changes(to=None))
    ]
    told = [fires(trigger).alias(f"t{number}") for number, trigger in enumerate(asked)]
    written = records(spark, rows)
    parsed = parse(written, STAY).where("reason IS NULL").select("offset", *told)
    found = {row["offset"]: row for row in parsed.collect()}
    assert len(found) == len(pairs)
    wrong = []
    for offset, (field, before, after) in enumerate(pairs):
        old, new = ({"id": "a", field: decode(text)} for text in (before, after))
        for number in (2 * list(TEXTS).index(field), 2 * list(TEXTS).index(field) + 1):
            expected = found[offset][f"t{number}"]
            if asked[number].fires(STAY, old, new) is not expected:
                wrong.append(f"{field}: {before} -> {after}: Spark says {expected}")
    assert wrong == []
