"""Outcomes that Spark's tasks return to the driver: each is a JSON text in one column."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import orjson
import pyarrow as pa

if TYPE_CHECKING:
    # Most tasks need no more of Spark than their worker has.
    from pyspark.sql import DataFrame

OUTCOME: Final = "outcome string"
"""The columns of a job whose tasks return outcomes."""


def outcome_rows(outcomes: Iterable[Mapping[str, Any]]) -> pa.RecordBatch:
    """A batch with the outcomes of a task, whose values have a JSON form."""
    texts = [orjson.dumps(dict(each)).decode() for each in outcomes]
    return pa.RecordBatch.from_pydict({"outcome": pa.array(texts, pa.string())})


def outcomes_of(rows: DataFrame) -> list[dict[str, Any]]:
    """Run a job; returns the outcomes of its tasks."""
    return [orjson.loads(row["outcome"]) for row in rows.collect()]
