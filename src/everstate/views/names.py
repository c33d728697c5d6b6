"""Which names entity types and views may have: all their tables share one schema."""

from __future__ import annotations

import re
from typing import Final

_TABLES: Final = (
    *("position", "counters", "view", "topic_identity", "held", "duplicate", "dead", "identity"),
    "request",
)
RESERVED: Final = frozenset(
    (
        *(*_TABLES, "view_published", "dead_id_seq", "dead_unpublished"),
        "dead_topic_partition_offset_key",
    )
)
"""Control tables, and what PostgreSQL or we name after them."""

_OURS: Final = re.compile(r"__v\d|_pkey$")


def refused_name(name: str) -> str | None:
    """Why neither an entity type nor a view may have a name; ``None``: it may.

    `x__v1` is the table behind the view x, `x_pkey` the index of x.
    """
    if name in RESERVED:
        return "it is the name of a control table"
    if _OURS.search(name):
        return "names with __v and a number, or that end in _pkey, are the store's own"
    return None


def names_of_entity(entity: str) -> tuple[str, ...]:
    """What readers call the tables of an entity type."""
    return (entity, f"{entity}_latest", f"{entity}_history")
