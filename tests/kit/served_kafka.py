"""Kafka for tests of views, and its rows as a program with a consumer reads them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar, Self

from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition

from everstate.config import Config, load
from everstate.local import Stack
from everstate.log.topics import Topics
from everstate.views.tables import Merge
from kit.served_store import Found, ServedStore
from kit.settings import altered


class ServedKafka(ServedStore):
    """The Kafka of a local stack, which is not that of the log."""

    name: ClassVar[str] = "kafka"
    plain: ClassVar[str] = ""

    def __init__(self, servers: Stack, folder: Path) -> None:
        self._servers, self._folder = servers, folder
        self.port = int(servers.resolve().bootstrap_servers.rpartition(":")[2])

    @classmethod
    @contextmanager
    def alone(cls, folder: Path, *, fsync: bool = True) -> Iterator[Self]:
        """A local stack of Kafka alone."""
        given = load(folder, store={"dsn": "host=elsewhere"}, local={"fsync": fsync})
        with Stack(given) as servers:
            yield cls(servers, folder)

    @property
    def unset(self) -> str:
        return r"log\.bootstrap_servers"

    @contextmanager
    def own(self) -> Iterator[Config]:
        with super().own() as config:
            yield altered(config, project={"data_dir": self._folder})

    def start(self) -> None:
        self._servers.revive([self.name])

    @property
    def process(self) -> int:
        return self._servers.pid(self.name)

    def kill(self) -> None:
        self._servers.kill(self.name)

    def refusals(self, config: Config) -> list[AbstractContextManager[None]]:
        return [self.set(config, "max.message.bytes", "100")]  # enough for markers

    @contextmanager
    def set(self, config: Config, setting: str, value: str) -> Iterator[None]:
        """Give a setting of all topics of a project another value for a while."""
        with self._topics(config) as topics:
            before = topics.configs(self.left(config))
            for name in before:
                topics.set_config(name, {setting: value})
            try:
                yield
            finally:
                for name, settings in before.items():
                    topics.set_config(name, {setting: settings[setting]})

    def records(self, topic: str) -> list[tuple[str, str | None, Mapping[str, Any]]]:
        """Key, value and headers of all records of a topic, as any consumer reads them."""
        settings = {"bootstrap.servers": self.url, "group.id": "a", "enable.partition.eof": True}
        consumer = Consumer({**settings, "isolation.level": "read_committed"})
        found = list[tuple[str, str | None, Mapping[str, Any]]]()
        try:
            left = set(consumer.list_topics(topic, timeout=10).topics[topic].partitions)
            consumer.assign([TopicPartition(topic, partition, 0) for partition in left])
            while left:
                message = consumer.poll(10)
                assert message is not None
                if (error := message.error()) is not None:
                    assert error.code() == KafkaError._PARTITION_EOF, error
                    left.remove(message.partition())
                    continue
                key, value = message.key(), message.value()
                shown = None if value is None else value.decode()
                found.append(((key or b"").decode(), shown, dict(message.headers() or ())))
        finally:
            consumer.close()
        return found

    def read(self, config: Config, view: str, merge: Merge = "row") -> list[Found] | None:
        topic = self._topic(config, view)
        with self._topics(config) as topics:
            if topic not in topics.existing():
                return None
        found = {key: row for key, row, _ in self.records(topic)}
        return [json.loads(row) for row in found.values() if row is not None]

    def table(self, config: Config, view: str) -> str:
        """The topic of the published version of a view."""
        pointed = self.records(self._topic(config, "").removesuffix("."))
        (name,) = [name for key, name, _ in pointed if key == self._topic(config, view)][-1:]
        return str(name)

    def spoil(self, config: Config, view: str, key: str, column: str, value: str) -> None:
        table = self.table(config, view)
        row = json.loads({key: row for key, row, _ in self.records(table)}[key] or "")
        producer = Producer({"bootstrap.servers": self.url, "partitioner": "murmur2_random"})
        for topic in (table, self._topic(config, view)):
            producer.produce(topic, json.dumps({**row, column: value}), key)
        assert producer.flush(10) == 0

    def left(self, config: Config) -> list[str]:
        with self._topics(config) as topics:
            mine = self._topic(config, "")
            return [name for name in topics.existing() if name.startswith(mine)]

    def clean(self, config: Config) -> None:
        """Delete all topics of a project."""
        with self._topics(config) as topics:
            topics.delete([*self.left(config), self._topic(config, "").removesuffix(".")])

    def _topics(self, config: Config) -> Topics:
        return Topics(config.replaced("log", bootstrap_servers=self.url))

    def _topic(self, config: Config, name: str) -> str:
        return f"{config.log.prefix}.{config.views.schema_name}.{name}"
