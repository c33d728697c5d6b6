"""`everstate cdc preview` and `held`: what clean makes of raw rows, and which rows wait."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated

import typer

from everstate.cli.console import AppOption, JsonOption, config_of, load_app, print_json, table
from everstate.local import connect
from everstate.sources.cdc.holding import read_held
from everstate.sources.cdc.preview import preview as preview_rows

_RAW_SHOWN = 160


def preview(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Capture, as the app declares it.")],
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


def held(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Capture, as the app declares it.")],
    app: AppOption = None,
    json: JsonOption = False,
) -> None:
    """List entities whose rows wait, and for what; a snapshot of its key lets one go on."""
    config = connect(config_of(context))
    project = load_app(app, config)
    found = read_held(config, project.capture_of(name).name)
    if json:
        print_json(
            [
                {
                    "table": one.table,
                    "entity": one.entity,
                    "key": one.key,
                    "columns": one.columns,
                    "reason": one.reason,
                    "since": datetime.fromtimestamp(one.since_s, UTC),
                    "rows": len(one.rows),
                    "waitsFor": one.waits_for,
                    "asksForSnapshot": one.asks_for_snapshot,
                }
                for one in found
            ]
        )
        return
    rows = [
        (
            one.table,
            one.key,
            len(one.rows),
            one.reason,
            "" if one.waits_for is None else " ".join(one.waits_for),
            "yes" if one.asks_for_snapshot else "",
            datetime.fromtimestamp(one.since_s, UTC).isoformat(timespec="seconds"),
        )
        for one in found
    ]
    table(("table", "key", "rows", "reason", "waits for", "asks for snapshot", "since"), rows)
