"""Contract of all stores of entities. A store's test class inherits `StoreContract`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from threading import Barrier
from typing import Annotated, Any, NamedTuple

import pytest
from pydantic import BaseModel, Field

from everstate.changes import DomainEvent, EntityType, Kind, Provenance
from everstate.errors import (
    ChangeTooLarge,
    EverstateError,
    InvalidChange,
    MissingProvenance,
    NotFound,
    VersionConflict,
)
from everstate.sources.stores.store import Store, Written

CLERK = Provenance(api_version="v1", service_name="desk", identifier="clerk-7")


class Line(BaseModel):
    """A line of an order."""

    article: str
    price: Annotated[Decimal, Field(max_digits=12, decimal_places=2)]


class StoredOrder(BaseModel):
    """The entity of the contract: text, a number and a nested list."""

    order_id: str
    note: str = ""
    weight: float | None = None
    lines: list[Line] = []


ORDER = EntityType("order", StoredOrder, "order_id")


class Recorded(NamedTuple):
    """A change as a store recorded it for the log; states and event are JSON text."""

    key: str
    version: int
    kind: str
    change_id: str
    before: str | None
    after: str | None
    event: str | None
    occurred_at: str


RecordedChanges = Callable[[], list[Recorded]]
"""Reads every recorded change, in the order in which they were recorded."""


def check_chain(changes: list[Recorded]) -> None:
    """Assert dense versions, kinds that match the states, and chained states, for each key."""
    newest: dict[str, tuple[int, str | None]] = {}
    for change in changes:
        version, state = newest.get(change.key, (0, None))
        assert change.version == version + 1
        assert change.before == state
        fits = {(False, True): "created", (True, True): "updated", (True, False): "deleted"}
        assert change.kind == fits[change.before is not None, change.after is not None]
        newest[change.key] = (change.version, change.after)
    assert len({change.change_id for change in changes}) == len(changes)


class StoreContract:
    """Give the fixtures ``store`` (of ORDER, empty), ``changes``, and ``tries`` (a number)."""

    def test_a_put_is_got_back_with_its_version(self, store: Store) -> None:
        """Read your writes."""
        assert store.get("o-1") is None
        order = StoredOrder(order_id="o-1", lines=[Line(article="nut", price=Decimal("1.10"))])
        assert store.put(order, provenance=CLERK).version == 1
        assert store.get("o-1") == (order, 1)

    def test_versions_are_dense_and_states_are_chained(
        self, store: Store, changes: RecordedChanges
    ) -> None:
        """Laws 2 and 3."""
        for note in ("a", "b", "c"):
            store.put(StoredOrder(order_id="o-1", note=note), provenance=CLERK)
            store.put(StoredOrder(order_id="o-2", note=note), provenance=CLERK)
        store.delete("o-1", provenance=CLERK)
        check_chain(changes())
        assert [change.version for change in changes() if change.key == "o-1"] == [1, 2, 3, 4]

    def test_C7_a_deleted_entity_keeps_its_version_and_goes_on(
        self, store: Store, changes: RecordedChanges
    ) -> None:
        """A deleted entity keeps its version, and continues from it when created again."""
        store.put(StoredOrder(order_id="o-1"), provenance=CLERK)
        deleted = store.delete("o-1", provenance=CLERK)
        assert (deleted.version, deleted.kind) == (2, Kind.DELETED)
        assert store.get("o-1") is None
        assert (store.deleted_version("o-1"), store.deleted_version("o-2")) == (2, None)
        created = store.put(StoredOrder(order_id="o-1"), provenance=CLERK, expected_version=0)
        assert (created.version, created.kind) == (3, Kind.CREATED)
        assert store.deleted_version("o-1") is None
        check_chain(changes())

    def test_deleting_what_is_not_there_is_refused(
        self, store: Store, changes: RecordedChanges
    ) -> None:
        """Both for an entity that was never created and for one that is already deleted."""
        with pytest.raises(NotFound):
            store.delete("o-1", provenance=CLERK)
        store.put(StoredOrder(order_id="o-1"), provenance=CLERK)
        store.delete("o-1", provenance=CLERK)
        with pytest.raises(NotFound):
            store.delete("o-1", provenance=CLERK)
        assert len(changes()) == 2

    def test_a_version_conflict_carries_expected_and_actual_and_writes_nothing(
        self, store: Store, changes: RecordedChanges
    ) -> None:
        """Section E."""
        store.put(StoredOrder(order_id="o-1"), provenance=CLERK, expected_version=0)
        for expected in (0, 2, 7):
            with pytest.raises(VersionConflict) as conflict:
                store.put(
                    StoredOrder(order_id="o-1", note="x"),
                    provenance=CLERK,
                    expected_version=expected,
                )
            assert (conflict.value.expected, conflict.value.actual) == (expected, 1)
        with pytest.raises(VersionConflict):
            store.delete("o-1", provenance=CLERK, expected_version=2)
        with pytest.raises(VersionConflict) as conflict:
            store.put(StoredOrder(order_id="o-9"), provenance=CLERK, expected_version=3)
        assert conflict.value.actual == 0
        assert len(changes()) == 1

    def test_an_equal_state_is_no_change_unless_forced(
        self, store: Store, changes: RecordedChanges
    ) -> None:
        """So that an import can be repeated."""
        order = StoredOrder(order_id="o-1", note="same")
        store.put(order, provenance=CLERK)
        again = store.put(order, provenance=CLERK)
        assert not again.changed
        assert (again.version, again.kind) == (1, None)
        forced = store.put(order, provenance=CLERK, force=True)
        assert (forced.version, forced.kind) == (2, Kind.UPDATED)
        assert len(changes()) == 2

    def test_put_many_gives_each_state_of_a_key_its_version(
        self, store: Store, changes: RecordedChanges
    ) -> None:
        """Several versions of one key in one call."""
        store.put(StoredOrder(order_id="o-2", note="old"), provenance=CLERK)
        store.put(StoredOrder(order_id="o-3"), provenance=CLERK)
        store.delete("o-3", provenance=CLERK)
        orders = [
            StoredOrder(order_id=key, note=note)
            for note in ("a", "b", "b", "c")
            for key in ("o-1", "o-2", "o-3")
        ]
        written = store.put_many(orders, provenance=CLERK)
        assert (written.changes, written.keys, written.unchanged) == (9, 3, 3)
        found = changes()
        check_chain(found)
        assert [change.key for change in found[3:]] == ["o-1", "o-2", "o-3"] * 3
        again = store.put_many(orders[-3:], provenance=CLERK)
        assert (again.changes, again.unchanged) == (0, 3)
        assert store.put_many([], provenance=CLERK).changes == 0

    def test_put_many_takes_provenance_time_and_event_for_each(
        self, store: Store, changes: RecordedChanges
    ) -> None:
        """A time keeps the UTC offset with which it was given."""
        zone = timezone(timedelta(hours=-5))
        times = [datetime(2013, 1, 1, hour, 17, tzinfo=zone) for hour in (5, 6)]
        store.put_many(
            [StoredOrder(order_id="o-1"), StoredOrder(order_id="o-2")],
            provenance=[CLERK, CLERK],
            occurred_at=times,
            event=[DomainEvent(type="Opened", data={"by": "web"}), None],
        )
        first, second = changes()
        assert first.occurred_at == "2013-01-01T05:17:00-05:00"
        assert json.loads(first.event or "") == {"type": "Opened", "data": {"by": "web"}}
        assert second.event is None
        with pytest.raises(ValueError, match="2 entities, but 1 values of provenance"):
            store.put_many(
                [StoredOrder(order_id="o-3"), StoredOrder(order_id="o-4")],
                provenance=[CLERK],
            )

    @pytest.mark.parametrize(
        ("entity", "error", "field"),
        [
            (StoredOrder(order_id="o-1", weight=math.nan), InvalidChange, "weight"),
            (StoredOrder(order_id="o-1", note="a\0b"), InvalidChange, "state"),
            (StoredOrder(order_id="o\0-1"), InvalidChange, "key"),
            (StoredOrder(order_id=""), InvalidChange, "order_id"),
            ({"order_id": "o-1", "weight": "heavy"}, InvalidChange, "weight"),
            # Pydantic validates neither what `model_copy` is given nor what is assigned.
            (
                StoredOrder(order_id="o-1").model_copy(update={"weight": "heavy"}),
                InvalidChange,
                "weight",
            ),
            (StoredOrder(order_id="o-1", note="x" * 2_097_152), ChangeTooLarge, "size"),
        ],
    )
    def test_what_the_log_could_not_hold_is_refused_and_nothing_is_written(
        self,
        store: Store,
        changes: RecordedChanges,
        entity: Any,
        error: type[EverstateError],
        field: str,
    ) -> None:
        """Bad input is refused at the write, before the commit, including a 2 MiB entity."""
        with pytest.raises(error) as refusal:
            store.put(entity, provenance=CLERK)
        assert getattr(refusal.value, "field", None) == field
        with pytest.raises(error):
            store.put_many([StoredOrder(order_id="o-2"), entity], provenance=CLERK)
        assert changes() == []
        assert store.get("o-2") is None

    def test_provenance_and_an_offset_of_time_are_required(
        self, store: Store, changes: RecordedChanges
    ) -> None:
        """Every change records who made it, and when."""
        nobody = Provenance(api_version="v1", service_name="", identifier="x")
        for missing in (nobody, None):
            with pytest.raises(MissingProvenance):
                store.put(StoredOrder(order_id="o-1"), provenance=missing)  # type: ignore[arg-type]
            with pytest.raises(MissingProvenance):
                store.put_many([StoredOrder(order_id="o-1")], provenance=missing)  # type: ignore[arg-type]
        naive = datetime(2026, 1, 1)  # noqa: DTZ001
        with pytest.raises(InvalidChange, match="occurredAt"):
            store.put(StoredOrder(order_id="o-1"), provenance=CLERK, occurred_at=naive)
        assert changes() == []

    def test_writers_without_expected_versions_all_get_their_own_version(
        self, store: Store, changes: RecordedChanges
    ) -> None:
        """Single and set-based writers on the same few keys, some of them new."""

        def write(writer: int) -> None:
            for turn in range(15):
                keys = [f"o-{(writer + turn + step) % 5}" for step in range(3)]
                orders = [StoredOrder(order_id=key, note=f"{writer}/{turn}") for key in keys]
                if writer % 2:
                    store.put_many(orders, provenance=CLERK)
                else:
                    for order in orders:
                        store.put(order, provenance=CLERK)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(write, range(4)))
        found = changes()
        check_chain(found)
        assert len(found) == 4 * 15 * 3

    def test_exactly_one_of_two_writers_wins_each_version(
        self, store: Store, changes: RecordedChanges, tries: int
    ) -> None:
        """Acceptance 4: expected versions, two writers per key."""
        barrier, conflicts = Barrier(2), list[tuple[int, int]]()

        def write(writer: int) -> list[Written]:
            won = []
            for turn in range(tries):
                order = StoredOrder(order_id=f"o-{turn % 3}", note=f"{writer}/{turn}")
                barrier.wait()
                try:
                    won.append(store.put(order, provenance=CLERK, expected_version=turn // 3))
                except VersionConflict as conflict:
                    conflicts.append((conflict.expected, conflict.actual))
            return won

        with ThreadPoolExecutor(2) as pool:
            wins = [win for each in pool.map(write, range(2)) for win in each]
        found = changes()
        check_chain(found)
        assert len(wins) == len(conflicts) == len(found) == tries
        assert all(actual == expected + 1 for expected, actual in conflicts)
        assert {(win.key, win.version) for win in wins} == {
            (change.key, change.version) for change in found
        }
