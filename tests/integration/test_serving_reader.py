"""Reading entities from the views' tables, which are filled by hand here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from typing import Any
from uuid import UUID

import psycopg
import pytest
from pydantic import BaseModel

from everstate.changes import EntityType
from everstate.config import Config, load
from everstate.errors import InvalidQuery, NotFound, Unavailable, UnknownEntity
from everstate.serving import ABSENT, Difference, Reader
from everstate.views.plan import ViewPlan

START = datetime(2026, 1, 1, tzinfo=UTC)
SCHEMA = "everstate_views"


class Guest(BaseModel):
    guest_id: str
    name: str
    nights: int | None = None
    born: date | None = None


@dataclass(frozen=True)
class Hotel:
    name: str = "hotel"
    entities: dict[str, EntityType] = field(
        default_factory=lambda: {"guest": EntityType("guest", Guest, "guest_id")}
    )
    views: dict[str, ViewPlan] = field(default_factory=dict)


TABLES = f"""
CREATE SCHEMA {SCHEMA};
CREATE TABLE {SCHEMA}.guest_latest__v1 (
    key text COLLATE "C" PRIMARY KEY, version bigint, change_id uuid, kind text,
    as_of timestamptz, occurred_at timestamptz, recorded_at timestamptz, generation int,
    partition int, "offset" bigint, provenance jsonb, state jsonb);
CREATE TABLE {SCHEMA}.guest_history__v1 (
    key text COLLATE "C", version bigint, change_id uuid, kind text, as_of timestamptz,
    occurred_at timestamptz, recorded_at timestamptz, schema_version int, generation int,
    partition int, "offset" bigint, provenance jsonb, transaction jsonb, event jsonb, state jsonb,
    PRIMARY KEY (key, version));
CREATE INDEX ON {SCHEMA}.guest_history__v1 (key, as_of, version);
"""

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
            f"INSERT INTO {SCHEMA}.guest_latest__v1 VALUES "
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
            "event) VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)",
            (*shared, json.dumps({"type": "Checked", "data": {"n": version}})),
        )


@pytest.fixture
def config(database: str) -> Config:
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(TABLES)
        fill(connection)
    return load(store={"dsn": database})


@pytest.fixture
def reader(config: Config) -> Iterator[Reader]:
    with Reader(config, Hotel()) as made:
        yield made


def at(hours: float) -> datetime:
    return START + timedelta(hours=hours)


def test_get_now_gives_the_newest_state_with_its_change(reader: Reader) -> None:
    eva = reader.get("guest", "eva")
    assert (eva.version, eva.kind, eva.state["name"]) == (3, "updated", "Eva Maria")
    assert eva.provenance["serviceName"] == "desk"
    assert eva.place.offset == 2
    assert eva.as_of == at(2)


@pytest.mark.parametrize(("hours", "version"), [(1, 1), (1.99, 1), (2, 3), (100, 3)])
def test_get_at_a_time_gives_the_last_version_of_that_moment(
    reader: Reader, hours: float, version: int
) -> None:
    assert reader.get("guest", "eva", at=at(hours)).version == version


def test_get_at_a_version_and_as_recorded_give_that_version(reader: Reader) -> None:
    assert reader.get("guest", "eva", version=2).state["nights"] == 2
    recorded = START + timedelta(days=1, hours=1)
    assert reader.get("guest", "eva", recorded_at=recorded).version == 2


@pytest.mark.parametrize(
    ("key", "question", "said"),
    [
        ("ada", {}, "deleted by desk at version 2.*--version 1"),
        ("tom", {"at": at(5)}, "deleted by desk at version 2"),
        ("tom", {"version": 2}, "deleted by desk at version 2"),
        ("eva", {"version": 9}, "no version 9; it has 1 to 3"),
        ("eva", {"at": at(0.5)}, "did not exist at 2026-01-01T00:30.*first seen 2026-01-01T01:00"),
        ("eve", {}, "never seen. Near it are 'eva' or 'tom'"),
    ],
)
def test_what_is_not_there_is_told_with_what_is_known(
    reader: Reader, key: str, question: dict[str, Any], said: str
) -> None:
    with pytest.raises(NotFound, match=said):
        reader.get("guest", key, **question)


def test_a_question_that_contradicts_itself_is_refused(reader: Reader) -> None:
    with pytest.raises(InvalidQuery, match="one of at"):
        reader.get("guest", "eva", at=at(1), version=1)
    with pytest.raises(InvalidQuery, match="no UTC offset"):
        reader.get("guest", "eva", at=datetime(2026, 1, 1))  # noqa: DTZ001
    with pytest.raises(UnknownEntity, match="guest"):
        reader.get("gust", "eva")


def test_list_now_gives_what_exists_in_key_order(reader: Reader) -> None:
    assert [found.key for found in reader.list("guest")] == ["eva", "tom"]


@pytest.mark.parametrize(
    ("hours", "keys"),
    [
        (0.5, []),
        (1, ["eva", "tom"]),
        (3, ["ada", "eva", "tom"]),
        (4, ["ada", "eva"]),
        (5, ["eva"]),
        (6, ["eva", "tom"]),
    ],
)
def test_list_at_a_time_gives_what_existed_then(
    reader: Reader, hours: float, keys: list[str]
) -> None:
    assert [found.key for found in reader.list("guest", at=at(hours))] == keys


@pytest.mark.parametrize(
    ("where", "keys"),
    [
        (["nights>5"], ["ada", "tom"]),
        (["nights>=9", "name!=Tom"], ["ada"]),
        (["name=Eva Maria"], ["eva"]),
        (["name=Eva"], []),
        (["born=1990-05-01"], ["eva"]),
        (["born<1990-05-01"], []),
        (["born=null"], ["ada", "tom"]),
        (["born!=null"], ["eva"]),
        (["nights!=9"], ["eva", "tom"]),
        (["name='; DROP TABLE x; --"], []),
    ],
)
def test_conditions_hold_for_the_state_at_that_time(
    reader: Reader, where: list[str], keys: list[str]
) -> None:
    assert [found.key for found in reader.list("guest", at=at(3), where=where)] == keys


def test_list_is_ordered_and_bounded(reader: Reader) -> None:
    found = reader.list("guest", at=at(3), order=["-nights"])
    assert [entity.state["nights"] for entity in found] == [10, 9, 3]
    assert len(reader.list("guest", at=at(3), order=["nights"], limit=2)) == 2


def test_history_tells_each_version_and_its_differences(reader: Reader) -> None:
    versions = reader.history("guest", "eva")
    assert [version.version for version in versions] == [1, 2, 3]
    assert versions[2].differences == (
        Difference("name", "Eva", "Eva Maria"),
        Difference("nights", 2, 3),
    )
    assert versions[0].differences[0] == Difference("guest_id", ABSENT, "eva")
    assert versions[1].event == {"type": "Checked", "data": {"n": 2}}


def test_a_bounded_history_keeps_the_newest_and_their_differences(reader: Reader) -> None:
    versions = reader.history("guest", "eva", limit=1)
    assert [version.version for version in versions] == [3]
    assert [difference.path for difference in versions[0].differences] == ["name", "nights"]


def test_history_shows_the_grave_and_what_came_after(reader: Reader) -> None:
    versions = reader.history("guest", "tom")
    assert [version.kind for version in versions] == ["created", "deleted", "updated"]
    assert versions[1].state is None
    with pytest.raises(NotFound, match="never seen"):
        reader.history("guest", "nobody")


def test_one_version_can_be_a_deleting_one(reader: Reader) -> None:
    assert reader.version("guest", "ada").kind == "deleted"
    assert reader.version("guest", "tom", 3).differences[0].before is ABSENT
    with pytest.raises(NotFound, match="it has 1 to 2"):
        reader.version("guest", "ada", 3)


def test_a_reader_goes_on_after_its_connection_broke(reader: Reader, database: str) -> None:
    reader.get("guest", "eva")
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
    assert reader.get("guest", "eva").version == 3


def test_a_database_that_does_not_answer_is_told_as_unavailable(config: Config) -> None:
    away = load(store={"dsn": "postgresql://nobody@127.0.0.1:1/none"})
    with Reader(away, Hotel()) as reader, pytest.raises(Unavailable, match="does not answer"):
        reader.get("guest", "eva")


def test_views_that_were_never_made_are_told(stack: Any) -> None:
    with Reader(stack.config, Hotel()) as reader, pytest.raises(NotFound, match="not there yet"):
        reader.get("guest", "eva")


def test_a_reader_cannot_write(reader: Reader) -> None:
    with pytest.raises(InvalidQuery, match="read-only"):
        reader.connection.rows(b"CREATE TABLE x (i int)")
