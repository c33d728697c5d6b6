"""What Debezium writes for a value of a column, made of what the database prints for it. Pure.

So a row that was read from its table becomes fields by the mapping of captured rows. Columns of
other types than these are not compared (``comparing``), as what a connector writes for them depends
on more than the printed text. ``test_cdc_types_captured`` compares with connectors that ran.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime, timedelta
from functools import partial
from math import isfinite
from typing import Any, Final

import msgspec

from everstate.sources.cdc.convert import NUMERIC

FromPrinted = Callable[[Any], Any]
"""Raises ValueError for a value that no captured row has, such as an infinite time."""
_DAY_ZERO: Final = date(1970, 1, 1)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_JAVA_NAMES: Final = {printed: written for written, printed in NUMERIC.items()}
_decode_elements = msgspec.json.Decoder(list[Any], float_hook=str).decode


def _elements(of_element: FromPrinted, text: str) -> list[Any]:
    """The elements of an array that is printed as JSON."""
    found = _decode_elements(text)
    return [None if each is None else of_element(each) for each in found]


def _day(text: str) -> int:
    return (date.fromisoformat(text) - _DAY_ZERO).days


def _local(text: str) -> int:
    at = datetime.fromisoformat(text).replace(tzinfo=UTC)
    return (at - _EPOCH) // timedelta(microseconds=1)


def _instant(text: str) -> str:
    at = datetime.fromisoformat(text).isoformat(timespec="microseconds")
    return at.replace("+00:00", "Z")


def of_two_forms(text: str) -> str:
    """A `timestamp` of MariaDB, of which snapshots write other texts than the stream."""
    return _instant(f"{text}+00")


def _clock(text: str) -> int:
    hours, minutes, seconds = text.lstrip("-").split(":")
    whole, _, fraction = seconds.partition(".")
    found = (int(hours) * 60 + int(minutes)) * 60 + int(whole)
    micros = found * 1_000_000 + int(fraction.ljust(6, "0"))
    return -micros if text.startswith("-") else micros


def _float(text: str) -> float | str:
    # JSON has no number for NaN and infinity.
    return value if isfinite(value := float(text)) else text


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode()


_IN_POSTGRES: Final[Mapping[str, FromPrinted]] = {
    **dict.fromkeys("text varchar bpchar citext uuid enum cidr inet macaddr ltree".split(), str),
    **dict.fromkeys("int4range int8range numrange daterange tsrange".split(), str),
    **dict.fromkeys("int2 int4 int8 oid".split(), int),
    **dict.fromkeys("float4 float8".split(), _float),
    "bool": lambda text: text in ("t", True),
    "bytea": lambda text: _base64(bytes.fromhex(text.removeprefix("\\x"))),
    "numeric": lambda text: _JAVA_NAMES.get(text, text),
    "date": _day,
    "timestamp": _local,
    "timestamptz": _instant,
}
_IN_MARIADB: Final[Mapping[str, FromPrinted]] = {
    **dict.fromkeys("char varchar tinytext text mediumtext longtext decimal".split(), str),
    **dict.fromkeys("enum set".split(), str),
    **dict.fromkeys("tinyint smallint mediumint int bigint year".split(), int),
    **dict.fromkeys("binary varbinary tinyblob blob mediumblob longblob".split(), _base64),
    "double": _float,
    "bit(1)": b"\x01".__eq__,
    "date": _day,
    "datetime": _local,
    "timestamp": of_two_forms,
    "time": _clock,
}
FORMS: Final[Mapping[str, Mapping[str, FromPrinted]]] = {
    "postgresql": {
        **{f"{kind}[]": partial(_elements, form) for kind, form in _IN_POSTGRES.items()},
        **_IN_POSTGRES,
        **dict.fromkeys("json jsonb xml tsvector macaddr8".split(), str),
        "bit(1)": "1".__eq__,
        "time": _clock,
    },
    "mariadb": _IN_MARIADB,
    "mysql": _IN_MARIADB,
}
"""Kind of database → type of a column → what makes Debezium's value of the printed one.

An array has ``[]`` after the type of its elements, and is printed as JSON; times are printed in
UTC. A domain is the type below it, every enum ``enum``, and a single bit ``bit(1)``.
"""
