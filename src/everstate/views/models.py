"""Changes of models since the last start of the project."""

from __future__ import annotations

from collections.abc import Iterable

from everstate.changes import EntityType
from everstate.changes.evolution import FieldChange, field_changes, model_note
from everstate.errors import InvalidModelChange
from everstate.views.control import Control
from everstate.views.project import Project


def model_changes(control: Control, project: Project) -> list[FieldChange]:
    """Changes of models since the stored ones; entity types without judged changes are skipped."""
    found: list[FieldChange] = []
    for name, entity_type in project.entities.items():
        stored = control.model(name)
        if stored is not None and any(control.core_vector(name).values()):
            found += field_changes(stored, entity_type)
    return found


def note_model(control: Control, entity_type: EntityType) -> None:
    """Store an entity type's model, with the former fields that its states may have."""
    name = entity_type.name
    before = control.model(name) if any(control.core_vector(name).values()) else None
    control.set_model(name, model_note(entity_type, before))


def check_models(changes: Iterable[FieldChange]) -> None:
    """Raise InvalidModelChange for changes that a running project cannot accept."""
    refused = [(each.entity, each.field, each.meaning) for each in changes if each.is_refused]
    if refused:
        raise InvalidModelChange(refused)
