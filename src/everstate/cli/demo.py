"""`everstate demo`: the flights of 2013, from an empty folder to proofs."""

from __future__ import annotations

from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer

from everstate.cli.console import SafeConsole, Session
from everstate.demo import FEBRUARY, YEAR

_PIPED_WIDTH = 110


def demo(
    session: Session,
    year: Annotated[
        bool, typer.Option("--year", help="Use all 336,776 flights. Default: 24,951 of February.")
    ] = False,
    begin: Annotated[
        datetime | None,
        typer.Option("--from", formats=["%Y-%m-%d"], help="First day, in 2013; needs --days."),
    ] = None,
    days: Annotated[
        int | None, typer.Option("--days", min=1, max=365, help="Number of days; needs --from.")
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Continue with the data of the last demonstration.")
    ] = False,
    stay: Annotated[
        bool, typer.Option("--stay", help="Keep everything running until Ctrl-C.")
    ] = False,
    folder: Annotated[
        Path | None,
        typer.Option("--folder", help="Folder of the project. Default: .everstate/demo."),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option("--picture", help="Write a picture (SVG) of the board and the proofs."),
    ] = None,
) -> None:
    """Send real flights through a real log, a real lake and views, and prove the result."""
    # Imported here: Spark and pyarrow take a second that no other verb should pay.
    from everstate.demo.run import DemoOptions, run_demo

    first, last = _period(year, begin, days)
    options = DemoOptions(
        folder=folder or session.project / ".everstate" / "demo",
        first=first,
        last=last,
        keep=keep,
        stay=stay,
        picture=picture,
    )
    # The demonstration is written in markup, and shows public data that it brings along.
    console = SafeConsole(markup=True, highlight=False)
    if not console.is_terminal:
        console = SafeConsole(markup=True, highlight=False, width=_PIPED_WIDTH)
    run_demo(options, console)


def _period(year: bool, begin: datetime | None, days: int | None) -> tuple[date, date]:
    """First and last day to play."""
    if begin is None and days is None:
        return YEAR if year else FEBRUARY
    if year or begin is None or days is None:
        raise typer.BadParameter("--from and --days go together, and without --year")
    first = begin.date()
    last = first + timedelta(days=days - 1)
    if first < YEAR[0] or last > YEAR[1]:
        raise typer.BadParameter(f"the flights are those of {YEAR[0]} to {YEAR[1]}")
    return first, last
