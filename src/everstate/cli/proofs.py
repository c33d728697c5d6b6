"""Proofs of views: requested from the running pipeline, else run in a new Spark session."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from everstate.app import App
from everstate.cli.asking import ask_pipeline, control_of
from everstate.cli.console import Telling, working
from everstate.cli.results import Aside, Piece, ResultTable
from everstate.config import Config
from everstate.errors import VerificationFailed
from everstate.pipeline.reports import ViewReport, failing
from everstate.views.control import RECOMPUTE, Control

Proved = tuple[list[ViewReport], list[str]]
"""Reports, and the names of views to be built again."""


def prove(
    config: Config, project: App, names: Sequence[str] | None, *, promote: bool = False
) -> Proved:
    """Prove views in the session of the running pipeline, which has the cores; else in a new one.

    Raises the same errors as :func:`everstate.pipeline.proof.verify.verify_views`.
    """
    with control_of(config) as control:
        if control.is_on_duty("answers"):
            with working("asking the running pipeline") as tell:
                return _asked(control, names, promote, tell)
    # Imported here: Spark takes a second that nobody else should pay.
    from everstate.pipeline.proof.recompute import recompute
    from everstate.pipeline.spark.session import own_spark

    with (
        working("starting Spark") as tell,
        own_spark(config, app_name="everstate views verify") as spark,
    ):
        tell("verifying")
        return recompute(
            spark,
            config,
            project,
            names,
            promote=promote,
            on_report=lambda report: tell(_said(report)),
            on_progress=lambda seen: tell.now(seen.text),
        )


def _asked(control: Control, names: Sequence[str] | None, promote: bool, tell: Telling) -> Proved:
    told = 0

    def show(answer: Mapping[str, Any]) -> None:
        nonlocal told
        reports = answer.get("reports", ())
        for note in reports[told:]:
            tell(_said(msgspec.convert(note, ViewReport)))
        told = len(reports)

    answer = ask_pipeline(control, RECOMPUTE, {"names": names, "promote": promote}, tell, show)
    return msgspec.convert(answer["reports"], list[ViewReport]), list(answer["promoted"])


def _said(report: ViewReport) -> str:
    return f"verified {report.name}: {report.outcome}, in {report.seconds:.1f} s"


def reports_pieces(reports: Sequence[ViewReport]) -> Iterator[Piece]:
    """Proofs as a table, and the rows that differ below it."""
    rows = (
        (
            *(report.name, report.kept_rows, report.expected_rows, report.kept_hash),
            report.seconds,
            f"{report.different_rows:,} rows differ"
            if report.outcome == "differs"
            else report.outcome,
            # The reason why the columns that readers see were not compared is in --json.
            report.as_read.partition(":")[0],
        )
        for report in reports
    )
    yield ResultTable(("view", "rows", "batch rows", "hash", "seconds", "proof", "as read"), rows)
    for what in ("not_read", "not_compared", "misfits"):
        for line in dict.fromkeys(line for report in reports for line in getattr(report, what)):
            yield Aside(f"{what.replace('_', ' ')}: {line}")
    for report in reports:
        if report.differences:
            differing = [(d.what, d.key, d.kept, d.expected) for d in report.differences]
            title = f"{report.name}: rows that differ"
            yield ResultTable(("what", "key", "kept", "batch"), differing, title=title)


def check_reports(reports: Sequence[ViewReport], *, are_named: bool) -> None:
    """Raise VerificationFailed when a proof does not hold.

    ``are_named``: the user named the views; then one that could not be compared fails too.
    """
    bad = [each for each in reports if not each.holds] if are_named else failing(reports)
    if bad:
        raise VerificationFailed(
            f"the proof of {len(bad)} of {len(reports)} views failed.",
            advice="What differs, or was not read, is above; `everstate explain` shows where a row "
            "came from.",
        )
