"""Prints changes in the states of a project's roles, as lines for the terminal."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.text import Text

from everstate.cli.console import err
from everstate.parts import Part, RoleState, read_states
from everstate.serving.troubles import SUPERVISOR, how_text

VIEW = "view "
"""Prefix of the names of parts that are views."""

_EVERY_S = 0.5
_NEW = Part("running", 0)


class Watch:
    """Prints changes in the state files of a project's roles."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self._before: Sequence[RoleState] = ()
        self._due = 0.0

    def look(self) -> None:
        """Print what changed; reads the files at most twice a second."""
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + _EVERY_S
        now = read_states(self._data_dir)
        for line in changes(self._before, now):
            err.print(Text.assemble(f"{time.strftime('%H:%M:%S')} ", line))
        self._before = now


def changes(before: Iterable[RoleState], now: Iterable[RoleState]) -> list[Text]:
    """Lines for the differences in ``now``, including activities of new roles."""
    former, lines = newest(before), list[Text]()
    for role, state in newest(now).items():
        known = former.get(role)
        if state.doing is not None and (known is None or known.doing != state.doing):
            lines.append(Text(f"{role}: {state.doing}"))
        lines += _of_parts(role, {} if known is None else known.parts, state.parts)
    return lines


def newest(states: Iterable[RoleState]) -> dict[str, RoleState]:
    """For each role the process that started last."""
    return {state.role: state for state in sorted(states, key=lambda state: state.started)}


def trouble(part: Part, *, of_role: bool = False, several: bool = False) -> Text:
    """Why a part does not run, with advice on a second line."""
    told = how_text(part, of_role=of_role, several=several)
    how = Text(told, "red" if part.state == "stopped" else "yellow")
    advice = (f"\n         {part.advice}", "cyan") if part.advice else ""
    return Text.assemble(how, f": {part.reason or 'no reason given'}", advice)


def _of_parts(role: str, before: Mapping[str, Part], now: Mapping[str, Part]) -> list[Text]:
    """One line for all parts of a role that changed in the same way."""
    names: dict[tuple[object, ...], list[str]] = defaultdict(list)
    example: dict[tuple[object, ...], Part] = {}
    live = []
    for name, part in now.items():
        known = before.get(name)
        what = _what(part)
        if what == _what(known or _NEW):
            if known is None and name.startswith(VIEW):
                live.append(name.removeprefix(VIEW))
            continue
        names[what].append(name)
        example[what] = part
    lines = [Text(f"{role}: views live: {', '.join(live)}")] if live else []
    for what, those in names.items():
        who = ", ".join(those) if role == SUPERVISOR else f"{role}: {', '.join(those)}"
        # A role of one part has one name.
        who = role if those == [role] else who
        several = len(those) > 1
        if example[what].state == "running":
            again = "run again" if several else "runs again"
            lines.append(Text.assemble(f"{who} ", (again, "green")))
        else:
            how = trouble(example[what], of_role=role == SUPERVISOR, several=several)
            lines.append(Text.assemble(f"{who} ", how))
    return lines


def _what(part: Part) -> tuple[object, ...]:
    return part.state, part.reason, part.advice
