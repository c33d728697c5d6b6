"""Misfits: values of accepted states that the model cannot hold; typed columns have NULL there.

The core judges envelopes, never models, so no change of a model can make a record dead. The state
itself stays as it was written, in `latest`, in the history and in the archive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Misfit:
    """States of one schema version in which a field does not fit the model, or is missing."""

    entity: str
    field: str
    """Its path in the state, such as `price` or `home.number`."""
    schema_version: int
    count: int
    first: str
    """Where the first one is in the log: `generation/partition/offset`."""
    last: str
    age_s: float = 0.0
    """Seconds since the core read the last one."""

    @property
    def text(self) -> str:
        """What does not fit, in words."""
        states = "1 state" if self.count == 1 else f"{self.count:,} states"
        return (
            f"{self.field} does not fit the model in {states} of schema version "
            f"{self.schema_version} (first {self.first}, last {self.last})"
        )


MisfitCount = tuple[str, int, int, int, int]
"""Field, schema version, how many; first and last offset."""


def slashed(place: Sequence[int]) -> str:
    """A place in the log as it is shown."""
    return "/".join(map(str, place))
