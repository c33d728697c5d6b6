"""A small hotel whose views are filled by hand, for the tests of the ways out."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, timedelta
from typing import Any
from uuid import UUID

import psycopg
from pydantic import BaseModel

from everstate.app import App
from kit.view_postgres import install_entity

START = datetime(2026, 1, 1, tzinfo=UTC)
SCHEMA = "everstate_views"


HOTEL = App("hotel")


@HOTEL.entity("guest", key="guest_id")
class Guest(BaseModel):
    guest_id: str
    name: str
    nights: int | None = None
    born: date | None = None


PROVENANCE = json.dumps({"apiVersion": "v1", "serviceName": "desk", "identifier": "clerk"})


def guest(key: str, name: str, **fields: Any) -> dict[str, Any]:
    state = Guest(guest_id=key, name=name, **fields).model_dump(mode="json")
    return dict(state)


# key, hours after START at which each version holds, its state
HISTORIES: list[tuple[str, float, dict[str, Any] | None]] = [
    ("eva", 1, guest("eva", "Eva")),
    ("eva", 2, guest("eva", "Eva", nights=2, born=date(1990, 5, 1))),
    ("eva", 2, guest("eva", "Eva Maria", nights=3, born=date(1990, 5, 1))),
    ("tom", 1, guest("tom", "Tom", nights=10)),
    ("tom", 4, None),
    ("tom", 6, guest("tom", "Tom", nights=1)),
    ("ada", 3, guest("ada", "Ada", nights=9)),
    ("ada", 5, None),
]


def fill(connection: psycopg.Connection[Any]) -> None:
    """Make the tables of the views and put every version of every guest into them."""
    install_entity(connection, SCHEMA, HOTEL.entities["guest"], {0: 8})
    versions: dict[str, int] = {}
    for offset, (key, hours, state) in enumerate(HISTORIES):
        version = versions[key] = versions.get(key, 0) + 1
        kind = "deleted" if state is None else "created" if version == 1 else "updated"
        moment = START + timedelta(hours=hours)
        shared = (
            key,
            version,
            UUID(int=offset),
            kind,
            moment,
            moment,
            START + timedelta(days=1, hours=offset),
            1,
            0,
            offset,
            PROVENANCE,
            None if state is None else json.dumps(state),
        )
        connection.execute(
            f"INSERT INTO {SCHEMA}.guest_latest__v1 (key, version, change_id, kind, as_of, "
            'occurred_at, recorded_at, generation, partition, "offset", provenance, state) VALUES '
            "(%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s) ON CONFLICT (key) DO UPDATE SET "
            "(version, change_id, kind, as_of, occurred_at, recorded_at, generation, partition, "
            '"offset", provenance, state) = ROW(excluded.version, excluded.change_id, '
            "excluded.kind, excluded.as_of, excluded.occurred_at, excluded.recorded_at, "
            'excluded.generation, excluded.partition, excluded."offset", excluded.provenance, '
            "excluded.state)",
            shared,
        )
        connection.execute(
            f"INSERT INTO {SCHEMA}.guest_history__v1 (key, version, change_id, kind, as_of, "
            'occurred_at, recorded_at, generation, partition, "offset", provenance, state, '
            "schema_version, event) "
            "VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, 1, %s)",
            (*shared, json.dumps({"type": "Checked", "data": {"n": version}})),
        )
