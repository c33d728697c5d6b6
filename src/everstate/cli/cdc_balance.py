"""The part of `everstate cdc status` on rows of captures: how many were read, and their outcome."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from everstate.cli.console import err
from everstate.cli.results import Aside, Piece, ResultTable
from everstate.errors import Unavailable
from everstate.parts import read_states
from everstate.roles import CLEAN_PART

if TYPE_CHECKING:
    from everstate.config import Config
    from everstate.declarations.captures import Capture
    from everstate.sources.cdc.balance import Balance

_COLUMNS = ("read", "added", "published", "skipped", "dead", "held", "vanished")


def balance_of(config: Config, capture: Capture) -> Balance | None:
    """Outcome of a capture's rows, by table; ``None`` when the log is not reachable."""
    from everstate.sources.cdc.balance import read_balance

    try:
        return read_balance(config, capture)
    except Unavailable as error:
        err.print(f"the outcome of the rows of {capture.name} is not known: {error}")
        return None


def whole_balance(found: Balance | None) -> dict[str, Any]:
    """``rows`` and ``unread`` of a balance, for JSON; empty when the log is not reachable."""
    return {} if found is None else {"rows": list(found.tables), "unread": found.unread}


def why_not_cleaned(config: Config, capture: str) -> str | None:
    """Why the running role does not clean a capture now; ``None``: it does, or none is running."""
    for state in read_states(config.project.data_dir):
        part = state.parts.get(f"{CLEAN_PART}{capture}")
        if part is not None and part.state != "running" and state.health != "ended":
            return f"{part.reason} {part.advice or ''}".strip()
    return None


def balances_pieces(found: Mapping[str, Balance | None]) -> Iterator[Piece]:
    """The outcome of the rows of captures that were cleaned."""
    listed = [
        (capture, one.table, *(getattr(one, column) for column in _COLUMNS))
        for capture, told in found.items()
        if told is not None
        for one in told.tables
    ]
    if listed:
        yield ResultTable(("capture", "table", *_COLUMNS), listed)
    if any(one.dead for told in found.values() if told is not None for one in told.tables):
        yield "`everstate dead list` has the reasons of dead letters"
    for capture, told in found.items():
        if told is not None and told.unread:
            yield f"{capture}: {told.unread:,} raw records are not cleaned yet"


def vanished_pieces(found: Mapping[str, Balance | None]) -> Iterator[Aside]:
    """The captures of which rows vanished, which must never happen."""
    for capture, told in found.items():
        if told is not None and told.vanished:
            yield Aside(
                f"{capture}: {told.vanished:,} rows were read and have no outcome. Please report "
                f"it; `everstate cdc snapshot {capture}` reads every row again."
            )
