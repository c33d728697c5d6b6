"""A capture that cannot go on stops alone: the others of the clean role go on."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import closing

import pytest
from pydantic import BaseModel

from capture_cases import eventually
from clean_role import newest, running
from everstate.app import App
from everstate.config import Config
from everstate.declarations.captures import Table
from everstate.log.producer import Producer
from everstate.log.topics import TopicNames, Topics
from everstate.parts import Part, read_states
from everstate.pipeline.clean import Cleaner
from everstate.sources.cdc.cleaning import cleaning_of
from everstate.sources.cdc.placeholders import DEFAULT_SETTING
from kit.settings import cleaning
from log_cases import forget

HELD_MAX = 3
pytestmark = cleaning(
    log={"partitions": 1}, pipeline={"held_max": HELD_MAX}, topics=["item", "thing"]
)


class Item(BaseModel):
    """A row of either capture."""

    id: int
    note: str


@pytest.fixture
def app(config: Config) -> App:
    """Two captures of somebody else's connectors."""
    names = TopicNames(config.log.prefix)
    with Topics(config) as topics:
        raw = [names.raw("shop", "items"), names.raw("stock", "things")]
        topics.ensure_raw(raw, partitions=1, settings={})
    found = App("two")
    for entity, capture in (("item", "shop"), ("thing", "stock")):
        found.entity(entity, key="id", source="capture")(Item)
        found.capture(
            capture,
            kind="postgresql",
            tables={f"public.{entity}s": Table(entity=entity)},
            transactions=False,
        )
    return found


def send(config: Config, topic: str, *keys: int, op: str = "c", note: str = "n") -> None:
    """One row of each key, as a connector writes it."""
    with Producer(config) as producer:
        for key in keys:
            source = {"connector": "postgresql", "lsn": 100 + key, "txId": key}
            value = {"op": op, "before": None, "after": {"id": key, "note": note}, "source": source}
            body = json.dumps(value).encode()
            producer.send_raw(topic, json.dumps({"id": key}).encode(), body)


def lose_raw_records(config: Config) -> None:
    """Rows that were never cleaned are gone."""
    raw = TopicNames(config.log.prefix).raw("shop", "items")
    send(config, raw, 11, 12)
    forget(config, raw)


def lose_states(config: Config) -> None:
    """Neither the newest states nor the whole history are in the log, nor are they here."""
    names = TopicNames(config.log.prefix)
    with Topics(config) as topics:
        topics.delete([names.state("item")])
    forget(config, names.changes("item"))


def hold_too_many(config: Config) -> None:
    """More rows wait for what they do not tell than may wait."""
    raw = TopicNames(config.log.prefix).raw("shop", "items")
    send(config, raw, *range(20, 21 + HELD_MAX), op="u", note=DEFAULT_SETTING)


def part_of(config: Config, name: str) -> Part | None:
    """What the role's state file says of one capture."""
    found = [role.parts.get(name) for role in read_states(config.project.data_dir)]
    return found[0] if found else None


def state_of(config: Config, name: str) -> str | None:
    part = part_of(config, name)
    return None if part is None else part.state


@pytest.mark.parametrize(
    ("lose", "reason"),
    [
        (lose_raw_records, "what was between is gone"),
        (lose_states, "no longer begins at its beginning"),
        (hold_too_many, "wait"),
    ],
)
def test_a_capture_that_cannot_go_on_stops_alone_and_says_why(
    config: Config, app: App, lose: Callable[[Config], None], reason: str
) -> None:
    names = TopicNames(config.log.prefix)
    send(config, names.raw("shop", "items"), 1, 2)
    with closing(Cleaner(config, cleaning_of(config, app, "shop"))) as cleaner:
        cleaner.catch_up()
    lose(config)

    with running(config, app) as role:
        assert eventually(
            lambda: (part := part_of(config, "clean-shop")) is not None and part.state == "waiting",
            60,
        ), part_of(config, "clean-shop")
        failed = part_of(config, "clean-shop")
        assert failed is not None
        assert reason in (failed.reason or "")
        send(config, names.raw("stock", "things"), 5, 6)
        assert eventually(lambda: newest(config, "thing").keys() == {"5", "6"}, 60)
        works = part_of(config, "clean-stock")
        assert works is not None
        assert works.state == "running"
        assert role.is_alive()


def test_a_capture_whose_record_the_broker_refuses_halts_alone_and_does_not_meet_it_for_ever(
    config: Config, app: App
) -> None:
    """Somebody lowers the topic's limit; a capture raises it again when it starts again."""
    names = TopicNames(config.log.prefix)
    send(config, names.raw("shop", "items"), 1)
    with running(config, app), Topics(config) as topics:
        assert eventually(lambda: newest(config, "item").keys() == {"1"}, 60)
        topics.set_config(names.changes("item"), {"max.message.bytes": "20000"})
        send(config, names.raw("shop", "items"), 2, note=random.Random(2).randbytes(40_000).hex())
        send(config, names.raw("shop", "items"), 3)
        assert eventually(lambda: state_of(config, "clean-shop") == "waiting", 60)
        failed = part_of(config, "clean-shop")
        assert failed is not None
        assert "the record is larger than Kafka accepts here" in (failed.reason or "")
        send(config, names.raw("stock", "things"), 5)
        assert eventually(lambda: newest(config, "thing").keys() == {"5"}, 60)
        assert eventually(lambda: newest(config, "item").keys() == {"1", "2", "3"}, 60)
        assert eventually(lambda: state_of(config, "clean-shop") == "running", 60)
