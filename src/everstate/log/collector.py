"""Pauses Python's cycle collector while many short-lived rows are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the cycle collector for the block, if it is on.

    While thousands of rows exist at once, the collector scans all of them repeatedly for cycles
    that rows do not have: that took 40 % of a batch's time. Reference counting still works.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
