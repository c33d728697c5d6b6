"""What a batch of changes adds to a view of sums: exact, and in one form for equal groups."""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from everstate.views.json_texts import json_texts
from everstate.views.tables import SumTable, planned_column

_DECIMAL128_DIGITS: Final = 38
_BATCH_DIGITS: Final = 10
"""A batch has fewer changes than a number of so many digits."""
_SUMMED_MAX: Final = 2**63 // 10**_BATCH_DIGITS
"""Whole numbers below this can be summed over a batch in 64 bits."""
_COUNTED: Final = pc.ScalarAggregateOptions(skip_nulls=True, min_count=0)


def sum_deltas(table: SumTable, changes: pa.Table) -> pa.Table:
    """Sums per group of what the changes take away (`original`) and add (`current`).

    Out: groups, then sums; counts as int64, sums as int64 or decimal without overflow. Groups
    that nothing happens to are left out.
    """
    taken, added = (
        _worth(table, changes[planned_column(table, image)]) for image in ("original", "current")
    )
    rows = pa.concat_tables([taken, added]).combine_chunks()
    names = [name for name, _ in table.sums]
    is_added = pa.array(np.arange(rows.num_rows) >= taken.num_rows)
    for name in names:
        values = _wide(rows[name])
        signed = pc.if_else(is_added, values, pc.negate_checked(values))
        rows = rows.set_column(rows.column_names.index(name), name, signed)
    # `use_threads` off: one task has one core, and the sums of a batch are small.
    found = rows.group_by(list(table.groups), use_threads=False).aggregate(
        [(name, "sum", _COUNTED) for name in names]
    )
    found = found.rename_columns([name.removesuffix("_sum") for name in found.column_names])
    changed = pa.array(np.zeros(found.num_rows, dtype=np.bool_))
    for name in names:
        changed = pc.or_(changed, pc.not_equal(found[name], pa.scalar(0, found[name].type)))
    return found.select([*table.groups, *names]).filter(changed)


def one_zero(values: pa.Array) -> pa.Array:
    """Floats in the form in which equal ones are alike, as Spark and PostgreSQL compare them.

    -0.0 is 0.0, and there is one NaN.
    """
    if not pa.types.is_floating(values.type):
        return values
    nan = pa.scalar(float("nan"), values.type)
    return pc.if_else(pc.is_nan(values), nan, pc.add(values, pa.scalar(0.0, values.type)))


def grouped(values: pa.Array) -> pa.Array:
    """Values of a group column in the form in which equal groups are alike."""
    return json_texts(values) if pa.types.is_nested(values.type) else one_zero(values)


def _worth(table: SumTable, images: pa.ChunkedArray) -> pa.Table:
    """Groups and inputs of the images that the view has a part in."""
    present = images.combine_chunks()
    present = present.filter(present.is_valid())
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
