"""Law 6 for every kind of view: 100 histories at random, in random splits, orders and shards.

What readers see equals an oracle: DuckDB, or a plain fold; of definitions that are written here,
and of others at random. A tenth of the histories in CI.
"""

from __future__ import annotations

from random import Random

import duckdb
import pytest
from pyspark.sql import SparkSession

from everstate.views.plan import compile_view
from kind_cases import sale_story, shop_story
from kind_oracle import CASES, TYPES, made, query, wanted, wrong
from kinds_rig import KeptKinds, plan_changes
from tiers import counted

HISTORIES, MADE = counted((5, 12), full=(100, 60))


@pytest.mark.timeout(counted(300, full=3000))
def test_law_6_any_history_in_any_ranges_reads_as_the_oracle_says(
    database: str, spark: SparkSession
) -> None:
    random, duck = Random(17), duckdb.connect()
    cases = [*CASES, *made(random, MADE)]
    views = [compile_view(case.definition, TYPES) for case in cases]
    defined = {plan.name: plan.defined for plan in views}
    stories = {"sale": [sale_story(random) for _ in range(HISTORIES)]}
    stories["shop"] = [shop_story(random) for _ in range(HISTORIES)]
    planned = {name: plan_changes(spark, TYPES[name], stories[name], views) for name in TYPES}
    with KeptKinds.installed(database, spark, TYPES, views) as kept:
        for number in range(HISTORIES):
            mine = {name: told[number] for name, told in stories.items()}
            kept.reset({name: told.partitions for name, told in mine.items()})
            for name in random.sample(list(TYPES), len(TYPES)):
                kept.apply(random, mine[name], planned[name][number])
            kept.refresh()
            found = {}
            for case in cases:
                expected = wanted(duck, case, mine["sale"], mine["shop"])
                rows = kept.rows(query(case, defined[case.name]))
                found[case.name] = wrong(case, expected, rows)
            assert {n: found[n] for n in found if found[n]} == {}, f"history {number}"
