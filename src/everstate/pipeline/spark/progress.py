"""Progress of Spark jobs: share of tasks done, a rate, and the time left."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

if TYPE_CHECKING:
    # A caller that only shows progress does not need Spark.
    from pyspark.sql import SparkSession

_POLL_S: Final = 0.5
_GROUP: Final = "spark.jobGroup.id"


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a piece of work at one moment."""

    doing: str
    share: float
    """Share of the work that is done, from 0 to 1."""
    rate: float | None = None
    """Changes per second; ``None``: they are not counted."""
    left_s: float | None = None
    """Estimated seconds left; ``None``: too early to estimate."""

    @property
    def text(self) -> str:
        """One line for people."""
        rate = "" if self.rate is None else f", {self.rate:,.0f} changes/s"
        left = "" if self.left_s is None else f", {self.left_s:.0f} s to go"
        return f"{self.doing}: {self.share:.0%}{rate}{left}"

    def note(self) -> dict[str, Any]:
        """The progress as plain values, for a database table."""
        return asdict(self)


OnProgress = Callable[[Progress], object]


def progress(doing: str, share: float, seconds: float, changes: int | None = None) -> Progress:
    """The progress, with rate and time left estimated from the share done and its seconds."""
    share = min(1.0, max(0.0, share))
    if not share or seconds < 1:
        return Progress(doing, share)
    rate = None if changes is None else changes * share / seconds
    return Progress(doing, share, rate, seconds * (1 - share) / share)


@contextmanager
def watched(
    spark: SparkSession,
    doing: str,
    on_progress: OnProgress,
    *,
    changes: int | None = None,
    stages: int = 1,
) -> Iterator[None]:
    """Report the progress of this thread's Spark jobs in the block, twice a second.

    ``stages``: how many stages of about equal cost the jobs will have, which Spark does not know
    beforehand. An error of ``on_progress`` cancels the jobs, and is raised here.
    """
    context = spark.sparkContext
    group, ended = uuid4().hex, threading.Event()
    raised: list[BaseException] = []

    def look() -> None:
        begun = time.monotonic()
        while not ended.wait(_POLL_S):
            done = _stages_done(spark, group)
            seen = progress(doing, done / stages, time.monotonic() - begun, changes)
            try:
                on_progress(seen)
            except BaseException as error:
                raised.append(error)
                context.cancelJobGroup(group)
                return

    before = context.getLocalProperty(_GROUP)
    context.setLocalProperty(_GROUP, group)
    thread = threading.Thread(target=look, name="progress", daemon=True)
    thread.start()
    try:
        yield
    except Exception as cause:
        if raised:
            raise raised[0] from cause
        raise
    finally:
        ended.set()
        thread.join()
        context.setLocalProperty(_GROUP, before)  # type: ignore[arg-type] # None clears it
    if raised:
        raise raised[0]


def _stages_done(spark: SparkSession, group: str) -> float:
    """Number of finished stages, plus the finished share of running ones."""
    tracker = spark.sparkContext.statusTracker()
    done = 0.0
    for job in tracker.getJobIdsForGroup(group):
        info = tracker.getJobInfo(job)
        for stage in () if info is None else info.stageIds:
            seen = tracker.getStageInfo(stage)
            if seen is not None and seen.numTasks:
                done += seen.numCompletedTasks / seen.numTasks
    return done
