"""A hotel with views filled by hand, a log and dead letters, for the tests of the console."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import psycopg
from pydantic import BaseModel

from everstate.app import App
from everstate.changes import ChangeCodec
from everstate.changes.tokens import Spot
from everstate.config import Config
from everstate.handling.tables import WAITS, HandlerTables, Item
from everstate.handling.worker import begin
from everstate.log.dead_letters import place_headers
from everstate.log.producer import Producer
from everstate.log.record import OutRecord
from everstate.log.topics import TopicNames, Topics
from everstate.views.control import BUILDING
from everstate.views.versions import registered
from kit.changes import change_of
from kit.view_orders import TELLER
from kit.view_postgres import install_entity

START = datetime(2026, 1, 1, tzinfo=UTC)
SCHEMA = "everstate_views"
SCRIPT = "<script>alert(1)</script>"
ODD_KEYS = (SCRIPT, "a/b c?d#e%2F", "žluťoučký/кінь", "..", ".", 'say "hi" & go', "tab\there")


class Address(BaseModel):
    city: str
    street: str | None = None


class Guest(BaseModel):
    """Somebody who stays with us."""

    guest_id: str
    name: str
    nights: int = 0
    address: Address | None = None


def hotel(source: Any = "capture") -> App:
    """The app: guests of another system, and one view of them in SQL."""
    app = App("hotel")
    app.entity("guest", key="guest_id", source=source)(Guest)
    app.view("by_city", sql="SELECT name, count(*) AS guests FROM guest GROUP BY name")
    return app


app = hotel()


def greeting_hotel() -> App:
    """The app with a handler, whose calls fail (:func:`fill_handler`)."""
    made = hotel()
    made.handler("guest", group="mail", name="greet", retries=0)(lambda change, context: None)
    return made


def guest(key: str, name: str, nights: int = 0, **address: Any) -> dict[str, Any]:
    """A guest's state."""
    made = Guest(
        guest_id=key, name=name, nights=nights, address=Address(**address) if address else None
    )
    return made.model_dump(mode="json")


Histories = Mapping[str, Sequence[tuple[float, dict[str, Any] | None]]]
"""Key → the hours after START at which each of its versions holds, and its state."""

HISTORIES: Histories = {
    "eva": [
        (1, guest("eva", "Eva", city="Wien", street="Ring 1")),
        (2, guest("eva", "Eva", 2, city="Wien", street="Ring 1")),
        (3, guest("eva", "Eva Maria", 2, city="Graz", street="Ring 1")),
        (4, guest("eva", "Eva Maria", 3, city="Graz", street="Ring 1")),
    ],
    "tom": [(1, guest("tom", "Tom", 10)), (4, None)],
    "ada": [(3, guest("ada", "Ada", 9)), (5, None), (6, guest("ada", "Ada", 1))],
    **{key: [(1, guest(key, SCRIPT)), (2, guest(key, "<b>bold</b>"))] for key in ODD_KEYS},
}


def fill(connection: psycopg.Connection[Any], histories: Histories = HISTORIES) -> None:
    """Make the views of guests, and put every version of every guest into them."""
    control = install_entity(connection, SCHEMA, hotel().entities["guest"], {0: 3})
    control.add_version(registered(hotel().views["by_city"], 1, status=BUILDING))
    progress = {"doing": "reading the archive", "share": 0.4, "rate": 1200.0, "left_s": 9.0}
    control.record("by_city", 1, progress=progress)
    offset = 0
    for key, versions in histories.items():
        for version, (hours, state) in enumerate(versions, 1):
            told = {
                "apiVersion": "v1",
                "serviceName": "desk",
                "identifier": f"clerk-{version}",
                "actor": SCRIPT if key in ODD_KEYS else "Frau Huber",
                "reason": None if version == 1 else "guest asked",
                "correlationId": f"visit-{version}",
            }
            at: Any = {"is_newest": version == len(versions), "offset": offset, "recorded": hours}
            insert_version(connection, key, version, hours, state, provenance=told, **at)
            offset += 1


def insert_version(
    connection: psycopg.Connection[Any],
    key: str,
    version: int,
    hours: float,
    state: Mapping[str, Any] | None,
    *,
    is_newest: bool,
    offset: int,
    recorded: float,
    provenance: Mapping[str, Any],
    **history: Any,
) -> None:
    """Put one version into the views of guests; ``recorded``: hours after the day of START."""
    row = {
        "key": key,
        "version": version,
        "change_id": UUID(int=offset),
        "kind": "deleted" if state is None else "created" if version == 1 else "updated",
        "as_of": START + timedelta(hours=hours),
        "occurred_at": START + timedelta(hours=hours),
        "recorded_at": START + timedelta(days=1, hours=recorded),
        "generation": 1,
        "partition": 0,
        "offset": offset,
        "provenance": json.dumps(provenance),
        "state": None if state is None else json.dumps(state),
    }
    _insert(connection, "guest_history__v1", {**row, "schema_version": 1, **history})
    if is_newest:
        _insert(connection, "guest_latest__v1", row)


def _insert(connection: psycopg.Connection[Any], table: str, row: Mapping[str, Any]) -> None:
    names = ", ".join(f'"{name}"' for name in row)
    query = f"INSERT INTO {SCHEMA}.{table} ({names}) VALUES ({', '.join(['%s'] * len(row))})"
    connection.execute(query.encode(), list(row.values()))


def fill_log(config: Config, age_s: int = 0) -> None:
    """Five changes in the log, of that age, and dead letters of two reasons."""
    names, written_ms = TopicNames(config.log.prefix), int(time.time() - age_s) * 1000
    with Topics(config) as topics:
        topics.ensure(["guest"])
    with Producer(config) as producer:
        for number in range(5):
            value = json.dumps({"number": number}).encode()
            topic = names.changes("guest")
            producer.send(OutRecord(topic, b"eva", value, partition=0, timestamp_ms=written_ms))
        for number, value in enumerate((SCRIPT.encode(), b"\xff\xfe\x00", b'{"guest_id": 1}')):
            where = place_headers(b"name: Field <b>required</b>", names.changes("guest"), 0, number)
            producer.send(OutRecord(names.dead("guest"), b"g1", value, where, partition=0))
        where = place_headers(b"no JSON", names.raw("shop", "t"), 0, 7)
        producer.send(OutRecord(names.dead_unknown, None, b"no", where, partition=0))
        producer.flush()


def fill_handler(config: Config) -> None:
    """Two changes whose calls failed, and one behind them."""
    app = greeting_hotel()
    handler = app.handlers["mail.greet"]
    tables, codec = HandlerTables(config, handler), ChangeCodec(handler.entity_type)
    with Topics(config) as topics:
        topics.ensure(["guest"])
    tables.place(*begin(config, app, handler, "beginning"))
    with tables.connected() as connection:
        mine = tables.take(connection, 0)
        for at, (key, version, reason) in enumerate(
            [("eva", 3, f"ValueError: {SCRIPT}"), ("eva", 4, WAITS), (SCRIPT, 1, "no address")], 1
        ):
            state = Guest(guest_id=key, name=SCRIPT)
            times = {"occurred_at": START, "recorded_at": START}
            made = change_of("guest", key, version, state, who=TELLER, **times)
            item = Item(key, codec.encode(made)[1], Spot(at), reason=reason)
            tables.settle(connection, mine, [item])
