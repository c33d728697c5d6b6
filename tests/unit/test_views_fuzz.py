"""Any definition is kept as its batch would be, or refused; tried with many at random (law 6).

Spark and PostgreSQL are stood in for by DuckDB, which runs the plan's texts on each image and the
whole definition on what is alive; what is kept goes through the code that keeps it.
"""

from __future__ import annotations

from collections import defaultdict
from decimal import Decimal
from random import Random
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from duck import arrow, in_duckdb
from everstate.errors import InvalidView
from everstate.pipeline.proof.as_read import read_differently
from everstate.pipeline.proof.row_texts import row_text
from everstate.views.definition import ViewDefinition
from everstate.views.kinds.linear import LinearPlan
from everstate.views.plan import compile_view
from everstate.views.sums import sum_deltas
from everstate.views.tables import planned_column
from kind_cases import SHOP
from view_fuzz import SALE, Sale, Writer, histories, mangled

CASES = 60


@pytest.fixture(scope="module")
def duck() -> duckdb.DuckDBPyConnection:
    return duckdb.connect()


def images(
    duck: duckdb.DuckDBPyConnection, plan: LinearPlan, states: list[Sale | None]
) -> pa.Array:
    """What Spark makes of each image: a struct, or null where the view has no part in it."""
    inputs = [(c.name, c.spark_sql) for c in plan.group]
    inputs += [(a.name, a.spark_sql) for a in plan.accumulators if a.spark_sql is not None]
    inputs = inputs or [("one", "1")]
    alive = pa.array([state is not None for state in states])
    image = (
        arrow(states)
        .append_column("alive", alive)
        .append_column("place_in_order", pa.array(range(len(states))))
    )
    condition = f"alive AND ({plan.where_sql or 'true'})".replace("`__image__`.", "image.")
    wanted = [f"({text}) AS {name}".replace("`__image__`.", "image.") for name, text in inputs]
    query = f"SELECT ({condition}) AS mine, {', '.join(wanted)} FROM image ORDER BY place_in_order"
    duck.register("image", image)
    found = duck.sql(in_duckdb(query, "spark")).to_arrow_table()
    mine = found["mine"].combine_chunks().fill_null(False)
    fields = [found[name].combine_chunks() for name, _ in inputs]
    return pa.StructArray.from_arrays(
        fields, [name for name, _ in inputs], mask=pa.compute.invert(mine)
    )


def kept(
    duck: duckdb.DuckDBPyConnection, plan: LinearPlan, story: list[tuple[str, Sale | None]]
) -> list[tuple[Any, ...]]:
    """What readers see after all batches, each summed as the keeper does."""
    before: dict[str, Sale | None] = {}
    originals: list[Sale | None] = []
    for key, state in story:
        originals.append(before.get(key))
        before[key] = state
    table = plan.table(1)
    changes = pa.table(
        {
            planned_column(table, "original"): images(duck, plan, originals),
            planned_column(table, "current"): images(duck, plan, [s for _, s in story]),
        }
    )
    names = [name for name, _ in table.sums]
    sums: dict[str, list[Decimal]] = defaultdict(lambda: [Decimal(0)] * len(names))
    groups: dict[str, list[Any]] = {}
    for start in range(0, len(story), 7):
        deltas = sum_deltas(table, changes.slice(start, 7))
        keys = [[row[name] for name in table.groups] for row in deltas.to_pylist()]
        texts = [row_text(key) for key in keys]
        assert len(set(texts)) == len(texts), "PostgreSQL takes one row a group"
        for group, text, row in zip(keys, texts, deltas.to_pylist(), strict=True):
            groups.setdefault(text, group)
            sums[text] = [a + Decimal(row[n]) for a, n in zip(sums[text], names, strict=True)]
    rows = [[*groups[text], *values] for text, values in sums.items() if values[0]]
    if not rows and not table.groups:
        rows = [[Decimal(0)] * len(names)]
    types = {f.name: f.type for f in changes.column(0).type}
    schema = pa.schema(
        [
            *((name, types[name]) for name in table.groups),
            *((n, pa.decimal128(38, 6)) for n in names),
        ]
    )
    duck.register(
        "kept",
        pa.Table.from_arrays(
            [pa.array([row[i] for row in rows], f.type) for i, f in enumerate(schema)],
            schema=schema,
        ),
    )
    outputs = ", ".join(f"{text} AS {name}" for name, text in plan.outputs)
    return duck.execute(in_duckdb(f"SELECT {outputs} FROM kept", "postgres")).fetchall()


@pytest.mark.parametrize("seed", range(CASES))
def test_a_linear_view_reads_as_its_definition_run_in_batch(
    duck: duckdb.DuckDBPyConnection, seed: int
) -> None:
    random = Random(seed)
    sql = Writer(random).linear()
    plan = compile_view(ViewDefinition("v", sql), {"sale": SALE})
    assert isinstance(plan, LinearPlan)
    story = histories(random, 6, 40)
    alive = {key: state for key, state in dict(story).items() if state is not None}
    duck.register("sale", arrow(list(alive.values())))
    expected = duck.execute(in_duckdb(sql, "spark")).fetchall()
    assert read_differently(expected, kept(duck, plan, story)) == [], sql


def test_any_text_is_kept_or_refused_with_a_reason() -> None:
    """Never another error: definitions with words taken out, doubled and put elsewhere."""
    random = Random(14)
    writer = Writer(random)
    writers = (writer.linear, writer.row, writer.values, writer.last, writer.join)
    refused = 0
    for _ in range(800):
        sql = mangled(random, random.choice(writers)())
        try:
            compile_view(ViewDefinition("v", sql), {"sale": SALE, "shop": SHOP})
        except InvalidView:
            refused += 1
        except Exception as error:
            raise AssertionError(f"{error!r}: {sql}") from error
    assert 200 < refused < 750
