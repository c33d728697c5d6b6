"""Output of the demonstration: the departure board, histories, and tables of views."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from everstate.demo.play import NEW_YORK, listed
from everstate.serving import Entity, Explanation, Version
from everstate.serving.words import (
    difference_text,
    explanation_lines,
    happening_text,
    provenance_text,
)

if TYPE_CHECKING:
    from everstate.pipeline.archiving.audit import AuditReport
    from everstate.pipeline.reports import ViewReport

_BOARD_WIDTH = 38
_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
_DIFFERENCES_SHOWN = 5
_COLUMNS_MAX = 3


def board(flights: Sequence[Entity], moment: datetime, origin: str, width: int) -> RenderableType:
    """The departure board of an airport: time, flight, destination and status of each flight."""
    columns = max(1, min(_COLUMNS_MAX, (width - 4) // _BOARD_WIDTH))
    height = -(-len(flights) // columns)
    wall = Table.grid(padding=(0, 3))
    parts = [flights[at : at + height] for at in range(0, len(flights), height)] if flights else []
    wall.add_row(*(_board_part(part, moment) for part in parts))
    local = moment.astimezone(NEW_YORK)
    airport = listed("airports.csv", "faa").get(origin, origin)
    return Panel(
        wall,
        title=f"[bold yellow]DEPARTURES[/]  {airport} ({origin})",
        subtitle=f"as of {local:%A, %-d %B %Y, %H:%M}",
        box=box.HEAVY,
        border_style="yellow",
        expand=False,
    )


def _board_part(flights: Sequence[Entity], moment: datetime) -> Table:
    grid = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("time", "flight", "to", "status"):
        grid.add_column(name, no_wrap=True)
    for flight in flights:
        state = flight.state
        leaves = departure(flight)
        number = f"{state['carrier']} {state['number']}"
        grid.add_row(f"{leaves:%H:%M}", number, state["dest"], board_status(state, moment))
    return grid


def departure(flight: Entity) -> datetime:
    """When a flight is to leave, in New York's time."""
    return datetime.fromisoformat(flight.state["sched_dep"]).astimezone(NEW_YORK)


def board_status(state: dict[str, Any], moment: datetime) -> Text:
    """The status text of a flight on a board."""
    status = state["status"]
    if status == "cancelled":
        return Text("CANCELLED", "bold red")
    if status == "scheduled":
        due = datetime.fromisoformat(state["sched_dep"])
        late = due + timedelta(minutes=15) < moment
        return Text("DELAYED", "yellow") if late else Text("on time", "green")
    if state["dep"] is None:
        return Text(status)
    left = datetime.fromisoformat(state["dep"]).astimezone(NEW_YORK)
    return Text(f"left {left:%H:%M} {_minutes(state['dep_delay'])}", "cyan")


def tally(flights: Iterable[Entity]) -> str:
    """How many flights are in which status: `146 cancelled, 121 arrived, …`."""
    counts = Counter(str(flight.state["status"]) for flight in flights)
    return ", ".join(f"{count} {status}" for status, count in counts.most_common())


def history(versions: Sequence[Version]) -> RenderableType:
    """A flight's versions: when, what happened, who reported it, and what it changed."""
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("version", "happened", "what", "by", "changed"):
        grid.add_column(name, no_wrap=name in ("version", "happened"))
    for version in versions:
        if version.version == 1:
            changed = f"{len(version.differences)} fields"
        else:
            changed = "\n".join(difference_text(found) for found in version.differences)
        local = version.occurred_at.astimezone(NEW_YORK)
        grid.add_row(
            str(version.version),
            f"{local:%Y-%m-%d %H:%M}",
            happening_text(version),
            escape(provenance_text(version.provenance)),
            escape(changed),
        )
    return grid


def explanation(found: Explanation) -> RenderableType:
    """An explanation, line by line."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in explanation_lines(found):
        grid.add_row(name, escape(value))
    return grid


def delays(rows: Sequence[tuple[Any, ...]]) -> RenderableType:
    """Delay by carrier with a bar; rows are (carrier, delay in minutes, flights)."""
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    grid.add_column("carrier")
    grid.add_column("flights", justify="right")
    grid.add_column("mean delay", justify="right")
    grid.add_column("")
    airlines = listed("airlines.csv", "carrier")
    largest = max((float(delay) for _, delay, _ in rows if delay is not None), default=1.0)
    for carrier, delay, flights in rows:
        minutes = Decimal(0) if delay is None else delay
        bar = "█" * round(24 * max(0.0, float(minutes)) / max(largest, 1.0))
        colour = "red" if minutes > 15 else "yellow" if minutes > 5 else "green"
        grid.add_row(
            f"{carrier} {airlines.get(carrier, carrier)}",
            f"{flights:,}",
            "–" if delay is None else f"{minutes:.1f} min",
            f"[{colour}]{bar}[/]",
        )
    return grid


def proof(report: ViewReport) -> RenderableType:
    """One view's proof on a line, and the first rows that differ."""
    line = _verdict(report.name, report.holds)
    if report.holds:
        line.append(f"{report.kept_rows:>9,} rows on both sides, hash {report.kept_hash[:12]}, ")
    else:
        line.append(f"{report.kept_rows:,} rows kept, {report.expected_rows:,} in batch, ")
        line.append(f"{report.different_rows:,} differ, ")
    line.append(f"{report.seconds:.1f} s")
    for found in report.differences[:_DIFFERENCES_SHOWN]:
        line.append(f"\n  {found.what} {found.key}: {found.expected} / {found.kept}", "red")
    return line


def audit(report: AuditReport) -> RenderableType:
    """The lake's proof on a line, and what is wrong."""
    line = _verdict("archive of flight", report.holds)
    line.append(f"{report.rows:>9,} records of {report.keys:,} flights, ")
    if report.holds:
        line.append("offsets and versions without holes, states chained, ")
    line.append(f"{report.seconds:.1f} s")
    for problem in report.problems[:_DIFFERENCES_SHOWN]:
        line.append(f"\n  {problem.rule} {problem.where}: {problem.message}", "red")
    return line


def _verdict(name: str, holds: bool) -> Text:
    """The beginning of a proof's line."""
    sign = ("✓ ", "bold green") if holds else ("✗ ", "bold red")
    told = "holds         " if holds else "DOES NOT HOLD "
    return Text.assemble(sign, (f"{name:<22}", "bold"), told)


def picture(console: Console) -> str:
    """The recorded lines of a console as an SVG that loads nothing from another server."""
    own_fonts = _FONTS.sub("", console.export_svg(title="everstate demo"))
    return own_fonts.replace("Fira Code, monospace", "ui-monospace, Menlo, Consolas, monospace")


def heading(console: Console, text: str, command: str | None = None) -> None:
    """A question and the command that asks it."""
    console.print()
    console.rule(f"[bold]{text}[/]", align="left", style="dim")
    if command is not None:
        # Never wrapped, so that it can be copied.
        console.print(f"[dim]$[/] [cyan]{escape(command)}[/]", highlight=False, soft_wrap=True)


def _minutes(delay: int | None) -> str:
    return "" if delay is None else f"{delay:+d}"
