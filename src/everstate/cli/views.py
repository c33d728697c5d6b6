"""`everstate views`: how the views stand, what they hold, and the proof of them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer

from everstate.cli.console import AppOption, JsonOption, config_of, load_app, print_json, table
from everstate.local import connect
from everstate.serving import Reader
from everstate.serving.words import value_text

views = typer.Typer(no_args_is_help=True, help="How the views stand, and the proof of them.")


def register(cli: typer.Typer) -> None:
    """Add the verbs."""
    cli.add_typer(views, name="views")


@views.command("list")
def list_(context: typer.Context, app: AppOption = None, json: JsonOption = False) -> None:
    """List every view: rows, position, lag, and when it was last proved."""
    config = connect(config_of(context))
    with Reader(config, load_app(app, config)) as reader:
        found = reader.views()
    if json:
        print_json(found)
        return
    table(
        ("view", "kind", "entity", "rows", "position", "lag", "seconds", "verified", "status"),
        [
            (
                view.name,
                view.kind,
                view.entity,
                view.rows,
                sum(view.position.values()),
                view.lag_changes,
                view.lag_seconds,
                _verified(view.verified_at, view.verified),
                view.status if view.reason is None else f"{view.status}: {view.reason}",
            )
            for view in found
        ],
    )


@views.command("show")
def show(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Name of the view.")],
    limit: Annotated[int, typer.Option("--limit", min=1, help="At most so many rows.")] = 50,
    app: AppOption = None,
    json: JsonOption = False,
) -> None:
    """Show the rows of a view as they are now."""
    config = connect(config_of(context))
    with Reader(config, load_app(app, config)) as reader:
        columns, rows = reader.rows(name, limit=limit)
    if json:
        print_json([dict(zip(columns, row, strict=True)) for row in rows])
        return
    table(columns, [[_cell(cell) for cell in row] for row in rows])


def _cell(cell: object) -> object:
    plain = cell is None or isinstance(cell, int | float | str)
    return cell if plain else str(cell) if not isinstance(cell, dict | list) else value_text(cell)


def _verified(moment: datetime | None, report: dict[str, object] | None) -> str | None:
    """When a view was proved, and whether the proof held."""
    if moment is None:
        return None
    seconds = (datetime.now(UTC) - moment).total_seconds()
    held = report is None or bool(report.get("holds", True))
    ago = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    return f"{'holds' if held else 'DOES NOT HOLD'}, {ago} ago"
