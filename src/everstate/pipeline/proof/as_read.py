"""Compares what readers of a view see with the definition as its author wrote it.

`compare` compares what is stored: groups and accumulators, or keys and rows. This module compares
the outputs that are computed from them. It collects both sides on the driver, so it is for views
of few rows. Engines divide and round differently in the last digits: numbers are equal when they
differ by no more than a millionth of the larger one, or of 1. Whole numbers and keys must be equal
exactly, unless one of the two is a float.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa

from everstate.pipeline.proof.row_texts import canonical, row_text
from everstate.pipeline.reports import RowDifference

ROWS_MAX: Final = 10_000
"""Views with more rows are not compared as they are read."""
_TOLERANCE: Final = Decimal("1e-6")

Values = Sequence[Any]


def is_plain(schema: pa.Schema) -> bool:
    """Whether all columns are of types that both engines return in the same form."""
    return not any(pa.types.is_nested(field.type) for field in schema)


def read_differently(
    expected: Sequence[Values], kept: Sequence[Values], *, keys: Collection[int] = ()
) -> list[RowDifference]:
    """Rows without an equal row on the other side; rows may come in any order, and repeat.

    ``keys``: places of the columns that no two rows have alike.
    """
    wanted, found = _by_exact_part(expected), _by_exact_part(kept)
    differences = []
    for part in sorted(wanted.keys() | found.keys()):
        left, right = wanted.get(part, []), found.get(part, [])
        exact = [*keys, *_whole_columns([*left, *right])]
        left, right = (sorted(rows, key=lambda row: _order(row, exact)) for rows in (left, right))
        for place in range(max(len(left), len(right))):
            one = left[place] if place < len(left) else None
            other = right[place] if place < len(right) else None
            if one is None or other is None or not _alike(one, other, keys):
                differences.append(RowDifference(f"as read: {part}", _shown(one), _shown(other)))
    return differences


Number = int | float | Decimal
Numbers = tuple[Number | None, ...]


def _by_exact_part(rows: Sequence[Values]) -> dict[str, list[Numbers]]:
    """The numbers of each row, by the row without its numbers; a null counts as a number."""
    found: dict[str, list[Numbers]] = defaultdict(list)
    for row in rows:
        cells = [_number(value) for value in row]
        exact = [
            "#" if value is None or number is not None else canonical(value)
            for value, number in zip(row, cells, strict=True)
        ]
        found[row_text(exact)].append(tuple(cells))
    return found


def _number(value: Any) -> Number | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, Decimal)):
        return None
    return value if _decimal(value).is_finite() else None


def _decimal(value: Number) -> Decimal:
    return Decimal(repr(value)) if isinstance(value, float) else Decimal(value)


def _whole_columns(rows: Sequence[Numbers]) -> list[int]:
    """Columns with whole numbers only: rows are ordered by these first; both sides are exact."""
    width = len(rows[0]) if rows else 0
    return [place for place in range(width) if all(_is_whole(row[place]) for row in rows)]


def _is_whole(value: Number | None) -> bool:
    return value is None or _decimal(value) == _decimal(value).to_integral_value()


def _order(row: Numbers, first: Sequence[int]) -> list[tuple[bool, Decimal]]:
    places = [*first, *(place for place in range(len(row)) if place not in first)]
    return [(row[place] is not None, _decimal(row[place] or 0)) for place in places]


def _alike(one: Numbers, other: Numbers, keys: Collection[int]) -> bool:
    for place, (left, right) in enumerate(zip(one, other, strict=True)):
        if left is None or right is None:
            if left is not right:
                return False
        elif not _is_near(left, right, is_key=place in keys):
            return False
    return True


def _is_near(left: Number, right: Number, *, is_key: bool) -> bool:
    one, other = _decimal(left), _decimal(right)
    if not isinstance(left, float) and not isinstance(right, float):
        if is_key or (_is_whole(one) and _is_whole(other)):
            return one == other
    return abs(one - other) <= _TOLERANCE * max(Decimal(1), abs(one), abs(other))


def _shown(row: Numbers | None) -> str | None:
    return None if row is None else row_text(row)
