"""DuckDB as an oracle: sales as rows for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

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
