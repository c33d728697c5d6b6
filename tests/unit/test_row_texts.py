"""Texts of whole columns are those of their rows, one by one."""

from __future__ import annotations

import json
import random
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import orjson
import pyarrow as pa
import pytest

from everstate.pipeline.proof.row_texts import fragments, joined, kept_fragments, row_text
from everstate.views.images import NEWEST, RAW, cut

MOMENTS = [
    datetime(1, 1, 1, tzinfo=UTC),
    datetime(2013, 2, 8, 22, 28, tzinfo=UTC),
    datetime(2026, 3, 29, 1, 30, 0, 7, tzinfo=UTC),
    datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC),
    datetime(999, 1, 1, tzinfo=UTC),
]
COLUMNS: dict[str, tuple[pa.DataType, list[Any], list[str]]] = {
    "bool": (pa.bool_(), [True, False], ["true", "false"]),
    "int": (
        pa.int64(),
        [0, -7, 10**15, 2**53 - 1, 2**53, -(2**63)],
        ["0", "-7", "1000000000000000", "9007199254740991", "9007199254740992", str(-(2**63))],
    ),
    "decimal": (
        pa.decimal128(38, 8),
        [Decimal(v) for v in ("0E-8", "-0.00", "12.5", "100", "0.00000001", "-3.10", "1E+29")],
        ["0.00000000", "0", "12.50", "100.00", "0.00000001", "-3.1", "1" + "0" * 29],
    ),
    "float": (
        pa.float64(),
        [0.0, -0.0, 0.1, 1e300, 5e-324, 2.0, float("nan")],
        ["0", "-0", "0.1", "1e+300", "5e-324", "2", "NaN"],
    ),
    "text": (
        pa.string(),
        ["", "plain", '"', "a\\b", "ü\n", "\x1f", "null", "\x7f"],
        ["", "plain", '"', "a\\b", "ü\n", "\x1f", "null", "\x7f"],
    ),
    "moment": (
        pa.timestamp("us", tz="UTC"),
        MOMENTS,
        [m.replace(tzinfo=None).isoformat(timespec="microseconds") for m in MOMENTS],
    ),
    "day": (pa.date32(), [date(1, 1, 1), date(2024, 2, 29)], ["0001-01-01", "2024-02-29"]),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_of_either_engine_has_the_texts_of_its_values(name: str) -> None:
    kind, values, copied = COLUMNS[name]
    wanted = [row_text([value])[1:-1] for value in [*values, None]]
    assert fragments(name, pa.array([*values, None], kind)).to_pylist() == wanted
    assert kept_fragments(name, kind, pa.array([*copied, None], pa.string())).to_pylist() == wanted


def test_states_are_read_out_of_messages_and_out_of_jsonb() -> None:
    states = ['{"b": 1.0, "a": [1e5, null, "x"]}', '{"n": 12345678901234567890}', "null", "{}"]
    wanted = [row_text([{"by": "me"}, orjson.loads(state)]) for state in states]
    assert fragments(NEWEST, newest(states)).to_pylist() == wanted
    # As jsonb writes them: other spaces, another order, no exponents.
    copied = ['{"a": [100000, null, "x"], "b": 1.0}', states[1], "null", "{}"]
    assert kept_fragments(NEWEST, pa.binary(), kept(copied)).to_pylist() == wanted


def test_who_changed_an_entity_and_why_is_compared_too() -> None:
    sources = ['{"by":"me"}', '{"by":"me","transaction":null}', '{"transaction" : {"index": 1}}']
    event = '{"type":"sold","data":{"n":1e2}}'
    messages = [f'{{"event":{event},"provenance":{source}}}'.encode() for source in sources]
    wanted = [
        f'[{{"by":"me"}},null,{event.replace("1e2", "100")},null]',
        f'[{{"by":"me","transaction":null}},null,{event.replace("1e2", "100")},null]',
        f'[{{"transaction":{{"index":1}}}},{{"index":1}},{event.replace("1e2", "100")},null]',
    ]
    texts = [row_text(orjson.loads(text))[1:-1] for text in wanted]
    assert [f"[{text}]" for text in texts] == fragments(RAW, pa.array(messages)).to_pylist()
    images = cut(messages)
    assert images.transaction.to_pylist() == [None, None, '{"index": 1}']
    columns = [images.provenance, images.transaction, images.event, images.state]
    rows = zip(*(column.fill_null("null").to_pylist() for column in columns), strict=True)
    stored = pa.array([f"[{','.join(row)}]" for row in rows])
    assert kept_fragments(RAW, pa.binary(), stored).to_pylist() == [f"[{text}]" for text in texts]


def newest(states: list[str]) -> pa.Array:
    """Messages with these states."""
    message = '{{"provenance":{{"by":"me"}},"x":1,"currentEntityState":{}}}'
    return pa.array([message.format(state).encode() for state in states])


def kept(states: list[str]) -> pa.Array:
    """What `latest` keeps of them."""
    return pa.array([f'[{{"by": "me"}},{state}]' for state in states])


LONG = "12345678901234567890.123456789"


@pytest.mark.parametrize("number", [LONG, "36893488147419103232", "0.30000000000000004"])
def test_the_text_of_a_long_number_has_all_its_digits(number: str) -> None:
    """A proof that reads numbers as floats finds two unequal states equal."""
    texts = [f'{{"a": {number}}}', f'{{"a": {number[:-1]}5}}', f'{{"b": [1], "a": {number}}}']
    wanted = [f'{{"a":{number}}}', f'{{"a":{number[:-1]}5}}', f'{{"a":{number},"b":[1]}}']
    compared = [f'[{{"by":"me"}},{text}]' for text in wanted]
    assert fragments(NEWEST, newest(texts)).to_pylist() == compared
    assert kept_fragments(NEWEST, pa.binary(), kept(texts)).to_pylist() == compared
    nested = pa.struct([("a", pa.decimal128(38, 9))])
    assert kept_fragments("v", nested, pa.array(texts[:2])).to_pylist() == wanted[:2]
    if number == LONG:
        values = pa.array([{"a": Decimal(LONG)}, {"a": Decimal(f"{LONG[:-1]}5")}], nested)
        assert fragments("v", values).to_pylist() == wanted[:2]


def test_a_number_is_not_the_text_of_it() -> None:
    states = ['{"a": 1.5, "n": 9007199254740993}', '{"a": "1.5", "n": "9007199254740993"}']
    one, other = fragments(NEWEST, newest(states)).to_pylist()
    assert (one, other) == (
        '[{"by":"me"},{"a":1.5,"n":9007199254740993}]',
        '[{"by":"me"},{"a":"1.5","n":"9007199254740993"}]',
    )
    assert kept_fragments(NEWEST, pa.binary(), kept(states)).to_pylist() == [one, other]


def test_numbers_of_32_bits_are_those_that_postgresql_keeps_as_real() -> None:
    values = [0.1, 16777216.0, 1e-45, 3.4028235e38, -0.0, 1 / 3, float("nan"), float("-inf"), None]
    kept = ["0.1", "1.6777216e+07", "1e-45", "3.4028235e+38", "-0", "0.33333334", "NaN"]
    kind = pa.float32()
    texts = fragments("v", pa.array(values, kind)).to_pylist()
    assert texts[0] == "0.1"
    copied = pa.array([*kept, "-Infinity", None], pa.string())
    assert kept_fragments("v", kind, copied).to_pylist() == texts


def test_nested_values_are_compared_as_they_are_kept() -> None:
    kind = pa.struct([("city", pa.string()), ("m", pa.map_(pa.string(), pa.int64()))])
    values = pa.array([{"city": "x", "m": [("b", 1), ("a", 2)]}, None], kind)
    copied = pa.array(['{"m": {"a": 2, "b": 1}, "city": "x"}', None])
    assert fragments("v", values).to_pylist() == kept_fragments("v", kind, copied).to_pylist()


def test_random_rows_have_the_text_of_row_text() -> None:
    chance = random.Random(15)
    rows = [
        (
            f"k{chance.randrange(99)}",
            chance.choice((None, chance.randint(-(2**60), 2**60))),
            chance.choice((None, Decimal(chance.randint(-(10**9), 10**9)).scaleb(-4))),
            datetime(2000, 1, 1, tzinfo=UTC) + timedelta(microseconds=chance.randrange(10**17)),
            json.dumps({"x": chance.random()}),
        )
        for _ in range(500)
    ]
    kinds = (pa.string(), pa.int64(), pa.decimal128(20, 4), MOMENT, pa.string())
    parts = [
        fragments("c", pa.array(column, kind))
        for column, kind in zip(zip(*rows, strict=True), kinds, strict=True)
    ]
    assert joined(parts) == [row_text(row) for row in rows]


MOMENT = pa.timestamp("us", tz="UTC")
