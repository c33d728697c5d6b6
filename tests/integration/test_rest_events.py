"""Events over REST: in the log and the log only, once by their id, views made from them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import UUID, uuid5

import httpx
import psycopg
import pytest
from psycopg import sql
from pyspark.sql import SparkSession
from rest_cases import DESK, client, hotel

from everstate.app import App
from everstate.changes import Kind, Provenance
from everstate.config import Config
from everstate.errors import EventConflict, Unavailable
from everstate.log.positions import Offsets
from everstate.log.record import Record
from everstate.log.topics import TopicNames, Topics
from everstate.pipeline.archiving.archiver import Archiver
from everstate.pipeline.keeping.keep import Keeper
from everstate.pipeline.proof.verify import verify_views
from everstate.sources.crud.events import EventLog
from everstate.testing.log_checker import read_topic
from kit.settings import altered

pytestmark = pytest.mark.settings(archive={"trigger_s": 1})

SPACE = UUID("0199c8a2-7c11-7d3e-9a55-0d8f2f6b1c77")


def event(number: int, kind: str = "opened") -> dict[str, Any]:
    return {
        "event_id": str(uuid5(SPACE, str(number))),
        "session_id": "s1",
        "type": kind,
        "occurred_at": "2026-01-02T03:04:05+01:00",
        "page": None,
    }


def events_only() -> App:
    """The hotel's events alone, with their view."""
    whole = hotel()
    app = App("events")
    app.entity("event", key="event_id", source="log")(whole.entity_type("event").model)
    app.view("events_by_type", sql=whole.views["events_by_type"].sql)
    return app


@pytest.fixture
def api(config: Config) -> Iterator[httpx.Client]:
    with client(config, hotel()) as made:
        yield made


def written(config: Config) -> list[Record]:
    return read_topic(config, TopicNames(config.log.prefix).changes("event"))


def test_an_event_is_a_change_in_the_log_and_no_row_anywhere(
    api: httpx.Client, config: Config
) -> None:
    made = api.post("/v1/event", json=event(1), headers={**DESK, "Everstate-Actor": "Eva"})
    assert (made.status_code, made.headers["ETag"]) == (201, '"1"')
    assert made.headers["Location"] == f"/v1/event/{event(1)['event_id']}"
    (record,) = written(config)
    change = json.loads(record.value or b"")
    assert record.key == event(1)["event_id"].encode()
    assert (change["kind"], change["version"], change["originalEntityState"]) == ("event", 1, None)
    assert change["occurredAt"] == "2026-01-02T03:04:05+01:00"
    assert change["provenance"]["actor"] == "Eva"
    assert json.loads(made.content) == change["currentEntityState"]
    with psycopg.connect(config.store_dsn) as connection:
        tables = connection.execute(
            "SELECT count(*) FROM everstate_store.outbox "
            "UNION ALL SELECT count(*) FROM pg_tables WHERE tablename = 'event'"
        ).fetchall()
    assert tables == [(0,), (0,)]
    for method in ("PUT", "PATCH", "DELETE"):
        refused = api.request(method, made.headers["Location"], json=event(1), headers=DESK)
        assert (refused.status_code, refused.headers["Allow"]) == (405, "GET, HEAD")


def test_the_same_event_again_is_one_record_and_one_answer(
    api: httpx.Client, config: Config
) -> None:
    def send(_: int) -> tuple[int, bytes]:
        answer = api.post("/v1/event", json=event(1), headers=DESK)
        return answer.status_code, answer.content

    with ThreadPoolExecutor(8) as pool:
        answers = set(pool.map(send, range(24)))
    assert len(answers) == 1
    assert len(written(config)) == 1
    other = api.post("/v1/event", json=event(1, "closed"), headers=DESK)
    assert (other.status_code, len(written(config))) == (409, 1)


def test_what_is_no_event_is_refused(api: httpx.Client, config: Config) -> None:
    wrong: list[dict[str, Any]] = [
        {"event_id": None},
        {"event_id": "no-uuid"},
        {"occurred_at": "2026-01-02T03:04:05"},
        {"type": "x" * 201},
    ]
    for change in wrong:
        refused = api.post("/v1/event", json={**event(1), **change}, headers=DESK)
        assert refused.status_code == 422, change
    assert api.post("/v1/event", json=event(1)).status_code == 422
    assert written(config) == []


def test_C13_views_count_an_event_once_however_often_it_was_written(
    config: Config, spark: SparkSession
) -> None:
    """A second process does not remember the first one's events: the gate does."""
    app = events_only()
    keeper = Keeper(spark, config, app)
    keeper.prepare()
    for round_ in range(2):
        with client(config, app) as api:
            for number in range(5):
                made = api.post("/v1/event", json=event(number), headers=DESK)
                assert made.status_code == 201
            if round_:
                # The same id with other content: the log takes it, the views do not.
                assert api.post("/v1/event", json=event(9, "a"), headers=DESK).status_code == 201
    with client(config, app) as api:
        assert api.post("/v1/event", json=event(9, "b"), headers=DESK).status_code == 201
        assert len(written(config)) == 12
        totals = {"applied": 0, "duplicate": 0, "dead": 0}
        while (batch := keeper.step()) is not None:
            for name in totals:
                totals[name] += getattr(batch, name)
        assert totals == {"applied": 6, "duplicate": 5, "dead": 1}
        found = api.get(f"/v1/event/{event(3)['event_id']}")
        assert (found.status_code, found.headers["ETag"]) == (200, '"1"')
        assert found.json()["type"] == "opened"
        assert api.get("/v1/event/none").status_code == 404
    with psycopg.connect(config.views_dsn) as connection:
        schema = sql.Identifier(config.views.schema_name)
        rows = connection.execute(
            sql.SQL("SELECT type, times FROM {}.events_by_type ORDER BY 1").format(schema)
        ).fetchall()
        kinds = connection.execute(
            sql.SQL("SELECT DISTINCT kind, version FROM {}.event_history").format(schema)
        ).fetchall()
    assert rows == [("a", 1), ("opened", 5)]
    assert kinds == [("event", 1)]
    with Offsets(config) as offsets, Topics(config) as topics:
        (entity_type,) = app.entities.values()
        Archiver(spark, config, entity_type, offsets=offsets, topics=topics).catch_up()
    reports = {report.name: report for report in verify_views(spark, config, app)}
    keeper.close()
    assert {name: report.holds for name, report in reports.items()} == {
        "events_by_type": True,
        "event_latest": True,
        "event_history": True,
    }


def test_a_log_that_is_away_is_told_and_the_event_can_be_sent_again(config: Config) -> None:
    """Nothing is remembered of an event whose outcome is unknown."""
    app = hotel()
    away = altered(config, api={"event_timeout_s": 0.001})
    model = app.entity_type("event").validate(event(1))
    who = Provenance(api_version="v1", service_name="t", identifier="t")
    with EventLog(away, app.entities_from("log")) as log:
        with pytest.raises(Unavailable, match="is not known"):
            log.append("event", model, provenance=who, occurred_at=None).result(10)
        other = app.entity_type("event").validate(event(1, "closed"))
        # Not a conflict: the first one may never have come.
        log.append("event", other, provenance=who, occurred_at=None).exception(10)
    closed = EventLog(config, app.entities_from("log"))
    with pytest.raises(Unavailable):
        closed.append("event", model, provenance=who, occurred_at=None)


def test_events_are_sent_many_at_a_time(config: Config) -> None:
    app = hotel()
    who = Provenance(api_version="v1", service_name="t", identifier="t")
    events = [app.entity_type("event").validate(event(n)) for n in range(2_000)]
    with EventLog(config, app.entities_from("log")) as log:
        done, unanswered = [], 0
        for each in events:
            done.append(log.append("event", each, provenance=who, occurred_at=None))
            unanswered = max(unanswered, sum(not future.done() for future in done[-500:]))
        for future in done:
            future.result(60)
        assert unanswered > 50, "each event waited for the one before"
        with pytest.raises(EventConflict):
            log.append(
                "event",
                app.entity_type("event").validate(event(0, "x")),
                provenance=who,
                occurred_at=None,
            )
    records = written(config)
    assert len(records) == len({record.key for record in records}) == 2_000
    assert {json.loads(record.value or b"")["kind"] for record in records} == {Kind.EVENT}
