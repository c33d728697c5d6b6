"""Planted defects of stores of rows with versions, and which test of their contract finds each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import pytest

from everstate.views.stores.versioned import RowsTrailing, VersionedStore
from everstate.views.tables import Core, KeptTable
from everstate.views.trailing import Exceptions
from kit.row_store_contract import RowsKept, RowStoreContract


class CommitsFirst(RowsTrailing):
    """The position is moved before the rows are written."""

    def exceptions(self, start: int, end: int) -> Exceptions:
        super().commit(end)
        with self.home() as opened:
            return opened.exceptions(start, end)

    def commit(self, end: int) -> None:
        pass


class PositionFirst(VersionedStore):
    @contextmanager
    def trailing(self, core: Core, table: KeptTable, partition: int) -> Iterator[RowsTrailing]:
        yield CommitsFirst(self, core, table, partition)


FOUND_BY: Final = {
    "a forgotten deletion": "test_a_deletion_stays_when_an_older_write_comes",
    "an older version wins": "test_an_older_write_never_wins",
    "the position before the rows": "test_a_position_is_moved_after_the_rows",
}
"""Planted defect → the test of the contract that is there to find it."""


def assert_found(planted: str, kept: RowsKept) -> None:
    """Fail unless a store with a planted defect fails the test that is there to find it."""
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        getattr(RowStoreContract(), FOUND_BY[planted])(kept)
