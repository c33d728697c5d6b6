"""`everstate views`: how the views stand, what they hold, and the proof of them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from everstate.cli.console import (
    READING,
    AppOption,
    JsonOption,
    err,
    print_json,
    project_of,
    table,
    working,
)
from everstate.cli.rebuild import drop, rebuild
from everstate.cli.standing import say_how_far
from everstate.errors import VerificationFailed
from everstate.serving import Reader
from everstate.serving.words import value_text

if TYPE_CHECKING:
    from everstate.pipeline.verify import ViewReport

_LEGEND = (
    "position: offsets that were read; lag: changes in the log that the view does not have; "
    "seconds: age of the oldest of them"
)

views = typer.Typer(no_args_is_help=True, help="How the views stand, and the proof of them.")


def register(cli: typer.Typer) -> None:
    """Add the verbs."""
    cli.add_typer(views, name="views")


views.command("rebuild")(rebuild)
views.command("drop")(drop)


@views.command("list")
def list_(context: typer.Context, app: AppOption = None, json: JsonOption = False) -> None:
    """List every view: rows, position, lag, and when it was last proved."""
    config, project = project_of(context, app, needs=READING)
    with Reader(config, project) as reader:
        found = reader.views()
    if any(view.lag_changes is None for view in found):
        err.print("note: Kafka does not answer: the lag is not known", style="yellow")
    if json:
        print_json(found)
        return
    err.print(_LEGEND, style="dim")
    table(
        (
            *("view", "version", "kind", "entity", "rows", "position", "lag", "seconds"),
            *("verified", "status"),
        ),
        [
            (
                view.name,
                view.version,
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
    config, project = project_of(context, app, needs=READING)
    with Reader(config, project) as reader:
        columns, rows = reader.rows(name, limit=limit)
        if json:
            print_json([dict(zip(columns, row, strict=True)) for row in rows])
        else:
            table(columns, [[cell(value) for value in row] for row in rows])
        say_how_far(reader, name)


@views.command("verify")
def verify(
    context: typer.Context,
    names: Annotated[list[str] | None, typer.Argument(help="Views; none: all.")] = None,
    app: AppOption = None,
    json: JsonOption = False,
) -> None:
    """Prove views: the kept rows against the same SQL, run in batch over the archive."""
    # Imported here: Spark takes a second that no other verb should pay.
    from everstate.pipeline.session import own_spark
    from everstate.pipeline.verify import failing, verify_views

    config, project = project_of(context, app)
    with (
        working("starting Spark") as tell,
        own_spark(config, app_name="everstate views verify") as spark,
    ):
        tell("verifying")
        reports = verify_views(
            spark,
            config,
            project,
            names or None,
            on_report=lambda report: tell(f"verified {report.name}, in {report.seconds:.1f} s"),
        )
    if json:
        print_json(reports)
    else:
        print_reports(reports)
    if bad := failing(reports):
        raise VerificationFailed(
            f"the proof of {len(bad)} of {len(reports)} views does not hold.",
            advice="What differs, or was not read, is above; `everstate explain` tells where a row "
            "came from.",
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
                _proof(report),
                # The reason why the columns that readers see were not compared is in --json.
                report.as_read.partition(":")[0],
            )
            for report in reports
        ],
    )
    for line in dict.fromkeys(line for report in reports for line in report.not_read):
        err.print(f"not read: {line}", highlight=False, markup=False)
    for report in reports:
        if report.differences:
            table(
                ("what", "key", "kept", "batch"),
                [(d.what, d.key, d.kept, d.expected) for d in report.differences],
                title=f"{report.name}: rows that differ",
            )


def _proof(report: ViewReport) -> str:
    if report.holds:
        return "holds"
    if report.different_rows:
        return f"{report.different_rows:,} rows differ"
    return "not all of the log was read"


def cell(value: object) -> object:
    """A value of a row as a table shows it."""
    if value is None or isinstance(value, int | float | str):
        return value
    return value_text(value) if isinstance(value, dict | list) else str(value)


def _verified(moment: datetime | None, report: dict[str, object] | None) -> str | None:
    """When a view was proved, and whether the proof held."""
    if moment is None:
        return None
    seconds = (datetime.now(UTC) - moment).total_seconds()
    held = report is None or bool(report.get("holds", True))
    ago = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    return f"{'holds' if held else 'DOES NOT HOLD'}, {ago} ago"
