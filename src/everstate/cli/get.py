"""`everstate get`: one entity, now or at any time."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import typer

from everstate.cli.console import (
    READING,
    AppOption,
    JsonOption,
    WaitOption,
    print_result,
    project_of,
)
from everstate.cli.standing import (
    ahead_of_views,
    not_yet,
    print_cold_read,
    print_freshness,
    print_newer_version,
)
from everstate.errors import NotFound
from everstate.serving import Entity, Reader, parse_moment
from everstate.serving.words import moment_text, provenance_text, value_text

AtOption = Annotated[
    str | None,
    typer.Option("--at", help="Time in the world: 2013-02-08T18:00-05:00, or with a zone's name."),
]


def moment_of(text: str | None) -> datetime | None:
    """The moment in an option's text."""
    return None if text is None else parse_moment(text)


def get(
    context: typer.Context,
    entity: Annotated[str, typer.Argument(help="Entity type.")],
    key: Annotated[str, typer.Argument(help="Key of the entity.")],
    at: AtOption = None,
    version: Annotated[
        int | None, typer.Option("--version", "-n", help="Number of the version.")
    ] = None,
    recorded_at: Annotated[
        str | None, typer.Option("--recorded-at", help="Use only changes recorded by this time.")
    ] = None,
    wait_for: WaitOption = None,
    app: AppOption = None,
    json: JsonOption = False,
) -> None:
    """Show one entity: now, at a time, or at a version; exit code 4 if it does not exist."""
    config, project = project_of(context, app, needs=READING, views=False)
    moment, recorded = moment_of(at), moment_of(recorded_at)
    with Reader(config, project) as reader:
        try:
            found = reader.get(
                entity, key, at=moment, recorded_at=recorded, version=version, wait_for=wait_for
            )
        except NotFound as error:
            stored = ahead_of_views(config, project, reader, entity, key)
            raise error if stored is None else not_yet(entity, key, stored) from error
        _show(found, moment, json)
        print_cold_read(found.cold)
        if stored := ahead_of_views(config, project, reader, entity, key):
            print_newer_version(entity, key, stored)
            print_freshness(reader, f"{entity}_latest")
        elif project.source_of(entity) != "store":
            print_freshness(reader, f"{entity}_latest")


def _show(found: Entity, moment: datetime | None, json: bool) -> None:
    """Print an entity; times are in the time zone of the request."""
    zone = moment.tzinfo if moment is not None else None
    state = [(name, value_text(value)) for name, value in found.state.items()]
    then = (
        f"version {found.version} ({found.kind}), as of {moment_text(found.as_of, zone)}, "
        f"by {provenance_text(found.provenance)}"
    )
    print_result(json, found, (found.entity, found.key), state, then=then)
