"""`everstate explain`: the origin of one value, and where it is now."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from everstate.cli.console import READING, AppSession
from everstate.cli.results import Result, ResultTable
from everstate.cli.standing import cold_read
from everstate.serving import Reader
from everstate.serving.words import explanation_lines, version_record


def explain(
    session: AppSession,
    entity: Annotated[str, typer.Argument(help="Entity type.")],
    key: Annotated[str, typer.Argument(help="Key of the entity.")],
    version: Annotated[
        int | None,
        typer.Option("--version", "-n", help="Number of the version. Default: the newest."),
    ] = None,
) -> Result:
    """Explain a version: its change, log position, source transaction, file in the lake, views."""
    config, project = session.connected(needs=READING)
    with Reader(config, project) as reader:
        found = reader.explain(entity, key, version)
    value = asdict(found) | {"version": version_record(found.version)}
    first, *rest = explanation_lines(found)
    return Result(value, ResultTable(first, rest), notes=cold_read(found.version.cold))
