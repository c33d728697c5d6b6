"""Spark SQL texts over one image of a change, or over live entities in batch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from everstate.changes import EntityType
from everstate.views.tables import Image, meaning_of

IMAGE: Final = "__image__"
"""Placeholder for the struct column with an image; replaced when a plan's SQL is made."""
_ENTITY: Final = "live_entity"
SHARD: Final = "__partition AS shard"
"""The shard of sums of an entity: its partition, whose task adds to it."""
SHARD_OF_CHANGE: Final = "partition AS shard"
_FORMAT: Final = 3
"""To be raised when the same SQL is stored in another way: every view is then built again."""
_SPARK: Final = 4
"""Spark's major version: another one may compute other values from the same SQL."""
_EXACT: Final = "decimals keep their places"
"""Earlier releases rounded products of decimals; views that compute with them are built again."""
_COMPUTED: Final = re.compile(r"[-+*/%]")
_NAME: Final = r"\.`((?:[^`]|``)+)`"
_FIELD: Final = re.compile(f"`{IMAGE}`{_NAME}(?:{_NAME})?")
_STATES: Final = ("current", "original")


def row_delta(image: Image, row: str, where_sql: str | None) -> str:
    """The row delta of one image: its row or rows, or null when WHERE does not hold for it.

    ``row``: canonical text of a struct, or of an array of structs.
    """
    condition = "`reason` IS NULL" if image == "change" else f"`{image}` IS NOT NULL"
    if where_sql is not None:
        condition += f" AND ({_over(where_sql, image)})"
    return f"CASE WHEN {condition} THEN {_over(row, image)} END"


def authors_text(text: str) -> str:
    """A canonical text without image and quotes, as its author may have written it."""
    return text.replace(f"`{IMAGE}`.", "").replace("`", "")


def struct(fields: Sequence[tuple[str, str]]) -> str:
    """Canonical text of a struct."""
    pairs = ", ".join(f"'{name}', {text}" for name, text in fields)
    return f"named_struct({pairs})"


def of_live(
    tables: Sequence[str], fields: Sequence[tuple[str, str]], where_sql: str | None, *own: str
) -> str:
    """Spark SQL of fields of each live entity of the only table.

    ``own``: columns that are no fields.
    """
    wanted = [*own, *(f"{_over(text, _ENTITY)} AS {name}" for name, text in fields)]
    return f"SELECT {', '.join(wanted) or '1 AS one'} FROM {_live(tables, where_sql)}"


def rows_of_live(tables: Sequence[str], rows: str, where_sql: str | None, *own: str) -> str:
    """The same with several rows per entity; ``rows``: canonical text of an array of structs."""
    wanted = ", ".join([*own, f"explode({_over(rows, _ENTITY)}) AS row"])
    names = ", ".join([*(text.rpartition(" ")[2] for text in own), "row.*"])
    return f"SELECT {names} FROM (SELECT {wanted} FROM {_live(tables, where_sql)})"


def _live(tables: Sequence[str], where_sql: str | None) -> str:
    (table,) = tables
    source = f"{table} AS {_ENTITY}"
    return source if where_sql is None else f"{source} WHERE {_over(where_sql, _ENTITY)}"


def fingerprint(entity_type: EntityType, texts: Sequence[str]) -> str:
    """A hash that is equal for definitions with the same meaning, whatever their text (V10).

    The types of the fields that the SQL uses belong to its meaning; the entity type's schema
    version does not, so that a new optional field rebuilds no view.
    """
    types = [f"{name} {_type_of(entity_type, name)}" for name in fields_used(texts)]
    parts = [str(_FORMAT), str(_SPARK), entity_type.name, *types, *texts]
    if any("decimal" in kind for kind in types) and any(map(_COMPUTED.search, texts)):
        parts.append(_EXACT)
    return meaning_of(parts)


def fields_used(texts: Sequence[str]) -> tuple[str, ...]:
    """Fields of the entity that canonical texts use, also those of a change's two states."""
    found = set()
    for text in texts:
        for name, inner in _FIELD.findall(text):
            found.add(inner if inner and name in _STATES else name)
    return tuple(sorted(found))


def _over(text: str, image: str) -> str:
    """Canonical text with the placeholder replaced; for a change, by its own columns."""
    return text.replace(f"`{IMAGE}`.", "" if image == "change" else f"`{image}`.")


def _type_of(entity_type: EntityType, name: str) -> str:
    schema = entity_type.arrow_schema
    place = schema.get_field_index(name.replace("``", "`"))
    if place < 0:
        return str(schema) if name in _STATES else "?"
    return str(schema.field(place).type)
