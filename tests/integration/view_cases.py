"""Logs of orders for the tests of applying."""

from __future__ import annotations

from everstate.testing.view_contract import Log, history, state_of


def orders(count: int, region: str = "north", versions: int = 1, *, prefix: str = "k") -> Log:
    """A log of ``count`` orders with some versions each, version by version."""
    log = Log()
    stories = [
        history(
            f"{prefix}{n:04}", [state_of(f"{prefix}{n:04}", region=region, quantity=n)] * versions
        )
        for n in range(count)
    ]
    for version in range(versions):
        for story in stories:
            log.append(story[version])
    return log
