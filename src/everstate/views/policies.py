"""Which accepted changes a view takes: a trigger, and policies by provenance. Pure.

`ignore(…)` excludes changes for good, `throttle(…)` defers them so that others go first. A proof of
the view applies the same rules. How a change is treated depends only on the change
(:class:`Rules`); whether it is deferred also depends on deferred changes of its key
(:func:`divided`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from everstate.changes import Provenance
from everstate.changes.triggers import Trigger, trigger_of
from everstate.errors import InvalidView
from everstate.views.batch import Batch
from everstate.views.gate import Keys
from everstate.views.tables import KeptTable, rule_column

TAKEN, IGNORED, DEFERRED = 0, 1, 2
"""How a view treats a change; the values of the planned rule column."""
_FIELDS: Final = tuple(field.name for field in fields(Provenance))
Matched = tuple[tuple[str, tuple[str, ...]], ...]
"""Field of the provenance and its allowed values; all fields must match."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How changes of some provenance are treated. Made by `ignore` and `throttle`."""

    matched: Matched
    per_second: float | None = None
    """Throttled: changes applied per second. ``None``: ignored."""


def ignore(**provenance: str | Sequence[str]) -> Policy:
    """Exclude changes with this provenance: ``ignore(service_name="importer")``.

    Each field takes one value or several. The view is as if these changes had not happened: an
    entity stays as its last other change left it.
    """
    return Policy(_matched(provenance))


def throttle(*, per_second: float, **provenance: str | Sequence[str]) -> Policy:
    """Apply at most so many changes per second with this provenance; other changes go first.

    A key's later changes wait behind its throttled ones, so that their order is kept.
    """
    if per_second <= 0:
        raise InvalidView("throttle", f"per_second is {per_second}; it must be more than 0.")
    return Policy(_matched(provenance), per_second)


def _matched(provenance: Mapping[str, str | Sequence[str]]) -> Matched:
    if not provenance:
        raise InvalidView(
            "policy",
            "it names no field of the provenance, so that it would match every change.",
            advice='Write service_name="…".',
        )
    for name in provenance:
        if name not in _FIELDS:
            raise InvalidView(
                "policy",
                f"a provenance has no field {name}; its fields are {', '.join(_FIELDS)}.",
            )
    return tuple(
        (name, (value,) if isinstance(value, str) else tuple(value))
        for name, value in sorted(provenance.items())
    )


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
    def from_stored(cls, definition: Mapping[str, Any]) -> Rules:
        """The rules from a view's definition in the registry."""
        trigger = trigger_of(definition["when"]) if "when" in definition else None
        policies = [_policy_of(each) for each in definition.get("policies", ())]
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
        return hashlib.sha256(json.dumps(meaning, sort_keys=True).encode()).hexdigest()[:32]


NO_RULES: Final = Rules()


def _policy_of(stored: Mapping[str, Any]) -> Policy:
    matched = tuple((name, tuple(values)) for name, values in sorted(stored["matches"].items()))
    return Policy(matched, stored["per_second"])


def taken(table: KeptTable, batch: Batch) -> Batch:
    """The changes that a view applies now or later: those that it does not ignore."""
    ruled = batch.changes[rule_column(table)]
    keep = pc.not_equal(pc.fill_null(ruled, TAKEN), IGNORED)
    if pc.all(keep, min_count=0).as_py():
        return batch
    return Batch(batch.changes.filter(keep), batch.floors)


def divided(
    table: KeptTable, batch: Batch, pending: Callable[[Keys], set[str]]
) -> tuple[Batch, pa.Table]:
    """Divide a batch into the changes that a view applies now, and those that are deferred.

    ``pending`` returns the keys with deferred changes: all their changes in the batch are deferred,
    as are a key's changes after the first throttled one. Versions of a key are in order.
    """
    batch = taken(table, batch)
    changes = batch.changes
    ruled = pc.fill_null(changes[rule_column(table)], TAKEN).to_numpy()
    throttled = np.flatnonzero(ruled == DEFERRED)
    waiting = pending(batch.keys) if changes.num_rows else set()
    if not len(throttled) and not waiting:
        return batch, changes.slice(0, 0)
    keys = batch.keys
    codes = np.empty(changes.num_rows, dtype=np.int64)
    codes[keys.order] = keys.codes
    first = np.full(len(keys), changes.num_rows, dtype=np.int64)
    np.minimum.at(first, codes[throttled], throttled)
    for code in keys.codes_of(waiting):
        if code is not None:
            first[code] = 0
    defer = np.arange(changes.num_rows) >= first[codes]
    return Batch(changes.filter(pa.array(~defer)), batch.floors), changes.filter(pa.array(defer))
