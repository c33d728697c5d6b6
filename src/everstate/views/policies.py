"""Which accepted changes a view takes: a trigger, and policies by provenance. Pure.

`ignore(…)` excludes changes for good, `throttle(…)` defers them so that others go first. A proof of
the view applies the same rules. How a change is treated depends only on the change
(:class:`Rules`); whether it is deferred also depends on deferred changes of its key
(:func:`deferred`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Final

import numpy as np
import pyarrow.compute as pc

from everstate.changes import PROVENANCE_FIELDS
from everstate.changes.triggers import Trigger, trigger_of
from everstate.errors import InvalidView
from everstate.views.batch import Batch
from everstate.views.gate import Bools, Keys
from everstate.views.tables import KeptTable, meaning_of, rule_column

TAKEN, IGNORED, DEFERRED = 0, 1, 2
"""How a view treats a change; the values of the planned rule column."""
Matched = tuple[tuple[str, tuple[str, ...]], ...]
"""Field of the provenance and its allowed values; all fields must match."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How changes of some provenance are treated. Made by `ignore` and `throttle`."""

    matched: Matched
    per_second: float | None = None
    """Throttled: changes applied per second. ``None``: ignored."""
    fault: tuple[str, str | None] | None = None
    """Why no view can have this policy, and the advice; the view that is declared with it tells."""


def ignore(**provenance: str | Collection[str]) -> Policy:
    """Exclude changes with this provenance: ``ignore(service_name="importer")``.

    Each field takes one value or several. The view is as if these changes had not happened: an
    entity stays as its last other change left it. A view with a policy that cannot be used is
    refused.
    """
    fault = _fault(provenance)
    return Policy((), fault=fault) if fault else Policy(_matched(provenance))


def throttle(*, per_second: float, **provenance: str | Collection[str]) -> Policy:
    """Apply at most so many changes per second with this provenance; other changes go first.

    A key's later changes wait behind its throttled ones, so that their order is kept. All
    throttles of a view have one rate, which their changes share.
    """
    fault = _fault(provenance)
    is_number = isinstance(per_second, (int, float)) and not isinstance(per_second, bool)
    if not is_number or not 0 < per_second < inf:
        fault = f"per_second is {per_second!r}, and it must be a number above 0.", None
    return Policy((), fault=fault) if fault else Policy(_matched(provenance), per_second)


def _fault(provenance: Mapping[str, object]) -> tuple[str, str | None] | None:
    """Why a policy cannot match changes by this provenance, and the advice."""
    if not provenance:
        return (
            "a policy names no field of the provenance, so that it would match every change.",
            'Write service_name="…".',
        )
    for name, given in provenance.items():
        if name not in PROVENANCE_FIELDS:
            return (
                f"a policy names {name}, which no provenance has.",
                f"Its fields are {', '.join(PROVENANCE_FIELDS)}.",
            )
        values = [given] if isinstance(given, str) else given
        if not isinstance(values, (list, tuple, set, frozenset)) or not values:
            values = [None]
        if not all(isinstance(each, str) for each in values):
            return (
                f"a policy has {given!r} for {name}; expected a text, or several in a list.",
                f'Write {name}="…".',
            )
    return None


def _matched(provenance: Mapping[str, str | Collection[str]]) -> Matched:
    return tuple(
        (name, (value,) if isinstance(value, str) else _in_order(value))
        for name, value in sorted(provenance.items())
    )


def _in_order(values: Collection[str]) -> tuple[str, ...]:
    """The values; those of a set sorted, because its order is another one in each process."""
    return tuple(sorted(values) if isinstance(values, (set, frozenset)) else values)


@dataclass(frozen=True, slots=True)
class Rules:
    """The trigger and the policies of one view."""

    trigger: Trigger | None = None
    ignored: tuple[Policy, ...] = ()
    throttled: tuple[Policy, ...] = ()

    @classmethod
    def of(cls, trigger: Trigger | None, policies: Sequence[Policy]) -> Rules:
        """The rules that a view is declared with."""
        ignored = tuple(policy for policy in policies if policy.per_second is None)
        throttled = tuple(policy for policy in policies if policy.per_second is not None)
        return cls(trigger, ignored, throttled)

    @classmethod
    def declared(cls, view: str, trigger: Trigger | None, policies: Sequence[Policy]) -> Rules:
        """The rules that a project declares for a view; raises InvalidView when they are wrong."""
        if trigger is not None and not isinstance(trigger, Trigger):
            raise InvalidView(
                view,
                "when has no condition on a change.",
                advice='Write when=when("field").changes().',
            )
        if not isinstance(policies, (list, tuple)) or not all(
            isinstance(each, Policy) for each in policies
        ):
            raise InvalidView(
                view,
                "policies is no list of policies.",
                advice="Write policies=[ignore(…)].",
            )
        for fault in (policy.fault for policy in policies if policy.fault is not None):
            raise InvalidView(view, fault[0], advice=fault[1])
        rules = cls.of(trigger, policies)
        rates = {policy.per_second for policy in rules.throttled if policy.per_second}
        if len(rates) > 1:
            raise InvalidView(
                view,
                f"its throttles have the rates {', '.join(f'{r:,g}' for r in sorted(rates))}, and "
                "a view applies the changes of all of them at one rate.",
                advice="Give all of them the same per_second, which they share.",
            )
        return rules

    @classmethod
    def from_stored(cls, definition: Mapping[str, Any]) -> Rules:
        """The rules from a view's definition in the registry."""
        trigger = trigger_of(definition["when"]) if "when" in definition else None
        policies = []
        for stored in definition.get("policies", ()):
            matches = sorted(stored["matches"].items())
            matched = tuple((name, tuple(values)) for name, values in matches)
            policies.append(Policy(matched, stored["per_second"]))
        return cls.of(trigger, policies)

    def __bool__(self) -> bool:
        return self.trigger is not None or bool(self.ignored or self.throttled)

    @property
    def per_second(self) -> float | None:
        """How many deferred changes are applied per second; ``None``: none are deferred."""
        return min((p.per_second for p in self.throttled if p.per_second), default=None)

    @property
    def definition(self) -> dict[str, Any]:
        """The rules as the registry stores them."""
        stored: dict[str, Any] = {}
        if self.trigger is not None:
            stored["when"] = self.trigger.definition
        if policies := (*self.ignored, *self.throttled):
            stored["policies"] = [
                {"matches": {n: list(v) for n, v in p.matched}, "per_second": p.per_second}
                for p in policies
            ]
        return stored

    def fingerprint(self, plan: str) -> str:
        """Fingerprint of a plan with these rules; the rate of a throttle is not part of it."""
        if not self:
            return plan
        trigger = None if self.trigger is None else self.trigger.definition
        meaning = [
            plan,
            trigger,
            *([p.matched for p in every] for every in (self.ignored, self.throttled)),
        ]
        return meaning_of([json.dumps(meaning, sort_keys=True)])


NO_RULES: Final = Rules()


def taken(table: KeptTable, batch: Batch) -> Batch:
    """The changes that a view applies now or later: those that it does not ignore."""
    ruled = batch.changes[rule_column(table)]
    keep = pc.not_equal(pc.fill_null(ruled, TAKEN), IGNORED)
    if pc.all(keep, min_count=0).as_py():
        return batch
    return Batch(batch.changes.filter(keep), batch.floors)


def deferred(table: KeptTable, batch: Batch, waits: Callable[[Keys], Bools]) -> Bools:
    """Whether each change of a batch, of those that a view takes, is deferred.

    ``waits`` tells which keys have deferred changes: all their changes in the batch are deferred,
    as are a key's changes after the first throttled one. Versions of a key are in order.
    """
    rows = batch.changes.num_rows
    if not rows:
        return np.zeros(0, dtype=np.bool_)
    ruled = pc.fill_null(batch.changes[rule_column(table)], TAKEN).to_numpy()
    throttled, waiting = np.flatnonzero(ruled == DEFERRED), waits(batch.keys)
    if not len(throttled) and not waiting.any():
        return np.zeros(rows, dtype=np.bool_)
    first = np.where(waiting, 0, rows)
    np.minimum.at(first, batch.keys.by_row[throttled], throttled)
    found: Bools = np.arange(rows) >= first[batch.keys.by_row]
    return found
