"""Dead letters go out once, whatever became of the log, of the table, or of the sender (C19)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import psycopg
import pytest

from everstate.config import Config
from everstate.log.consumer import Consumer
from everstate.log.producer import Producer
from everstate.log.record import Record
from everstate.log.topics import Topics
from everstate.pipeline.dead import DeadLetterSender
from everstate.views.control import Control

ENTITY = "order"


@dataclass
class World:
    """Topics of one entity type, and the table of dead changes of a views schema."""

    config: Config
    connection: psycopg.Connection[object]

    @property
    def topic(self) -> str:
        return f"{self.config.log.prefix}.{ENTITY}.changes.g1"

    def bury(self, offset: int, value: bytes, schema: str = "everstate_views") -> None:
        self.connection.execute(
            f'INSERT INTO {schema}.dead (topic, generation, partition, "offset", entity, '
            "reason, raw_key, raw_value, header_names, header_values) "
            "VALUES (%s, 1, 0, %s, %s, 'malformed', 'k', %s, '{h}', '{x}')".encode(),
            (self.topic, offset, ENTITY, value),
        )

    def sender(self, schema: str = "everstate_views") -> DeadLetterSender:
        views = self.config.views.model_copy(update={"schema_name": schema})
        return DeadLetterSender(self.config.model_copy(update={"views": views}))

    def send(self, schema: str = "everstate_views") -> None:
        sender = self.sender(schema)
        try:
            while sender.step():
                pass
        finally:
            sender.close()

    def letters(self) -> list[Record]:
        with Consumer(self.config) as consumer:
            return list(consumer.read_topic(f"{self.config.log.prefix}.{ENTITY}.dead"))

    def values(self) -> list[bytes | None]:
        return sorted((letter.value for letter in self.letters()), key=str)


@pytest.fixture
def world(stack: object, database: str, topic_prefix: str) -> Iterator[World]:
    running: Config = stack.config  # type: ignore[attr-defined]
    config = running.model_copy(
        update={
            "store": running.store.model_copy(update={"dsn": database}),
            "log": running.log.model_copy(update={"prefix": topic_prefix, "partitions": 1}),
        }
    )
    with Topics(config) as topics:
        topics.ensure([ENTITY])
    with psycopg.connect(database, autocommit=True) as connection:
        Control(connection, "everstate_views").install()
        yield World(config, connection)


def test_in_a_new_project_there_are_no_letters_and_no_error(world: World) -> None:
    sender = world.sender("not_made_yet")
    try:
        assert sender.step() == 0
    finally:
        sender.close()


def test_views_kept_anew_count_their_letters_anew(world: World) -> None:
    world.bury(0, b"first")
    world.send()
    Control(world.connection, "anew").install()
    world.bury(0, b"second", "anew")
    world.send("anew")
    assert world.values() == [b"first", b"second"]


def test_a_table_restored_from_a_backup_does_not_reuse_numbers(world: World) -> None:
    for offset in range(3):
        world.bury(offset, b"%d" % offset)
        world.send()
    world.connection.execute("DELETE FROM everstate_views.dead")
    world.bury(7, b"after the restore")
    world.send()
    assert world.values() == [b"0", b"1", b"2", b"after the restore"]


def test_a_batch_is_found_again_whole_though_older_letters_came_to_light(world: World) -> None:
    for offset in range(4):
        world.bury(offset, b"%d" % offset)
    control = Control(world.connection, "everstate_views")
    late, *numbered = control.unnumbered(10)
    control.number(1, [each.id for each in numbered])
    sender = world.sender()
    try:
        assert sender.step() == 3
        assert late.raw_value not in world.values()
        assert sender.step() == 1
    finally:
        sender.close()
    assert world.values() == [b"0", b"1", b"2", b"3"]


def test_a_batch_that_went_out_before_the_kill_is_not_sent_again(world: World) -> None:
    world.bury(0, b"once")
    world.send()
    world.connection.execute("UPDATE everstate_views.dead SET published_at = NULL")
    world.send()
    assert world.values() == [b"once"]


def test_a_letter_whose_record_is_gone_is_sent_as_the_table_has_it(world: World) -> None:
    with Producer(world.config) as producer:
        producer.send_raw(world.topic, b"k", b"there", [])
    world.bury(0, b"from the table")
    world.connection.execute(
        "UPDATE everstate_views.dead SET header_names = '{}', header_values = '{}', \"offset\" = 99"
    )
    world.send()
    (letter,) = world.letters()
    assert letter.value == b"from the table"
    assert dict(letter.headers)["everstate_headers"] == b"lost with the log's record"


def test_a_letter_that_no_topic_takes_stops_nobody(world: World) -> None:
    world.bury(0, b"before")
    world.bury(1, b"x" * 3_000_000)
    world.bury(2, b"behind")
    world.send()
    assert world.values() == [b"before", b"behind"]
    query = 'SELECT reason FROM everstate_views.dead WHERE "offset" = 1'
    row = world.connection.execute(query.encode()).fetchone()
    assert row is not None
    assert str(row[0]).startswith("malformed; not sent: ")  # type: ignore[index]
