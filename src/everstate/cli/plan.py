"""`everstate plan`: what starting this app would change of the kept views, before it does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import typer

from everstate.app import App
from everstate.cli.console import READING, AppOption, JsonOption, err, print_json, project_of, table
from everstate.config import Config
from everstate.views.control import Control
from everstate.views.database import connect_views, views_errors
from everstate.views.versions import Step, declared_views, steps

_CHANGES_PER_S = 40_000
"""What a build reads on two cores, measured; for an estimate only."""

_READERS = {
    "new": "nothing, until it is built",
    "changed": "the version before, until the new one is built",
    "asked": "the version before; `everstate views rebuild` builds the new one",
    "text": "the same: only the text changed",
    "returns": "what was kept, until it has caught up",
    "goes back": "the version before, until this one has caught up",
    "not declared": "what was kept, as it stands; `everstate views drop` removes it",
}


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """What becomes of one view."""

    view: str
    entity: str
    what: str
    version: int
    published: int | None
    reads_changes: int
    reads_bytes: int
    seconds: float
    """An estimate."""
    readers_see: str


def register(cli: typer.Typer) -> None:
    """Add the verb."""
    cli.command("plan")(plan)


def plan(context: typer.Context, app: AppOption = None, json: JsonOption = False) -> None:
    """Show what starting this app would change of its views: what is built, and what it reads."""
    config, project = project_of(context, app, needs=READING)
    found = planned_steps(config, project)
    if json:
        print_json([asdict(step) for step in found])
        return
    if not found:
        err.print("nothing to do: what is kept is what the app declares", highlight=False)
        return
    print_plan(found)


def print_plan(found: Sequence[PlannedStep]) -> None:
    """Print steps as a table."""
    table(
        ("view", "what", "version", "reads changes", "MiB", "seconds, about", "readers see"),
        [
            (
                step.view,
                step.what,
                step.version,
                step.reads_changes,
                round(step.reads_bytes / 2**20, 1),
                round(step.seconds, 1),
                step.readers_see,
            )
            for step in found
        ],
    )


def planned_steps(config: Config, project: App) -> list[PlannedStep]:
    """What differs between what is kept and what an app declares; empty: nothing.

    Cost: three small statements; for views that are built a look into the lake's statistics.
    """
    with views_errors(config.views_dsn), connect_views(config.views_dsn) as connection:
        control = Control(connection, config.views.schema_name)
        control.install()
        found: list[Step] = []
        for entity in project.entities:
            places = {(place.view, place.version) for place in control.positions(entity)}
            found += steps(
                entity,
                declared_views(project, entity),
                control.versions(entity=entity),
                standing=places,
                on_change=config.views.on_change,
            )
        changes = {name: sum(control.core_vector(name).values()) for name in project.entities}
        retired = {row.name for row in control.versions() if row.status == "retired"}
    return [
        _planned(config, step, changes[step.entity])
        for step in found
        if step.what != "same" and not (step.what == "not declared" and step.name in retired)
    ]


def _planned(config: Config, step: Step, changes: int) -> PlannedStep:
    builds = step.what in ("new", "changed") and changes > 0
    return PlannedStep(
        view=step.name,
        entity=step.entity,
        what=step.what,
        version=step.version,
        published=step.published,
        reads_changes=changes if builds else 0,
        reads_bytes=_archive_bytes(config, step.entity) if builds else 0,
        seconds=changes / _CHANGES_PER_S if builds else 0.0,
        readers_see=_READERS[step.what],
    )


def _archive_bytes(config: Config, entity: str) -> int:
    from everstate.archive import ArchiveLog, ArchiveReader

    if not ArchiveLog(config, entity).exists():
        return 0
    return ArchiveReader(config, entity).counts().bytes
