"""The cycle collector, out of the way while many short-lived rows are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the cycle collector for the block, if it is on.

    Thousands of rows alive at once make it look at all of them again and again, for cycles that
    rows do not have: that was 40 % of a batch's time. Reference counting goes on.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
