"""`everstate cdc preview`: raw rows of a capture, and what clean makes of them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from everstate.cli.console import AppOption, JsonOption, config_of, load_app, print_json, table
from everstate.local import connect
from everstate.sources.cdc.preview import preview as preview_rows

_RAW_SHOWN = 160


def preview(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Capture.")],
    rows: Annotated[int, typer.Option("--rows", min=1, help="Newest rows of each table.")] = 3,
    app: AppOption = None,
    json: JsonOption = False,
) -> None:
    """Show newest raw rows of a capture and what clean makes of each; writes nothing."""
    config = connect(config_of(context))
    project = load_app(app, config)
    found = preview_rows(config, project.capture_of(name), project.entities, rows)
    if json:
        print_json([asdict(one) for one in found])
        return
    shown = [
        (
            one.table,
            f"{one.partition}@{one.offset}",
            one.raw if len(one.raw) <= _RAW_SHOWN else one.raw[: _RAW_SHOWN - 1] + "…",
            one.outcome,
            one.key,
            ", ".join(f"{field}={value}" for field, value in one.clean.items()),
        )
        for one in found
    ]
    table(("table", "at", "raw", "outcome", "key", "clean"), shown)
