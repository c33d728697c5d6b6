"""Whether Spark reads a value exactly: its readers round decimals, and cut dates and times.

A column of `Decimal(10, 2)` would have 12.51 for 12.505 and 25 for "2,5", a date the day of any
time, and a time no parts of a microsecond. Such a value does not fit. Equal values do, as 12.500.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import reduce
from operator import and_, or_
from typing import Final, TypeAlias

import pyarrow as pa
from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DataType, MapType, StringType, StructField, StructType

from everstate.changes import EntityType
from everstate.changes.arrow import arrow_type
from everstate.changes.fields import tree_of

Test: TypeAlias = Callable[[Column, pa.DataType], Column | None]

# Java reads possessive loops (``*+``) without recursion, so no text is too long for them.
_DAY: Final = "[0-9]{4}-[0-9]{2}-[0-9]{2}"
_MINUTE: Final = "[0-9]{2}:[0-9]{2}"
_TIME: Final = rf"{_MINUTE}(?::[0-9]{{2}}(?:\.[0-9]{{1,6}}+0*+)?+)?+(?:Z|[+-]{_MINUTE})?+"
_NUMBER: Final = r"-?[0-9]++(?:\.[0-9]{{0,{scale}}}+0*+)?+(?:[eE]\+?[0-9]++)?+"
_STRING: Final = r'"(?:[^"\\]++|\\.)*+"'
_NUMBERS: Final = rf'\G((?:[^"0-9-]++|{_STRING})*+)(-?[0-9][0-9.eE+-]*+)'
# Escaped characters of which a plain name may consist; others are common in texts.
_ESCAPED: Final = r"u00(?:2[dD]|3[0-9]|[46][1-9a-fA-F]|5[0-9aAfF]|7[0-9aA])"
_PLAIN_NAME: Final = re.compile(r"[\w-]+", re.ASCII)

_PARTS: Final = r"^[+-]?([0-9]*)\.?([0-9]*)(?:[eE]([+-]?[0-9]+))?$"
_DATE_ALONE: Final = r"^[\x00-\x20\x7F]*[^ T]+[\x00-\x20\x7F]*$"
_FINER: Final = r"\.[0-9]{6}[0-9]*[1-9]"
"""Parts of a microsecond."""
_TIME_ONLY: Final = r"^\s*[+-]?(?:T\d|\d{1,2}:)"
"""A time without a date, which Spark reads as one of the day on which it reads it."""


def is_doubtful(text: Column, entity_type: EntityType) -> Column | None:
    """Whether a message may have a value that is not read exactly; ``None``: its type has none.

    Finds each, and few others: any field of that name in the text, also one in the event. Cost:
    one or two microseconds for each such field.
    """
    names: dict[str, set[str]] = {}
    for tree in tree_of(entity_type.model).walk(computed=True):
        for field in tree.columns:
            if (plain := _plain(arrow_type(field.tree))) is not None:
                names.setdefault(plain, set()).update((field.written, *field.former))
    if not names:
        return None
    # Each expression begins with fixed characters, which Java finds with Boyer and Moore's method:
    # one look for each of some names costs less than one look for any of them.
    looks = [
        text.rlike(rf'"{_written(name)}"\s*+:\s*+(?!{plain})')
        for plain, group in names.items()
        for name in sorted(group)
    ]
    may_escape = F.contains(text, F.lit("\\"))
    if all(_PLAIN_NAME.fullmatch(name) for group in names.values() for name in group):
        may_escape &= text.rlike(rf"\\{_ESCAPED}")
    return reduce(or_, looks, may_escape)


def _written(name: str) -> str:
    """A regular expression of a name as it is in JSON."""
    return re.escape(json.dumps(name, ensure_ascii=False)[1:-1])


def _plain(kind: pa.DataType) -> str | None:
    """A regular expression of what is surely read exactly; ``None``: all is, or it has fields."""
    if pa.types.is_decimal(kind):
        number = _NUMBER.format(scale=kind.scale)
        return f'(?:null|"{number}"|{number}(?![0-9.eE]))'
    if pa.types.is_date(kind):
        return f'(?:null|"{_DAY}")'
    if pa.types.is_timestamp(kind):
        return f'(?:null|"{_DAY}[T ]{_TIME}")'
    if pa.types.is_list(kind):
        each = _plain(kind.value_type)
        return each and rf"(?:null|\[\s*+(?:{each}\s*+,?\s*+)*+\])"
    if pa.types.is_map(kind):
        each = _plain(kind.item_type)
        return each and rf"(?:null|\{{\s*+(?:{_STRING}\s*+:\s*+{each}\s*+,?\s*+)*+\}})"
    return None


def texts_schema(kind: pa.DataType) -> DataType | None:
    """Spark's type of the values that may not be read exactly, as text; ``None``: it has none."""
    if pa.types.is_list(kind):
        each = texts_schema(kind.value_type)
        return each and ArrayType(each)
    if pa.types.is_map(kind):
        each = texts_schema(kind.item_type)
        return each and MapType(StringType(), each)
    if pa.types.is_struct(kind):
        found = [StructField(f.name, each) for f in kind if (each := texts_schema(f.type))]
        return StructType(found) if found else None
    may_change = pa.types.is_decimal(kind) or pa.types.is_date(kind) or pa.types.is_timestamp(kind)
    return StringType() if may_change else None


def numbers_as_texts(text: Column) -> Column:
    """JSON in which each number is a text of all its digits, which Spark would cut in a text."""
    return F.regexp_replace(text, _NUMBERS, '$1"$2"')


def is_exact(text: Column, kind: pa.DataType) -> Column | None:
    """Whether a value that Spark can read as a type is read exactly; ``None``: each is.

    ``text`` is a column of :func:`texts_schema`, read from :func:`numbers_as_texts`.
    """
    return every_part(text, kind, _exact)


def _exact(text: Column, kind: pa.DataType) -> Column | None:
    if pa.types.is_decimal(kind):
        whole, fraction, exponent = (F.regexp_extract(text, _PARTS, n) for n in (1, 2, 3))
        digits = F.concat(whole, fraction)
        kept = F.rtrim(digits, F.lit("0"))
        power = F.coalesce(exponent.try_cast("bigint"), F.lit(0))
        places = F.length(fraction) - F.length(digits) + F.length(kept) - power
        fits: Column = text.rlike(_PARTS) & ((kept == "") | (places <= kind.scale))
        return fits
    if pa.types.is_date(kind):
        return text.rlike(_DATE_ALONE)
    if pa.types.is_timestamp(kind):
        return ~text.rlike(_FINER) & ~text.rlike(_TIME_ONLY)
    return None


def every_part(value: Column, kind: pa.DataType, test: Test) -> Column | None:
    """Whether a value, or each in a list, map or struct, passes; ``None``: no type has a test."""
    if pa.types.is_list(kind):
        return _all(value, kind.value_type, test)
    if pa.types.is_map(kind):
        return _all(F.map_values(value), kind.item_type, test)
    if pa.types.is_struct(kind):
        passed = [
            value[field.name].isNull() | found
            for field in kind
            if (found := every_part(value[field.name], field.type, test)) is not None
        ]
        return reduce(and_, passed) if passed else None
    return test(value, kind)


def _all(values: Column, kind: pa.DataType, test: Test) -> Column | None:
    # A lambda must return a condition, so whether the type needs one is tested beforehand.
    if every_part(F.lit(None), kind, test) is None:
        return None

    def one(value: Column) -> Column:
        found = every_part(value, kind, test)
        assert found is not None
        return value.isNull() | found

    return F.forall(values, one)
