"""The race of two writes: two stores without a log diverge for good; with one they end equal."""

import random
import threading
import time
from collections.abc import Callable

import psycopg
from pydantic import BaseModel

from everstate.app import App
from everstate.changes import ChangeCodec, Provenance
from everstate.config import Config, load
from everstate.local import connect
from everstate.log.consumer import Consumer
from everstate.log.topics import TopicNames
from everstate.sources.outbox import EntityStore, Relay

KEYS, ROUNDS = 20, 50
app = App("dual-write")


@app.entity("parcel", key="parcel_id")
class Parcel(BaseModel):
    """What both stores are to agree on."""

    parcel_id: str
    place: str


def two_clients(client: Callable[[str, random.Random], None]) -> None:
    """Run two clients at once; the same load each time."""
    clients = [
        threading.Thread(target=client, args=(name, random.Random(name)))
        for name in ("north", "south")
    ]
    for each in clients:
        each.start()
    for each in clients:
        each.join()


def without_a_log(config: Config) -> int:
    """Each client writes store A, then store B; says how many parcels differ in the end."""

    def client(name: str, chance: random.Random) -> None:
        with (
            psycopg.connect(config.store_dsn, autocommit=True) as a,
            psycopg.connect(config.store_dsn, autocommit=True) as b,
        ):
            for round_ in range(ROUNDS):
                key, place = f"p-{chance.randrange(KEYS)}", f"{name}-{round_}"
                a.execute("UPDATE dual_a SET place = %s WHERE key = %s", [place, key])
                time.sleep(chance.uniform(0, 0.004))  # the network
                b.execute("UPDATE dual_b SET place = %s WHERE key = %s", [place, key])

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

        def client(name: str, chance: random.Random) -> None:
            source = Provenance(api_version="v1", service_name="client", identifier=name)
            for round_ in range(ROUNDS):
                place = f"{name}-{round_}"
                store.put(
                    Parcel(parcel_id=f"p-{chance.randrange(KEYS)}", place=place), provenance=source
                )
                time.sleep(chance.uniform(0, 0.004))

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
    with Consumer(config) as consumer:
        for record in consumer.read_topic(TopicNames(config.log.prefix).changes("parcel")):
            change = codec.decode(record.value)
            if change.version > places.get(change.key, (0, ""))[0]:
                places[change.key] = change.version, change.current["place"]
    return places


if __name__ == "__main__":
    from everstate.log.topics import Topics

    settings = connect(load())
    with Topics(settings) as topics:
        topics.ensure(app.entities)
    print(f"without a log: {without_a_log(settings)} of {KEYS} parcels differ, for good")
    print(f"with a log:    {with_a_log(settings)} of {KEYS} parcels differ")
