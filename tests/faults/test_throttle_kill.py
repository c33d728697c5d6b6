"""SIGKILL of what takes throttled changes, at any moment: each is in its view once, in order.

The checker folds the log by brute force and reads the views with bare SQL. ``--kills`` sets how
many kills, FAULT_SEED repeats their moments.
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pyspark.sql import SparkSession
from throttle_child import Crate, app

from everstate.changes import ChangeCodec, Provenance
from everstate.config import Config
from everstate.log.consumer import Consumer
from everstate.log.producer import Producer
from everstate.pipeline.keeping.keep import Keeper
from kit.changes import change_of
from kit.waiting import started, until
from tiers import kills

KILLS = kills(2, full=10)
SEED = int(os.environ.get("FAULT_SEED") or time.time_ns() % 2**32)
moments = random.Random(SEED)
NOW = datetime(2026, 1, 1, tzinfo=UTC)
WHO = {
    name: Provenance(api_version="v1", service_name=name, identifier="load")
    for name in ("importer", "desk")
}

pytestmark = [
    pytest.mark.settings(log={"partitions": 2}, archive={"trigger_s": 1}),
    pytest.mark.slow,
    pytest.mark.timeout(120 + 40 * KILLS),
]


def load_changes(config: Config, stop: threading.Event) -> None:
    """Send changes of some crates; most of them by an import."""
    rng, codec = random.Random(SEED + 1), ChangeCodec(app.entity_type("crate"))
    states: dict[str, tuple[int, Crate | None]] = {}
    topic = f"{config.log.prefix}.crate.changes.g1"
    with Producer(config) as producer:
        while not stop.is_set():
            for _ in range(100):
                key = f"c{rng.randrange(300)}"
                version, before = states.get(key, (0, None))
                place, weight = rng.choice(("dock", "ship", None)), rng.randrange(100)
                after: Crate | None = Crate(crate_id=key, place=place, weight=weight)
                if before is not None and rng.random() < 0.1:
                    after = None
                states[key] = (version + 1, after)
                who = WHO["importer" if rng.random() < 0.8 else "desk"]
                change = change_of("crate", key, version + 1, after, before, who=who, at=NOW)
                producer.send_raw(topic, *codec.encode(change))
            producer.flush(30)
            stop.wait(0.02)


def folded(config: Config) -> tuple[set[Any], set[Any]]:
    """Rows that both views must have: the newest state of each crate, by the log alone."""
    newest: dict[str, Any] = {}
    with Consumer(config) as consumer:
        for record in consumer.read_topic(f"{config.log.prefix}.crate.changes.g1"):
            message = json.loads(record.value or b"")
            newest[message["key"]] = message["currentEntityState"]
    live = [state for state in newest.values() if state is not None]
    places: dict[Any, list[int]] = defaultdict(list)
    for state in live:
        places[state["place"]].append(state["weight"])
    weights = {(place, len(each), sum(each)) for place, each in places.items()}
    return weights, {(s["crate_id"], s["weight"]) for s in live if s["weight"] > 50}


def read(config: Config) -> tuple[set[Any], set[Any]]:
    """What readers of the views see."""
    options = f"-c search_path={config.views.schema_name}"
    with psycopg.connect(config.views_dsn, options=options) as connection:
        weights = connection.execute("SELECT place, crates, weight FROM weights").fetchall()
        heavy = connection.execute("SELECT crate_id, weight FROM heavy").fetchall()
    assert len(set(heavy)) == len(heavy)
    return {(place, crates, int(weight)) for place, crates, weight in weights}, set(heavy)


def left(config: Config) -> int:
    """Changes that wait, or that the views have not reached."""
    query = (
        "SELECT (SELECT coalesce(sum(changes), 0) FROM everstate_views.deferred) + "
        "(SELECT sum(ahead - behind) FROM (SELECT max(next_offset) AS ahead, min(next_offset) AS "
        "behind FROM everstate_views.position GROUP BY partition) AS places)"
    )
    with psycopg.connect(config.views_dsn) as connection:
        row = connection.execute(query).fetchone()
    assert row is not None
    return int(row[0])


@pytest.fixture
def keeper(config: Config, spark: SparkSession) -> Iterator[Keeper]:
    made = Keeper(spark, config, app)
    made.prepare()
    yield made
    made.close()


@pytest.mark.full
def test_whatever_is_killed_each_throttled_change_is_taken_once(
    config: Config, keeper: Keeper
) -> None:
    print(f"FAULT_SEED={SEED}")
    ended, stop = threading.Event(), threading.Event()
    sender = threading.Thread(target=load_changes, args=(config, ended))
    keeping = threading.Thread(target=keeper.run, args=(stop,))
    sender.start()
    keeping.start()
    start = partial(started, Path(__file__).with_name("throttle_child.py"), config)
    # The first job of a Spark that has just started takes longer than all kills together.
    until(lambda: left(config), 90, 0.2, what=lambda: "nothing waits")
    waited = 0
    for _ in range(KILLS):
        child = start()
        time.sleep(1.0 + 2.5 * moments.random())
        assert child.poll() is None
        child.kill()
        child.wait()
        waited = max(waited, left(config))
    ended.set()
    sender.join(30)
    assert waited > 0
    child = start()
    deadline = time.monotonic() + 120
    while (wanted := folded(config)) != read(config) or left(config):
        assert time.monotonic() < deadline, (left(config), wanted, read(config))
        time.sleep(0.5)
    child.kill()
    child.wait()
    stop.set()
    keeping.join(60)
