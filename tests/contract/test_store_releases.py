"""Two releases write at random on one PostgreSQL, each by every way in: no field is erased."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest

from everstate.changes import DomainEvent, EntityType
from everstate.config import Config
from everstate.errors import ImportFailed, InvalidChange
from everstate.http.answers import HttpRequest
from everstate.http.callers import Caller
from everstate.sources.crud.resource import Resource
from everstate.sources.stores.postgres import EntityStore, import_file
from everstate.sources.stores.rows import prepare
from everstate.testing.store_contract import CLERK, Recorded, check_chain
from kit.settings import altered
from release_cases import NEW, OLD, NewOrder, OldOrder, Order, read, write_at_random
from tiers import counted

_CHANGES = """
SELECT key, version, kind, change_id::text, before, after, event, occurred_at
FROM everstate_store.outbox ORDER BY id
"""
_HEADERS = {"everstate-service": "desk", "everstate-identifier": "clerk-7"}


class Written:
    """One entity that each release writes by one of its ways in, chosen at random."""

    def __init__(self, config: Config, folder: Path, seed: int) -> None:
        self._dsn, self._file = config.store_dsn, folder / "order.jsonl"
        self._chosen = random.Random(seed)
        self.stores = {each: EntityStore(config, each, connections_max=1) for each in (OLD, NEW)}
        self.stores[OLD].install()

    def write(self, release: EntityType, order: Order | None) -> None:
        store = self.stores[release]
        if order is None:
            store.delete("o-1", provenance=CLERK)
            return
        way = self._chosen.choice((self._put, self._put_many, self._import, self._request))
        way(store, order)

    def stored(self) -> str | None:
        with psycopg.connect(self._dsn) as connection:
            found = connection.execute('SELECT state FROM everstate_store."order"').fetchone()
        return None if found is None else found[0]

    def changes(self) -> list[Recorded]:
        with psycopg.connect(self._dsn) as connection:
            return [Recorded(*row) for row in connection.execute(_CHANGES.encode()).fetchall()]

    def _put(self, store: EntityStore, order: Order) -> None:
        store.put(order, provenance=CLERK, force=self._chosen.random() < 0.2)

    def _put_many(self, store: EntityStore, order: Order) -> None:
        between = order.model_copy(update={"note": "between"})
        event = DomainEvent(type="Noted")
        store.put_many([between, order], provenance=CLERK, event=event)

    def _import(self, store: EntityStore, order: Order) -> None:
        self._file.write_bytes(store.entity_type.encode(order))
        missing: Any = self._chosen.choice(("refuse", "keep", "reset"))
        try:
            import_file(store, self._file, provenance=CLERK, first_row=1, missing=missing)
        except ImportFailed as error:
            field = error.reason.partition(":")[0]
            raise InvalidChange("order", "o-1", field, error.reason) from error

    def _request(self, store: EntityStore, order: Order) -> None:
        resource = Resource(store, project="shop")
        present = store.get("o-1")
        whole = order.model_dump(mode="json")
        kind = self._chosen.choice(("json", "merge-patch", "json-patch"))
        if present is None or kind == "json":
            resource.replace(_request("PUT", "json", whole), "o-1")
            return
        was = present.entity.model_dump(mode="json")
        changed: Any = {name: value for name, value in whole.items() if value != was[name]}
        if kind == "json-patch":
            changed = [
                {"op": "replace", "path": f"/{name}", "value": value}
                for name, value in changed.items()
            ]
        elif gone := was["places"].keys() - whole["places"].keys():
            changed["places"] |= dict.fromkeys(gone)
        resource.patch(_request("PATCH", f"{kind}+json", changed), "o-1")


def _request(method: str, kind: str, body: Any) -> HttpRequest:
    headers = {"content-type": f"application/{kind}", **_HEADERS}
    encoded = msgspec.json.encode(body)
    return HttpRequest(method, "/v1/order/o-1", headers, Caller("desk", "clerk-7"), encoded)


@pytest.fixture
def config(stack_config: Config, database: str) -> Config:
    return altered(stack_config, store={"dsn": database})


@pytest.fixture
def written(config: Config, tmp_path: Path) -> Iterator[Written]:
    made = Written(config, tmp_path, 1)
    yield made
    for store in made.stores.values():
        store.close()


def test_releases_that_write_at_random_keep_the_fields_of_each_other(written: Written) -> None:
    """Each state follows the one before it (law 3), whichever release wrote it."""
    done, refused = write_at_random(written, 1, turns=counted(150, full=2_000))
    assert done > refused > 0
    check_chain(written.changes())


def test_an_import_knows_a_state_that_another_release_has_written_to_again(
    written: Written, tmp_path: Path
) -> None:
    """A key comes twice; its last state is stored, with a field of the other release."""
    path, old, new = tmp_path / "orders.jsonl", *written.stores.values()
    old.put(OldOrder(order_id="o-1", note="last"), provenance=CLERK)
    new.put(NewOrder(order_id="o-1", note="last", tier="gold"), provenance=CLERK)
    path.write_bytes(
        b"\n".join(OLD.encode(OldOrder(order_id="o-1", note=note)) for note in ("first", "last"))
    )
    imported = import_file(old, path, provenance=CLERK, first_row=1)
    assert (imported.changes, imported.unchanged) == (0, 2)


def test_many_writes_keep_the_fields_of_an_entity_that_another_release_creates_meanwhile(
    written: Written,
) -> None:
    """It is created after the rows were locked, which it was not among, and before the write."""
    old, new = written.stores.values()
    created = NewOrder(order_id="o-1", tier="gold")

    def settle(stored: Mapping[str, str], rows: object) -> dict[int, str]:
        if not stored:
            new.put(created, provenance=CLERK)
        return {}

    now = datetime.now(UTC)
    rows = prepare(OLD, [OldOrder(order_id="o-1", note="x")], provenance=CLERK, occurred_at=now)
    assert old.write_rows(list(rows), now, settle=settle).changes == 1
    assert read(NEW, written.stored() or "") == created.model_copy(update={"note": "x"})
    check_chain(written.changes())
