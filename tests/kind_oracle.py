"""What readers of views of every kind must see, and how what they see differs from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import duckdb
import pyarrow as pa

from duck import arrow, in_duckdb
from everstate.pipeline.proof.as_read import read_differently
from everstate.pipeline.proof.row_texts import canonical
from everstate.views.plan import compile_view
from kind_cases import (
    CACHED,
    CHANGES,
    JOIN_SUMS,
    JOINS,
    LAST,
    PYTHON,
    SCALED,
    SEARCHED,
    SHOP,
    SHOWN,
    TIMELINES,
    VALUES,
    WINDOWS,
    Case,
    sales,
)
from kinds_rig import Story
from view_fuzz import SALE, Writer

# Views with ORDER BY whose outputs have the names of columns that everstate uses itself.
ORDERED = (
    Case(
        "groups_under_names_of_columns",
        "SELECT region, sum(quantity) AS n, count(*) AS c FROM sale GROUP BY region "
        "ORDER BY c DESC, n LIMIT 2",
        oracle="SELECT region, sum(quantity) AS q, count(*) AS c FROM sale GROUP BY region "
        "ORDER BY c DESC, q NULLS FIRST, region NULLS FIRST LIMIT 2",
        ordered=True,
    ),
    Case(
        "values_under_names_of_columns",
        "SELECT shop AS m0, count(*) AS g0, max(quantity) AS most FROM sale GROUP BY shop "
        "ORDER BY most DESC LIMIT 2",
        oracle="SELECT shop, count(*) AS c, max(quantity) AS most FROM sale GROUP BY shop "
        "ORDER BY most DESC NULLS LAST, shop DESC LIMIT 2",
        ordered=True,
    ),
    Case(
        "rows_under_names_of_columns",
        "SELECT quantity AS c1, price AS c0, shop AS key FROM sale ORDER BY price, day LIMIT 4",
        oracle="SELECT quantity, price, shop FROM sale "
        "ORDER BY price NULLS FIRST, day NULLS FIRST, sale_id LIMIT 4",
        ordered=True,
    ),
    Case(
        "by_constants",
        "SELECT shop, 2 AS two, 'x' AS x, count(*) AS n FROM sale GROUP BY shop "
        "ORDER BY two, x, n DESC LIMIT 2",
        oracle="SELECT shop, 2 AS two, 'x' AS x, count(*) AS n FROM sale GROUP BY shop "
        "ORDER BY n DESC, shop DESC LIMIT 2",
        ordered=True,
    ),
)


CASES = (
    *(*VALUES, *SHOWN, *ORDERED, *SCALED, *LAST, *WINDOWS, *CHANGES),
    *(*SEARCHED, *CACHED, *TIMELINES, *JOINS, *JOIN_SUMS, *PYTHON),
)
TYPES = {"sale": SALE, "shop": SHOP}
Rows = list[tuple[Any, ...]]


def made(random: Random, count: int) -> list[Case]:
    """Definitions at random of the kinds that have their own in SQL."""
    writer = Writer(random)
    writers = (writer.values, writer.last, writer.join, writer.row)
    return [Case(f"made_{n}", writers[n % len(writers)]()) for n in range(count)]


def wanted(duck: duckdb.DuckDBPyConnection, case: Case, told: Story, shops: Story) -> Rows:
    """What the oracle says must be read."""
    if callable(case.oracle):
        return list(case.oracle(told))
    duck.register("sale", arrow(sales(told)))
    rows = [shop.model_dump() for shop in shops.alive.values()]
    duck.register("shop", pa.Table.from_pylist(rows, schema=SHOP.arrow_schema))
    dialect = "duckdb" if case.oracle else "spark"
    return duck.execute(in_duckdb(case.oracle or case.sql, dialect)).fetchall()


def query(case: Case, defined: Sequence[str]) -> str:
    """How a case is read; ``defined``: the columns of its view."""
    columns = ", ".join(f'"{name}"' for name in defined)
    return case.reads or f"SELECT {columns} FROM {case.name}"


def wrong(case: Case, expected: Rows, found: Rows) -> list[Any]:
    """How what readers see differs from the oracle."""
    if case.ordered:
        pair = [[list(map(canonical, row)) for row in rows] for rows in (expected, found)]
        return [] if pair[0] == pair[1] else pair
    return list(read_differently(expected, found))


def read_wrongly(read: Callable[[str], Rows], told: Mapping[str, Story]) -> dict[str, list[Any]]:
    """Views of a whole project that readers see otherwise than the oracle."""
    duck, found = duckdb.connect(), dict[str, list[Any]]()
    duck.execute("SET TimeZone = 'UTC'")
    for case in CASES:
        plan = compile_view(case.definition, {"sale": SALE, "shop": SHOP})
        rows = read(query(case, plan.defined))
        if different := wrong(case, wanted(duck, case, told["sale"], told["shop"]), rows):
            found[case.name] = different
    return found
