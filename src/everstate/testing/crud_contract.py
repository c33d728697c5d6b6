"""Contract of stores for the REST routes. A store's test class inherits `CrudStoreContract`."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from decimal import Decimal
from threading import Barrier
from typing import Annotated, Any

import msgspec
import pytest
from pydantic import BaseModel, Field

from everstate.changes import EntityType
from everstate.errors import InvalidBody, InvalidChange, NotFound, VersionConflict
from everstate.http.answers import HttpAnswer, HttpRequest
from everstate.http.callers import Caller
from everstate.sources.crud.resource import Resource
from everstate.sources.stores.store import AnsweredBefore, Once, Scalar, Store, Write, Written
from everstate.testing.store_contract import CLERK, Line, RecordedChanges, StoredOrder, check_chain

CounterStep = Callable[[str], bool]
"""Reads the counter of a key and writes it plus one; ``False``: another writer came first."""


@dataclass(frozen=True, slots=True)
class Counted:
    """Result of a load: successful increments, by key, and attempts that came too late."""

    taken: Counter[str]
    lost: int


def count_up(step: CounterStep, *, writers: int = 50, keys: int = 100, turns: int = 20) -> Counted:
    """Let concurrent writers increment counters, each ``turns`` times, with retries."""

    def write(writer: int) -> tuple[list[str], int]:
        chosen, lost = random.Random(writer), 0
        done = []
        for _ in range(turns):
            key = f"o-{chosen.randrange(keys)}"
            while not step(key):
                lost += 1
            done.append(key)
        return done, lost

    with ThreadPoolExecutor(writers) as pool:
        results = list(pool.map(write, range(writers)))
    taken = Counter(key for done, _ in results for key in done)
    return Counted(taken, sum(lost for _, lost in results))


def check_counts(counted: Counted, found: dict[str, tuple[int, int]]) -> None:
    """Assert that no update was lost and versions are dense; ``found``: counter and version.

    Every counter starts at 0 with version 1, and each increment is one version.
    """
    wrong = {
        key: (counted.taken[key], found.get(key))
        for key in counted.taken.keys() | found.keys()
        if found.get(key) != (counted.taken[key], counted.taken[key] + 1)
    }
    assert wrong == {}, f"key: (increments, (counter, version)): {wrong}"


def once_each(keys: list[str]) -> set[str]:
    """The keys of some pages; raises AssertionError when one is there twice."""
    assert len(keys) == len(set(keys)), f"an entity is on the pages twice: {keys}"
    return set(keys)


def stepping(store: Store) -> CounterStep:
    """A step that reads an order's weight and writes it plus one, expecting the read version."""

    def step(key: str) -> bool:
        found = store.get(key)
        assert found is not None
        order = found.entity
        assert isinstance(order, StoredOrder)
        heavier = order.model_copy(update={"weight": (order.weight or 0) + 1})
        try:
            store.put(heavier, provenance=CLERK, expected_version=found.version)
        except VersionConflict:
            return False
        return True

    return step


def counters(store: Store, keys: int) -> dict[str, tuple[int, int]]:
    """Counter and version of each order."""
    found = {}
    for number in range(keys):
        entity, version = store.get(f"o-{number}") or (StoredOrder(order_id="none", weight=-1), 0)
        assert isinstance(entity, StoredOrder)
        found[f"o-{number}"] = int(entity.weight or 0), version
    return found


def once(number: int = 1, fingerprint: str = "f") -> Once:
    """A request that may be repeated; its answer is the version."""
    return Once(
        id=f"desk-{number}",
        fingerprint=fingerprint,
        answer=lambda written: f"version {written.version}",
    )


class FormerOrder(BaseModel):
    """An order as an earlier model wrote it."""

    order_id: str


class PricedOrder(BaseModel):
    """An order with a number of many digits and places."""

    order_id: str
    price: Annotated[Decimal, Field(max_digits=38, decimal_places=4)] | None = Decimal("1.50")


class ProcessEnded(BaseException):
    """The process of a request ended before the answer was kept."""


def request(method: str, body: Any, content_type: str, **headers: str) -> HttpRequest:
    """A request for the order `o-1` with an Idempotency-Key."""
    said = {"content-type": content_type, "idempotency-key": "K1", **headers}
    encoded = b"" if body is None else msgspec.json.encode(body)
    return HttpRequest(method, "/v1/order/o-1", said, Caller("desk", "clerk-7"), encoded)


_JSON_PATCH = "application/json-patch+json"
_NOTED = [{"op": "replace", "path": "/note", "value": "b"}]
_LINE = {"article": "nut", "price": "1.10"}
_REQUESTS: tuple[tuple[str, HttpRequest], ...] = (
    (
        "replace",
        request("PUT", {"order_id": "o-1", "note": "b"}, "application/json", **{"if-match": '"1"'}),
    ),
    (
        "patch",
        request("PATCH", [{"op": "test", "path": "/note", "value": "a"}, *_NOTED], _JSON_PATCH),
    ),
    ("patch", request("PATCH", [{"op": "add", "path": "/lines/-", "value": _LINE}], _JSON_PATCH)),
    ("delete", request("DELETE", None, "application/json", **{"if-match": '"1"'})),
)


class RepeatedRequestContract:
    """A repeated request is answered as it was done, wherever its first process ended."""

    @pytest.mark.parametrize(("verb", "incoming"), _REQUESTS)
    @pytest.mark.parametrize("is_changed_since", [False, True])
    def test_a_request_whose_process_ended_before_its_answer_is_answered_as_done(
        self,
        store: Store,
        changes: RecordedChanges,
        monkeypatch: pytest.MonkeyPatch,
        verb: str,
        incoming: HttpRequest,
        is_changed_since: bool,
    ) -> None:
        """If its write was stored, the answer has the state of that write; else it is done now."""

        def ended(_: Written) -> str:
            raise ProcessEnded

        def ending(write: Write) -> Written:
            assert write.once is not None
            return written(replace(write, once=replace(write.once, answer=ended)))

        store.put(StoredOrder(order_id="o-1", note="a"), provenance=CLERK)
        resource, written = Resource(store, project="shop"), store.write

        def ask() -> HttpAnswer:
            answer: HttpAnswer = getattr(resource, verb)(incoming, "o-1")
            return answer

        with monkeypatch.context() as dying:
            dying.setattr(store, "write", ending)
            with pytest.raises(ProcessEnded):
                ask()
        was_stored = len(changes()) == 2
        if is_changed_since and was_stored:
            store.put(StoredOrder(order_id="o-1", note="z"), provenance=CLERK)
        answer = ask()
        done = changes()[1]
        assert (answer.status, done.version) == (204 if verb == "delete" else 200, 2)
        assert answer.headers["Everstate-Change-Id"] == done.change_id
        assert answer.body == done.after
        assert ask() == answer
        check_chain(changes())
        assert len(changes()) == (3 if is_changed_since and was_stored else 2)

    def test_a_request_that_was_not_done_is_judged_when_it_is_repeated(self, store: Store) -> None:
        """No answer is made for a write that is not there."""
        store.put(StoredOrder(order_id="o-1", note="x"), provenance=CLERK)
        resource, (verb, incoming) = Resource(store, project="shop"), _REQUESTS[1]
        for _ in range(2):
            with pytest.raises(InvalidBody, match="tested value"):
                getattr(resource, verb)(incoming, "o-1")
        assert store.answer_of(once(), "o-1") is None


class CrudStoreContract(RepeatedRequestContract):
    """Give the fixtures ``store`` (of ORDER, empty) and ``changes`` (see `store_contract`)."""

    def test_what_was_put_is_got_and_deleted(self, store: Store, changes: RecordedChanges) -> None:
        """Read your writes, dense versions, and a deleted entity that keeps its version (C7)."""
        order = StoredOrder(order_id="o-1", lines=[Line(article="nut", price=Decimal("1.10"))])
        assert store.get("o-1") is None
        assert store.put(order, provenance=CLERK, expected_version=0).version == 1
        assert store.get("o-1") == (order, 1)
        assert not store.put(order, provenance=CLERK).changed
        for expected in (0, 2):
            with pytest.raises(VersionConflict) as conflict:
                store.put(order, provenance=CLERK, expected_version=expected)
            assert conflict.value.actual == 1
        assert store.delete("o-1", provenance=CLERK, expected_version=1).version == 2
        assert store.get("o-1") is None
        with pytest.raises(NotFound):
            store.delete("o-1", provenance=CLERK)
        assert store.put(order, provenance=CLERK, expected_version=0).version == 3
        check_chain(changes())

    def test_pages_have_every_entity_once_and_no_deleted_ones(self, store: Store) -> None:
        """With any page size; entities that are created meanwhile do no harm."""
        for number in range(23):
            store.put(StoredOrder(order_id=f"o-{number:02}"), provenance=CLERK)
        for number in (0, 7, 8, 22):
            store.delete(f"o-{number:02}", provenance=CLERK)
        there = {f"o-{number:02}" for number in range(23)} - {"o-00", "o-07", "o-08", "o-22"}
        for limit in (1, 5, 19, 100):
            cursor, seen = None, list[str]()
            while True:
                page = store.page(limit=limit, cursor=cursor)
                assert len(page.entities) <= limit
                seen += [store.entity_type.key_of(found.entity) for found in page.entities]
                cursor = page.cursor
                if cursor is None:
                    break
                store.put(StoredOrder(order_id="o-99"), provenance=CLERK)
            if store.get("o-99") is not None:
                store.delete("o-99", provenance=CLERK)
            assert sorted(set(seen) - {"o-99"}) == sorted(there)
            assert len(seen) == len(set(seen))

    def test_a_page_has_only_what_is_equal(self, store: Store) -> None:
        """Filters by text, numbers and null; several at once."""
        for number in range(12):
            weight = None if number % 3 == 0 else float(number % 3)
            note = "odd" if number % 2 else "even"
            store.put(
                StoredOrder(order_id=f"o-{number}", note=note, weight=weight), provenance=CLERK
            )

        def keys(**equal: str | float | None) -> set[str]:
            cursor, found = None, list[str]()
            while True:
                page = store.page(limit=3, cursor=cursor, equal=equal)
                assert len(page.entities) <= 3
                found += [store.entity_type.key_of(each.entity) for each in page.entities]
                cursor = page.cursor
                if cursor is None:
                    return once_each(found)

        assert keys(note="odd") == {f"o-{number}" for number in range(1, 12, 2)}
        assert keys(weight=None) == {"o-0", "o-3", "o-6", "o-9"}
        assert keys(weight=1, note="even") == {"o-4", "o-10"}
        assert keys(note="'; DROP TABLE") == set()

    def test_a_page_has_states_that_are_older_than_an_attribute(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Readers see the attribute's default in them, so a filter for it finds them."""
        with monkeypatch.context() as before:
            before.setattr(store, "entity_type", EntityType("order", FormerOrder, "order_id"))
            store.put(FormerOrder(order_id="o-1"), provenance=CLERK)
        store.put(StoredOrder(order_id="o-2"), provenance=CLERK)
        store.put(StoredOrder(order_id="o-3", note="late", weight=1.0), provenance=CLERK)

        def keys(equal: Mapping[str, Scalar]) -> set[str]:
            page = store.page(limit=9, equal=equal)
            return once_each([store.entity_type.key_of(each.entity) for each in page.entities])

        assert keys({"weight": None}) == keys({"note": "", "weight": None}) == {"o-1", "o-2"}
        assert keys({"note": "late"}) == keys({"weight": 1.0}) == {"o-3"}

    def test_a_page_has_each_decimal_of_a_value_however_it_is_written(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """In JSON a Decimal is a text, which may have more zeros than an equal one."""
        with monkeypatch.context() as priced:
            priced.setattr(store, "entity_type", EntityType("order", FormerOrder, "order_id"))
            store.put(FormerOrder(order_id="former"), provenance=CLERK)
            priced.setattr(store, "entity_type", EntityType("order", PricedOrder, "order_id"))
            for price in ("1.5", "1.500", "15E-1", "1.51", "0", "-0.0", "9" * 34):
                store.put(PricedOrder(order_id=price, price=Decimal(price)), provenance=CLERK)
            store.put(PricedOrder(order_id="none", price=None), provenance=CLERK)

            def keys(price: Decimal | None, **more: str) -> set[str]:
                page = store.page(limit=20, equal={"price": price, **more})
                return once_each([store.entity_type.key_of(each.entity) for each in page.entities])

            assert keys(Decimal("1.50")) == {"former", "1.5", "1.500", "15E-1"}
            assert keys(Decimal("1.50"), order_id="15E-1") == {"15E-1"}
            assert keys(Decimal(0)) == {"0", "-0.0"}
            assert keys(Decimal("9" * 34)) == {"9" * 34}
            assert keys(Decimal("1E+34")) == set()
            assert keys(None) == {"none"}

    def test_a_write_with_an_id_is_done_once_and_its_answer_kept(
        self, store: Store, changes: RecordedChanges
    ) -> None:
        """Puts and deletes, including a put of an equal state."""
        assert store.answered("desk-1") is None
        store.put(StoredOrder(order_id="o-1"), provenance=CLERK, once=once())
        kept = store.answered("desk-1")
        assert kept is not None
        assert (kept.fingerprint, kept.answer) == ("f", "version 1")
        with pytest.raises(AnsweredBefore):
            store.put(StoredOrder(order_id="o-1", note="x"), provenance=CLERK, once=once())
        with pytest.raises(AnsweredBefore):
            store.put(
                StoredOrder(order_id="o-1"), provenance=CLERK, expected_version=7, once=once()
            )
        assert not store.put(StoredOrder(order_id="o-1"), provenance=CLERK, once=once(2)).changed
        store.delete("o-1", provenance=CLERK, once=once(3))
        with pytest.raises(AnsweredBefore):
            store.delete("o-1", provenance=CLERK, once=once(3))
        answers = [store.answered(f"desk-{number}") for number in (2, 3)]
        assert [each.answer for each in answers if each] == ["version 1", "version 2"]
        assert [change.kind for change in changes()] == ["created", "deleted"]

    def test_a_write_that_was_refused_leaves_its_id_free(
        self, store: Store, changes: RecordedChanges
    ) -> None:
        """So that the same request may succeed later."""
        with pytest.raises(VersionConflict):
            store.put(
                StoredOrder(order_id="o-1"), provenance=CLERK, expected_version=4, once=once()
            )
        with pytest.raises(InvalidChange):
            store.put(StoredOrder(order_id="o-1", note="\0"), provenance=CLERK, once=once())
        with pytest.raises(NotFound):
            store.delete("o-1", provenance=CLERK, once=once())
        assert store.answered("desk-1") is None
        store.put(StoredOrder(order_id="o-1"), provenance=CLERK, once=once())
        assert len(changes()) == 1

    def test_the_same_id_at_the_same_time_writes_once(
        self, store: Store, changes: RecordedChanges
    ) -> None:
        """Eight at once, several rounds; one writes, all others get AnsweredBefore."""
        together = Barrier(8)

        def write(writer: int, number: int) -> Written | None:
            together.wait()
            order = StoredOrder(order_id=f"o-{number}", note=str(writer))
            try:
                return store.put(order, provenance=CLERK, once=once(number))
            except AnsweredBefore:
                return None

        with ThreadPoolExecutor(8) as pool:
            for number in range(5):
                results = list(pool.map(write, range(8), [number] * 8))
                assert sum(result is not None for result in results) == 1
                assert store.answered(f"desk-{number}") is not None
        assert len(changes()) == 5

    def test_fifty_writers_on_a_hundred_keys_lose_no_update(
        self, store: Store, changes: RecordedChanges
    ) -> None:
        """With expected versions only: versions are dense, and each increment counts."""
        for number in range(100):
            store.put(StoredOrder(order_id=f"o-{number}", weight=0), provenance=CLERK)
        counted = count_up(stepping(store))
        assert counted.taken.total() == 50 * 20
        check_counts(counted, counters(store, 100))
        found = changes()
        check_chain(found)
        assert len(found) == 100 + 50 * 20
