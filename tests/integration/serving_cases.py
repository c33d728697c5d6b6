"""A small hotel whose views are filled by hand, for the tests of the ways out."""

from __future__ import annotations

import json
from collections import Counter
from datetime import date
from typing import Any

import psycopg
from pydantic import BaseModel

from console_cases import SCHEMA, insert_version
from everstate.app import App
from kit.view_postgres import install_entity

HOTEL = App("hotel")


@HOTEL.entity("guest", key="guest_id")
class Guest(BaseModel):
    guest_id: str
    name: str
    nights: int | None = None
    born: date | None = None


PROVENANCE = {"apiVersion": "v1", "serviceName": "desk", "identifier": "clerk"}


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
    left, versions = Counter(key for key, _, _ in HISTORIES), Counter[str]()
    for offset, (key, hours, state) in enumerate(HISTORIES):
        version = versions[key] = versions[key] + 1
        insert_version(
            connection,
            key,
            version,
            hours,
            state,
            is_newest=version == left[key],
            offset=offset,
            recorded=offset,
            provenance=PROVENANCE,
            event=json.dumps({"type": "Checked", "data": {"n": version}}),
        )
