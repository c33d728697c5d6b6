"""The questions at the end of the demonstration, their answers, and the proofs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from datetime import datetime, timedelta

from rich.console import Console
from rich.markup import escape

from everstate.config import Config
from everstate.demo import show
from everstate.demo.flights import app
from everstate.demo.play import BLIZZARD, NEW_YORK
from everstate.demo.watch import Course, PeakMemory
from everstate.errors import VerificationFailed
from everstate.serving import Entity, Reader

_ORIGIN = "JFK"
_LEFT_AGO = timedelta(minutes=45)
_DUE_AGO = timedelta(minutes=25)
_DUE_IN = timedelta(hours=2, minutes=20)


def ask_board(config: Config, console: Console, folder: str) -> Sequence[Entity]:
    """Show the board in the blizzard; returns all flights of that day, as they were then."""
    moment = BLIZZARD.astimezone(NEW_YORK)
    with Reader(config, app) as reader:
        today = reader.list(
            "flight",
            at=moment,
            where=[f"origin={_ORIGIN}", f"day={moment:%Y-%m-%d}"],
            order=["sched_dep", "carrier", "number"],
            limit=None,
        )
        _show_board(reader, console, folder, today)
    return today


def ask(config: Config, console: Console, folder: str, today: Sequence[Entity]) -> None:
    """Show one flight's history and its origin, and a view; ``today``: the flights of the board."""
    with Reader(config, app) as reader:
        late = max(
            (flight for flight in today if flight.state["status"] == "departed"),
            key=lambda flight: flight.state["dep_delay"],
            default=None,
        )
        if late is not None:
            _ask_flight(reader, console, folder, late)
        show.heading(
            console,
            "Which airline is late, and by how much? A view in SQL, kept change by change",
            f"everstate -C {folder} views show delay_by_carrier",
        )
        names, rows = reader.rows("delay_by_carrier")
        wanted = [names.index(name) for name in ("carrier", "delay", "flights")]
        picked = [tuple(row[at] for at in wanted) for row in rows]
        picked.sort(key=lambda row: (row[1] is None, -float(row[1] or 0)))
        console.print(show.delays(picked))


def _show_board(reader: Reader, console: Console, folder: str, today: Sequence[Entity]) -> None:
    moment = BLIZZARD.astimezone(NEW_YORK)
    show.heading(
        console,
        "How did the board look when the blizzard came in?",
        f"everstate -C {folder} list flight --at {moment.isoformat(timespec='minutes')} "
        f"-w origin={_ORIGIN} -w day={moment:%Y-%m-%d} -o sched_dep",
    )
    window = [flight for flight in today if _on_board(flight, moment)]
    console.print(show.board(window, moment, _ORIGIN, console.width))
    console.print(f"all day: {show.tally(today)}", highlight=False)
    week = timedelta(days=7)
    before = reader.list(
        "flight",
        at=moment - week,
        where=[f"origin={_ORIGIN}", f"day={(moment - week):%Y-%m-%d}"],
        limit=None,
    )
    console.print(f"a week earlier, at the same hour: {show.tally(before)}", highlight=False)


def _on_board(flight: Entity, moment: datetime) -> bool:
    """Whether a board shows a flight: it is due soon, or left a moment ago."""
    left = flight.state["dep"]
    if left is not None:
        return flight.state["status"] == "departed" and (
            moment - _LEFT_AGO <= datetime.fromisoformat(left)
        )
    return moment - _DUE_AGO <= show.departure(flight) <= moment + _DUE_IN


def _ask_flight(reader: Reader, console: Console, folder: str, flight: Entity) -> None:
    delay = flight.state["dep_delay"]
    show.heading(
        console,
        f"One flight left {delay} minutes late. Who changed what, and when?",
        f"everstate -C {folder} history flight {flight.key} --diff",
    )
    console.print(show.history(reader.history("flight", flight.key)))
    show.heading(
        console,
        "Where does that come from?",
        f"everstate -C {folder} explain flight {flight.key}",
    )
    console.print(show.explanation(reader.explain("flight", flight.key)))


def farewell(
    console: Console, folder: str, course: Course, memory: PeakMemory, seconds: float
) -> None:
    """Print time and memory used, and what to try next."""
    console.print()
    console.print(
        f"[bold]{course.total:,} changes[/] from the store through log and lake into views at "
        f"[bold]{course.overall_rate():,.0f} changes/s[/]; the views were "
        f"{course.median_lag_s():.1f} s behind (median); peak memory of all processes while the "
        f"changes came in {memory.peak_bytes / 1e9:.1f} GB; {seconds:.0f} s in all.",
        highlight=False,
    )
    console.print("\nEverything is stopped; the data is kept. Try:", highlight=False)
    for command in (
        f"everstate -C {folder} up",
        f"everstate -C {folder} get flight B6-917-JFK-2013-02-08 --at 2013-02-08T12:00-05:00",
        f"everstate -C {folder} list flight -w status=diverted --fields dest,sched_arr,status",
        f"everstate -C {folder} views list",
        f"everstate -C {folder} down",
    ):
        console.print(f"  [cyan]{escape(command)}[/]", highlight=False)


def prove(config: Config, console: Console, folder: str) -> None:
    """Prove every view against the lake, and the lake against the log.

    Raises VerificationFailed, after all proofs were shown, when one does not hold.
    """
    # Imported here: Spark takes a second that the questions should not wait for.
    from everstate.pipeline.archiving.audit import audit
    from everstate.pipeline.proof.verify import verify_views
    from everstate.pipeline.reports import failing
    from everstate.pipeline.spark.session import own_spark

    show.heading(
        console,
        "Are the views right? The SQL of each, run in batch over the lake at the view's position",
        f"everstate -C {folder} views verify",
    )
    with ExitStack() as until_proved:
        with console.status("starting Spark"):
            spark = until_proved.enter_context(own_spark(config, app_name="everstate demo proofs"))
        with console.status("comparing row by row"):
            reports = verify_views(
                spark, config, app, on_report=lambda report: console.print(show.proof(report))
            )
        show.heading(
            console,
            "Is the lake complete? Every offset of the log, every version of every flight",
            f"everstate -C {folder} archive verify",
        )
        with console.status("reading the lake"):
            found = audit(spark, config, "flight", entity_type=app.entities["flight"])
        console.print(show.audit(found))
    failed = [report.name for report in failing(reports)]
    failed += [] if found.holds else ["the archive"]
    if failed:
        raise VerificationFailed(f"the proof failed: {', '.join(failed)}.")
