"""The batch of a view has the columns that its proof compares with the kept rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import sqlglot

from everstate.pipeline.batch.rows import batch_rows
from everstate.views.kinds import ViewPlan
from kind_app import app


class Rows:
    """A DataFrame of which only the columns are known."""

    def __init__(self, columns: list[str]) -> None:
        self.columns = columns
        self.sparkSession: Any = self
        self.catalog: Any = self

    def sql(self, query: str) -> Rows:
        return Rows(columns_of(query, "spark"))

    def where(self, _condition: str) -> Rows:
        return self

    def drop(self, name: str) -> Rows:
        return Rows([each for each in self.columns if each != name])

    def createOrReplaceTempView(self, name: str) -> None:
        pass

    def dropTempView(self, name: str) -> None:
        pass


def columns_of(query: str, dialect: str) -> list[str]:
    found: Any = sqlglot.parse_one(query, dialect=dialect)
    return list(found.named_selects)


@pytest.mark.parametrize(
    "plan",
    [each for each in app.views.values() if each.function is None and each.sums_kept is None],
    ids=lambda plan: plan.name,
)
def test_the_batch_has_the_columns_that_are_compared(plan: ViewPlan) -> None:
    def same(name: str) -> str:
        return name

    names: Any = SimpleNamespace(table=same, view=same, field=lambda path, _kind: path[-1])
    accepted: Any = SimpleNamespace(changes=Rows([]), live=Rows([]))
    with batch_rows(plan, [accepted] * max(1, len(plan.inputs))) as rows:
        assert len(rows.columns) == len(columns_of(plan.compared(names), "postgres"))
