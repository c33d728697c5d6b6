"""When two states of an entity are equal: by the values of the model's fields. Pure.

One value may have several texts: 2.5 and 2.50, or one instant with two offsets. To write an equal
state is no change, and equal keys name one entity.
"""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Context, Decimal, InvalidOperation
from typing import Any, Final

from everstate.changes.fields import FieldTree, ValuePath
from everstate.changes.json_numbers import decode, encode_sorted

_EXACT: Final = Context(prec=10_000)


def decimal_text(value: Decimal) -> str:
    """The one text of a decimal number: without an exponent, and without zeros at its end."""
    if not value.is_finite() or abs(value.adjusted()) > _EXACT.prec // 2:
        return str(value)
    return format(value.normalize(_EXACT), "f") if value else "0"


def instant_text(moment: datetime) -> str:
    """The one text of a time: in UTC; without an offset for a time that has none."""
    if moment.tzinfo is None:
        return moment.isoformat()
    try:
        return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")
    except OverflowError:
        return moment.isoformat()


def has_equal_values(place: FieldTree, one: str, other: str) -> bool:
    """Whether the JSON of two states has equal values; ``place``: where the model has numbers."""
    first, second = decode(one), decode(other)
    if isinstance(first, dict) and isinstance(second, dict):
        if first.keys() != second.keys():
            return False
        for name, value in first.items():
            inside = place.members.get(name)
            is_one_text = inside is None or inside.rule in ("integer", "date")
            if is_one_text and value != second[name]:
                return False
    return canonical(place, first) == canonical(place, second)


def canonical(place: FieldTree, tree: Any) -> bytes:
    """The one JSON text of all states with these values."""
    # As JSON, because Python takes 1, 1.0 and True for equal.
    return encode_sorted(place.apply(tree, one_text))


def one_text(place: FieldTree, value: Any, _: ValuePath) -> Any:
    """The one form of a decimal, a float or a time; any other value is returned unchanged."""
    try:
        if place.rule == "decimal" and not isinstance(value, bool):
            return decimal_text(Decimal(str(value)))
        if place.rule == "float" and not isinstance(value, bool):
            return float(value) + 0.0  # not -0.0
        if place.rule == "timestamp" and isinstance(value, str):
            return instant_text(datetime.fromisoformat(value))
    except (ValueError, InvalidOperation):
        pass  # a text of another writer, which is compared as it is
    return value
