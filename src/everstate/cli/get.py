"""`everstate get`: one entity, now or at any time."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import typer

from everstate.cli.console import (
    AppOption,
    JsonOption,
    config_of,
    load_app,
    out,
    print_json,
    table,
)
from everstate.local import connect
from everstate.serving import Reader, parse_moment
from everstate.serving.words import moment_text, provenance_text, value_text

AtOption = Annotated[
    str | None,
    typer.Option("--at", help="World time: 2013-02-08T18:00-05:00, or with a zone's name."),
]


def register(cli: typer.Typer) -> None:
    """Add the verb."""
    cli.command("get")(get)


def moment_of(text: str | None) -> datetime | None:
    """The moment an option names."""
    return None if text is None else parse_moment(text)


def get(
    context: typer.Context,
    entity: Annotated[str, typer.Argument(help="Entity type.")],
    key: Annotated[str, typer.Argument(help="Key of the entity.")],
    at: AtOption = None,
    version: Annotated[int | None, typer.Option("--version", "-n", help="That version.")] = None,
    recorded_at: Annotated[
        str | None, typer.Option("--recorded-at", help="As the records stood at that time.")
    ] = None,
    app: AppOption = None,
    json: JsonOption = False,
) -> None:
    """Show one entity: now, at a time, or at a version; exit code 4 when it is not there."""
    config = connect(config_of(context))
    moment, recorded = moment_of(at), moment_of(recorded_at)
    with Reader(config, load_app(app, config)) as reader:
        found = reader.get(entity, key, at=moment, recorded_at=recorded, version=version)
    if json:
        print_json(found)
        return
    zone = moment.tzinfo if moment is not None else None
    table(
        (entity, found.key),
        [(name, value_text(value)) for name, value in found.state.items()],
    )
    out.print(
        f"version {found.version} ({found.kind}), as of {moment_text(found.as_of, zone)}, "
        f"by {provenance_text(found.provenance)}",
        highlight=False,
    )
