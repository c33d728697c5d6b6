"""`everstate history`: every version of one entity."""

from __future__ import annotations

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
from everstate.serving import Reader
from everstate.serving.words import (
    differences_text,
    happening_text,
    moment_text,
    provenance_text,
    version_record,
)


def history(
    session: AppSession,
    entity: Annotated[str, typer.Argument(help="Entity type.")],
    key: Annotated[str, typer.Argument(help="Key of the entity.")],
    diff: Annotated[
        bool, typer.Option("--diff", "-d", help="Show the changed fields of each version.")
    ] = False,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Largest number of versions, newest first.")
    ] = None,
    wait_for: WaitOption = None,
) -> Result:
    """Show every version of an entity: when, what, by whom, and what it changed."""
    config, project = session.connected(needs=READING, views=False)
    with Reader(config, project) as reader:
        with or_not_yet(config, project, reader, entity, key):
            versions = reader.history(entity, key, limit=limit, wait_for=wait_for)
        stored = ahead_of_views(config, project, reader, entity, key)
        notes = [
            *newer_version(entity, key, stored),
            *cold_read(versions[-1].cold),
            *freshness(reader, f"{entity}_history"),
        ]
    rows = (
        (
            version.version,
            moment_text(version.occurred_at),
            happening_text(version),
            provenance_text(version.provenance),
            differences_text(version.differences) if diff else len(version.differences),
        )
        for version in versions
    )
    columns = ("version", "happened", "what", "by", "changed" if diff else "fields changed")
    return Result(list(map(version_record, versions)), ResultTable(columns, rows), notes=notes)
