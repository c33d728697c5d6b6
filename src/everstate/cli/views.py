"""`everstate views`: how the views stand, what they hold, and the proof of them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from everstate.cli.console import (
    AppOption,
    JsonOption,
    config_of,
    err,
    load_app,
    print_json,
    table,
)
from everstate.errors import VerificationFailed
from everstate.local import connect
from everstate.serving import Reader
from everstate.serving.words import value_text

if TYPE_CHECKING:
    from everstate.pipeline.verify import ViewReport

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


@views.command("verify")
def verify(
    context: typer.Context,
    names: Annotated[list[str] | None, typer.Argument(help="Views; none: all.")] = None,
    app: AppOption = None,
    json: JsonOption = False,
) -> None:
    """Prove views: the kept rows against the same SQL, run in batch over the archive."""
    # Imported here: Spark takes a second that no other verb should pay.
    from everstate.pipeline.session import spark_session
    from everstate.pipeline.verify import failing, verify_views

    config = connect(config_of(context))
    project = load_app(app, config)
    with err.status("starting Spark") as status:
        spark = spark_session(config, app_name="everstate views verify")
        try:
            status.update("verifying")
            reports = verify_views(
                spark,
                config,
                project,
                names or None,
                on_report=lambda report: status.update(f"verified {report.name}"),
            )
        finally:
            spark.stop()
    if json:
        print_json(reports)
    else:
        print_reports(reports)
    if bad := failing(reports):
        raise VerificationFailed(
            f"{len(bad)} of {len(reports)} views differ from the batch result.",
            advice="The differing rows are above; `everstate explain` tells where each came from.",
        )


def print_reports(reports: Sequence[ViewReport]) -> None:
    """Print proofs as a table, and the rows that differ below it."""
    table(
        ("view", "rows", "batch rows", "hash", "seconds", "proof", "as read"),
        [
            (
                report.name,
                report.kept_rows,
                report.expected_rows,
                report.kept_hash,
                report.seconds,
                "holds" if report.holds else f"{report.different_rows:,} rows differ",
                # The reason why the columns that readers see were not compared is in --json.
                report.as_read.partition(":")[0],
            )
            for report in reports
        ],
    )
    for report in reports:
        if report.differences:
            table(
                ("what", "key", "kept", "batch"),
                [(d.what, d.key, d.kept, d.expected) for d in report.differences],
                title=f"{report.name}: rows that differ",
            )


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
