"""The clean role of a test, the changelog that it writes, and the laws that the changelog keeps."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from everstate.config import Config
from everstate.log.consumer import Consumer
from everstate.log.positions import Offsets
from everstate.log.topics import TopicNames
from everstate.pipeline.clean import Cleaner
from everstate.sources.cdc.capturing import Capturing
from everstate.sources.cdc.restarting import Restarter, keep_running


class CleanRole:
    """The clean role in a thread, which can be ended and begun again as a process is.

    With ``capturing``, a second thread restarts that capture's connector when it fails.
    """

    def __init__(self, make: Callable[[], Cleaner], capturing: Capturing | None = None) -> None:
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


def changelog(config: Config, entity: str) -> list[dict[str, Any]]:
    """All changes of an entity type, those of a key in the order of the log."""
    with Consumer(config) as consumer:
        records = consumer.read_topic(TopicNames(config.log.prefix).changes(entity))
        return [json.loads(record.value or b"") for record in records]


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
