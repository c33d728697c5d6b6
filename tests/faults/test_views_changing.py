"""Views that change while 40 changes a second come: no reader sees what is wrong after any kill.

An aggregate is added, WHERE is changed, undone, a column is renamed, a field with a default is
added and used, a text that becomes a number is refused and becomes a field of its own, and a view
is dropped; `everstate run` starts again for each. A reader polls, and one reads in REPEATABLE READ.
The pipeline is killed with all that it started while it builds, while it publishes, and while an
undo catches up.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
from fault_rig import kill_family, left_after
from pydantic import BaseModel

from everstate.changes import ChangeCodec, EntityType, Provenance
from everstate.config import Config, load
from everstate.local import Stack
from everstate.log.producer import Producer
from everstate.log.record import OutRecord
from everstate.log.topics import TopicNames, Topics
from everstate.views.changing import ask_undo, drop
from everstate.views.control import Control
from kit.changes import change_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.kafka,
    pytest.mark.postgres,
    pytest.mark.spark,
    pytest.mark.full,
    pytest.mark.timeout(900),
]
PATIENCE_S = 180.0
RATE = 40
KEYS = 300
DESK = Provenance(api_version="v1", service_name="faults", identifier="views")
TOML = """
[project]
app = "shop:app"
[log]
partitions = 2
[archive]
trigger_s = 2
[pipeline]
master = "local[2]"
driver_memory = "1g"
"""
APP = '''
from pydantic import BaseModel

from everstate import App

app = App("shop")


@app.entity("sale", key="sale_id")
class Sale(BaseModel):
    """A sale."""

    sale_id: str
    city: str
    amount: int
    code: {code}
    {more}


for name, sql in {views!r}.items():
    app.view(name, sql=sql)
'''


class Sold(BaseModel):
    """A sale as the first writer knows it."""

    sale_id: str
    city: str
    amount: int
    code: str


class Numbered(Sold):
    """A sale as a later writer knows it."""

    number: int


class Worded(Sold):
    """A sale as a writer sends it who is not careful about types."""

    number: str


MODELS = (Sold, Numbered, Worded)
CODECS = {model: ChangeCodec(EntityType("sale", model, "sale_id")) for model in MODELS}
BY_CITY = "SELECT city, count(*) AS n FROM sale GROUP BY city"
SUMS = "SELECT city, count(*) AS n, sum(amount) AS amount FROM sale GROUP BY city"
SMALL = SUMS.replace(" GROUP", " WHERE amount < 50 GROUP")
RENAMED = SUMS.replace("AS n", "AS sales")


@dataclass
class Shop:
    """Servers, `everstate run`, a writer, two readers, and the states that were written."""

    folder: Path
    config: Config
    states: dict[str, Sold] = field(default_factory=dict)
    versions: Counter[str] = field(default_factory=Counter)
    sent: int = 0
    trouble: list[str] = field(default_factory=list)
    reads: Counter[str] = field(default_factory=Counter)
    writes: threading.Event = field(default_factory=threading.Event)
    stop: threading.Event = field(default_factory=threading.Event)
    models: tuple[type[Sold], ...] = (Sold,)
    process: subprocess.Popen[bytes] | None = None
    begun: float = 0.0

    def write(self) -> None:
        """Send changes at the rate, while writing is wanted."""
        rng, topic = random.Random(7), TopicNames(self.config.log.prefix).changes("sale")
        with Producer(self.config) as producer:
            while not self.stop.wait(1 / RATE):
                if not self.writes.is_set():
                    continue
                model = rng.choice(self.models)
                key = f"{model.__name__}-{rng.randrange(KEYS)}"
                new = model.model_validate(
                    {"sale_id": key, "city": f"c{rng.randrange(5)}", "amount": rng.randrange(100)}
                    | {"code": rng.choice(("7", "seven"))}
                    | {"number": "three" if model is Worded else rng.randrange(3)}
                )
                self.versions[key] += 1
                old, version = self.states.get(key), self.versions[key]
                change = change_of("sale", key, version, new, old, who=DESK)
                producer.send_many([OutRecord(topic, *CODECS[model].encode(change))])
                producer.flush(30)
                self.states[key] = new
                self.sent += 1

    def read(self, level: psycopg.IsolationLevel | None) -> None:
        """Read for ever: in one transaction all reads are alike, and nothing is ever less."""
        with psycopg.connect(self.config.views_dsn, autocommit=level is None) as connection:
            connection.isolation_level = level
            before = (-1, -1)
            while not self.stop.wait(0.1):
                try:
                    seen = [self._seen(connection) for _ in range(1 if level is None else 3)]
                except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
                    if before != (-1, -1):
                        self.trouble.append(f"{level}: a name is gone")
                    connection.rollback()  # before the first start
                    continue
                except psycopg.Error as error:
                    self.trouble.append(f"{level}: {type(error).__name__}: {error}")
                    connection.rollback()
                    continue
                connection.rollback()
                self.reads[str(level)] += 1
                if len(set(seen)) > 1 or seen[0][0] < before[0] or seen[0][1] < before[1]:
                    self.trouble.append(f"{level}: {seen} after {before}")
                before = seen[0]

    def _seen(self, connection: psycopg.Connection[Any]) -> tuple[int, int]:
        """Sales in a view that stays, and cities in the one that changes: both only grow."""
        schema = self.config.views.schema_name
        query = (
            f"SELECT (SELECT coalesce(sum(n), 0)::bigint FROM {schema}.watched), "
            f"(SELECT count(*) FROM {schema}.by_city)"
        )
        ((sales, cities),) = connection.execute(query.encode()).fetchall()
        return sales, cities

    def refused(self, views: Mapping[str, str], *, code: str, more: str) -> None:
        """A start that is refused with the field and the next step."""
        self.start(views, code=code, more=more)
        assert self.process is not None
        assert self.process.wait(PATIENCE_S) != 0
        self.process = None
        log = (self.folder / "everstate.log").read_text("utf-8")
        assert "sale.code: " in log[-2000:], log[-3000:]

    def start(self, views: Mapping[str, str], *, code: str = "str", more: str = "") -> None:
        """Start `everstate run` with these views, after it has ended."""
        self.end()
        watched = {"watched": "SELECT city, count(*) AS n FROM sale GROUP BY city"}
        text = APP.format(code=code, more=more, views={**watched, **views})
        (self.folder / "shop.py").write_text(text, "utf-8")
        argv = [sys.executable, "-m", "everstate.cli", "--project", str(self.folder), "run"]
        self.begun = time.monotonic()
        with open(self.folder / "everstate.log", "ab") as output:
            self.process = subprocess.Popen(
                argv,
                env={**os.environ, "PYTHONPATH": str(self.folder)},
                stdout=output,
                stderr=output,
            )

    def end(self) -> None:
        """End `everstate run`; nothing of it may be left."""
        if self.process is not None:
            family = psutil.Process(self.process.pid).children(recursive=True)
            self.process.terminate()
            assert self.process.wait(90) == 0
            assert left_after(family, 60) == []
            self.process = None

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """Rows of a query on the views' database; none before its tables are made."""
        with psycopg.connect(self.config.views_dsn) as connection:
            connection.execute(f"SET search_path TO {self.config.views.schema_name}".encode())
            try:
                return connection.execute(query.encode()).fetchall()
            except psycopg.errors.UndefinedTable:
                return []

    def kill_pipeline(self) -> None:
        """SIGKILL the pipeline with all that it started; the supervisor starts it again."""
        assert self.process is not None
        for child in psutil.Process(self.process.pid).children():
            if "pipeline" in child.cmdline():
                kill_family(child)

    def until(self, what: str, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            log = (self.folder / "everstate.log").read_text("utf-8", errors="replace")[-3000:]
            assert self.process is None or self.process.poll() is None, f"ended: {what}\n{log}"
            assert time.monotonic() < deadline, f"not within {PATIENCE_S:.0f} s: {what}\n{log}"
            time.sleep(0.05)

    def published(self, view: str, version: int, *, kill_when: str | None = None) -> None:
        """Wait until readers see a version; kill once while a condition on it holds."""
        place = f"WHERE name = '{view}' AND version = {version}"
        killed = kill_when is None

        def is_seen() -> bool:
            nonlocal killed
            if not killed and self.rows(f"SELECT FROM view {place} AND {kill_when}"):
                self.kill_pipeline()
                killed = True
            return bool(self.rows(f"SELECT FROM view {place} AND published"))

        self.until(f"version {version} of {view} is published", is_seen)
        seconds = time.monotonic() - self.begun
        print(f"{view} {version}: published {seconds:.1f} s after the start", flush=True)
        assert killed, f"version {version} of {view} was too quick to be killed at"

    def settle(self) -> list[Sold]:
        """Stop the writer, and wait until the views have everything; the present states."""
        self.writes.clear()
        behind = (
            "SELECT min(total) FROM (SELECT sum(next_offset)::bigint AS total FROM position p "
            "JOIN view v ON (v.name, v.version) = (p.view, p.version) WHERE v.status = 'live' "
            "GROUP BY p.view, p.version) AS each"
        )
        self.until("all is kept", lambda: self.rows(behind) == [(self.sent,)])
        found = list(self.states.values())
        assert self.rows("SELECT count(*) FROM sale_latest") == [(len(found),)]
        assert self.rows("SELECT count(*) FROM dead") == [(0,)]
        assert self.trouble == []
        return found


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    (tmp_path / "everstate.toml").write_text(TOML, "utf-8")
    stack = Stack(load(tmp_path))
    shop = Shop(tmp_path, stack.start())
    with Topics(shop.config) as topics:
        topics.ensure(["sale"])
    levels = (None, psycopg.IsolationLevel.REPEATABLE_READ)
    threads = [threading.Thread(target=shop.read, args=(level,), daemon=True) for level in levels]
    threads.append(threading.Thread(target=shop.write, daemon=True))
    for thread in threads:
        thread.start()
    try:
        yield shop
    finally:
        shop.stop.set()
        for thread in threads:
            thread.join(30)
        shop.end()
        stack.stop()


def sums(states: list[Sold]) -> list[tuple[Any, ...]]:
    """City, number and sum of amounts."""
    found: dict[str, list[int]] = {}
    for state in states:
        found.setdefault(state.city, []).append(state.amount)
    return sorted((city, len(amounts), sum(amounts)) for city, amounts in found.items())


def number(state: Sold) -> int | None:
    """What a typed column has of a state's number."""
    found = getattr(state, "number", None)
    return found if isinstance(found, int) else None


def test_views_change_under_load_and_kills_and_no_reader_sees_what_is_wrong(shop: Shop) -> None:
    seen = "SELECT city, n, amount::bigint FROM by_city ORDER BY city"
    shop.writes.set()
    shop.start({"by_city": BY_CITY})
    shop.published("by_city", 1)
    shop.until("some changes are written", lambda: shop.sent > 10 * RATE)
    shop.start({"by_city": SUMS})
    shop.published("by_city", 2, kill_when="attempt IS NOT NULL")
    assert shop.rows(seen) != []
    shop.start({"by_city": SMALL})
    shop.published("by_city", 3, kill_when="built IS NOT NULL AND NOT published")
    small = [state for state in shop.settle() if state.amount < 50]
    assert shop.rows(seen) == sums(small)
    shop.writes.set()
    shop.begun = time.monotonic()
    with psycopg.connect(shop.config.views_dsn, autocommit=True) as connection:
        ask_undo(Control(connection, shop.config.views.schema_name), "by_city")
    shop.published("by_city", 2, kill_when="status = 'building'")
    states = shop.settle()
    assert shop.rows(seen) == sums(states)
    shop.writes.set()
    shop.start({"by_city": RENAMED})
    shop.published("by_city", 4)
    stars = {"stars": "SELECT stars, count(*) AS n FROM sale GROUP BY stars"}
    shop.start({"by_city": RENAMED, **stars}, more="stars: int = 0")
    shop.published("stars", 1)
    shop.refused({"by_city": RENAMED, **stars}, code="int", more="stars: int = 0")
    numbers = {"numbers": "SELECT number, count(*) AS n FROM sale GROUP BY number"}
    shop.start({"by_city": RENAMED, **numbers}, more="stars: int = 0; number: int | None = None")
    shop.models = MODELS
    shop.published("numbers", 1)
    states = shop.settle()
    assert shop.rows(seen.replace("n,", "sales,")) == sums(states)
    assert Counter(dict(shop.rows("SELECT number, n FROM numbers"))) == Counter(map(number, states))
    assert shop.rows("SELECT count(*) > 0 FROM misfit WHERE field = 'number'") == [(True,)]
    with psycopg.connect(shop.config.views_dsn, autocommit=True) as connection:
        assert drop(Control(connection, shop.config.views.schema_name), "stars")
    assert shop.rows("SELECT count(*) FROM view WHERE name = 'stars'") == [(0,)]
    everstate = [sys.executable, "-m", "everstate.cli", "--project", str(shop.folder)]
    done = subprocess.run(
        [*everstate, "views", "verify"],
        env={**os.environ, "PYTHONPATH": str(shop.folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert shop.reads[str(None)] > 0
    assert shop.trouble == []
    print(f"{shop.sent} changes, reads: {dict(shop.reads)}", flush=True)
