"""OpenSearch for tests: one node on loopback, from the jars of the lock file beside this one."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar, Final, Self

import httpx

from everstate.config import Config, load
from everstate.errors import LocalStackError
from everstate.local.artifacts import Artifact, obtain
from everstate.local.jvm import find_jvm, java_env
from everstate.local.processes import free_port
from everstate.views.tables import Merge
from kit.served_store import Found, ServedStore

_HERE: Final = Path(__file__).parent
_START_S_MAX: Final = 200.0
_OPTIONS: Final = ("-Xms384m", "-Xmx384m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")


class OpenSearchServer(ServedStore):
    """A node that can be killed, and started again with its data on the same port.

    Java compiles the class that starts it, so that it needs a JDK of 17 to 23: OpenSearch 2 does
    not run on those that have no security manager any more.
    """

    name: ClassVar[str] = "opensearch"
    plain: ClassVar[str] = "http://"
    secure: ClassVar[str] = "https://"

    def __init__(self, config: Config, folder: Path) -> None:
        lock = json.loads((_HERE / "opensearch.lock.json").read_text("utf-8"))
        self._jars = [str(path) for path in obtain(config, [Artifact(**each) for each in lock])]
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port(set())
        self._ports = self.port, free_port({self.port})
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    @contextmanager
    def alone(cls, folder: Path, *, fsync: bool = True) -> Iterator[Self]:
        """A node; with ``fsync`` or without, it writes each request to its disk."""
        server = cls(load(folder), folder / "opensearch")
        try:
            server.start()
            yield server
        finally:
            server.kill()

    def start(self) -> None:
        """Start it, and wait until it answers; raises LocalStackError with the end of its log."""
        java = find_jvm().home / "bin" / "java"
        words = [str(java), *_OPTIONS, "OpenSearchServer.java", str(self._folder)]
        log = self._folder / "log.txt"
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*words, *(str(port) for port in self._ports)],
                cwd=_HERE,
                env=java_env(self._jars),
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        until = time.monotonic() + _START_S_MAX
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > until:
                self.kill()
                raise LocalStackError(f"OpenSearch does not start: {log.read_text()[-2000:]}")
            time.sleep(0.2)

    @property
    def process(self) -> int | None:
        return None if self._process is None else self._process.pid

    def kill(self) -> None:
        """SIGKILL it, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        wait = "wait_for_status=yellow&timeout=1s"
        try:
            return httpx.get(f"{self.url}/_cluster/health?{wait}", timeout=5).is_success
        except httpx.HTTPError:
            return False

    def refusals(self, config: Config) -> list[AbstractContextManager[None]]:
        return [self._blocked(config)]

    @contextmanager
    def _blocked(self, config: Config) -> Iterator[None]:
        """As OpenSearch does it itself when its disk is nearly full."""
        place, block = f"{self._all(config)}/_settings", "index.blocks.read_only_allow_delete"
        httpx.put(place, json={block: True}).raise_for_status()
        try:
            yield
        finally:
            httpx.put(place, json={block: None}).raise_for_status()

    def read(self, config: Config, view: str, merge: Merge = "row") -> list[Found] | None:
        return self.search(config, view, {"match_all": {}})

    def search(self, config: Config, view: str, query: Any) -> list[Found] | None:
        """Documents that a query finds by the alias of a view, or ``None`` if there is none."""
        place = self._place(config, view)
        if httpx.post(f"{place}/_refresh").status_code == 404:
            return None
        asked, pages = {"size": 1_000, "query": query}, f"{self.url}/_search/scroll"
        page = httpx.post(f"{place}/_search?scroll=1m", json=asked).json()
        found: list[Found] = []
        while hits := page["hits"]["hits"]:
            found += [hit["_source"] for hit in hits]
            again = {"scroll": "1m", "scroll_id": page["_scroll_id"]}
            page = httpx.post(pages, json=again).json()
        httpx.delete(f"{pages}/{page['_scroll_id']}").raise_for_status()
        return found

    def spoil(self, config: Config, view: str, key: str, column: str, value: str) -> None:
        place = self._place(config, view)
        query = {"version": True, "query": {"term": {"_key": key}}}
        (hit,) = httpx.post(f"{place}/_search", json=query).json()["hits"]["hits"]
        at = f"_doc/{hit['_id']}?version_type=external&version={hit['_version'] + 1}"
        httpx.put(f"{place}/{at}", json={**hit["_source"], column: value}).raise_for_status()

    def left(self, config: Config) -> list[str]:
        return list(httpx.get(self._all(config)).json())

    def clean(self, config: Config) -> None:
        httpx.delete(self._all(config), timeout=60).raise_for_status()

    def _place(self, config: Config, view: str) -> str:
        return f"{self.url}/{config.views.schema_name}.{view}"

    def _all(self, config: Config) -> str:
        return self._place(config, "*")
