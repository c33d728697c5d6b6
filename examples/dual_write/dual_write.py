"""The race of two writes: two stores without a log diverge for good; with one they end equal."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import psycopg
from pydantic import BaseModel

from everstate import App, Config, EntityStore, Provenance, project_config
from everstate.changes import ChangeCodec
from everstate.log.consumer import Consumer
from everstate.log.topics import TopicNames
from everstate.sources.outbox import Relay

KEYS, ROUNDS = 20, 5
app = App("dual-write")


@app.entity("parcel", key="parcel_id")
class Parcel(BaseModel):
    """What both stores are to agree on."""

    parcel_id: str
    place: str


Write = Callable[[str, str], None]
"""Writes the place of a parcel, by its key."""


def two_clients(make: Callable[[str], AbstractContextManager[Write]]) -> None:
    """Let two clients move the same parcels at the same time, again and again."""
    together = threading.Barrier(2)

    def client(name: str) -> None:
        with make(name) as write:
            for turn in range(ROUNDS * KEYS):
                together.wait()
                write(f"p-{turn % KEYS}", f"{name}-{turn}")

    clients = [threading.Thread(target=client, args=(name,)) for name in ("north", "south")]
    for each in clients:
        each.start()
    for each in clients:
        each.join()


def without_a_log(config: Config) -> int:
    """Each client writes store A, then store B; says how many parcels differ in the end."""

    @contextmanager
    def client(name: str) -> Iterator[Write]:
        network = random.Random(name)
        with (
            psycopg.connect(config.store_dsn, autocommit=True) as a,
            psycopg.connect(config.store_dsn, autocommit=True) as b,
        ):

            def write(key: str, place: str) -> None:
                for number, store in enumerate((a, b)):
                    time.sleep(network.uniform(0, 0.005))
                    table = "dual_b" if number else "dual_a"
                    store.execute(f"UPDATE {table} SET place = %s WHERE key = %s", [place, key])

            yield write

    with psycopg.connect(config.store_dsn, autocommit=True) as connection:
        for table in ("dual_a", "dual_b"):
            connection.execute(f"DROP TABLE IF EXISTS {table}")
            connection.execute(f"CREATE TABLE {table} (key text PRIMARY KEY, place text)")
            connection.execute(
                f"INSERT INTO {table} SELECT 'p-' || n FROM generate_series(0, %s) AS n",
                [KEYS - 1],
            )
        two_clients(client)
        found = connection.execute(
            "SELECT count(*) FROM dual_a JOIN dual_b USING (key) "
            "WHERE dual_a.place IS DISTINCT FROM dual_b.place"
        ).fetchone()
    assert found is not None
    return int(found[0])


def with_a_log(config: Config) -> int:
    """Each client writes the store; the other store follows the log. How many parcels differ."""
    parcel = app.entity_type("parcel")
    with EntityStore(config, parcel) as store, Relay(config, [parcel]) as relay:
        store.install()

        @contextmanager
        def client(name: str) -> Iterator[Write]:
            source = Provenance(api_version="v1", service_name="client", identifier=name)
            network = random.Random(name)

            def write(key: str, place: str) -> None:
                time.sleep(network.uniform(0, 0.005))
                store.put(Parcel(parcel_id=key, place=place), provenance=source)

            yield write

        two_clients(client)
        while relay.step():
            pass
        followed = follow(config)
        truth = {f"p-{n}": store.get(f"p-{n}") for n in range(KEYS)}
    return sum(
        found is not None and followed.get(key) != (found.version, found.entity.place)
        for key, found in truth.items()
    )


def follow(config: Config) -> dict[str, tuple[int, str]]:
    """Version and place of each parcel, as the log tells it: a version is taken once, in order."""
    codec, places = ChangeCodec(app.entity_type("parcel")), {}
    topic = TopicNames(config.log.prefix).changes("parcel")
    with Consumer(config) as consumer:
        for record in consumer.tail([topic], from_end=False, idle_s=30):
            change = codec.decode(record.value)
            if change.version > places.get(change.key, (0, ""))[0]:
                places[change.key] = change.version, change.current["place"]
            if sum(version for version, _ in places.values()) == 2 * KEYS * ROUNDS:
                break  # every write of both clients is one version
    return places


if __name__ == "__main__":
    from everstate.log.topics import Topics

    settings = project_config()
    with Topics(settings) as topics:
        topics.ensure(app.entities)
    print(f"without a log: {without_a_log(settings)} of {KEYS} parcels differ, for good")
    print(f"with a log:    {with_a_log(settings)} of {KEYS} parcels differ")
