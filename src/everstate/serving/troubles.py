"""What does not run among a project's roles and their parts, and why. Pure but for the clock."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from everstate.parts import Part, RoleHealth, RoleState

SUPERVISOR: Final = "run"
"""The role whose parts are the other roles."""

_UNHEALTHY: Final[Mapping[RoleHealth, str]] = {
    "killed": "ended: its process was killed. `everstate run` or `everstate serve` starts it.",
    "not answering": "does not answer: its process exists, but hangs or is suspended.",
}


@dataclass(frozen=True, slots=True)
class Trouble:
    """A role, or a part of one, that does not run."""

    who: str
    part: Part | None
    """The part; ``None``: the process of the role itself."""
    is_role: bool
    """Whether the part is a role that `everstate run` starts again."""
    process: str = ""
    """What is wrong with the process; empty for a part."""


def supervised(states: Iterable[RoleState]) -> dict[str, Part]:
    """The roles supervised by a running `everstate run`, with the state that it records."""
    runs = (s for s in states if s.role == SUPERVISOR and s.health == "running")
    return {name: part for state in runs for name, part in state.parts.items()}


def troubles(states: Sequence[RoleState]) -> list[Trouble]:
    """The roles and parts that do not run; empty: all do."""
    restarted, found = supervised(states), list[Trouble]()
    for state in states:
        gone = state.health in ("killed", "ended")
        if gone and state.role in restarted:
            continue  # the supervisor reports why, and when it restarts the role
        for name, part in state.parts.items():
            if part.state != "running":
                alone = state.role in (SUPERVISOR, name)
                who = name if alone else f"{state.role}: {name}"
                found.append(Trouble(who, part, state.role == SUPERVISOR))
        if process := _UNHEALTHY.get(state.health):
            found.append(Trouble(state.role, None, True, process))
    return found


def how_text(part: Part, *, of_role: bool = False, several: bool = False) -> str:
    """How a part does not run: `stopped`, or `waits, and tries again in 5 s`."""
    left_s = 0.0 if part.retry_at is None else part.retry_at - time.time()
    again = f" in {left_s:.0f} s" if left_s >= 1 else ""
    if part.state == "stopped":
        return "stopped"
    if of_role:
        return f"ended, and starts again{again}"
    return f"wait, and try again{again}" if several else f"waits, and tries again{again}"
