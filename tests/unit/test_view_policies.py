"""Policies of views: which changes wait, for any history in any ranges; what may be declared."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstate.app import App
from everstate.changes.triggers import when
from everstate.cli.declaration import _taken
from everstate.errors import InvalidView
from everstate.views.batch import Batch
from everstate.views.definition import ViewDefinition
from everstate.views.gate import Bools, Keys
from everstate.views.plan import compile_view, plan_of
from everstate.views.policies import (
    DEFERRED,
    IGNORED,
    TAKEN,
    Rules,
    deferred,
    ignore,
    taken,
    throttle,
)
from everstate.views.sums import sum_deltas
from everstate.views.tables import rule_column
from everstate.views.versions import registered
from kit.view_orders import ORDER, TABLES, Log, random_logs

TOTALS = replace(TABLES["totals"], has_rules=True)


def ruled(log: Log, start: int, end: int, rules: dict[int, int]) -> pa.Table:
    """Planned changes of a range, with what the rules say of each offset."""
    changes = log.between(start, end)
    column = pa.array([rules[o] for o in changes["offset"].to_pylist()], pa.int8())
    return changes.append_column(rule_column(TOTALS), column)


def sums_of(table: pa.Table) -> dict[str, int]:
    """What changes add up to in the view, by the keeper's own arithmetic."""
    rows = sum_deltas(TOTALS, table).to_pylist()
    return dict(rows[0]) if rows else {}


def folded(records: list[Any], waiting: set[int]) -> dict[str, int]:
    """The same of the newest change of each key that does not wait: a plain fold."""
    newest: dict[str, Any] = {}
    for offset, record in records:
        if offset not in waiting:
            newest[record.key] = record.current
    live = [state for state in newest.values() if state is not None]
    found = {"n": len(live), "a0": sum(s["quantity"] or 0 for s in live)}
    found["a1"] = sum(s["quantity"] is not None for s in live)
    return found if any(found.values()) else {}


@given(random=st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_what_is_not_waiting_is_the_batch_of_accepted_minus_deferred(random: Random) -> None:
    """For any history, any ranges, and parts that are taken at any time."""
    (log,) = random_logs(random, 1, disorder=False)
    rules = {o: random.choice((TAKEN, TAKEN, DEFERRED)) for o in log.records}
    waiting: list[pa.Table] = []
    done: list[pa.Table] = []
    position = 0
    while position < log.end or waiting:
        if waiting and (position == log.end or random.random() < 0.4):
            done.append(waiting.pop(0))
        else:
            end = random.randint(position + 1, log.end)
            batch = Batch(ruled(log, position, end, rules), {})

            def waits(keys: Keys) -> Bools:
                names = {k for part in waiting for k in part["key"].to_pylist()}
                return np.array([name in names for name in keys.names.to_pylist()], dtype=np.bool_)

            later = deferred(TOTALS, batch, waits)
            done.append(batch.changes.filter(pa.array(~later)))
            if later.any():
                waiting.append(batch.changes.filter(pa.array(later)))
            position = end
        offsets = {o for part in waiting for o in part["offset"].to_pylist()}
        records = [(o, r) for o, r in sorted(log.records.items()) if o < position]
        whole = pa.concat_tables(done)
        assert sums_of(whole) == folded(records, offsets)
        by_key: dict[str, list[int]] = defaultdict(list)
        for key, version in zip(
            whole["key"].to_pylist(), whole["version"].to_pylist(), strict=True
        ):
            by_key[key].append(version)
        assert all(versions == sorted(versions) for versions in by_key.values()), "in order"


def test_planted_a_live_change_that_passes_its_keys_throttled_one_is_caught() -> None:
    """The order of a key: what a rule that looks at single changes would do."""
    for seed in range(50):
        random = Random(seed)
        (log,) = random_logs(random, 1, disorder=False)
        rules = {o: random.choice((TAKEN, DEFERRED)) for o in log.records}
        changes = ruled(log, 0, log.end, rules)
        alone = changes.filter(pa.array([rules[o] == TAKEN for o in changes["offset"].to_pylist()]))
        waiting = {o for o, rule in rules.items() if rule == DEFERRED}
        if alone.num_rows and sums_of(alone) != folded(sorted(log.records.items()), waiting):
            return
    raise AssertionError("no history tells the two apart")


def test_ignored_changes_are_not_there() -> None:
    (log,) = random_logs(Random(3), 1, disorder=False)
    changes = ruled(log, 0, log.end, dict.fromkeys(log.records, IGNORED))
    assert taken(TOTALS, Batch(changes, {})).changes.num_rows == 0


def declared(sql: str, *policies: Any, trigger: Any = None) -> Any:
    rules = Rules.of(trigger, policies)
    return compile_view(ViewDefinition("v", sql, rules=rules), {"order": ORDER})


SUM, ROWS = (
    "SELECT region, sum(quantity) AS q FROM order GROUP BY region",
    "SELECT region FROM order",
)


def test_a_view_that_adds_up_cannot_ignore_changes() -> None:
    with pytest.raises(InvalidView, match="subtract a value that the ignored change never added"):
        declared(SUM, ignore(service_name="importer"))
    assert declared(ROWS, ignore(service_name="importer")).rules.ignored
    assert declared(SUM, ignore(actor="x"), trigger=when("status").changes()).rules.trigger


CHANGES = "SELECT status, count(*) AS n FROM order_changes GROUP BY status"


def test_rules_are_for_every_kind_that_is_kept_by_itself() -> None:
    importer = ignore(service_name="importer")
    most = "SELECT region, max(quantity) AS most FROM order GROUP BY region"
    # Of changes nothing is taken away, so that one that is ignored leaves nothing behind.
    assert declared(CHANGES, importer).rules.ignored
    assert declared(most, importer, trigger=when("status").changes()).kind == "values"
    with pytest.raises(InvalidView, match="subtract a value that the ignored change never added"):
        declared(most, importer)
    with pytest.raises(InvalidView, match="a join cannot have a trigger or policies"):
        declared("SELECT a.region FROM order a JOIN order b ON a.id = b.id", importer)


def test_what_is_sent_aside_follows_the_rules_of_its_view() -> None:
    app = App("aside")
    app.entity("order", key="order_id")(ORDER.model)
    slow = throttle(service_name="importer", per_second=5)
    app.view("some", sql=CHANGES, lateness="1 hour", late="aside", policies=[slow])
    assert app.views["some_late"].rules == app.views["some"].rules == Rules.of(None, [slow])


def test_the_rules_belong_to_a_views_meaning_and_the_rate_does_not() -> None:
    plain = declared(SUM)
    slow, fast = (declared(SUM, throttle(service_name="i", per_second=n)) for n in (1, 1000))
    other = declared(SUM, throttle(service_name="j", per_second=1))
    fired = declared(SUM, trigger=when("status").changes(to="paid"))
    assert slow.fingerprint == fast.fingerprint
    assert len({each.fingerprint for each in (plain, slow, other, fired)}) == 4
    assert slow.definition != fast.definition
    for plan in (slow, fired):
        assert plan_of(registered(plan, 1), {"order": ORDER}) == plan
        assert plan.ruled_table(1).has_rules
    assert not plain.ruled_table(1).has_rules


anything: Any = [None, "2000", float("nan"), float("inf"), True, -1]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"policies": [ignore()]}, "names no field of the provenance"),
        ({"policies": [ignore(service="x")]}, "names service, which no provenance has"),
        ({"policies": [ignore(actor=anything[0])]}, "has None for actor"),
        ({"policies": [ignore(service_name=[])]}, "has \\[\\] for service_name"),
        ({"policies": [ignore(service_name=["a", anything[0]])]}, "for service_name"),
        ({"policies": [throttle(per_second=0, actor="x")]}, "per_second is 0.*above 0"),
        *(
            ({"policies": [throttle(per_second=rate, actor="x")]}, "per_second is .*above 0")
            for rate in anything
        ),
        ({"policies": ignore(service_name="x")}, "no list of policies"),
        ({"policies": ["importer"]}, "no list of policies"),
        ({"when": when("colour").changes()}, "no field 'colour'"),
        ({"when": when("status")}, "when has no condition on a change"),
    ],
)
def test_a_policy_that_says_nothing_is_refused_with_its_view(options: Any, reason: str) -> None:
    app = App("refused")
    app.entity("order", key="order_id")(ORDER.model)
    with pytest.raises(InvalidView, match=f"view some: .*{reason}"):
        app.view("some", sql=ROWS, **options)


def test_the_throttles_of_a_view_have_one_rate() -> None:
    """Deferred changes are applied in one queue, so the smallest rate would be that of all."""
    app = App("rates")
    app.entity("order", key="order_id")(ORDER.model)
    quick = throttle(service_name="a", per_second=2000)
    slow = throttle(service_name="b", per_second=10)
    with pytest.raises(InvalidView, match=r"the rates 10, 2,000.*the same per_second"):
        app.view("some", sql=ROWS, policies=[quick, slow])
    app.view("some", sql=ROWS, policies=[slow, throttle(actor="c", per_second=10)])
    rules = app.views["some"].rules
    assert rules.per_second == 10
    assert _taken(rules) == "10 a second of service_name b and of actor c"


def test_the_values_of_a_set_have_one_order() -> None:
    names = {"d", "b", "a", "c"}
    assert ignore(service_name=names).matched == (("service_name", ("a", "b", "c", "d")),)
