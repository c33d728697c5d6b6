"""A request that comes again, without servers: Cassandra's store on tables in memory, and races."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast
from uuid import uuid4

import pytest
from cassandra.query import UNSET_VALUE

from everstate.changes import Kind
from everstate.config import Config
from everstate.errors import InvalidBody, VersionConflict
from everstate.http.answers import HttpAnswer
from everstate.sources.crud.resource import Resource
from everstate.sources.stores.cassandra import CassandraStore, Database
from everstate.sources.stores.store import (
    AnsweredBefore,
    Kept,
    Once,
    Store,
    Versioned,
    Write,
    Written,
)
from everstate.testing.crud_contract import RepeatedRequestContract, request
from everstate.testing.store_contract import ORDER, Recorded, RecordedChanges, StoredOrder

NO_ROW = SimpleNamespace(fingerprint=None, answer=None, since=None)
JSON_PATCH = "application/json-patch+json"
COLUMNS = (
    *("key", "version", "change_id", "kind", "schema_version", "occurred_at", "recorded_at"),
    *("provenance", "event", "after", "before", "chained"),
)


class Tables:
    """Answers the statements of a store's writes; only one thread uses it."""

    keyspace = "k"

    def __init__(self) -> None:
        self.settings = Config().cassandra
        self.changes: list[dict[str, Any]] = []
        self.requests: dict[str, SimpleNamespace] = {}

    def execute(self, statement: str, values: Sequence[Any], *, serial: bool = False) -> list[Any]:
        table = statement.partition("k.")[2].split()[0]
        if table == "answered":
            return self._request(statement, values)
        if table == "unpublished":
            return []
        of_key = [each for each in self.changes if each["key"] == values[0]]
        if "ALLOW FILTERING" in statement:
            _, since, change_id = values
            of_key = [c for c in of_key if c["version"] > since and c["change_id"] == change_id]
        return [
            SimpleNamespace(
                **each, head_version=each["version"], head_change_id=each["change_id"], fence=None
            )
            for each in reversed(of_key)
        ]

    def execute_if(self, statements: Sequence[tuple[str, Sequence[Any]]]) -> tuple[bool]:
        (_, (_, _, key, expected, _)), *added = statements
        newest = max((c["version"] for c in self.changes if c["key"] == key), default=None)
        if newest != expected:
            return (False,)
        for _, values in added:
            known = (None if value is UNSET_VALUE else value for value in values)
            self.changes.append(dict(zip(COLUMNS, known, strict=True)))
        return (True,)

    def _request(self, statement: str, values: Sequence[Any]) -> list[Any]:
        if statement.startswith("SELECT"):
            return [self.requests[values[0]]] if values[0] in self.requests else []
        if statement.startswith("INSERT"):
            key, fingerprint, since, _ = values
            if key in self.requests:
                return [Applied(False, self.requests[key])]
            self.requests[key] = SimpleNamespace(fingerprint=fingerprint, answer=None, since=since)
            return [Applied(True, NO_ROW)]
        if statement.startswith("UPDATE"):
            _, fingerprint, answer, key, _ = values
            since = self.requests[key].since
            self.requests[key] = SimpleNamespace(
                fingerprint=fingerprint, answer=answer, since=since
            )
        else:
            self.requests.pop(values[0])
        return [Applied(True, NO_ROW)]


class Applied:
    """The row of a conditional statement."""

    def __init__(self, is_done: bool, row: SimpleNamespace) -> None:
        self._is_done = is_done
        self.fingerprint, self.answer, self.since = row.fingerprint, row.answer, row.since

    def __getitem__(self, place: int) -> bool:
        return self._is_done


class TestCassandraInMemory(RepeatedRequestContract):
    @pytest.fixture
    def tables(self) -> Tables:
        return Tables()

    @pytest.fixture
    def store(self, tables: Tables) -> CassandraStore:
        return CassandraStore(Config(), ORDER, database=cast(Database, tables))

    @pytest.fixture
    def changes(self, tables: Tables) -> RecordedChanges:
        return lambda: list(recorded(tables))


def recorded(tables: Tables) -> Iterator[Recorded]:
    before: dict[str, str | None] = {}
    for each in tables.changes:
        after, key, change_id = each["after"], each["key"], str(each["change_id"])
        occurred_at, kind = each["occurred_at"], each["kind"]
        yield Recorded(
            key, each["version"], kind, change_id, before.get(key), after, None, occurred_at
        )
        before[key] = after


class InMemory:
    """Stores an answer with its write, as PostgreSQL does."""

    entity_type = ORDER

    def __init__(self) -> None:
        self.order, self.version = StoredOrder(order_id="o-1", note="a"), 1
        self.kept: dict[str, Kept] = {}
        self.meanwhile: Callable[[], None] | None = None

    def get(self, key: str) -> Versioned:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        return Versioned(self.order, self.version)

    def answer_of(self, once: Once, key: str) -> Kept | None:
        return self.kept.get(once.id)

    def write(self, write: Write) -> Written:
        assert write.once is not None
        if write.once.id in self.kept:
            raise AnsweredBefore(write.once.id)
        if write.expected_version not in (None, self.version):
            raise VersionConflict("order", "o-1", write.expected_version, self.version)
        self.version, self.order = self.version + 1, cast(StoredOrder, write.entity)
        done = Written(key="o-1", version=self.version, kind=Kind.UPDATED, change_id=uuid4())
        self.kept[write.once.id] = Kept(write.once.fingerprint, write.once.answer(done))
        return done


@pytest.mark.parametrize(
    "operations",
    [
        [
            {"op": "test", "path": "/note", "value": "a"},
            {"op": "replace", "path": "/note", "value": "b"},
        ],
        [{"op": "add", "path": "/lines/-", "value": {"article": "nut", "price": "1.10"}}],
    ],
)
def test_a_patch_that_an_equal_one_overtook_gets_its_answer(operations: list[Any]) -> None:
    """The first commits between the second's question for an answer and its reading."""
    store, first = InMemory(), list[HttpAnswer]()
    resource = Resource(cast(Store, store), project="shop")

    def patch() -> HttpAnswer:
        return resource.patch(request("PATCH", operations, JSON_PATCH), "o-1")

    store.meanwhile = lambda: first.append(patch())
    assert patch() == first[0]
    assert store.version == 2


def test_a_patch_that_cannot_be_applied_is_refused_as_before() -> None:
    operations = [{"op": "test", "path": "/note", "value": "z"}]
    with pytest.raises(InvalidBody, match="tested value"):
        Resource(cast(Store, InMemory()), project="shop").patch(
            request("PATCH", operations, JSON_PATCH), "o-1"
        )
