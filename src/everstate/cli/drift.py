"""`everstate drift`: does the log have what the source of truth has, and if not: mend it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from everstate.cli.console import (
    AppOption,
    JsonOption,
    out,
    print_json,
    project_of,
    table,
    working,
)
from everstate.errors import InvalidQuery, VerificationFailed

if TYPE_CHECKING:
    from everstate.changes.drift import Truth
    from everstate.pipeline.drift import DriftReport

drift = typer.Typer(
    no_args_is_help=True,
    help="Compare the sources of truth with their logs, and mend what differs.",
)

_WHY_NOT = "They have moved on since, or neither side has a state to write; check again."
_REFUSED = (
    "{:,} of them have a state in the source that readers of the log would refuse; the report"
    " names the field. Correct the state in the source, and repair again."
)

EntityArgument = Annotated[str, typer.Argument(help="Name of the entity type.")]


def register(cli: typer.Typer) -> None:
    """Add the verbs."""
    cli.add_typer(drift, name="drift")


@drift.command("check")
def check(
    context: typer.Context,
    entity: EntityArgument,
    app: AppOption = None,
    json: JsonOption = False,
) -> None:
    """Compare an entity type's source of truth with its log; exit code 8 when they differ."""
    report = _run(context, entity, app, json, repair=False)
    if not report.holds:
        raise VerificationFailed(
            f"{report.drifted:,} of {report.stored:,} entities of {entity} have drifted.",
            advice=f"`everstate drift repair {entity}` mends them.",
        )


@drift.command("repair")
def repair(
    context: typer.Context,
    entity: EntityArgument,
    app: AppOption = None,
    json: JsonOption = False,
) -> None:
    """Compare, and publish again what differs; all of the type when much does."""
    report = _run(context, entity, app, json, repair=True)
    if not report.holds:
        raise VerificationFailed(
            f"{report.drifted - report.mended:,} entities of {entity} could not be mended.",
            advice=_WHY_NOT if not report.refused else _REFUSED.format(report.refused),
        )


def _run(
    context: typer.Context, entity: str, app: str | None, json: bool, *, repair: bool
) -> DriftReport:
    # Imported here: Spark takes a second that no other verb should pay.
    from everstate.pipeline.drift import check_drift
    from everstate.pipeline.session import own_spark

    config, project = project_of(context, app)
    entity_type = project.entity_type(entity)
    truths: dict[str, Truth] = project.truths(config)
    if entity not in truths:
        raise InvalidQuery(
            f"{entity} cannot drift: its source of truth is {project.source_of(entity)!r}.",
            advice="Drift is between a store (PostgreSQL, Cassandra) and the log.",
        )
    with (
        working("starting Spark") as tell,
        own_spark(config, app_name="everstate drift") as spark,
    ):
        tell(f"comparing {entity}")
        report = check_drift(spark, config, entity_type, truths[entity], repair=repair)
    if json:
        print_json(report)
    else:
        print_report(report)
    return report


def print_report(report: DriftReport) -> None:
    """Print what was found, which keys, why, and what was done."""
    table(
        ("entities", "in the log", "missing", "stale", "different", "extra", "pending", "seconds"),
        [
            (
                report.stored,
                report.logged,
                report.missing,
                report.stale,
                report.different,
                report.extra,
                report.pending,
                report.seconds,
            )
        ],
        title=report.entity,
    )
    if report.keys:
        table(
            ("key", "what", "why", "source", "log"),
            [
                (each.key, each.what, each.why, each.stored_version, each.logged_version)
                for each in report.keys
            ],
            title=f"the first {len(report.keys):,} of {report.drifted:,}",
        )
    if not report.drifted:
        out.print("no drift")
    elif report.action == "none":
        out.print(f"{report.drifted:,} entities have drifted ({report.share:.2%})")
    else:
        again = f", {report.sent_again:,} that agreed sent again" if report.sent_again else ""
        out.print(f"{report.action}: {report.mended:,} of {report.drifted:,} mended{again}")
