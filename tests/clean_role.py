"""The clean role of a test, the changelog that it writes, and the laws that the changelog keeps."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from everstate.config import Config
from everstate.log.consumer import Consumer
from everstate.log.topics import TopicNames
from everstate.pipeline.clean import Cleaner
from everstate.sources.cdc.capturing import Capturing
from everstate.sources.cdc.restarting import Restarter, keep_running


class CleanRole:
    """The clean role in threads, which can be ended and begun again as a process is."""

    def __init__(self, capturing: Capturing, cleaner: Callable[[], Cleaner]) -> None:
        self._make = cleaner
        self._restarters = [Restarter(capturing.capture.name, lambda: capturing)]
        self._failed: list[BaseException] = []
        self._begin()

    def _begin(self) -> None:
        self._stop = threading.Event()
        self._cleaner = self._make()
        self._thread = threading.Thread(target=self._run, name="clean")
        self._watching = threading.Thread(
            target=keep_running, args=(self._restarters, self._stop), name="restart-captures"
        )
        self._thread.start()
        self._watching.start()

    def _run(self) -> None:
        try:
            self._cleaner.run(self._stop)
        except BaseException as error:
            self._failed.append(error)
        finally:
            self._cleaner.close()

    def end(self) -> None:
        self._stop.set()
        self._thread.join()
        self._watching.join()
        if self._failed:
            raise self._failed[0]

    def begin_again(self) -> None:
        self.end()
        self._begin()


def changelog(config: Config, entity: str) -> list[dict[str, Any]]:
    """All changes of an entity type, those of a key in the order of the log."""
    with Consumer(config) as consumer:
        records = consumer.read_topic(TopicNames(config.log.prefix).changes(entity))
        return [json.loads(record.value or b"") for record in records]


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
