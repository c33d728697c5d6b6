"""growth: whether a change costs more when the state is larger: 0.25, 1 and 4 million changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench import data
from bench.archive import archiving
from bench.keep import kept
from bench.report import Reach, Result, Steps, between, result
from bench.session import Session

COUNTS = (250_000, 1_000_000, 4_000_000)


def run(session: Session) -> list[Result]:
    marks = tuple(session.size(count) for count in COUNTS)
    filled = session.filled(marks[-1])

    def keep() -> Steps:
        config = session.fresh(filled)
        try:
            return kept(session, config, marks[-1])
        finally:
            session.drop(config)

    def archive() -> Steps:
        config = session.fresh(filled)
        # Batches that lie within the marks: one across them would be split by its count.
        small = config.archive.model_copy(update={"batch_changes_max": marks[0] // 5})
        config = config.model_copy(update={"archive": small})
        steps = []
        one = config.archive.model_copy(update={"batch_changes_max": 1})
        with archiving(session, config.model_copy(update={"archive": one}), data.PURCHASE) as first:
            first.step()  # makes the table, which is no part of what a change costs
        with archiving(session, config, data.PURCHASE) as archiver:
            while (batch := archiver.step()) is not None:
                steps.append((batch.rows, batch.seconds))
        session.drop(config)
        return steps

    return [*_rows(session, "keep", keep, marks), *_rows(session, "archive", archive, marks)]


def _rows(
    session: Session, name: str, measure: Callable[[], Steps], marks: Sequence[int]
) -> list[Result]:
    """Microseconds a change, between the marks of one run over the whole log."""
    measure()  # warm
    runs = [between(measure(), marks) for _ in range(session.repeat)]
    first = [run[0] for run in runs]
    rows = [
        result(
            "growth",
            f"{name}: per change of the first {marks[0]:,}",
            "µs",
            first,
        )
    ]
    for at in range(1, len(marks)):
        rows.append(
            result(
                "growth",
                f"{name}: per change from {marks[at - 1]:,} to {marks[at]:,}",
                "µs",
                [run[at] for run in runs],
                floors=first,
                floor_is=f"the first {marks[0]:,}",
                reach=Reach(ratio_max=1.3),
            )
        )
    return rows
