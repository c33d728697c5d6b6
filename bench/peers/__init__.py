"""peers: one log into latest and sums by everstate, Kafka Streams, Flink SQL and bare Python."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import confluent_kafka
import psycopg
from confluent_kafka.admin import (  # type: ignore[attr-defined] # its stubs lack a name
    AdminClient,
    NewTopic,
)

from bench.peers import log, ours
from bench.peers.environment import Peers, peers
from bench.postgres_floors import BareKeeper
from bench.project import VIEW
from bench.report import Reach, Result, result
from bench.session import Session, changes_topic
from everstate.config import Config
from everstate.log.producer import Producer
from everstate.log.topics import Topics

_ANSWER = "SELECT country, status, purchases, total FROM"
_READ_S = 3.0
WITH_START = 4_000_000


@dataclass(frozen=True, slots=True)
class Took:
    """Seconds until a peer was ready, for the first part of the log, and for the rest."""

    start_s: float
    first_s: float
    existing_s: float


@dataclass
class _Run:
    """One filled log, and the peers on it."""

    session: Session
    config: Config
    debezium: str
    ends: tuple[Mapping[int, int], Mapping[int, int]]
    """Offsets of the topic in Debezium's form after the first part, and after both."""
    answer: Path
    peers: Peers
    first: int
    both: int
    work: Path
    topics: list[str] = field(default_factory=list)

    def topic(self, name: str) -> str:
        """A fresh topic of four partitions."""
        return _topic(self.config, name)

    def everstate(self) -> Took:
        """A process of our own."""
        config = self.session.fresh(self.config)
        given = {"config": json.loads(config.model_dump_json()), "began": time.time()}
        given |= {"first": self.first, "both": self.both}
        program = "from bench.peers.ours import main; main()"
        told = _child([sys.executable, "-c", program], given)
        self._check(config, f"{_ANSWER} {config.views.schema_name}.{VIEW}")
        self.session.drop(config)
        return Took(**told)

    def everstate_warm(self) -> Took:
        """The same in a session that has kept the log before."""
        config = self.session.fresh(self.config)
        _, first_s, existing_s = ours.keep(self.session.spark, config, self.first, self.both)
        self._check(config, f"{_ANSWER} {config.views.schema_name}.{VIEW}")
        self.session.drop(config)
        return Took(0.0, first_s, existing_s)

    def bare(self) -> Took:
        """One thread of Python into PostgreSQL."""
        config = self.session.fresh(self.config)
        began = time.perf_counter()
        keeper = BareKeeper(config, changes_topic(config), config.log.partitions)
        done, half = 0, 0.0
        ready = time.perf_counter()
        while done < self.both:
            done += keeper.step(1.0)
            if not half and done >= self.first:
                half = time.perf_counter()
        ended = time.perf_counter()
        keeper.close()
        self._check(config, f"{_ANSWER} bare_totals")
        self.session.drop(config)
        return Took(ready - began, half - ready, ended - half)

    def streams(self) -> Took:
        """Kafka Streams, exactly once, with a commit each 100 ms."""
        state = tempfile.mkdtemp(dir=self.work)
        arguments = (
            *(self.config.bootstrap_servers or "", changes_topic(self.config)),
            *(self.topic("streams"), state, "exactly_once_v2", str(self.answer)),
            *(str(self.first), str(self.both)),
        )
        java = ("java", "-Xmx1g", "-Dorg.slf4j.simpleLogger.defaultLogLevel=error")
        return Took(**_child([*java, "-cp", self.peers.streams, "Views", *arguments]))

    def flink(self) -> Took:
        """Flink SQL: once up to the end of the first part, once up to the end of both."""
        once = [self._flink(ends) for ends in self.ends]
        first_s = float(once[0]["seconds"])
        return Took(once[1]["start_s"], first_s, once[1]["seconds"] - first_s)

    def _flink(self, ends: Mapping[int, int]) -> dict[str, Any]:
        out, latest = self.topic("out"), self.topic("latest")
        given = {
            "servers": self.config.bootstrap_servers,
            "source": self.debezium,
            "ends": ends,
            "out": out,
            "latest": latest,
            "work": tempfile.mkdtemp(dir=self.work),
            "connector": str(self.peers.flink_connector),
        }
        script = str(Path(__file__).with_name("flink.py"))
        told = _child([str(self.peers.flink_python), script], given)
        if ends == self.ends[1]:
            found = _compacted(self.config, out)
            rows = {f"{k['country']}|{k['status']}": (v["n"], v["total"]) for k, v in found}
            self._same(rows)
        return told

    def _check(self, config: Config, query: str) -> None:
        with psycopg.connect(config.store_dsn) as connection:
            rows = connection.execute(query.encode()).fetchall()
        self._same({f"{country}|{status}": (n, total) for country, status, n, total in rows})

    def _same(self, rows: Mapping[str, tuple[Any, Any]]) -> None:
        found = {group: [n, round(float(total) * 100)] for group, (n, total) in rows.items() if n}
        wanted = json.loads(self.answer.read_text("utf-8"))
        assert found == wanted, "the view is not right"


def run(session: Session) -> list[Result]:
    first, existing = session.size(log.FIRST), session.size(log.EXISTING)
    took: dict[str, list[Took]] = {}
    with tempfile.TemporaryDirectory(prefix="everstate-bench-peers-") as folder:
        found = _filled(session, first, first + existing, Path(folder))
        for number in range(session.repeat):
            for name, measure in (
                ("Kafka Streams, exactly once", found.streams),
                ("Flink SQL", found.flink),
                ("one thread of Python", found.bare),
                ("everstate", found.everstate),
            ):
                took.setdefault(name, []).append(measure())
                session.say(f"[dim]  run {number + 1}: {name}: {took[name][-1]}[/dim]")
        found.everstate_warm()
        for _ in range(session.repeat):
            took.setdefault("everstate, warm", []).append(found.everstate_warm())
    return _rows(took, first, existing)


def _rows(took: Mapping[str, list[Took]], first: int, existing: int) -> list[Result]:
    reaches = {"Kafka Streams, exactly once": 2.5, "Flink SQL": 1.5, "one thread of Python": None}
    rows = []
    parts: dict[str, Callable[[Took], float]] = {
        f"first load, {first:,} changes, less start": lambda t: first / t.first_s,
        f"existing keys, {existing:,} changes, less start": lambda t: existing / t.existing_s,
        f"{WITH_START:,} changes, with start": lambda t: (
            WITH_START / (t.start_s + _rest_s(t, first, existing))
        ),
    }
    for part, rate in parts.items():
        with_start = "with start" in part
        for mine in ("everstate",) if with_start else ("everstate", "everstate, warm"):
            values = [rate(each) for each in took[mine]]
            metric = part + mine.removeprefix("everstate")
            for peer, least in reaches.items():
                bound = least and (1.0 if with_start else least)
                floors = [rate(each) for each in took[peer]]
                reach = Reach(ratio_min=bound) if mine == "everstate" else None
                rows.append(
                    result("peers", metric, "changes/s", values, floors=floors, floor_is=peer,
                           reach=reach)
                )  # fmt: skip
    return rows


def _rest_s(took: Took, first: int, existing: int) -> float:
    """Seconds of so many changes, the first part of them as a first load."""
    return took.first_s + took.existing_s * (WITH_START - first) / existing


def _filled(session: Session, first: int, both: int, work: Path) -> _Run:
    """The log in our form and in Debezium's; each key in one partition of both."""
    session.say(f"[dim]making the peers, and filling two logs with {both:,} changes[/dim]")
    config = session.fresh()
    made = peers(config)
    with Topics(config) as topics:
        topics.ensure(["purchase"])
    answer = work / "answer.json"
    log.write_answer(answer, first, both - first)
    debezium = _topic(config, "debezium")
    ends = []
    with Producer(config) as producer:
        for number, change in enumerate(log.changes(first, both - first), start=1):
            producer.send_raw(changes_topic(config), change.key, change.value, change.headers)
            producer.send_raw(debezium, change.key, change.debezium, [])
            if number in (first, both):
                producer.flush()
                ends.append(_ends(config, debezium))
    return _Run(session, config, debezium, (ends[0], ends[1]), answer, made, first, both, work)


def _topic(config: Config, name: str) -> str:
    """A fresh topic with as many partitions as the log."""
    made = f"peer-{name}-{uuid.uuid4().hex[:8]}"
    admin = AdminClient({"bootstrap.servers": config.bootstrap_servers})
    admin.create_topics([NewTopic(made, config.log.partitions, 1)])[made].result()
    return made


def _reader(config: Config) -> confluent_kafka.Consumer:
    return confluent_kafka.Consumer(
        {
            "bootstrap.servers": config.bootstrap_servers,
            "group.id": "bench-peers",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
        }
    )


def _ends(config: Config, topic: str) -> dict[int, int]:
    """Offsets behind the last record of each partition."""
    reader = _reader(config)
    places = [confluent_kafka.TopicPartition(topic, part) for part in range(config.log.partitions)]
    found = {place.partition: reader.get_watermark_offsets(place)[1] for place in places}
    reader.close()
    return found


def _compacted(config: Config, topic: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Newest value of each key of a topic."""
    reader, newest = _reader(config), dict[bytes, bytes | None]()
    reader.assign(
        [confluent_kafka.TopicPartition(topic, part, 0) for part in range(config.log.partitions)]
    )
    while records := reader.consume(10_000, _READ_S):
        newest |= {record.key() or b"": record.value() for record in records}
    reader.close()
    return [(json.loads(k), json.loads(v)) for k, v in newest.items() if v is not None]


def _child(command: list[str], given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Run a peer; the JSON object that it prints last."""
    text = None if given is None else json.dumps(given)
    done = subprocess.run(command, input=text, text=True, check=True, stdout=subprocess.PIPE)
    told: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return told
