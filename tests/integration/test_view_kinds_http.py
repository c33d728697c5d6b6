"""Views of every kind over HTTP: the rows of SQL, on pages of any size, by key, word and time."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from random import Random
from typing import Any, NamedTuple
from urllib.parse import quote

import httpx
import pytest
from pyspark.sql import SparkSession
from rest_cases import client
from test_subscriptions import events
from test_view_rows_http import as_json, differences, got, pages

from dropped_database import own_database
from everstate.app import App
from everstate.config import Config, load
from everstate.log.topics import TopicIdentity
from everstate.serving import Reader
from everstate.serving.connection import close_pools
from everstate.views.control import Control
from everstate.views.versions import registered
from kind_app import kinds_app
from kind_cases import sale_story, shop_story
from kind_oracle import TYPES
from kinds_rig import SCHEMA, START, KeptKinds, plan_changes
from running_stack import RunningStack


class Kinds(NamedTuple):
    """A server over views of every kind, and who keeps them."""

    api: httpx.Client
    kept: KeptKinds
    config: Config
    app: App

    def rows(self, view: str) -> list[dict[str, Any]]:
        """The rows of a view by SQL, as JSON has them."""
        cursor = self.kept.connection.execute(f'SELECT * FROM "{view}"'.encode())
        names = [column.name for column in cursor.description or ()]
        rows = [dict(zip(names, row, strict=True)) for row in cursor]
        for row in rows:
            row.pop("_words", None)
        return as_json(rows)


@pytest.fixture(scope="module")
def kinds_database(stack: RunningStack) -> Iterator[str]:
    """A database of this file: Spark plans its histories once."""
    with own_database(stack.dsn) as made:
        yield made


@pytest.fixture(scope="module")
def kinds(kinds_database: str, spark: SparkSession) -> Iterator[Kinds]:
    random, app = Random(23), kinds_app()
    views = list(app.views.values())
    stories = {"sale": sale_story(random), "shop": shop_story(random)}
    planned = {n: plan_changes(spark, TYPES[n], [stories[n]], views)[0] for n in TYPES}
    with KeptKinds.installed(kinds_database, spark, TYPES, views) as kept:
        kept.reset({name: told.partitions for name, told in stories.items()})
        control = Control(kept.connection, SCHEMA)
        for name, told in stories.items():
            kept.apply(random, told, planned[name])
            control.check_topic_identity(name, name, TopicIdentity("c", name, told.partitions))
        kept.refresh()
        for plan in views:
            if plan.inputs:
                control.add_version(registered(plan, 1, published=True))
        config = load(
            store={"dsn": kinds_database},
            views={"schema_name": SCHEMA},
            api={"port": 0, "page_max": 500},
        )
        with client(config, app) as api:
            yield Kinds(api, kept, config, app)
        close_pools()


def test_every_kind_has_the_rows_of_sql_on_pages_and_by_key(kinds: Kinds) -> None:
    listed = {each["name"]: each for each in got(kinds.api, "/views/v1")["items"]}
    asked = 0
    for name in kinds.app.views:
        expected, view = kinds.rows(name), listed[name]
        for limit in (7, 500):
            found = pages(kinds.api, name, limit=limit)
            assert differences(expected, found) == [], (name, limit)
            if kinds.app.views[name].is_ordered:
                assert found == expected, f"{name}: its own order"
        assert view["state"] == "live"
        if expected:
            assert [each["name"] for each in view["columns"]] == list(expected[0])
        for row in expected[:3] if view["key"] else []:
            key = [row[column] for column in view["key"]]
            if all(part not in (None, "") for part in key):
                path = "/".join(quote(_text(part), safe="") for part in key)
                assert got(kinds.api, f"/views/v1/{name}/rows/{path}") == row, name
                asked += 1
    assert asked > 30
    keyless = {name for name, view in listed.items() if view["key"] is None}
    assert keyless == {"by_week", "stays"}, "it shows the end of a window, which may be null"


def _text(part: Any) -> str:
    return ("true" if part else "false") if isinstance(part, bool) else str(part)


def test_every_kind_can_be_followed(kinds: Kinds) -> None:
    for name in kinds.app.views:
        with kinds.api.stream("GET", f"/views/v1/{name}/stream") as answer:
            first = next(events(answer))
        assert (first[0], first[2]["reason"]) == ("snapshot", "began"), name
        assert differences(kinds.rows(name), first[2]["rows"]) == [], name


def test_rows_are_read_while_the_log_is_away_and_no_lag_is_told(kinds: Kinds) -> None:
    answer = kinds.api.get("/views/v1/extremes")
    assert answer.status_code == 200
    assert answer.headers["everstate-token"]
    assert not {"everstate-lag-changes", "everstate-lag-seconds"} & set(answer.headers)
    listed = {each["name"]: each for each in got(kinds.api, "/views/v1")["items"]}
    assert (listed["extremes"]["lag_changes"], listed["with_shop"]["entities"]) == (
        None,
        ["sale", "shop"],
    )


@pytest.mark.full
def test_every_column_can_be_sorted_and_paged(kinds: Kinds) -> None:
    """Each order is that of the rows at once, whatever the type, with nulls at the end."""
    listed = got(kinds.api, "/views/v1")["items"]
    for view in listed:
        for column in view["columns"]:
            if column["type"] in ("jsonb", "text"):
                continue
            for order in (column["name"], f"-{column['name']}"):
                whole = pages(kinds.api, view["name"], order=order, limit=500)
                paged = pages(kinds.api, view["name"], order=order, limit=13)
                assert paged == whole, (view["name"], order)
                values = [row[column["name"]] for row in whole]
                there = [value for value in values if value is not None]
                assert values[: len(there)] == there or column["type"].startswith("double")


def test_a_search_finds_what_the_reader_finds(kinds: Kinds) -> None:
    words = "north or south"
    with Reader(kinds.config, kinds.app) as reader:
        wanted = reader.search("found", words, limit=30)
    assert wanted
    found = got(kinds.api, "/views/v1/found", q=words, limit=30)["items"]
    told = [(each.key, each.rank, each.headline) for each in wanted]
    assert [(row["_key"], row["_rank"], row["_headline"]) for row in found] == told
    key = wanted[0].key
    (only,) = got(kinds.api, "/views/v1/found", q=words, where=f"_key={key}")["items"]
    assert only["_key"] == key
    assert got(kinds.api, "/views/v1/found", q='"')["items"] == []
    refused = got(kinds.api, "/views/v1/found", 422, q=words, order="_key")
    assert "its own order" in refused["detail"]


def test_a_timeline_is_read_at_a_time(kinds: Kinds) -> None:
    """What is valid at a time is what the entities had then."""
    times = [START + timedelta(hours=hours) for hours in range(0, 30, 3)]
    seen = 0
    with Reader(kinds.config, kinds.app) as reader:
        for at in times:
            then = reader.list("sale", at=at, limit=None)
            rows = pages(kinds.api, "shops_over_time", at=at.isoformat(), limit=500)
            assert {row["key"]: row["shop"] for row in rows} == {
                each.key: each.state["shop"] for each in then
            }
            seen += len(rows)
    assert seen > 10
    assert got(kinds.api, "/views/v1/shops_over_time", 400, at="yesterday")
