"""Types of MariaDB: those that Debezium cannot read, and what its numbers are of the others.

All were read from connectors that ran (``test_cdc_types_captured``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from everstate.sources.cdc.connectors import ColumnUnit, SourceColumn

_UNREADABLE: Final = frozenset({"inet4", "inet6"})
_UNTOLD: Final = {"uuid": "Debezium writes another uuid for a change than the table has"}
_UNITS: Final[Mapping[str, ColumnUnit]] = {
    "date": "days",
    "datetime": "times",
    "time": "times of day",
    **dict.fromkeys(("tinyint", "smallint", "mediumint", "int", "bigint", "year"), "numbers"),
}
COLUMNS: Final = """\
SELECT column_name AS name, data_type AS type FROM information_schema.columns
WHERE table_schema = %s AND table_name = %s ORDER BY ordinal_position"""
TABLE_IDS: Final = """\
SELECT name, table_id AS id,
  (SELECT max(table_id) FROM information_schema.innodb_sys_tables) AS seen
FROM information_schema.innodb_sys_tables WHERE name IN %s"""


def source_column(name: str, kind: str) -> SourceColumn:
    """A column of this type, as far as its values reach the raw log."""
    stops = None
    if kind in _UNREADABLE:
        stops = f"Debezium cannot read a table with a column of type {kind}"
    return SourceColumn(name, _UNTOLD.get(kind), numbers=_UNITS.get(kind), stops=stops)
