"""What a store of views besides PostgreSQL implements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import ClassVar, Final, Protocol, TypeAlias

import pyarrow as pa

from everstate.views.tables import KeptTable, Merge

RANK: Final = "_rank"
HEADLINE: Final = "_headline"
"""Columns that a search adds: how well a row matches, and the words in their context."""
LoadRows: TypeAlias = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]
"""A task that adds the rows of a batch to a version, and gives a row with their number."""


class ViewStore(Protocol):
    """A store of rows with versions, without transactions.

    It is made from the project's :class:`~everstate.config.Config`, and pickled to tasks; it
    connects when it is first called, from any thread. Every row has the columns `_key` and
    `_version` beside the author's. In a table with the merge `row`, `_key` is unique, and a row or
    deletion is written only over a lower `_version`, so that calls may be repeated, late, or in
    another order; with `append` and `periods`, `_key` and `_version` together are unique. With
    `periods`, rows and deletions come with the time of their change as `valid_from`. Any error of
    a call is the view's, which is retried. A call that takes longer than ``call_s_max`` seconds is
    given up.
    After that, or after an error of a class named ConnectionError, TimeoutError, TransportError or
    Unavailable (or a subclass), other calls to the store are made later. `publish` is called again
    each minute, or each ``shown_every_s`` seconds where the class says so.
    """

    merges: ClassVar[frozenset[Merge]]
    """How the tables of its views may be merged: `row`, `append`, `periods`."""
    call_s_max: ClassVar[float]

    def install(self, table: KeptTable, schema: pa.Schema) -> None:
        """Create the table named ``table.name``; raises InvalidView for types it cannot hold.

        Where it is not there, `write`, `rows` and `publish` raise ViewRowsMissing.
        """

    def write(self, table: KeptTable, rows: pa.Table, gone: pa.Table) -> None:
        """Write rows; delete the keys of ``gone`` for every write of a version up to `_version`."""

    def rows(self, table: KeptTable, schema: pa.Schema) -> Iterable[pa.RecordBatch]:
        """All rows of a table that are not deleted, in the columns of ``schema``."""

    def drop(self, name: str) -> None:
        """Drop a table; nothing if there is none."""

    def publish(self, view: str, name: str) -> None:
        """Let readers of a view see the rows of a table, from one moment on."""

    def unpublish(self, view: str) -> None:
        """Let readers see nothing under the name of a view."""


class SearchedStore(ViewStore, Protocol):
    """A store that finds rows by the words in their texts."""

    def search(
        self, table: KeptTable, schema: pa.Schema, words: str, limit: int, *, fresh: bool
    ) -> pa.Table:
        """The best rows with some words, in the columns of ``schema``, then `_rank`, `_headline`.

        With ``fresh``, all rows that were written before the call are searched.
        """
