"""However many keys the log refuses, each blocks only itself and what is behind it (C4)."""

from __future__ import annotations

import random
import time
from typing import Any

import psycopg
import pytest

from everstate.config import Config
from everstate.log.publisher import OncePublisher
from everstate.log.topics import TopicNames, Topics
from everstate.sources.outbox import Relay, parked, read_status
from everstate.sources.outbox.pending import read_page
from everstate.testing.log_checker import check_log, read_topic
from outbox_service import CLICK, PURCHASE, click, problems, set_total

pytestmark = pytest.mark.settings(
    topics=["purchase", "click"], store={"relay_poll_ms": 5, "relay_batch_rows": 40}
)

MANY = 110
TYPES = (PURCHASE, CLICK)
PATIENCE_S = 400.0
Service = psycopg.Connection[Any]


def limit(config: Config, value: str) -> str:
    topic = TopicNames(config.log.prefix).changes("purchase")
    with Topics(config) as topics:
        before = topics.config(topic)["max.message.bytes"]
        topics.set_config(topic, {"max.message.bytes": value})
    return before


def enlarge(service: Service, key: str) -> None:
    """Make a state larger than the topic takes."""
    note = random.Random(key).randbytes(20_000).hex()
    with service.transaction():
        service.execute("INSERT INTO purchase (id, total) VALUES (%s, 0)", [key])
        service.execute("UPDATE purchase SET note = %s WHERE id = %s", [note, key])
        service.execute("DELETE FROM audit WHERE id = %s", [key])
        service.execute(
            "SELECT everstate_store.emit('purchase', %(key)s, NULL, to_json(purchase),"
            ' \'{"apiVersion": "v1", "serviceName": "shop", "identifier": "w"}\')'
            " FROM purchase WHERE id = %(key)s",
            {"key": key},
        )
        service.execute(
            "INSERT INTO audit (entity, id, after) SELECT 'purchase', id, to_jsonb(purchase)"
            " FROM purchase WHERE id = %s",
            [key],
        )


def total(service: Service, *keys: str, to: int) -> None:
    with service.transaction():
        for key in keys:
            set_total(service, key, to)


def make_many_refused(service: Service, many: int) -> None:
    """Keys that fail, each with a neighbour in its last transaction, among others that do not."""
    for number in range(many):
        enlarge(service, f"big-{number}")
        total(service, f"free-{number}", to=1)
        total(service, f"big-{number}", f"mate-{number}", to=2)
        total(service, f"mate-{number}", to=3)
        total(service, f"free-{number}", to=2)


def published(config: Config, prefix: str) -> int:
    records = read_topic(config, TopicNames(config.log.prefix).changes("purchase"))
    return sum((record.key or b"").startswith(prefix.encode()) for record in records)


def step_until(relay: Relay, holds: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        relay.step()


def parked_of(service: Service) -> int:
    return read_status(service).parked_count


@pytest.mark.full
@pytest.mark.timeout(900)
def test_C4_more_than_a_hundred_keys_that_fail_hold_up_nobody_else(
    config: Config, service: Service
) -> None:
    with Relay(config, TYPES, retry_blocked_s=3600.0) as relay:
        relay.step()
        usual = limit(config, "20000")
        make_many_refused(service, MANY)
        step_until(relay, lambda: read_status(service).blocked_count == MANY)
        step_until(relay, lambda: parked_of(service) == 4 * MANY and not relay.step())
        assert published(config, "free-") == 2 * MANY
        assert published(config, "big-") == published(config, "mate-") == 0
        # From here on all else goes at its usual pace, and a page has nothing of what waits.
        total(service, "free-0", "new", to=3)
        with service.transaction():
            click(service, "a-fact")
        total(service, "big-0", to=4)
        step_until(relay, lambda: parked_of(service) == 4 * MANY + 1)
        step_until(relay, lambda: published(config, "new") == 1)
        assert read_page(service, 1_000).rows == []
        assert problems(config, complete=False) == []
    # A new relay knows what waits: it neither lets anything overtake nor finds it all out again.
    with Relay(config, TYPES, retry_blocked_s=3600.0) as relay:
        relay.step()
        total(service, "big-1", to=5)
        total(service, "free-1", to=6)
        step_until(relay, lambda: published(config, "free-1") > 0 and not relay.step())
        assert published(config, "big-") == 0
        assert read_status(service).blocked_count == MANY
    limit(config, usual)
    with Relay(config, TYPES, retry_blocked_s=3600.0) as relay:
        step_until(relay, lambda: not read_status(service).blocked)
        step_until(relay, lambda: problems(config) == [])
        assert parked_of(service) == 0
        assert check_log(config, ["purchase"]).problems == []


@pytest.mark.parametrize("when", ["before publishing", "after publishing"])
def test_C3_a_relay_killed_while_it_tries_again_neither_doubles_nor_reorders(
    config: Config, service: Service, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    usual = limit(config, "20000")
    enlarge(service, "big")
    total(service, "big", "mate", to=2)
    total(service, "mate", to=3)
    with Relay(config, TYPES, retry_blocked_s=3600.0) as relay:
        step_until(relay, lambda: parked_of(service) == 4)
    limit(config, usual)
    target: Any = OncePublisher if when == "before publishing" else parked
    with Relay(config, TYPES) as relay, monkeypatch.context() as patch:
        patch.setattr(target, "publish" if target is OncePublisher else "release", killed)
        with pytest.raises(KeyboardInterrupt):
            relay.step()
    total(service, "big", to=5)
    with Relay(config, TYPES) as relay:
        step_until(relay, lambda: problems(config) == [])
        assert not relay.step()
    assert (published(config, "big"), published(config, "mate")) == (3, 2)
    assert (parked_of(service), read_status(service).blocked_count) == (0, 0)


def killed(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def test_what_an_older_relay_left_blocked_is_found_out_again(
    config: Config, service: Service
) -> None:
    total(service, "a", to=1)
    service.execute(
        "INSERT INTO everstate_store.relay_blocked (xid, entity, key, version, reason)"
        " SELECT xid, entity, key, version, 'too large' FROM everstate_store.outbox"
    )
    with Relay(config, TYPES) as relay:
        assert relay.step() == 1
    assert read_status(service).blocked == ()
