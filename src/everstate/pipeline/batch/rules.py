"""Triggers and policies of views in Spark: as a column of each change, and in batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, reduce
from operator import and_, or_

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from everstate.changes import PROVENANCE_FIELDS, EntityType
from everstate.changes.triggers import Changed, Combined, Trigger
from everstate.pipeline.batch.accepted import mark_newest
from everstate.pipeline.batch.rows import Accepted
from everstate.views.kinds import ViewPlan
from everstate.views.policies import DEFERRED, IGNORED, TAKEN, Policy


def fires(trigger: Trigger) -> Column:
    """Whether a change fires, from its typed columns `original` and `current`; never null."""
    if isinstance(trigger, Combined):
        parts = [fires(part) for part in trigger.parts]
        if trigger.word == "not":
            return ~parts[0]
        return reduce(and_ if trigger.word == "and" else or_, parts)
    assert isinstance(trigger, Changed)
    old, new = (
        reduce(lambda column, name: column[name], trigger.path, F.col(side))
        for side in ("original", "current")
    )
    found = ~old.eqNullSafe(new)
    for side, values in ((old, trigger.before), (new, trigger.after)):
        if values is not None:
            same = (side.eqNullSafe(F.lit(value)) for value in values)
            found = found & reduce(or_, same, F.lit(False))
    return found


def matches(policy: Policy) -> Column:
    """Whether a change has the provenance of a policy; never null."""
    tests = [
        F.coalesce(F.col("provenance")[PROVENANCE_FIELDS[name]].isin(list(values)), F.lit(False))
        for name, values in policy.matched
    ]
    return reduce(and_, tests)


def treatment(plan: ViewPlan) -> Column:
    """How a view's rules treat a change: taken, ignored or deferred."""
    rules = plan.rules
    found = F.when(_is_ignored(plan), F.lit(IGNORED))
    for policy in rules.throttled:
        found = found.when(matches(policy), F.lit(DEFERRED))
    return found.otherwise(F.lit(TAKEN)).cast("byte")


def _is_ignored(plan: ViewPlan) -> Column:
    tests = [matches(policy) for policy in plan.rules.ignored]
    if plan.rules.trigger is not None:
        tests.append(~fires(plan.rules.trigger))
    return reduce(or_, tests, F.lit(False))


class _Facts(Accepted):
    """Each change that fires, as a fact: later changes of the entity do not replace it."""

    @cached_property
    def newest(self) -> DataFrame:
        """All changes."""
        return self.changes


def taken_by(
    plan: ViewPlan,
    entity_type: EntityType,
    changes: DataFrame,
    deferred: Sequence[tuple[int, int, Sequence[int]]] = (),
) -> Accepted:
    """The accepted changes that a view takes, as the input of its batch.

    ``deferred`` has generation, partition and offsets of the view's deferred changes, which are
    left out: 8 bytes each on the driver.
    """
    if plan.rules:
        changes = changes.where(~_is_ignored(plan))
    if deferred:
        waiting = changes.sparkSession.createDataFrame(
            [tuple(each) for each in deferred],
            "generation int, partition int, offsets array<long>",
        ).select("generation", "partition", F.explode("offsets").alias("offset"))
        place = ["generation", "partition", "offset"]
        changes = changes.join(waiting, place, "left_anti").select(*changes.columns)
    if plan.rules or deferred:
        changes = mark_newest(changes)
    is_of_facts = plan.rules.trigger is not None and plan.sums_kept is not None
    return (_Facts if is_of_facts else Accepted)(entity_type, changes)
