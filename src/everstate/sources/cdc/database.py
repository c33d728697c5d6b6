"""What a capture asks of a captured database, whichever kind it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from everstate.errors import InvalidCapture
from everstate.sources.cdc.connectors import Address, OwnTables

Outcome = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that the doctor looked at."""

    name: str
    outcome: Outcome
    found: str
    sql: tuple[str, ...] = ()
    """Statements that mend it, to be run by somebody who may; empty: nothing to mend in SQL."""
    advice: str | None = None
    """What else to do, such as a restart of the server."""


@dataclass(frozen=True, slots=True)
class Standing:
    """How a connector stands as the database sees it."""

    connected: bool
    """A session reads the database's log now; a connector that is RUNNING may have none."""
    behind_bytes: int | None
    """Log written after what the connector has confirmed; None: cannot be told."""
    held_bytes: int | None
    """Log that the database keeps because of the connector's slot; None: it has no slots."""
    note: str | None = None
    idle: bool = False
    """Nothing of the captured tables is in the log after the connector's place, for sure."""


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that was made, or was there already."""

    what: str
    done: Literal["made", "there", "changed", "removed", "kept"]


class CapturedDatabase(Protocol):
    """A connection to a captured database with the rights of its connector; close it.

    Every method raises Unavailable when the server does not answer, and CaptureFailed with the
    server's reason when it refuses.
    """

    address: Address
    own: OwnTables

    def prepare(self) -> list[Step]:
        """Make what the connector needs and may make; idempotent."""

    def remove(self) -> list[Step]:
        """Drop what :meth:`prepare` and the connector made; the connector must be gone."""

    def check(self) -> list[Finding]:
        """Look at every setting and right that the connector needs."""

    def standing(self, offset: Mapping[str, Any]) -> Standing:
        """How far the connector is; ``offset`` is what Connect has stored of it."""

    def signal(self, signal_id: str, kind: str, data: str) -> None:
        """Put a signal into the table that the connector reads."""

    def condition(self, table: str, key: Mapping[str, str] | Sequence[str]) -> str:
        """SQL condition that holds for the row with that primary key."""

    def close(self) -> None:
        """Close the connection."""


def key_values(
    capture: str, table: str, columns: Sequence[str], key: Mapping[str, str] | Sequence[str]
) -> list[str]:
    """Values of the key's columns in their order; raises InvalidCapture when they do not fit."""
    given = key if isinstance(key, Mapping) else dict(zip(columns, key, strict=False))
    count = len(key)
    if not columns:
        raise InvalidCapture(capture, f"{table} has no primary key, or there is no such table")
    if count != len(columns) or set(given) != set(columns):
        raise InvalidCapture(
            capture,
            f"the key of {table} is {', '.join(columns)}",
            advice=f"Give {' '.join(f'--key {column}=VALUE' for column in columns)}.",
        )
    return [given[column] for column in columns]
