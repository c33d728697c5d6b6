"""Checks permissions and masks against the entity types of an app, before anything is served."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

from everstate.api_config import ApiConfig
from everstate.app import App
from everstate.changes import EntityType
from everstate.changes.fields import tree_of
from everstate.errors import InvalidConfig
from everstate.http.callers import EVERY


def check_access(settings: ApiConfig, app: App) -> None:
    """Raise InvalidConfig for a permission or a mask of something that the app does not have.

    A mask with a slip would hide nothing, and a permission with a slip would permit nothing.
    """
    for caller, entry in settings.tokens.items():
        for entity in entry.permissions:
            if entity != EVERY:
                _known(f"api.tokens.{caller}.permissions", entity, app)
    _check_masks("api.masks", settings.masks, settings, app)
    _check_masks("api.former_masks", settings.former_masks, settings, app)


def _check_masks(
    setting: str, masks: Mapping[str, Sequence[str]], settings: ApiConfig, app: App
) -> None:
    if masks and not settings.tokens:
        raise InvalidConfig(
            setting,
            ", ".join(masks),
            "callers with tokens too ([api.tokens]): without them everybody sees everything",
        )
    for entity, fields in masks.items():
        kind = _known(setting, entity, app)
        for field in fields:
            if field.partition(".")[0] == kind.key:
                expected = "another field than the key, which is in addresses"
                raise InvalidConfig(f"{setting}.{entity}", field, expected)
            _check_field(f"{setting}.{entity}", kind, field, is_former=masks is not settings.masks)
            others = {".".join(way) for way in product(*kind.names_to(field.split(".")))} - {field}
            if masks is settings.masks and others - {*settings.former_masks.get(entity, ())}:
                expected = f"its former names in api.former_masks too: {', '.join(sorted(others))}"
                raise InvalidConfig(f"{setting}.{entity}", field, expected)


def _known(setting: str, entity: str, app: App) -> EntityType:
    if entity not in app.entities:
        known = ", ".join(app.entities)
        raise InvalidConfig(setting, entity, f"entity types of the app: {known}")
    return app.entities[entity]


def _check_field(setting: str, kind: EntityType, field: str, *, is_former: bool) -> None:
    """Raise InvalidConfig for a field that the model lacks; ``is_former``: for one that it has."""
    known = _known_at(kind, field)
    if is_former and (known is None or not all(field.split("."))):
        expected = f"a field that {kind.name} does not have any more; others belong in api.masks"
        raise InvalidConfig(setting, field, expected)
    if not is_former and known is not None:
        expected = f"a field of {kind.name}; there are: {', '.join(known) or 'none'}"
        hint = "a field that the model does not have any more belongs in api.former_masks"
        raise InvalidConfig(setting, field, f"{expected} ({hint})")


def _known_at(kind: EntityType, field: str) -> Sequence[str] | None:
    """The fields that there are where the model lacks one of the path; ``None``: it has all."""
    tree = tree_of(kind.model)
    for part in field.split("."):
        while tree.type == "list" and tree.element is not None:
            tree = tree.element
        inside = {each.written: each.tree for each in tree.columns}
        if part not in inside:
            return tuple(inside)
        tree = inside[part]
    return None
