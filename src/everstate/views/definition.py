"""What a view is declared as."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ViewDefinition:
    """A view's name and its SQL, in Spark's dialect, over one entity type.

    ``FROM <entity>`` means the present state of every live entity. `latest` and `history` of an
    entity type are kept without a definition.
    """

    name: str
    sql: str
