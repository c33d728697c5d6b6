"""SQL of Spark or PostgreSQL in the words of DuckDB, which runs it in this process."""

from __future__ import annotations

import sqlglot
from sqlglot import exp


def in_duckdb(text: str, dialect: str) -> str:
    """Translate a query of sqlglot's ``dialect``; the result means what that engine means."""

    def meant(node: exp.Expr) -> exp.Expr:
        if isinstance(node, exp.CountIf):  # null in DuckDB where no value is known
            return exp.Count(this=exp.Nullif(this=node.this, expression=exp.false()))
        bare = isinstance(node, exp.DataType) and node.this is exp.DType.DECIMAL
        return exp.DataType.build("DOUBLE") if bare and not node.expressions else node

    return sqlglot.parse_one(text, read=dialect).transform(meant).sql(dialect="duckdb")
