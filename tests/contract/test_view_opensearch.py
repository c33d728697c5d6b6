"""OpenSearch keeps the contract of stores of rows with a server, and finds by types."""

from __future__ import annotations

import re
from typing import Any, ClassVar, Final

import pyarrow as pa
import pytest

from everstate.views.stores.opensearch import OpenSearchRows
from everstate.views.tables import KeptTable
from kit.opensearch import OpenSearchServer
from kit.served_store_contract import TABLE, ServedStoreContract, odd_rows
from tiers import counted


class ForgetsDeletions(OpenSearchRows):
    """A key that was deleted has no document, as after a real deletion and a minute."""

    def write(self, table: KeptTable, rows: pa.Table, gone: pa.Table) -> None:
        super().write(table, rows, gone)
        if gone.num_rows:
            alive = pa.Table.from_batches(self.rows(table, rows.schema), rows.schema)
            self.drop(table.name)
            self.install(table, rows.schema)
            super().write(table, alive, gone.slice(0, 0))


class OlderWins(OpenSearchRows):
    """The last write wins, and not the highest version."""

    def _ask(self, method: str, place: str, body: Any = None, allowed: Any = ()) -> Any:
        if isinstance(body, str):
            body = re.sub(r', "version": \d+, "version_type": "external"', "", body)
        return super()._ask(method, place, body, allowed)


class TestOpenSearchRows(ServedStoreContract):
    histories = counted(2, full=30)
    forgets_deletions = ForgetsDeletions
    older_wins = OlderWins
    refused: ClassVar[dict[str, pa.DataType]] = {"bytes": pa.binary(), "null": pa.null()}

    @pytest.fixture
    def served(self, opensearch: OpenSearchServer) -> OpenSearchServer:
        return opensearch


# What only OpenSearch has


QUERIES: Final[dict[str, tuple[Any, int]]] = {
    "a word": ({"match": {"text": "日本"}}, 1),
    "a whole text": ({"term": {"text.keyword": '"\\\n'}}, 1),
    "a range of decimals": ({"range": {"exact": {"gt": 9, "lt": 1e37}}}, 1),
    "a whole number": ({"term": {"whole": 2**63 - 1}}, 1),
    "days": ({"range": {"day": {"gte": "9999-01-01"}}}, 1),
    "moments": ({"range": {"zoned": {"gte": "2026-11-29T21:00:00Z"}}}, 2),
    "inside a struct": ({"term": {"struct.a": 2**60 + 1}}, 1),
    "in a list": ({"range": {"list": {"gt": 1}}}, 1),
    "infinite": ({"range": {"double": {"gt": 1.7976931348623157e308}}}, 0),
}


def test_columns_are_searched_by_their_types(opensearch: OpenSearchServer) -> None:
    with opensearch.own() as own:
        store, rows = OpenSearchRows(own), odd_rows({})
        store.install(TABLE, rows.schema)
        store.write(TABLE, rows, rows.slice(0, 0).select(["_key", "_version"]))
        store.publish(TABLE.view, TABLE.name)
        found = {
            name: len(opensearch.search(own, TABLE.view, query) or ())
            for name, (query, _) in QUERIES.items()
        }
    assert found == {name: count for name, (_, count) in QUERIES.items()}
