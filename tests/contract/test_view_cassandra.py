"""Cassandra keeps the contract of stores of rows with a server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, Final

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pydantic import SecretStr

from everstate.config import Config
from everstate.errors import StoreSilent, ViewFailed, ViewRowsMissing
from everstate.local import cassandra as local_cassandra
from everstate.views.stores.cassandra import CassandraRows
from everstate.views.tables import KeptTable
from kit.row_store_contract import told
from kit.row_values import KINDS
from kit.served_cassandra import ServedCassandra
from kit.served_store import ServedStore
from kit.served_store_contract import ServedStoreContract, kept_in
from kit.settings import altered
from kit.tls_door import TRUSTED, tls_before
from kit.waiting import until
from tiers import counted

LATER: Final = 2**40
REFUSED: Final = {
    **{name: KINDS[name][0] for name in ("list", "struct", "map")},
    "bytes": pa.binary(),
    "null": pa.null(),
    "unsigned": pa.uint64(),
}
ODD: Final = [*(each for each in KINDS if each not in REFUSED), 'a "word", as TABLE', "select"]


class ForgetsDeletions(CassandraRows):
    """A key that was deleted has no version, as after `gc_grace_seconds` and a compaction."""

    def write(self, table: KeptTable, rows: pa.Table, gone: pa.Table) -> None:
        super().write(table, rows, gone)
        if gone.num_rows:
            alive = pa.Table.from_batches(self.rows(table, rows.schema), rows.schema)
            self.drop(table.name)
            self.install(table, rows.schema)
            super().write(table, alive, gone.slice(0, 0))


class OlderWins(CassandraRows):
    """The last write wins, and not the highest version."""

    writes = 0

    def write(self, table: KeptTable, rows: pa.Table, gone: pa.Table) -> None:
        self.writes += 1
        super().write(table, *(self._later(each) for each in (rows, gone)))

    def _later(self, rows: pa.Table) -> pa.Table:
        later = pc.add(rows["_version"], self.writes * LATER)
        return rows.set_column(1, "_version", later)

    def rows(self, table: KeptTable, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        place = schema.get_field_index("_version")
        for batch in super().rows(table, schema):
            if place < 0:
                yield batch
            else:
                version = pc.bit_wise_and(batch.column(place), LATER - 1)
                yield batch.set_column(place, "_version", version)


class TestCassandraRows(ServedStoreContract):
    histories = counted(3, full=50)
    forgets_deletions = ForgetsDeletions
    older_wins = OlderWins
    refused: ClassVar[dict[str, pa.DataType]] = REFUSED

    @pytest.fixture
    def served(self, cassandra_views: ServedCassandra) -> ServedCassandra:
        return cassandra_views

    def test_a_server_that_takes_no_writes_stops_the_view_and_loses_nothing(
        self, served: ServedStore, own: Config
    ) -> None:
        """One replica of three answers, which is no quorum."""
        assert isinstance(served, ServedCassandra)
        kept = kept_in(served, own)
        kept.keep(told("a", "north", "south"))
        before, log = kept.rows(), told("a", "north", "south", "east")
        kept.judge(0, log, 2, 3)
        served.replicate(own, 3)
        with pytest.raises(StoreSilent, match=r"Unavailable: .* LOCAL_QUORUM"):
            kept.trail(0, log, 2, 3)
        served.replicate(own, 1)
        assert kept.rows() == before
        kept.trail(0, log, 2, 3)
        kept.check(log)


# What only Cassandra has


@pytest.fixture
def own(cassandra_views: ServedCassandra) -> Iterator[Config]:
    with cassandra_views.own() as config:
        yield config


def test_a_null_beats_an_older_value_in_columns_with_any_name(own: Config) -> None:
    """Also in a table whose name would be too long."""
    store, table = CassandraRows(own), KeptTable("n" * 40, 12, "f", "row", attempt="5f2b7c1e")
    columns = [(name, KINDS.get(name, (pa.float32(), ()))[0]) for name in ODD]
    schema = pa.schema([("_key", pa.string()), ("_version", pa.int64()), *columns])
    full = {name: KINDS.get(name, (None, [0.5]))[1][0] for name in ODD}
    newer = pa.Table.from_pylist([{"_key": "a", "_version": 2}], schema)
    older = pa.Table.from_pylist([{"_key": "a", "_version": 1, **full}], schema)
    store.install(table, schema)
    for rows in (newer, older):
        store.write(table, rows, rows.slice(0, 0).select(["_key", "_version"]))
    assert pa.Table.from_batches(store.rows(table, schema), schema).equals(newer)


def test_a_table_that_is_not_there_is_neither_read_nor_published(
    cassandra_views: ServedCassandra, own: Config
) -> None:
    kept = kept_in(cassandra_views, own)
    kept.store.drop(kept.plan.name, 1)
    with pytest.raises(ViewRowsMissing):
        kept.rows()
    with pytest.raises(ViewRowsMissing):
        kept.store.show(kept.plan.name, 1)


def test_deletions_are_kept_for_ten_days(cassandra_views: ServedCassandra, own: Config) -> None:
    kept_in(cassandra_views, own)
    query = "SELECT gc_grace_seconds AS s FROM system_schema.tables WHERE keyspace_name = ?"
    found = cassandra_views.ask(own, query, own.cassandra.keyspace)
    assert [row.s for row in found] == [864_000] * 2


def test_an_address_that_would_be_ignored_is_refused(
    cassandra_views: ServedCassandra, own: Config
) -> None:
    stores = own.stores.with_url("cassandra", "cassandra://a")
    with pytest.raises(ConnectionError, match=r"not in \[stores.cassandra\]"):
        CassandraRows(own.model_copy(update={"stores": stores})).drop("a")


def test_a_server_with_logins_is_used_with_the_right_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With TLS, too; no message has a password."""
    asking = local_cassandra._SETTINGS.replace("AllowAllAuthenticator", "PasswordAuthenticator")
    asking = asking.replace("AllowAllAuthorizer", "CassandraAuthorizer")
    monkeypatch.setattr(local_cassandra, "_SETTINGS", asking)
    with ServedCassandra.alone(tmp_path) as served, tls_before(served.port) as port:
        named = altered(Config(), views={"schema_name": "with_logins"})

        def secured(password: str) -> Config:
            login = {"user": "cassandra", "password": SecretStr(password)}
            return served.secured(served.settings(named), port, TRUSTED, **login)

        def has_logins() -> bool:
            """Cassandra makes its first one some seconds after its start."""
            with suppress(ViewFailed):
                kept_in(served, secured("cassandra"))
                return True
            return False

        until(has_logins, within_s=60)
        kept, log = kept_in(served, secured("cassandra")), told("a", "north")
        kept.keep(log)
        kept.check(log)
        with pytest.raises(ViewFailed, match="refuses the user 'cassandra'") as refused:
            kept_in(served, secured("hunter2"))
        assert "hunter2" not in str(refused.value)
        with pytest.raises(ViewFailed, match=r"[Aa]uthentication"):
            kept_in(served, served.settings(named))
        served.clean(secured("cassandra"))
