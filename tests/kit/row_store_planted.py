"""Planted defects of stores of rows with versions, and which tests of their contract find one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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


def found_by(kept: Callable[[], RowsKept], histories: int = 5) -> list[str]:
    """The tests of the contract that fail."""
    contract, failed = type("Few", (RowStoreContract,), {"histories": histories})(), []
    for name, test in inspect.getmembers(contract, inspect.ismethod):
        if name.startswith("test_"):
            try:
                test(kept())
            except (AssertionError, pytest.fail.Exception):
                failed.append(name)
    return failed
