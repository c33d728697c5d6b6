"""A subscription wakes its subscriber when there is something to take, not at every change."""

from __future__ import annotations

from typing import Any

from everstate.serving.changes import Delivery
from everstate.serving.hub import Subscription


def test_a_subscriber_is_woken_once_for_all_that_waits() -> None:
    woken: list[bool] = []
    subscription = Subscription({}, lambda _: True, lambda: woken.append(True), limit=2)
    first, second, third = _deliveries(3)
    subscription.offer(first)
    subscription.offer(second)
    assert len(woken) == 1
    subscription.offer(third)
    assert subscription.take() == ([second, third], 1)
    subscription.offer(first)
    assert len(woken) == 2
    assert subscription.take() == ([first], 0)


def test_a_change_that_is_not_wanted_wakes_nobody() -> None:
    woken: list[bool] = []
    subscription = Subscription({}, lambda _: False, lambda: woken.append(True), limit=2)
    subscription.offer(_deliveries(1)[0])
    assert (woken, subscription.take()) == ([], ([], 0))


def _deliveries(count: int) -> list[Delivery]:
    found: list[Any] = [object() for _ in range(count)]
    return found
