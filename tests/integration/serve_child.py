"""A server for readers in a process of its own, to be killed; or one with a planted defect."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

from everstate.api import stream_router
from everstate.api.server import serve
from everstate.changes.tokens import Spot
from everstate.config import Config
from everstate.serving import feeds
from reading_cases import orders_app


def plant(defect: str) -> None:
    """Break what the checker must see."""
    if defect == "a place is forgotten":
        # Whoever comes back gets only what comes from now on.
        setattr(stream_router, "LAST_ID", "no-such-header")  # noqa: B010 (a constant)
    elif defect == "a page is what was written":
        # A page has the changes that were written on it, not those that take effect on it.
        setattr(feeds, "in_effect", _written)  # noqa: B010


def _written(
    records: Sequence[Any], offsets: Sequence[int], since: Spot, *_: Any
) -> list[tuple[Spot, Any]]:
    return [
        (Spot(offset + 1), record)
        for record, offset in zip(records, offsets, strict=True)
        if offset >= since.next_offset
    ]


def main() -> None:
    """Serve until killed; the first line of the output is the address."""
    defect, config = sys.argv[1], Config.model_validate_json(sys.stdin.read())
    plant(defect)
    serve(config, orders_app(), threading.Event(), partial(print, flush=True))


if __name__ == "__main__":
    main()
