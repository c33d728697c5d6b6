"""`everstate get`: one entity, now or at any time."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import typer

from everstate.cli.console import READING, AppSession, WaitOption
from everstate.cli.results import Result, ResultTable
from everstate.cli.standing import (
    ahead_of_views,
    cold_read,
    freshness,
    newer_version,
    or_not_yet,
)
from everstate.serving import Reader, parse_moment
from everstate.serving.words import moment_text, provenance_text, value_text

AtOption = Annotated[
    str | None,
    typer.Option("--at", help="Time in the world: 2013-02-08T18:00-05:00, or with a zone's name."),
]
RecordedAtOption = Annotated[
    str | None, typer.Option("--recorded-at", help="Use only changes recorded by this time.")
]


def moment_of(text: str | None) -> datetime | None:
    """The moment in an option's text."""
    return None if text is None else parse_moment(text)


def get(
    session: AppSession,
    entity: Annotated[str, typer.Argument(help="Entity type.")],
    key: Annotated[str, typer.Argument(help="Key of the entity.")],
    at: AtOption = None,
    version: Annotated[
        int | None, typer.Option("--version", "-n", help="Number of the version.")
    ] = None,
    recorded_at: RecordedAtOption = None,
    wait_for: WaitOption = None,
) -> Result:
    """Show one entity: now, at a time, or at a version; exit code 4 if it does not exist."""
    config, project = session.connected(needs=READING, views=False)
    moment, recorded = moment_of(at), moment_of(recorded_at)
    with Reader(config, project) as reader:
        with or_not_yet(config, project, reader, entity, key):
            found = reader.get(
                entity, key, at=moment, recorded_at=recorded, version=version, wait_for=wait_for
            )
        stored = ahead_of_views(config, project, reader, entity, key)
        notes = [*cold_read(found.cold), *newer_version(entity, key, stored)]
        if stored or project.source_of(entity) != "store":
            notes += freshness(reader, f"{entity}_latest")
    # Times are in the time zone of the request.
    zone = moment.tzinfo if moment is not None else None
    state = [(name, value_text(value)) for name, value in found.state.items()]
    said = (
        f"version {found.version} ({found.kind}), as of {moment_text(found.as_of, zone)}, "
        f"by {provenance_text(found.provenance)}"
    )
    return Result(found, ResultTable((found.entity, found.key), state), said, notes=notes)
