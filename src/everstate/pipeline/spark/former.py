"""Former names of fields in Spark, as :mod:`everstate.changes.former` has them for Python."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce
from operator import and_
from typing import Final

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DataType, MapType, StructField, StructType

from everstate.changes.former import NONE, FormerNames

_EXACT: Final = {
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}


def with_former(kind: DataType, former: FormerNames) -> DataType:
    """The type that JSON is read as: each former name is a field of its own."""
    if not former:
        return kind
    if isinstance(kind, ArrayType):
        return ArrayType(with_former(kind.elementType, former.element or NONE))
    if isinstance(kind, MapType):
        return MapType(kind.keyType, with_former(kind.valueType, former.element or NONE))
    assert isinstance(kind, StructType)
    read = [(f.name, with_former(f.dataType, former.within(f.name))) for f in kind]
    return StructType([StructField(n, each) for name, each in read for n in former.names(name)])


def one_of(given: Sequence[Column], *, may_clash: bool = False) -> Column:
    """The value of a field that has these under its names; null where they are different ones."""
    first = F.coalesce(*given) if len(given) > 1 else given[0]
    if may_clash or len(given) == 1:
        return first
    return F.when(reduce(and_, (each.isNull() | same(each, first) for each in given)), first)


def same(one: Column, other: Column) -> Column:
    """Whether two values of a type are equal; Spark itself compares no maps."""
    first, second = (F.to_json(F.struct(each.alias("v")), _EXACT) for each in (one, other))
    return first == second


def today(value: Column, kind: DataType, former: FormerNames, *, may_clash: bool = False) -> Column:
    """A value of :func:`with_former` in the fields of ``kind``."""
    if not former:
        return value

    part, element = partial(today, may_clash=may_clash), former.element or NONE
    if isinstance(kind, ArrayType):
        return F.transform(value, lambda each: part(each, kind.elementType, element))
    if isinstance(kind, MapType):
        return F.transform_values(value, lambda _, each: part(each, kind.valueType, element))
    assert isinstance(kind, StructType)
    made = []
    for field in kind:
        one = one_of([value[name] for name in former.names(field.name)], may_clash=may_clash)
        made.append(part(one, field.dataType, former.within(field.name)).alias(field.name))
    return F.when(value.isNotNull(), F.struct(*made))


def has_clash(value: Column, kind: DataType, former: FormerNames) -> Column:
    """Whether a field at any depth has different values under its names."""
    return ~same(today(value, kind, former), today(value, kind, former, may_clash=True))
