"""The batch layer: compares views with their batch result, and rebuilds those that differ."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from prometheus_client import Gauge
from pyspark.sql import SparkSession

from everstate.config import Config
from everstate.errors import EverstateError, VerificationFailed
from everstate.pipeline.proof.verify import verify_views
from everstate.pipeline.reports import ViewReport, failing
from everstate.pipeline.spark.progress import OnProgress
from everstate.runtime.worker import Worker
from everstate.views.changing import ask_rebuild
from everstate.views.control import opened_control
from everstate.views.project import Project
from everstate.views.tables import latest_of

logger = logging.getLogger(__name__)

PROVED = Gauge(
    "everstate_view_proved",
    "1 if the view equalled its definition run in batch at the last proof, else 0",
    ["view"],
)


def recompute(
    spark: SparkSession,
    config: Config,
    project: Project,
    names: Iterable[str] | None = None,
    *,
    promote: bool = False,
    on_report: Callable[[ViewReport], object] = lambda _report: None,
    on_progress: OnProgress = lambda _progress: None,
) -> tuple[list[ViewReport], list[str]]:
    """Compare views with their batch result; returns the reports and the names of rebuilt views.

    With ``promote`` a new version is requested for each view with a table that differs: it is
    built in batch, and published when it has caught up. `latest` is never replaced, only reported.
    Raises the errors of :func:`verify_views`.
    """
    reports = verify_views(
        spark, config, project, names, on_report=on_report, on_progress=on_progress
    )
    for report in reports:
        if report.outcome != "not compared":
            PROVED.labels(report.name).set(int(report.holds))
    wrong = [
        report
        for report in reports
        # A new version does not help where the log could not be read.
        if report.outcome == "differs" and report.name != latest_of(report.entity)
    ]
    if not promote or not wrong:
        return reports, []
    promoted = []
    with opened_control(config) as control:
        for report in wrong:
            try:
                asked = ask_rebuild(control, report.name)
            except EverstateError as refused:  # such as a join, which has no table of its own
                logger.warning("view %s is not built again: %s", report.name, refused)
                continue
            promoted.append(report.name)
            logger.warning(
                "view %s differs from its definition run in batch: version %d is built",
                report.name,
                asked.version,
            )
    return reports, promoted


class ScheduledProof(Worker):
    """Recomputes all views every `views.recompute_every_s`.

    While a proof does not hold, the part is shown as waiting with the names of the views.
    """

    doing = "recomputing of the views"
    begins_idle = True

    def __init__(self, spark: SparkSession, config: Config, project: Project) -> None:
        self._spark, self._config, self._project = spark, config, project
        self.idle_s = config.views.recompute_every_s
        self.retry_s = (self.idle_s, self.idle_s)

    def may_pass(self, error: EverstateError) -> bool:
        """Also a proof that failed: the next one follows as after one that holds."""
        return error.retryable or isinstance(error, VerificationFailed)

    def step(self) -> None:
        """Recompute once; raises VerificationFailed with the names of the views that differ."""
        promote = self._config.views.recompute == "promote"
        reports, promoted = recompute(self._spark, self._config, self._project, promote=promote)
        if wrong := failing(reports):
            found = _failed(wrong, promoted)
            logger.error("recomputed: %s", found.message)
            raise found
        logger.info("recomputed: all views equal their definitions run in batch")


def _failed(wrong: Sequence[ViewReport], promoted: Sequence[str]) -> VerificationFailed:
    """What the proofs found, for the one who looks at `status`."""
    differing = ", ".join(each.name for each in wrong if each.outcome == "differs")
    unread = ", ".join(each.name for each in wrong if each.outcome != "differs")
    told = []
    if differing:
        told.append(f"these views differ from their definitions run in batch: {differing}.")
    if promoted:
        told.append(f"They are built again: {', '.join(promoted)}.")
    if unread:
        told.append(f"the log has records that these views lack: {unread}.")
    return VerificationFailed(
        " ".join(told),
        advice="`everstate views verify` shows the rows; `everstate views rebuild` builds a view "
        "again.",
    )
