"""The clean role of a test, the changelog that it writes, and the laws that the changelog keeps."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from everstate.app import App
from everstate.config import Config
from everstate.log.consumer import Consumer
from everstate.log.positions import Offsets, Range
from everstate.log.producer import Producer
from everstate.log.topics import TopicNames
from everstate.pipeline.clean import Cleaner
from everstate.roles import Role, run_roles
from everstate.sources.cdc.capturing import Capturing
from everstate.sources.cdc.cleaning import Cleaning
from everstate.sources.cdc.restarting import Restarter, keep_running


class PlainCleaner:
    """Cleans one capture as the role does, without Spark: for a raw log that is small."""

    def __init__(self, config: Config, cleaning: Cleaning) -> None:
        self._config, self._cleaning = config, cleaning

    def run(self, stop: threading.Event) -> None:
        self._cleaning.open()
        with Offsets(self._config) as offsets, Consumer(self._config) as consumer:
            while not stop.wait(0.2):
                self._read(offsets, consumer)
                while self._cleaning.step() is not None:
                    pass

    def _read(self, offsets: Offsets, consumer: Consumer) -> None:
        (topic, partition), start = self._cleaning.parts[0], self._cleaning.read_to[0]
        end = offsets.stable_ends([topic])[topic, partition]
        if end <= start:
            return
        slices = self._cleaning.slices()
        records = []
        for one in consumer.read(topic, partition, start, end):
            headers = dict(one.headers)
            wanted = [headers.get(name) for name in slices.header_names]
            records.append((0, one.offset, one.key, one.value, wanted, one.timestamp_ms))
        columns = pa.Table.from_batches([slices.begin().columns(records)])
        self._cleaning.add(columns, {0: Range(start, end)})

    def close(self) -> None:
        self._cleaning.close()


class CleanRole:
    """The clean role in a thread, which can be ended and begun again as a process is.

    With ``capturing``, a second thread restarts that capture's connector when it fails.
    """

    def __init__(
        self, make: Callable[[], Cleaner | PlainCleaner], capturing: Capturing | None = None
    ) -> None:
        self._make = make
        self._restarters = (
            [Restarter(capturing.capture.name, lambda: capturing)] if capturing else []
        )
        self._failed: list[BaseException] = []
        self.begin()

    def begin(self) -> None:
        self._stop = threading.Event()
        self._cleaner = self._make()
        self._threads = [threading.Thread(target=self._run, name="clean")]
        if self._restarters:
            watch = threading.Thread(
                target=keep_running, args=(self._restarters, self._stop), name="restart-captures"
            )
            self._threads.append(watch)
        for each in self._threads:
            each.start()

    def _run(self) -> None:
        try:
            self._cleaner.run(self._stop)
        except BaseException as error:
            self._failed.append(error)
        finally:
            self._cleaner.close()

    @property
    def runs(self) -> bool:
        """Whether cleaning goes on; false once it has failed."""
        return self._threads[0].is_alive()

    def end(self) -> None:
        self._stop.set()
        for each in self._threads:
            each.join()
        if self._failed:
            raise self._failed.pop(0)


def send_raw(config: Config, topic: str, log: Iterable[tuple[Any, Any]]) -> None:
    """Keys and values of a pretended database's log, as its connector sends them."""
    with Producer(config) as producer:
        for key, value in log:
            body = None if value is None else json.dumps(value).encode()
            producer.send_raw(topic, json.dumps(key).encode(), body)


def changelog(config: Config, entity: str) -> list[dict[str, Any]]:
    """All changes of an entity type, those of a key in the order of the log."""
    with Consumer(config) as consumer:
        records = consumer.read_topic(TopicNames(config.log.prefix).changes(entity))
        return [json.loads(record.value or b"") for record in records]


def newest(config: Config, entity: str) -> dict[str, dict[str, Any]]:
    """Key → state of the entities that are not deleted, as the changelog says."""
    states = {each["key"]: each["currentEntityState"] for each in changelog(config, entity)}
    return {key: state for key, state in states.items() if state is not None}


@contextmanager
def running(config: Config, app: App, *, given: Config | None = None) -> Iterator[threading.Thread]:
    """The clean role as `everstate run` has it; what it raises is raised."""
    stop, failed = threading.Event(), list[BaseException]()

    def run() -> None:
        try:
            run_roles([Role.CLEAN], config, app, stop, given=given)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="clean role")
    thread.start()
    try:
        yield thread
    finally:
        stop.set()
        thread.join()
    assert not failed, failed


def has_come(config: Config, entity: str, key: str) -> bool:
    """Whether the newest changes of an entity type have one of this key."""
    topic = TopicNames(config.log.prefix).changes(entity)
    with Offsets(config) as offsets, Consumer(config) as consumer:
        return any(
            json.loads(record.value or b"")["key"] == key
            for (_, partition), end in offsets.stable_ends([topic]).items()
            for record in consumer.read(topic, partition, max(0, end - 50), end)
        )


def broken_laws(changes: list[dict[str, Any]]) -> list[str]:
    """What breaks the laws: versions dense from 1, the chain of states, no id twice."""
    broken, versions, states = [], Counter[str](), dict[str, Any]()
    ids = Counter(change["id"] for change in changes)
    broken += [f"id {each} is there {count} times" for each, count in ids.items() if count > 1]
    for change in changes:
        key, where = change["key"], f"{change['entity']} {change['key']} v{change['version']}"
        versions[key] += 1
        if change["version"] != versions[key]:
            broken.append(f"{where}: expected version {versions[key]}")
        if change["originalEntityState"] != states.get(key):
            broken.append(f"{where}: its original is not the state before")
        states[key] = change["currentEntityState"]
    return broken
