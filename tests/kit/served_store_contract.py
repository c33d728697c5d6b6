"""Contract of stores of rows with a server; a store's test class inherits `ServedStoreContract`.

The class names two planted defects of the store, and the types that it refuses.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from decimal import Decimal
from typing import Any, ClassVar, Final

import pyarrow as pa
import pytest

from everstate.config import Config
from everstate.errors import InvalidView, StoreSilent, ViewFailed, ViewRowsMissing
from everstate.views.stores.registry import store_class
from everstate.views.stores.versioned import VersionedStore
from everstate.views.tables import KeptTable, Merge, Row
from kit.row_store_contract import RowsKept, RowStoreContract, columns_of, told
from kit.row_store_planted import FOUND_BY, PositionFirst, assert_found
from kit.row_values import KINDS
from kit.served_store import ServedStore
from kit.tls_door import TRUSTED, tls_before
from kit.view_oracle import in_order
from kit.waiting import until

TABLE: Final = KeptTable(view="odd", version=1, fingerprint="f", merge="row")
_HANGS_S: Final = 3.0
_PLACE: Final = [("_key", pa.string()), ("_version", pa.int64())]


def kept_in(
    served: ServedStore,
    config: Config,
    merge: Merge = "row",
    rows: Any = None,
    store: type[VersionedStore] = VersionedStore,
) -> RowsKept:
    """Views of orders in a store, or in a class with a defect; and what its client reads."""

    def read(view: str) -> list[Row] | None:
        found = served.read(config, view, merge)
        if found is None:
            return None
        amounts = [row.get("amount") for row in found]
        exact = [None if amount is None else Decimal(amount) for amount in amounts]
        return in_order(
            (row.get("region"), amount, row["_key"])
            for row, amount in zip(found, exact, strict=True)
        )

    made = (rows or store_class("", served.name))(config)
    return RowsKept(made, read, merge, store_class=store)


def odd_rows(refused: Mapping[str, pa.DataType]) -> pa.Table:
    """A row for each value of each type that is not refused, and null in its other columns."""
    kinds = {name: given for name, given in KINDS.items() if name not in refused}
    schema = pa.schema([*_PLACE, *((name, kind) for name, (kind, _) in kinds.items())])
    rows = [{name: each} for name, (_, values) in kinds.items() for each in values]
    places = ({"_key": f"k/{n}", "_version": 2**60 + n} for n in range(len(rows)))
    return pa.Table.from_pylist(
        [{**place, **row} for place, row in zip(places, rows, strict=True)], schema
    )


class ServedStoreContract(RowStoreContract):
    """Contract of stores with a server; provide the fixture ``served``."""

    forgets_deletions: ClassVar[Any]
    """The store with a defect: a key that was deleted has no version any more."""
    older_wins: ClassVar[Any]
    """The store with a defect: the last write wins, and not the highest version."""
    refused: ClassVar[Mapping[str, pa.DataType]]
    """Name → a type that the store cannot hold; it holds all others of `KINDS`."""

    @pytest.fixture
    def own(self, served: ServedStore) -> Iterator[Config]:
        """Settings with names in the store that no other test has."""
        with served.own() as config:
            yield config

    @pytest.fixture(params=["row", "append"])
    def kept(self, request: pytest.FixtureRequest, served: ServedStore, own: Config) -> RowsKept:
        return kept_in(served, own, request.param)

    @pytest.mark.parametrize("planted", FOUND_BY)
    def test_a_planted_defect_is_found(
        self, served: ServedStore, own: Config, planted: str
    ) -> None:
        rows = {
            "a forgotten deletion": self.forgets_deletions,
            "an older version wins": self.older_wins,
        }.get(planted)
        store = VersionedStore if rows is not None else PositionFirst
        assert_found(planted, kept_in(served, own, rows=rows, store=store))

    def test_values_of_all_types_come_back_exactly(self, served: ServedStore, own: Config) -> None:
        """Whole numbers beyond 2^53, all digits of decimals, microseconds, and infinities."""
        store, rows = store_class("", served.name)(own), odd_rows(self.refused)
        store.install(TABLE, rows.schema)
        store.write(TABLE, rows, rows.slice(0, 0).select(["_key", "_version"]))
        found = pa.Table.from_batches(store.rows(TABLE, rows.schema), rows.schema)
        # As texts: minus zero equals zero.
        assert list(map(repr, found.sort_by("_version").to_pylist())) == [
            repr(row) for row in rows.to_pylist()
        ]

    def test_a_type_that_the_store_cannot_hold_is_refused(
        self, served: ServedStore, own: Config
    ) -> None:
        store = store_class("", served.name)(own)
        for name, kind in self.refused.items():
            with pytest.raises(InvalidView, match=f"column '{name}' is"):
                store.install(TABLE, pa.schema([*_PLACE, (name, kind)]))

    def test_a_server_that_takes_no_writes_stops_the_view_and_loses_nothing(
        self, served: ServedStore, own: Config
    ) -> None:
        kept = kept_in(served, own)
        kept.keep(told("a", "north", "south"))
        before, log = kept.rows(), told("a", "north", "south", "east")
        kept.judge(0, log, 2, 3)
        for refusing in served.refusals(own):
            with refusing:
                with pytest.raises(ViewFailed, match="the store tested failed"):
                    kept.trail(0, log, 2, 3)
                assert kept.rows() == before
        kept.trail(0, log, 2, 3)
        kept.check(log)

    def test_a_server_that_hangs_is_given_up_and_its_late_writes_change_nothing(
        self, served: ServedStore, own: Config, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A call that was given up goes on in its thread, and ends when the server answers."""
        if served.process is None:
            return  # a folder
        kept, log = kept_in(served, own), told("a", "north", "south", "east")
        kept.keep(told("a", "north"))
        kept.judge(0, log, 1, 3)
        with monkeypatch.context() as patched, served.hanging():
            patched.setattr(type(kept.kept), "call_s_max", _HANGS_S)
            with pytest.raises(StoreSilent, match="the store tested failed: "):
                kept.trail(0, log, 1, 2)
        assert kept.position() == 1

        def has_caught_up() -> bool:
            with suppress(ViewFailed):
                kept.trail(0, log, 1, 3)
                return True
            return False

        until(has_caught_up)
        kept.check(log)
        time.sleep(_HANGS_S)  # the late write has come by now, if not before
        kept.check(log)

    def test_deletions_and_versions_outlive_a_kill(self, served: ServedStore) -> None:
        """A late write of a lower version changes nothing after its start, either."""
        with served.own() as one, served.own() as other:
            views = [
                (kept_in(served, one, "row"), told("a", "north", None)),
                (kept_in(served, other, "append"), told("a", "north", "south")),
            ]
            for kept, log in views:
                kept.keep(log)
                kept.store.show(kept.plan.name, 1)
            shown = [kept.read(kept.plan.name) for kept, _ in views]
            served.kill()
            served.start()
            for kept, log in views:
                kept.store.write(kept.table(), columns_of(("a", 1, "old", Decimal(9))))
                kept.check(log)
            assert [kept.read(kept.plan.name) for kept, _ in views] == shown

    def test_a_late_write_to_a_dropped_version_leaves_nothing(
        self, served: ServedStore, own: Config
    ) -> None:
        """A server may otherwise make the table, with types that it guesses."""
        kept = kept_in(served, own)
        kept.keep(told("a", "north"))
        kept.store.drop(kept.plan.name, 1)
        with pytest.raises(ViewRowsMissing):
            kept.store.write(kept.table(), columns_of(("a", 1, "late", Decimal(1))))
        assert served.left(own) == []

    def test_a_server_with_tls_is_used_and_its_certificate_is_checked(
        self, served: ServedStore, own: Config
    ) -> None:
        with tls_before(served.port) as port:
            kept, log = kept_in(served, served.secured(own, port, TRUSTED)), told("a", "north")
            kept.keep(log)
            kept.check(log)
            with pytest.raises(ViewFailed, match="certificate"):
                kept_in(served, served.secured(own, port, None))

    def test_without_an_address_the_reason_says_what_is_missing(self, served: ServedStore) -> None:
        with pytest.raises(ConnectionError, match=served.unset):
            store_class("", served.name)(Config()).drop("a")
