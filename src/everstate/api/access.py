"""Checks permissions and masks against the entity types of an app, before anything is served."""

from __future__ import annotations

from typing import TYPE_CHECKING

from everstate.api_config import ApiConfig
from everstate.app import App
from everstate.changes import EntityType
from everstate.errors import InvalidConfig
from everstate.http.callers import EVERY

if TYPE_CHECKING:
    import pyarrow as pa


def check_access(settings: ApiConfig, app: App) -> None:
    """Raise InvalidConfig for a permission or a mask of something that the app does not have.

    A mask with a slip would hide nothing, and a permission with a slip would permit nothing.
    """
    for caller, entry in settings.tokens.items():
        for entity in entry.permissions:
            if entity != EVERY:
                _known(f"api.tokens.{caller}.permissions", entity, app)
    if settings.masks and not settings.tokens:
        raise InvalidConfig(
            "api.masks",
            ", ".join(settings.masks),
            "callers with tokens too ([api.tokens]): without them everybody sees everything",
        )
    for entity, fields in settings.masks.items():
        kind = _known("api.masks", entity, app)
        for field in fields:
            _check_field(kind, field)


def _known(setting: str, entity: str, app: App) -> EntityType:
    if entity not in app.entities:
        known = ", ".join(app.entities)
        raise InvalidConfig(setting, entity, f"entity types of the app: {known}")
    return app.entities[entity]


def _check_field(kind: EntityType, field: str) -> None:
    setting = f"api.masks.{kind.name}"
    if field.partition(".")[0] == kind.key:
        raise InvalidConfig(setting, field, "another field than the key, which is in addresses")
    fields = {column.name: column.type for column in kind.arrow_schema}
    for part in field.split("."):
        if part not in fields:
            names = ", ".join(fields) or "none"
            raise InvalidConfig(setting, field, f"a field of {kind.name}; there are: {names}")
        fields = _fields_within(fields[part])


def _fields_within(kind: pa.DataType) -> dict[str, pa.DataType]:
    """Fields of an object, or of the objects of a list."""
    # Imported here: the layers below do not need it, and it takes a fifth of a second.
    import pyarrow as pa

    while pa.types.is_list(kind) or pa.types.is_large_list(kind):
        kind = kind.value_type
    return {each.name: each.type for each in kind} if pa.types.is_struct(kind) else {}
