"""`everstate drift`: compare the source of truth with the log, and repair differences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from everstate.cli.cdc_captures import connected, declared_capture
from everstate.cli.console import AppSession, working
from everstate.cli.results import Aside, Piece, Result, ResultTable, Verbs
from everstate.errors import InvalidQuery, Unavailable, VerificationFailed

if TYPE_CHECKING:
    from everstate.changes.drift import DriftReport

drift = Verbs(
    no_args_is_help=True,
    help="Compare the sources of truth with their logs, and repair differences.",
)

_WHY_NOT = "They changed meanwhile, or neither side has a state to write. Check again."
_REFUSED = (
    "Readers of the log would refuse the state of {:,} of them in the source; the report names"
    " the field. Correct the states in the source, and repair again."
)

_CAPTURED = (
    "`everstate cdc snapshot {0}` reads all rows of the capture again, and changes only what"
    " differs; `everstate cdc snapshot {0} --new-epoch` also deletes entities whose row is gone."
)

EntityNameArgument = Annotated[str, typer.Argument(help="Name of the entity type.")]


@drift.command("check")
def check(session: AppSession, entity: EntityNameArgument) -> Result:
    """Compare an entity type's source of truth with its log; exit code 8 when they differ.

    Exit code 6: a capture has not come to what its tables have.
    """
    if (capture := _capture_of(session, entity)) is None:
        report = _run(session, entity, repair=False)
        advice = f"`everstate drift repair {entity}` repairs them."
    else:
        report, advice = _captured(session, capture, entity), _CAPTURED.format(capture)

    def check() -> None:
        if not report.holds:
            raise VerificationFailed(
                f"{report.drifted:,} of {report.stored:,} entities of {entity} have drifted.",
                advice=advice,
            )
        if report.pending_why is not None:
            raise Unavailable(
                f"{report.pending:,} entities of {entity} differ, and may have changed since: "
                f"{report.pending_why}.",
                advice=f"`everstate cdc status {capture}` shows what the capture does; check again "
                "when it reads.",
            )

    return Result(report, *_pieces(report), then=check)


@drift.command("repair")
def repair(session: AppSession, entity: EntityNameArgument) -> Result:
    """Compare, and publish entities that differ again; if many differ, all of the type."""
    report = _run(session, entity, repair=True)

    def check() -> None:
        if not report.holds:
            raise VerificationFailed(
                f"{report.drifted - report.repaired:,} entities of {entity} could not be repaired.",
                advice=_WHY_NOT if not report.refused else _REFUSED.format(report.refused),
            )

    return Result(report, *_pieces(report), then=check)


def _capture_of(session: AppSession, entity: str) -> str | None:
    """The capture of an entity type; ``None``: it has another source of truth."""
    captures = session.app().captures
    return next((name for name, each in captures.items() if entity in each.entities), None)


def _captured(session: AppSession, capture: str, entity: str) -> DriftReport:
    from everstate.sources.cdc.comparing import compare_with_table

    config = connected(session)
    with working(f"comparing {entity}"):
        return compare_with_table(config, declared_capture(session, capture, config), entity)


def _run(session: AppSession, entity: str, *, repair: bool) -> DriftReport:
    # Imported here: Spark takes a second that no other verb should pay.
    from everstate.pipeline.drift.check import check_drift
    from everstate.pipeline.spark.session import own_spark
    from everstate.sources.ways import truths_of

    config, project = session.connected()
    entity_type = project.entity_type(entity)
    truths = truths_of(config, project)
    if entity not in truths:
        raise InvalidQuery(
            f"The source of truth of {entity} is no store: it is {project.source_of(entity)!r}.",
            advice=_CAPTURED.format(_capture_of(session, entity))
            if project.source_of(entity) == "capture"
            else "Only stores and captured tables are compared with the log.",
        )
    with (
        working("starting Spark") as tell,
        own_spark(config, app_name="everstate drift") as spark,
    ):
        tell(f"comparing {entity}")
        return check_drift(spark, config, entity_type, truths[entity], repair=repair)


def _pieces(report: DriftReport) -> Iterator[Piece]:
    """The differences found, their keys and reasons, and what was done."""
    counts = (
        *(report.stored, report.logged, report.missing, report.stale, report.different),
        *(report.extra, report.pending, report.seconds),
    )
    columns = ("missing", "stale", "different", "extra", "pending", "seconds")
    yield ResultTable(("entities", "in the log", *columns), [counts], title=report.entity)
    if report.keys:
        keys = (
            (each.key, each.what, each.why, each.stored_version, each.logged_version)
            for each in report.keys
        )
        differ = report.drifted + report.refused_rows
        differ += report.pending if report.pending_why else 0
        title = f"the first {len(report.keys):,} of {differ:,}"
        yield ResultTable(("key", "what", "reason", "source", "log"), keys, title=title)
    if report.refused_rows:
        yield Aside(
            f"{report.refused_rows:,} entities have a row that the capture refused; "
            f"`everstate dead list {report.entity}` has the reasons"
        )
    for column, why in report.not_compared.items():
        yield Aside(f"{column} was not compared: {why}")
    if not report.drifted and report.pending_why is None:
        yield "no drift"
    elif not report.drifted:
        return
    elif report.action == "none":
        yield f"{report.drifted:,} entities have drifted ({report.share:.2%})"
    else:
        again = f"; {report.sent_again:,} equal ones sent again" if report.sent_again else ""
        yield f"{report.action}: {report.repaired:,} of {report.drifted:,} repaired{again}"
