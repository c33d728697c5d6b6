"""`everstate explain`: the origin of one value, and where it is now."""

from __future__ import annotations

from typing import Annotated

import typer

from everstate.cli.console import READING, AppOption, JsonOption, print_json, project_of, table
from everstate.cli.standing import print_cold_read
from everstate.serving import Reader
from everstate.serving.words import explanation_lines, version_record


def explain(
    context: typer.Context,
    entity: Annotated[str, typer.Argument(help="Entity type.")],
    key: Annotated[str, typer.Argument(help="Key of the entity.")],
    version: Annotated[
        int | None,
        typer.Option("--version", "-n", help="Number of the version. Default: the newest."),
    ] = None,
    app: AppOption = None,
    json: JsonOption = False,
) -> None:
    """Explain a version: its change, log position, source transaction, file in the lake, views."""
    config, project = project_of(context, app, needs=READING)
    with Reader(config, project) as reader:
        found = reader.explain(entity, key, version)
        print_cold_read(found.version.cold)
    if json:
        print_json(
            {
                "version": version_record(found.version),
                "topic": found.topic,
                "archived": found.archived,
                "applied_by": found.applied_by,
            }
        )
        return
    first, *rest = explanation_lines(found)
    table(first, rest)
