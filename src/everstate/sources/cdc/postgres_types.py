"""Types of PostgreSQL: those that Debezium carries, and those whose unchanged value it can mark.

PostgreSQL stores a long value apart from its row, and its log leaves such a value out of an update
that did not change it, unless the replica identity is FULL. Debezium then writes a placeholder, but
only for some types; for the others it writes null, or its task fails where the column is NOT NULL.
Both lists were read from connectors that ran (``test_cdc_column_types``). A type that is in neither
list is refused, since nobody has seen what becomes of its values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from everstate.sources.cdc.connectors import ColumnUnit

_RANGES: Final = "int4range int8range numrange tsrange tstzrange daterange".split()
_BOTH: Final = (
    "char bool bpchar bytea varchar cidr citext date float4 float8 hstore inet int2 int4 int8 json "
    "jsonb ltree macaddr macaddr8 numeric oid text time timetz timestamp timestamptz uuid"
).split()
_CARRIED: Final = frozenset([*_BOTH, *_RANGES]) | frozenset(
    "bit varbit box circle interval line lseg money name path point polygon tsvector xml geometry "
    "geography vector halfvec sparsevec isbn".split()
)
_CARRIED_ARRAYS: Final = frozenset([*_BOTH, *_RANGES])
"""Types of their elements. Arrays of other types have no column, but for those of `bit`."""
_MARKED: Final = frozenset([*_RANGES, "tsvector"]) | frozenset(
    "text varchar bpchar json jsonb xml numeric bytea citext ltree hstore".split()
)
_MARKED_ARRAYS: Final = frozenset(
    "text varchar bpchar json jsonb bytea int4 int8 date uuid".split()
)
_NUMBERS: Final[Mapping[str, ColumnUnit]] = {
    "date": "days",
    "timestamp": "times",
    "time": "times of day",
    **dict.fromkeys(("int2", "int4", "int8", "oid"), "numbers"),
}
_SMALL: Final = frozenset({"inet", "cidr"})
"""Types with a variable length that is always too small to be stored apart."""
_BITS_MAX: Final = 128
"""PostgreSQL keeps a value of 24 bytes or less in its row: 8 of them are not the bits."""
_MODES: Final[Mapping[str, tuple[str, str]]] = {
    "bytea": ("binary.handling.mode", "bytes"),
    "numeric": ("decimal.handling.mode", "string"),
}
"""Type → the connector's setting that decides whether it is marked, and the value that does."""


@dataclass(frozen=True, slots=True)
class ColumnType:
    """The type of a column, without its domain."""

    text: str
    """As it was declared, for people."""
    name: str
    """The type's own name; that of the elements, for an array."""
    kind: str
    """The type's kind as `pg_type.typtype` has it: ``b``, ``e`` (enum), ``c`` (composite), …"""
    is_array: bool
    is_domain: bool
    """It is a domain, whose type was looked up."""
    is_domain_inside: bool
    """It is an array of a domain."""
    dimensions: int
    """Number of dimensions that an array was declared with."""
    size: int
    """Declared size of a `bit`; -1: none."""

    @property
    def untold(self) -> str | None:
        """Why no record has its values, or not as they are; None: records have them."""
        if self.is_array and self.dimensions > 1:
            return f"Debezium cannot read nested arrays ({self.text}{'[]' * (self.dimensions - 1)})"
        carried = _CARRIED_ARRAYS if self.is_array else _CARRIED
        is_carried = self.kind == "e" or (self.kind in ("b", "r") and self.name in carried)
        if is_carried and not self.is_domain_inside:
            return None
        return f"Debezium carries no values of type {self.text}"

    @property
    def fails(self) -> bool:
        """Whether a connector fails at its values, instead of leaving them out."""
        return self.is_array and self.name == "bit"

    @property
    def form(self) -> str:
        """Its name as ``SourceColumn.kind`` has it; that of an enum is ``enum``."""
        name = "bit(1)" if (self.name, self.size) == ("bit", 1) else self.name
        return f"{'enum' if self.kind == 'e' else name}{'[]' if self.is_array else ''}"

    @property
    def numbers(self) -> ColumnUnit | None:
        """What its whole numbers in the raw log are; of an array, those of its elements."""
        return _NUMBERS.get(self.name)

    def is_marked(self, settings: Mapping[str, str]) -> bool:
        """Whether a connector with these settings marks a long value that did not change."""
        if self.is_array:
            is_known = self.name in _MARKED_ARRAYS and not self.is_domain
        elif self.name in ("bit", "varbit"):
            is_known = 0 <= self.size <= _BITS_MAX
        else:
            is_known = self.name in _MARKED | _SMALL
        setting, value = _MODES.get(self.name, ("", ""))
        return is_known and settings.get(setting, value) == value
