"""The floors in PostgreSQL: one thread, drivers only, written by hand."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import confluent_kafka
import orjson
import psycopg
from confluent_kafka import TopicPartition

from bench import floors
from everstate.config import Config

_TABLES = """
CREATE TABLE IF NOT EXISTS bare_latest (key text PRIMARY KEY, version bigint, state jsonb);
CREATE TABLE IF NOT EXISTS bare_totals (country text, status text, purchases bigint, total numeric,
    PRIMARY KEY (country, status));
CREATE TABLE IF NOT EXISTS bare_position (partition int PRIMARY KEY, next_offset bigint);
CREATE TEMP TABLE staged (key text, version bigint, state jsonb);
"""
_UPSERT = """
INSERT INTO bare_latest SELECT * FROM staged ORDER BY key
ON CONFLICT (key) DO UPDATE SET version = excluded.version, state = excluded.state
WHERE bare_latest.version < excluded.version
"""
_ADD = """
INSERT INTO bare_totals VALUES (%s, %s, %s, %s) ON CONFLICT (country, status) DO UPDATE
SET purchases = bare_totals.purchases + excluded.purchases,
    total = bare_totals.total + excluded.total
"""
_POSITION = """
INSERT INTO bare_position VALUES (%s, %s)
ON CONFLICT (partition) DO UPDATE SET next_offset = excluded.next_offset
"""
_BATCH = 20_000
_COPY_ROWS = 5_000


class BareKeeper:
    """A consumer that keeps latest and one linear view: parse, sum, COPY, upsert, position.

    One transaction a batch; no gate, no gaps, no dead letters, no history: the practical floor
    of the apply half.
    """

    def __init__(self, config: Config, topic: str, partitions: int) -> None:
        self._connection = psycopg.connect(config.store_dsn)
        self._connection.execute(_TABLES)
        self._connection.commit()
        self._consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": config.bootstrap_servers,
                "group.id": "bench-bare",
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "fetch.wait.max.ms": 5,
                "queued.max.messages.kbytes": 65_536,
            }
        )
        self._consumer.assign([TopicPartition(topic, each, 0) for each in range(partitions)])

    def step(self, timeout_s: float = 0.01) -> int:
        """Take what is there (at most 20,000) into the tables; says how many."""
        messages = self._consumer.consume(_BATCH, timeout_s)
        if not messages:
            return 0
        latest: dict[str, tuple[str, int, str]] = {}
        sums: dict[tuple[str, str], list[Any]] = defaultdict(lambda: [0, Decimal(0)])
        positions: dict[int, int] = {}
        for message in messages:
            change = orjson.loads(message.value() or b"")
            key, current = change["key"], change["currentEntityState"]
            latest[key] = (key, change["version"], orjson.dumps(current).decode())
            for state, sign in ((current, 1), (change["originalEntityState"], -1)):
                if state is not None:
                    total = sums[state["country"], state["status"]]
                    total[0] += sign
                    total[1] += sign * Decimal(state["total"])
            positions[message.partition() or 0] = (message.offset() or 0) + 1
        self._apply(latest, sums, positions)
        return len(messages)

    def _apply(
        self,
        latest: dict[str, tuple[str, int, str]],
        sums: dict[tuple[str, str], list[Any]],
        positions: dict[int, int],
    ) -> None:
        cursor = self._connection.cursor()
        cursor.execute("TRUNCATE staged")
        with cursor.copy("COPY staged FROM STDIN") as copy:
            copy.write("".join(f"{k}\t{v}\t{s}\n" for k, v, s in latest.values()))
        cursor.execute(_UPSERT)
        cursor.executemany(_ADD, [(*group, *values) for group, values in sorted(sums.items())])
        cursor.executemany(_POSITION, sorted(positions.items()))
        self._connection.commit()

    def close(self) -> None:
        """Give up both connections."""
        self._consumer.close()
        self._connection.close()


def keep_bare(config: Config, topic: str, partitions: int, count: int) -> float:
    """Changes a second of the bare consumer over a whole topic, once it is connected."""
    keeper = BareKeeper(config, topic, partitions)
    began = time.perf_counter()
    done = 0
    while done < count:
        done += keeper.step(1.0)
    took = time.perf_counter() - began
    keeper.close()
    return count / took


def copy_and_produce(config: Config, topic: str, messages: Sequence[floors.Message]) -> float:
    """Changes a second of COPY of the messages into a plain table, then of a bare produce."""
    with psycopg.connect(config.store_dsn) as connection:
        began = time.perf_counter()
        cursor = connection.cursor()
        cursor.execute("CREATE TABLE bare_outbox (id bigint PRIMARY KEY, key text, value text)")
        with cursor.copy("COPY bare_outbox FROM STDIN") as copy:
            for start in range(0, len(messages), _COPY_ROWS):
                rows = enumerate(messages[start : start + _COPY_ROWS], start)
                copy.write("".join(f"{n}\t{k.decode()}\t{v.decode()}\n" for n, (k, v, _) in rows))
        connection.commit()
        copied_s = time.perf_counter() - began
    # Its figure leaves out how long it takes to connect.
    produced_s = len(messages) / floors.produce_encoded(config, topic, messages)
    return len(messages) / (copied_s + produced_s)
