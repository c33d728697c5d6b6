"""Outputs of sums that are NULL for readers, because a CAST in them cannot hold the value."""

from __future__ import annotations

from collections.abc import Mapping

from everstate.serving.connection import ReadConnection
from everstate.views.control import ViewVersion
from everstate.views.kinds import ViewPlan
from everstate.views.reading import overflow_sql
from everstate.views.stores.postgres.tables import Readers


def overflows(
    connection: ReadConnection, schema: str, row: ViewVersion, plan: ViewPlan | None
) -> Mapping[str, int]:
    """Number of groups in which an output is too large for its CAST, by output; none is left out.

    ``plan``: as the project declares the view; nothing is known where the version is of another
    meaning. Cost: nothing without such a CAST, else one pass over the groups.
    """
    if plan is None or plan.fingerprint != row.fingerprint:
        return {}
    if (computed := plan.computed(Readers(schema, row.version))) is None:
        return {}
    relation, outputs = computed
    conditions = {name: overflow_sql(text) for name, text in outputs if "CAST(" in text}
    names = [name for name, condition in conditions.items() if condition is not None]
    if not names:
        return {}
    counts = ", ".join(f"count(*) FILTER (WHERE {conditions[name]})" for name in names)
    query = f"SELECT {counts} FROM {relation}"
    # It has no parameters, but maybe the operator %.
    found = connection.row(query.replace("%", "%%").encode()) or ()
    return {name: count for name, count in zip(names, found, strict=True) if count}
