"""Rows of unknown state ask for themselves: a capture that began late, and nobody who helps it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from datetime import date
from typing import Any

import pytest
from pydantic import BaseModel

from capture_cases import CONNECTED, LONG, UNAVAILABLE, PostgresSource, eventually, removed
from clean_role import changelog, newest, running
from everstate.app import App
from everstate.config import Config
from everstate.declarations.captures import Table
from everstate.log.topics import TopicNames, Topics
from everstate.sources.cdc.capturing import Capturing
from everstate.sources.cdc.holding import read_held
from everstate.testing.log_checker import read_topic

pytestmark = CONNECTED

NOTES, READINGS = 40, 10


class Note(BaseModel):
    """What was said."""

    id: int
    title: str
    body: str


class Reading(BaseModel):
    """What a sensor said of a day; its key is computed of both."""

    reading_key: str
    day: date
    sensor: str
    level: int
    remark: str


def app_of(dsn: str) -> App:
    app = App("shop")
    app.entity("note", key="id", source="capture")(Note)
    app.entity("reading", key="reading_key", source="capture")(Reading)
    readings = Table(
        entity="reading",
        computed={"reading_key": lambda state: f"{state['sensor']}-{state['day']}"},
    )
    tables = {"public.notes": Table(entity="note"), "public.readings": readings}
    app.capture("shop", kind="postgresql", dsn=dsn, tables=tables)
    return app


@pytest.fixture
def source(database: str) -> PostgresSource:
    """Rows that were there before the capture, with columns that are kept outside the row."""
    found = PostgresSource(database)
    found.run(
        "CREATE TABLE notes (id int PRIMARY KEY, title text NOT NULL, body text NOT NULL)",
        "CREATE TABLE readings (day date, sensor text, level int NOT NULL, remark text NOT NULL, "
        "PRIMARY KEY (day, sensor))",
        "ALTER TABLE notes ALTER body SET STORAGE EXTERNAL",
        "ALTER TABLE readings ALTER remark SET STORAGE EXTERNAL",
        f"INSERT INTO notes SELECT n, 'old', repeat(n::text, {LONG}) "
        f"FROM generate_series(1, {NOTES}) n",
        f"INSERT INTO readings SELECT date '2026-01-01' + n, 'it''s ' || n, 0, "
        f"repeat('x', {LONG}) FROM generate_series(1, {READINGS}) n",
    )
    return found


@pytest.fixture
def capturing(config: Config, source: PostgresSource) -> Iterator[Capturing]:
    found = Capturing(config, app_of(source.dsn).capture_of("shop"), local=True)
    with removed(found):
        yield found


def rows(source: PostgresSource) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tables as they are: the oracle."""
    notes = {
        str(number): {"id": number, "title": title, "body": body}
        for number, title, body in source.rows("SELECT id, title, body FROM notes")
    }
    readings = {
        f"{sensor}-{day}": {
            "reading_key": f"{sensor}-{day}", "day": str(day), "sensor": sensor,
            "level": level, "remark": remark,
        }
        for day, sensor, level, remark in source.rows("SELECT * FROM readings")
    }  # fmt: skip
    return notes, readings


def broken_laws(found: list[dict[str, Any]]) -> list[str]:
    broken, versions, states = [], Counter[str](), dict[str, Any]()
    ids = Counter(change["id"] for change in found)
    broken += [f"id {each} is there {count} times" for each, count in ids.items() if count > 1]
    for change in found:
        key, version = change["key"], change["version"]
        versions[key] += 1
        if version != versions[key]:
            broken.append(f"{key} v{version}: expected version {versions[key]}")
        if change["originalEntityState"] != states.get(key):
            broken.append(f"{key} v{version}: its original is not the state before")
        states[key] = change["currentEntityState"]
    return broken


@pytest.mark.timeout(300)
def test_rows_of_unknown_state_become_whole_with_nobody_doing_anything(
    config: Config, source: PostgresSource, capturing: Capturing
) -> None:
    app = app_of(source.dsn)
    with Topics(config) as topics:
        topics.ensure(app.entities)
    capturing.add(snapshot=False)
    with running(config, app):
        source.run("UPDATE notes SET title = 'new'", "UPDATE readings SET level = 1")
        source.run("UPDATE notes SET title = 'newer' WHERE id <= 10")
        source.run("DELETE FROM notes WHERE id = 11", "UPDATE notes SET id = 1012 WHERE id = 12")
        notes, readings = rows(source)

        def is_there() -> bool:
            return (newest(config, "note"), newest(config, "reading")) == (notes, readings)

        assert eventually(is_there, 60, every_s=1.0), read_held(config, "shop")
        assert eventually(lambda: read_held(config, "shop") == [], 10)
        source.run("UPDATE notes SET title = title || '!'", "UPDATE readings SET level = 2")
        notes, readings = rows(source)
        assert eventually(is_there, 30, every_s=1.0)
    assert read_held(config, "shop") == []
    topic = TopicNames(config.log.prefix).raw_prefix("shop")
    raw = b" ".join(record.value or b"" for record in read_topic(config, topic)).decode()
    assert raw.count(json.dumps(UNAVAILABLE)) > NOTES, "the source did not tell them whole"
    for entity in ("note", "reading"):
        found = changelog(config, entity)
        assert broken_laws(found) == []
        assert json.dumps(UNAVAILABLE)[1:-1] not in json.dumps(found), "nothing is invented"
