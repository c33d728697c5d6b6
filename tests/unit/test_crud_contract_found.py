"""What the contract of stores finds wrong, without servers."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from everstate.testing.crud_contract import Counted, CrudStoreContract, check_counts
from everstate.testing.store_contract import ORDER, StoredOrder


class Pages:
    """A store of orders in memory, with pages that a test may spoil."""

    entity_type = ORDER

    def __init__(self, *, beyond: int = 0, again: int = 0) -> None:
        self._orders: dict[str, StoredOrder] = {}
        self._beyond, self._again = beyond, again

    def put(self, order: StoredOrder, **_: Any) -> None:
        self._orders[order.order_id] = order

    def page(self, *, limit: int, equal: dict[str, Any], cursor: int | None = None) -> Any:
        start = cursor or 0
        fits = [
            order
            for order in self._orders.values()
            if all(getattr(order, name) == value for name, value in equal.items())
        ]
        end = start + limit + self._beyond
        shown = fits[max(0, start - self._again) : end]
        entities = [SimpleNamespace(entity=order) for order in shown]
        return SimpleNamespace(entities=entities, cursor=end if end < len(fits) else None)


def pages(store: Any) -> None:
    CrudStoreContract().test_a_page_has_only_what_is_equal(store)


def test_pages_that_are_right_pass() -> None:
    pages(Pages())


def test_a_page_over_its_limit_is_found() -> None:
    with pytest.raises(AssertionError):
        pages(Pages(beyond=1))


def test_an_entity_on_two_pages_is_found() -> None:
    with pytest.raises(AssertionError):
        pages(Pages(again=1))


def test_a_counter_that_nobody_incremented_and_that_moved_is_found() -> None:
    counted = Counted(Counter({"o-1": 2}), 0)
    check_counts(counted, {"o-1": (2, 3), "o-2": (0, 1)})
    with pytest.raises(AssertionError, match="o-2"):
        check_counts(counted, {"o-1": (2, 3), "o-2": (5, 6)})
