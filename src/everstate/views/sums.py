"""The sums that a batch of changes adds to a view: exact, with equal groups in one form."""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from everstate.views.json_texts import json_texts
from everstate.views.tables import KeptTable, Sum, planned_column

_DECIMAL128_DIGITS: Final = 38
_BATCH_DIGITS: Final = 10
"""The number of changes of a batch has at most so many digits."""
_SUMMED_MAX: Final = 2**63 // 10**_BATCH_DIGITS
"""Whole numbers below this can be summed over a batch in 64 bits."""
_COUNTED: Final = pc.ScalarAggregateOptions(skip_nulls=True, min_count=0)


def sum_deltas(table: KeptTable, changes: pa.Table) -> pa.Table:
    """Sums per group of the values that changes subtract (`original`) and add (the other images).

    Out: groups, then sums; counts as int64, sums as int64 or decimal without overflow. Groups
    whose sums do not change are left out.
    """
    sides = [_counted(table, changes[planned_column(table, image)]) for image in table.images]
    rows = pa.concat_tables(sides).combine_chunks()
    taken = sides[0].num_rows if table.images[0] == "original" else 0
    is_added = pa.array(np.arange(rows.num_rows) >= taken)
    for name in _added(table):
        values = _wide(rows[name])
        if taken:
            values = pc.if_else(is_added, values, pc.negate_checked(values))
        rows = rows.set_column(rows.column_names.index(name), name, values)
    # Without threads: one task has one core, and the sums of a batch are small.
    found = rows.group_by(list(table.groups), use_threads=False).aggregate(
        [_aggregate(name, kind) for name, kind in table.sums]
    )
    names = [name for name, _ in table.sums]
    found = found.rename_columns([*table.groups, *names])
    changed = pa.array(np.zeros(found.num_rows, dtype=np.bool_))
    for name in _added(table):
        changed = pc.or_(changed, pc.not_equal(found[name], pa.scalar(0, found[name].type)))
    return found.filter(changed)


def _added(table: KeptTable) -> list[str]:
    """Names of added columns (counts and sums); the others are maximum or minimum."""
    return [name for name, kind in table.sums if kind in ("count", "sum")]


def _aggregate(name: str, kind: Sum) -> tuple[str, str, pc.FunctionOptions]:
    if kind in ("count", "sum"):
        return name, "sum", _COUNTED
    return name, kind, pc.ScalarAggregateOptions(skip_nulls=True)


def one_zero(values: pa.Array) -> pa.Array:
    """Floats with one form for equal values, as Spark and PostgreSQL compare them.

    -0.0 is 0.0, and there is one NaN.
    """
    if not pa.types.is_floating(values.type):
        return values
    nan = pa.scalar(float("nan"), values.type)
    return pc.if_else(pc.is_nan(values), nan, pc.add(values, pa.scalar(0.0, values.type)))


def grouped(values: pa.Array) -> pa.Array:
    """Values of a group column, with one form for equal groups."""
    return json_texts(values) if pa.types.is_nested(values.type) else one_zero(values)


def _counted(table: KeptTable, images: pa.ChunkedArray) -> pa.Table:
    """Groups and inputs of the images that count in the view: one row or several for each."""
    present = images.combine_chunks()
    present = present.filter(present.is_valid())
    if pa.types.is_list(present.type):
        present = present.flatten()
    fields = dict(zip([field.name for field in present.type], present.flatten(), strict=True))
    columns: dict[str, pa.Array] = {name: grouped(fields[name]) for name in table.groups}
    for name, _ in table.sums:
        ones = pa.array(np.ones(len(present), dtype=np.int64))
        columns[name] = fields.get(name, ones)
    return pa.Table.from_pydict(columns)


def _wide(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """A type in which neither a value's negative nor the sum of a batch can overflow."""
    kind = values.type
    if pa.types.is_decimal(kind) and kind.precision <= _DECIMAL128_DIGITS - _BATCH_DIGITS:
        return values.cast(pa.decimal128(_DECIMAL128_DIGITS, kind.scale))
    if pa.types.is_decimal(kind):
        return values.cast(pa.decimal256(76, kind.scale))
    whole = values.cast(pa.int64())
    bounds = pc.min_max(whole).as_py()
    if max(-(bounds["min"] or 0), bounds["max"] or 0) < _SUMMED_MAX:
        return whole
    return whole.cast(pa.decimal128(_DECIMAL128_DIGITS, 0))
