"""Hides the values of masked fields in what a reader answers. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from everstate.http.callers import EVERY
from everstate.http.masks import NO_MASK, Mask
from everstate.serving.answers import Entity, Version
from everstate.serving.differences import ABSENT, Difference, MemberPath
from everstate.views.project import Project, entities_of, known_views

Masks = Callable[[str], Mask]
"""What a caller does not see of an entity type, by the type's name."""


def no_masks(_entity: str) -> Mask:
    """The masks of one who sees everything: the command line, and the server itself."""
    return NO_MASK


def entities_read_by(project: Project, view: str) -> tuple[str, ...]:
    """The entity types that a caller must be permitted to read, and see unmasked, for a view.

    For a view that is refused, whose earlier version may be shown, and for an unknown one: all.
    """
    if view in project.derivations:
        return (project.derivations[view].entity,)
    if view in known_views(project):
        return entities_of(project, view)
    return (EVERY, *project.entities)


def masked_entity(found: Entity, mask: Mask) -> Entity:
    """An entity without the hidden values."""
    return replace(found, state=mask.state(found.state)) if mask else found


def masked_version(found: Version, mask: Mask) -> Version:
    """A version without the hidden values, also in its differences and its event."""
    if not mask:
        return found
    return replace(
        found,
        state=mask.state(found.state),
        event=mask.event(found.event),
        differences=_masked_differences(found.differences, mask),
    )


def _masked_differences(found: tuple[Difference, ...], mask: Mask) -> tuple[Difference, ...]:
    """Differences without values: those within one hidden field become one difference of it."""
    shown: dict[MemberPath, Difference] = {}
    for each in found:
        names = mask.shown(each.names)
        is_within = names != each.names
        before, after = (
            value if value is ABSENT and not is_within else mask.within(each.names, value)
            for value in (each.before, each.after)
        )
        shown.setdefault(names, Difference(names, before, after))
    return tuple(shown.values())
