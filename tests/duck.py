"""DuckDB as an oracle: sales as rows for it, and queries in its words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import sqlglot
from sqlglot import exp

from view_fuzz import SALE, Sale


def arrow(states: Sequence[Sale | None]) -> pa.Table:
    """States as rows; what does not exist is a row of nulls."""
    schema = pa.schema(
        [
            # DuckDB's zoned times need an extension: these are of UTC.
            pa.field(f.name, pa.timestamp("us") if f.name == "moment" else f.type)
            for f in SALE.arrow_schema
        ]
    )
    rows: list[dict[str, Any]] = []
    for state in states:
        row = {} if state is None else state.model_dump()
        if row.get("moment") is not None:
            row["moment"] = row["moment"].replace(tzinfo=None)
        rows.append({name: row.get(name) for name in schema.names})
    return pa.Table.from_pylist(rows, schema=schema)


def in_duckdb(text: str, dialect: str) -> str:
    """Translate a query of sqlglot's ``dialect``; the result means what that engine means."""

    def meant(node: exp.Expr) -> exp.Expr:
        if isinstance(node, exp.CountIf):  # null in DuckDB where no value is known
            return exp.Count(this=exp.Nullif(this=node.this, expression=exp.false()))
        bare = isinstance(node, exp.DataType) and node.this is exp.DType.DECIMAL
        return exp.DataType.build("DOUBLE") if bare and not node.expressions else node

    return sqlglot.parse_one(text, read=dialect).transform(meant).sql(dialect="duckdb")
