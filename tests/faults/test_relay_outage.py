"""A broker or a database that goes away: the relay waits, loses nothing, and goes on by itself."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator

import psycopg
import pytest

from everstate.config import Config, load
from everstate.errors import Unavailable
from everstate.local import Stack
from everstate.log.topics import Topics
from everstate.sources.outbox import EntityStore, Relay
from everstate.testing.log_checker import check_log
from everstate.testing.store_contract import CLERK, ORDER, Order

AWAY_S = 20.0 if os.environ.get("EVERSTATE_FULL") else 4.0


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Servers of our own, to be killed; fsync is on."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("EVERSTATE_")]:
            patch.delenv(name)
        config = load(tmp_path_factory.mktemp("outage"))
    with Stack(config) as stack:
        yield stack


@pytest.fixture
def config(servers: Stack, topic_prefix: str) -> Config:
    config = servers.connect()
    # The parameters of the test share the servers, so each begins with an empty store.
    with psycopg.connect(config.store_dsn, autocommit=True) as connection:
        connection.execute("DROP SCHEMA IF EXISTS everstate_store CASCADE")
    log = config.log.model_copy(update={"prefix": topic_prefix})
    return config.model_copy(update={"log": log})


@pytest.mark.kafka
@pytest.mark.postgres
@pytest.mark.slow
@pytest.mark.parametrize("server", ["kafka", "postgres"])
def test_the_relay_outlives_a_server_that_is_killed_and_comes_back(
    servers: Stack, config: Config, server: str
) -> None:
    with Topics(config) as topics:
        topics.ensure([ORDER.name])
    stop, done = threading.Event(), threading.Event()
    written: list[int] = []

    def write(store: EntityStore) -> None:
        while not done.wait(0.01):
            written.append(put(store, len(written)))

    with EntityStore(config, ORDER) as store, Relay(config, [ORDER]) as relay:
        store.install()
        threads = [
            threading.Thread(target=relay.run, args=[stop]),
            threading.Thread(target=write, args=[store]),
        ]
        for thread in threads:
            thread.start()
        try:
            wait_for(lambda: len(written) > 50)
            servers.kill(server)
            time.sleep(AWAY_S)
            servers.restart(server)
            before = sum(written)
            wait_for(lambda: sum(written) > before + 50)
            done.set()
            threads[1].join(60)
            wait_for(lambda: check_log(config, [ORDER.name]).problems == [])
        finally:
            done.set()
            stop.set()
            for thread in threads:
                thread.join(60)
    assert check_log(config, [ORDER.name]).problems == []


def put(store: EntityStore, number: int) -> int:
    order = Order(order_id=f"o-{number % 17}", note=f"{number}")
    try:
        return int(store.put(order, provenance=CLERK).changed)
    except Unavailable:
        return 0


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)
