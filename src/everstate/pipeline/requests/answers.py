"""Requests of commands to a running pipeline, answered in its Spark session, one at a time."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from pyspark.sql import SparkSession

from everstate.config import Config
from everstate.errors import EverstateError, RequestCancelled, SparkLost, StatementRefused
from everstate.parts import works
from everstate.pipeline.proof.recompute import recompute
from everstate.pipeline.reports import ViewReport
from everstate.pipeline.requests.moment import Moment
from everstate.pipeline.requests.query import Queries
from everstate.pipeline.spark.progress import OnProgress, Progress
from everstate.runtime.worker import Worker
from everstate.views.control import QUERY, RECOMPUTE, Control, ControlConnection, Request
from everstate.views.project import Project

logger = logging.getLogger(__name__)

_POLL_S: Final = 0.5
_KEPT_HOURS: Final = 24.0


class Answers(Worker):
    """Takes requests from the control table; one process per schema does so at a time."""

    doing = "answering of requests"
    idle_s = _POLL_S

    def __init__(self, spark: SparkSession, config: Config, project: Project) -> None:
        self._spark, self._config, self._project = spark, config, project
        self._duty, self._database = (ControlConnection(config) for _ in range(2))

    def close(self) -> None:
        """Close the connections; the Spark session is the caller's."""
        self._duty.close()
        self._database.close()

    def step(self) -> None:
        """Answer until a run is stopped, unless another process has this duty.

        Raises SparkLost, Unavailable.
        """
        with self._duty.connected() as control, control.duty("answers") as is_mine:
            works()
            if is_mine:
                self._serve(control)

    def _serve(self, control: Control) -> None:
        control.resume_requests(_KEPT_HOURS)
        while not self.stop.is_set():
            request = control.take_request()
            if request is None:
                self.stop.wait(_POLL_S)
            else:
                self._answer(control, request)

    def _answer(self, control: Control, request: Request) -> None:
        logger.info("request: %s %s", request.verb, dict(request.arguments))
        reports: list[Mapping[str, Any]] = []

        def report_progress(seen: Progress) -> None:
            if self.stop.is_set():
                raise RequestCancelled(request.verb, "the pipeline is stopping")
            with self._database.connected() as own:
                so_far = {"progress": seen.note(), "reports": reports}
                if not own.answer(request.id, "taken", so_far):
                    raise RequestCancelled(request.verb, "no client waits for the answer")

        def proved(report: ViewReport) -> None:
            reports.append(report.note())
            report_progress(Progress(f"verified {report.name}, in {report.seconds:.1f} s", 1.0))

        try:
            if request.verb == QUERY:
                control.answer(request.id, "done", self._query(request.arguments, report_progress))
                return
            if request.verb != RECOMPUTE:
                raise RequestCancelled(
                    request.verb, "this release of the pipeline does not know this request"
                )
            _, promoted = recompute(
                self._spark,
                self._config,
                self._project,
                request.arguments.get("names"),
                promote=bool(request.arguments.get("promote")),
                on_report=proved,
                on_progress=report_progress,
            )
            control.answer(request.id, "done", {"reports": reports, "promoted": promoted})
        except SparkLost:
            raise  # another pipeline takes the request again
        except Exception as error:
            # The client gets it: raised here, it would end this part at each new attempt.
            reason: tuple[str, str | None] = (
                f"{request.verb} failed in the pipeline: {error!r}",
                "The log of the pipeline shows where.",
            )
            if isinstance(error, EverstateError):
                reason = error.message, error.advice
            if isinstance(error, StatementRefused) or not isinstance(error, EverstateError):
                logger.exception("request: %s failed", request.verb)
            problem = {"error": type(error).__name__, "message": reason[0], "advice": reason[1]}
            control.answer(request.id, "failed", problem)

    def _query(self, asked: Mapping[str, Any], on_progress: OnProgress) -> dict[str, Any]:
        """Compute a view as it was; the requester finds the result in the project's data folder."""
        moment = msgspec.convert(asked["moment"], Moment)
        Queries(self._config, self._project).compute(
            self._spark, asked["view"], moment, on_progress
        )
        return {}
