"""What `everstate cdc status` tells of the rows of captures: read, and what became of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from everstate.cli.console import err, table
from everstate.errors import Unavailable

if TYPE_CHECKING:
    from everstate.config import Config
    from everstate.sources.cdc.balance import TableBalance
    from everstate.sources.cdc.declaration import Capture

_COLUMNS = ("read", "published", "skipped", "dead", "held", "vanished", "unread")


def balance_of(config: Config, capture: Capture) -> dict[str, Any]:
    """``rows``: what became of a capture's rows, by table; without it when the log is away."""
    from everstate.sources.cdc.balance import read_balance

    try:
        return {"rows": read_balance(config, capture)}
    except Unavailable as error:
        err.print(f"what became of the rows of {capture.name} is not known: {error}")
        return {}


def tell_balances(found: Mapping[str, Mapping[str, Sequence[TableBalance]]]) -> None:
    """Print what became of the rows of captures that were cleaned."""
    listed = [
        (capture, one.table, *(getattr(one, column) for column in _COLUMNS))
        for capture, told in found.items()
        for one in told.get("rows", ())
    ]
    if listed:
        table(("capture", "table", *_COLUMNS), listed)


def has_vanished(found: Mapping[str, Mapping[str, Sequence[TableBalance]]]) -> bool:
    """Whether rows vanished, which never may be; says of which capture."""
    lost = {each: sum(one.vanished for one in told.get("rows", ())) for each, told in found.items()}
    for capture, rows in lost.items():
        if rows:
            err.print(
                f"{capture}: {rows:,} rows were read and became nothing. Please report it; "
                f"`everstate cdc snapshot {capture}` reads every row again."
            )
    return any(lost.values())
