"""Names that entity types and views may have; all their tables are in one schema."""

from __future__ import annotations

import re
from typing import Final

_TABLES: Final = (
    *("position", "counters", "view", "topic_identity", "held", "duplicate", "dead", "identity"),
    *("request", "entity_model", "deployment", "deferred", "misfit", "view_number", "reader_name"),
    "stored_table",
)
RESERVED: Final = frozenset(
    (
        *(*_TABLES, "view_published", "dead_id_seq", "deployment_number_seq", "dead_unpublished"),
        *("held_offset", "held_released", "dead_offset"),
        *("deferred_id_seq", "deferred_place"),
        "dead_topic_partition_offset_key",
    )
)
"""Names of control tables, and of their indexes, sequences and constraints."""

COLUMN_BYTES_MAX: Final = 63
"""PostgreSQL truncates longer names without an error."""
_OURS: Final = re.compile(r"__v\d|_pkey$")


def refused_name(name: str) -> str | None:
    """Why neither an entity type nor a view may have a name; ``None``: it may.

    `x__v1` is the table behind the view x, `x_pkey` the index of x.
    """
    if name in RESERVED:
        return "one of everstate's control tables has it"
    if _OURS.search(name):
        return (
            "names that contain __v and a number, or end in _pkey, are for everstate's own tables"
        )
    return None


def length_fault(column: str) -> str | None:
    """Why a name is too long for a column, as an end of a sentence; ``None``: it is not."""
    if len(column.encode()) > COLUMN_BYTES_MAX:
        return f"is longer than {COLUMN_BYTES_MAX} bytes"
    return None


def names_of_entity(entity: str) -> tuple[str, ...]:
    """Names under which readers find the tables of an entity type."""
    return (entity, f"{entity}_latest", f"{entity}_history")
