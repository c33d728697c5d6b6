"""Statements in MariaDB's binlog that a connector need not read, and those that it cannot read.

The binlog has the statements of all databases of the server, and Debezium parses each of them. At
one that its parser does not know it fails, whoever's table it is about, and at each restart again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

FILTER: Final = "internal.schema.history.internal.ddl.filter"
"""The connector's setting with the expressions of the statements that it does not parse."""
_NO_TABLE: Final = (
    r"(?:create|alter|drop)\s+(?:(?!(?:tables?|unique|index|database|schema)\b)\S+\s+)*?"
    r"(?:user|role|view|function|procedure|trigger|event|package|sequence|server)\b"
)
_UNIMPORTANT: Final = (
    r"\s*(?>set\s+statement\s.*?\sfor\s+)?+"
    r"(?:#\s*dummy\s|(?:grant|revoke|analyze|optimize|repair|flush|savepoint|drop\s+temporary|replace\s+into)\b"
    rf"|{_NO_TABLE}).*"
)
"""Statements that change no table's columns, whichever tables they name."""
_UNREADABLE: Final = (
    r"\b(?:inet[46]|system_time|without\s+overlaps|(?:add|drop|without)\s+(?:system|period))\b"
)
"""Types and clauses that Debezium cannot read; a table that has them cannot be captured either."""
_QUOTED: Final = re.compile(r"'(?:[^'\\]|\\.|'')*'", re.DOTALL)
_CLAUSES: Final = re.compile(
    r"\b(WITHOUT OVERLAPS|WITHOUT SYSTEM VERSIONING|PARTITION BY SYSTEM_TIME)\b"
)


def unread_statements(tables: Iterable[str]) -> str:
    """The expressions, as a list, of the statements that a connector of these tables skips.

    ``tables``: as ``db.table``. All statements about them are read, and those that make other
    tables, one of which may take the place of a captured table by RENAME: Debezium would go on with
    the columns that the captured table had before. Skipped are statements that make no table, and
    those about other databases, or about tables that could not be captured.
    """
    listed = [table.partition(".") for table in tables]
    names = "|".join(sorted({_in_sql(name) for _, _, name in listed}))
    databases = "|".join(sorted({_in_sql(database) for database, _, _ in listed}))
    other_database = (
        rf"\s*create\s+(?:or\s+replace\s+)?(?:database|schema)\b(?!.*{_whole(databases)}).*"
    )
    other_table = rf"(?!.*{_whole(names)})(?:[^']*'[^']*')*[^']*?{_UNREADABLE}.*"
    return ",".join(f"(?ius){each}" for each in (_UNIMPORTANT, other_database, other_table))


def unreadable_clauses(made: str) -> list[str]:
    """Clauses at which Debezium fails in the result of SHOW CREATE TABLE."""
    return sorted(set(_CLAUSES.findall(_QUOTED.sub("''", made))))


def _in_sql(name: str) -> str:
    """The expression of a name in a statement, where its quotation marks are doubled."""
    return re.escape(name).replace('"', '"+').replace("`", "`+")


def _whole(names: str) -> str:
    return f"(?<![A-Za-z0-9_$])(?:{names})(?![A-Za-z0-9_$])"
