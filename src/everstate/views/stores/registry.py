"""The stores of views by name, a line each; other packages add theirs by an entry point."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

from everstate.errors import InvalidView
from everstate.views.kinds.kind import ViewPlan
from everstate.views.tables import HOME, Merge, meaning_of

GROUP: Final = "everstate.stores"
"""The group of the entry points."""
STORES: Final[dict[str, str]] = {
    HOME: "everstate.views.stores.postgres.transaction:PostgresViewStore",
    "redis": "everstate.views.stores.redis:RedisStore",
    "opensearch": "everstate.views.stores.opensearch:OpenSearchRows",
    "cassandra": "everstate.views.stores.cassandra:CassandraRows",
    "lake": "everstate.views.stores.lake:LakeRows",
    "kafka": "everstate.views.stores.kafka:KafkaRows",
}
"""Name → module and class: a :class:`~everstate.views.stores.store.ViewStore`, but for the home."""

_NOT_KEPT: Final[Mapping[Merge, str]] = {
    "sum": "sums are kept in PostgreSQL",
    "cache": "rows that expire are kept in PostgreSQL",
    "periods": "all states are kept in the lake",
}


def found_stores() -> Mapping[str, EntryPoint]:
    """All stores that a view may name; no module of a store is imported."""
    own = {name: EntryPoint(name, place, GROUP) for name, place in STORES.items()}
    return {each.name: each for each in entry_points(group=GROUP)} | own


def store_class(view: str, name: str) -> Any:
    """The class of a store; raises InvalidView for the view that names it."""
    known = found_stores()
    if name not in known:
        raise InvalidView(
            view,
            f"there is no store {name!r} (known: {', '.join(sorted(known))}).",
            advice="Install the package of that store, or name another one.",
        )
    try:
        return known[name].load()
    except Exception as cause:  # its module may raise anything
        raise InvalidView(
            view,
            f"the store {name} cannot be loaded: {cause}.",
            advice=f"Install what {known[name].value.partition(':')[0]} needs.",
        ) from cause


def kept_in(store: str, plan: ViewPlan) -> ViewPlan:
    """The plan of a view whose rows are in a store; raises InvalidView if it cannot keep them.

    The store is a part of the meaning: a view that moves to another store is built there.
    """
    reason, merges = None, store_class(plan.name, store).merges
    advice = f'Leave store="{store}" out.'
    if plan.inputs:
        reason = "it is computed from other views when it is read"
    elif (merge := plan.table(0).merge) not in merges:
        reason = _NOT_KEPT.get(merge, f"that store keeps no views of the kind {plan.kind}")
        if merge == "sum":
            advice += " A program that calls Client.follow_view can copy the groups."
        elif merge == "periods":
            advice = 'Write store="lake".'
    elif plan.rules.throttled:
        reason = "throttled changes wait in PostgreSQL"
    if reason is not None:
        raise InvalidView(
            plan.name,
            f"it cannot be kept in the store {store}: {reason}.",
            advice=advice,
        )
    meaning = meaning_of([f"{plan.fingerprint} in {store}"])
    moved = replace(plan, store=store, fingerprint=meaning)
    moved.ruled_table(0)  # raises where readers see something else than the stored rows
    return moved
