"""A mark of a process's start that no change of the clock alters, to tell a reused pid apart."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Final

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_START_TICKS: Final = 19
"""Index of the field `starttime`, counted from the first field after the program's name."""


def start_mark(pid: int) -> str | None:
    """The boot of the machine, and the ticks from it to the start of the process.

    ``None`` on a system without these two, or when the process does not exist. The time of day at
    which a process started is no mark: Linux computes it from the clock, so that a step of the
    clock (a virtual machine that resumes, NTP) moves it for every running process.
    """
    boot = _boot_id()
    if boot is None:
        return None
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The name of the program is in parentheses, and may have spaces and parentheses itself.
    ticks = stat.rpartition(b")")[2].split()[_START_TICKS]
    return f"{boot} {ticks.decode()}"


@cache
def _boot_id() -> str | None:
    try:
        return _BOOT_ID.read_text("ascii").strip()
    except (OSError, ValueError):
        return None
