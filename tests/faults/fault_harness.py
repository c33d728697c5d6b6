"""Is everything where it must be? A checker that shares no code with what it checks.

It reads `.changes` with a bare consumer, the outbox as the oracle of what was committed, the
views' tables with bare SQL and the archive with delta-rs, and folds the log by brute force. Every
function of the first half is pure, so that planted defects can be shown to it.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, cast

import confluent_kafka
import psycopg
import pyarrow as pa
from confluent_kafka import TopicPartition
from deltalake import DeltaTable
from fault_app import ENTITY

from everstate.config import Config

Place = tuple[int, int]
"""Partition and offset in `.changes`."""
Foreign = Mapping[Place, str]
"""Records that the test itself put into the log: `duplicate` or `unreadable`."""
Group = tuple[int, Decimal, int]
"""Count, sum of fees, sum of weights of a region."""


@dataclass(frozen=True, slots=True)
class Committed:
    """One row of the outbox: a change that the store committed."""

    change_id: str
    key: str
    version: int
    kind: str
    before: Any
    after: Any
    call: str | None = None
    """Correlation id: which set-based write it came with."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One record of the log, as a read_committed reader sees it."""

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None

    @property
    def message(self) -> dict[str, Any]:
        """The value as JSON."""
        decoded: dict[str, Any] = json.loads(self.value or b"null")
        return decoded


@dataclass
class Tables:
    """What the views hold."""

    latest: dict[str, tuple[int, str, Any]] = field(default_factory=dict)
    """key → version, change id, state (``None``: deleted)."""
    history: dict[tuple[str, int], tuple[str, Any]] = field(default_factory=dict)
    """(key, version) → change id, state."""
    regions: dict[str | None, Group] = field(default_factory=dict)
    heavy: dict[str, tuple[str | None, int]] = field(default_factory=dict)
    positions: dict[str, dict[int, int]] = field(default_factory=dict)
    """view, `latest` among them → partition → next offset."""


@dataclass
class Lake:
    """What the archive holds."""

    rows: list[Seen] = field(default_factory=list)
    ranges: list[tuple[int, int, int]] = field(default_factory=list)
    """(partition, start, end) of every append, in the order of the commits."""


@dataclass(frozen=True, slots=True)
class Account:
    """What the main group says became of the log's records (law 7)."""

    applied: int
    duplicate: int
    held: int
    dead: int


@dataclass(frozen=True, slots=True)
class Letter:
    """A record of `.dead`: the place in the log that it names, and its bytes."""

    place: Place
    key: bytes | None
    value: bytes | None


# ---- the judgements: pure ------------------------------------------------------------------


def log_problems(committed: Iterable[Committed], log: Sequence[Seen]) -> list[str]:
    """Lost, doubled, foreign, changed or misplaced records; versions dense and in order."""
    problems = []
    expected = {change.change_id: change for change in committed}
    counts = Counter(record.message["id"] for record in log)
    problems += [f"{_name(expected[i])} is lost" for i in expected if i not in counts]
    problems += [f"change {i} is in the log {n} times" for i, n in counts.items() if n > 1]
    last: dict[str, int] = defaultdict(int)
    home: dict[str, int] = {}
    for record in log:
        message = record.message
        key, version, where = message["key"], message["version"], _where(record)
        wanted = expected.get(message["id"])
        if wanted is None:
            problems.append(f"{where}: {key} version {version} was never committed")
        elif _content(message) != wanted or (record.key or b"").decode() != key:
            problems.append(f"{where}: {_name(wanted)} is not as committed")
        if version != last[key] + 1:
            problems.append(f"{where}: {key} version {version} follows version {last[key]}")
        last[key] = max(last[key], version)
        if home.setdefault(key, record.partition) != record.partition:
            problems.append(f"{where}: {key} also lives in partition {home[key]}")
    return problems


def fold(log: Iterable[Seen]) -> Tables:
    """The views of a log, by brute force: the whole log read from its begin."""
    tables = Tables()
    for record in log:
        message = record.message
        key, version, state = message["key"], message["version"], message["currentEntityState"]
        tables.history[key, version] = (message["id"], state)
        tables.latest[key] = (version, message["id"], state)
    groups: dict[str | None, list[Any]] = defaultdict(lambda: [0, Decimal(0), 0])
    for key, (_, _, state) in tables.latest.items():
        if state is None:
            continue
        group = groups[state["region"]]
        group[0] += 1
        group[1] += Decimal(state["fee"])
        group[2] += state["weight"]
        if state["weight"] >= 50:
            tables.heavy[key] = (state["region"], state["weight"])
    tables.regions = {region: (n, fees, w) for region, (n, fees, w) in groups.items()}
    return tables


def view_problems(log: Sequence[Seen], tables: Tables, ends: Mapping[int, int]) -> list[str]:
    """Where the views differ from the fold of the log, or their position from its end."""
    wanted = fold(log)
    problems = _differences("latest", wanted.latest, tables.latest)
    problems += _differences("history", wanted.history, tables.history)
    problems += _differences("fees_by_region", wanted.regions, tables.regions)
    problems += _differences("heavy", wanted.heavy, tables.heavy)
    for view, positions in tables.positions.items():
        problems += _differences(f"position of {view}", dict(ends), positions)
    return problems


def archive_problems(log: Sequence[Seen], lake: Lake, ends: Mapping[int, int]) -> list[str]:
    """Where the archive is not the log: ranges that do not tile it, rows lost or doubled."""
    problems = []
    reached: dict[int, int] = {}
    for partition, start, end in lake.ranges:
        begun = reached.get(partition, 0)
        if start != begun:
            what = "hole" if start > begun else "overlap"
            problems.append(f"archive: {what} in partition {partition}: {begun} to {start}")
        reached[partition] = max(begun, end)
    problems += _differences("archive position", dict(ends), reached)
    rows = Counter(lake.rows)
    problems += [f"archive: {_where(row)} is there {n} times" for row, n in rows.items() if n > 1]
    problems += [f"archive: {_where(record)} is missing" for record in log if record not in rows]
    served = set(log)
    problems += [f"archive: {_where(row)} is not in the log" for row in rows if row not in served]
    return problems


def state_problems(log: Sequence[Seen], state: Sequence[Seen]) -> list[str]:
    """Keys whose newest record in `.state` is not their newest change, byte for byte."""
    wanted = {record.key: (record.partition, record.value) for record in log}
    found = {record.key: (record.partition, record.value) for record in state}
    return _differences(".state", wanted, found)


def account_problems(log: Sequence[Seen], foreign: Foreign, account: Account) -> list[str]:
    """Where the main group's counters do not say what became of each record (law 7)."""
    planted = Counter(foreign.values())
    wanted = Account(len(log) - len(foreign), planted["duplicate"], 0, planted["unreadable"])
    return [] if account == wanted else [f"counters: {account}, should be {wanted}"]


def dead_problems(log: Sequence[Seen], foreign: Foreign, letters: Sequence[Letter]) -> list[str]:
    """Unreadable records that are not in `.dead` once, with their bytes; and what else is there."""
    wanted = Counter(
        Letter((record.partition, record.offset), record.key, record.value)
        for record in log
        if foreign.get((record.partition, record.offset)) == "unreadable"
    )
    found = Counter(letters)
    problems = [f".dead: {each.place} is missing" for each in wanted - found]
    return problems + [f".dead: {each.place} should not be there" for each in found - wanted]


def acknowledged_problems(committed: Iterable[Committed], lines: Iterable[str]) -> list[str]:
    """Writes whose commit was acknowledged, and that the store no longer has.

    A line is a change's id, or the id of a set-based write and its number of changes.
    """
    changes = list(committed)
    known = {change.change_id for change in changes}
    calls = Counter(change.call for change in changes)
    problems = []
    for line in lines:
        if not line.endswith("\n"):
            continue  # the writer was killed within it
        name, _, count = line.strip().partition(" ")
        if not count and name not in known:
            problems.append(f"store: acknowledged change {name} is lost")
        if count and calls[name] != int(count):
            problems.append(f"store: {calls[name]} of {count} changes of call {name} are there")
    return problems


def _content(message: dict[str, Any]) -> Committed:
    return Committed(
        message["id"],
        message["key"],
        message["version"],
        message["kind"],
        message["originalEntityState"],
        message["currentEntityState"],
        message["provenance"]["correlationId"],
    )


def _differences(name: str, wanted: Mapping[Any, Any], found: Mapping[Any, Any]) -> list[str]:
    problems = [f"{name}: {k!r} is missing" for k in wanted if k not in found]
    problems += [f"{name}: {k!r} should not be there" for k in found if k not in wanted]
    problems += [
        f"{name}: {k!r} is {found[k]!r}, the fold says {wanted[k]!r}"
        for k in wanted
        if k in found and found[k] != wanted[k]
    ]
    return problems


def _name(change: Committed) -> str:
    return f"{change.key} version {change.version} ({change.change_id})"


def _where(record: Seen) -> str:
    return f"{record.partition}@{record.offset}"


# ---- the witnesses: each read with its bare driver -----------------------------------------


def read_committed_changes(config: Config) -> list[Committed]:
    """Every change in the outbox (which is trimmed a day late at the earliest)."""
    query = (
        "SELECT change_id::text, key, version, kind, before, after, "
        "provenance::jsonb ->> 'correlation_id' "
        "FROM everstate_store.outbox WHERE entity = %s"
    )
    with psycopg.connect(config.store_dsn) as connection:
        rows = connection.execute(query, (ENTITY,)).fetchall()
    return [
        Committed(i, k, v, kind, _loaded(before), _loaded(after), call)
        for i, k, v, kind, before, after, call in rows
    ]


def _loaded(text: str | None) -> Any:
    return None if text is None else json.loads(text)


def read_log(config: Config, entity: str = ENTITY) -> tuple[list[Seen], dict[int, int]]:
    """Committed records of `.changes`, partition by partition, and each partition's end."""
    messages, ends = read_topic(config, f"{config.log.prefix}.{entity}.changes.g1")
    return [_seen(message) for message in messages], ends


def read_state(config: Config) -> list[Seen]:
    """Committed records of `.state`."""
    messages, _ = read_topic(config, f"{config.log.prefix}.{ENTITY}.state.g1")
    return [_seen(message) for message in messages]


def read_dead(config: Config) -> list[Letter]:
    """Committed records of `.dead`."""
    messages, _ = read_topic(config, f"{config.log.prefix}.{ENTITY}.dead")
    letters = []
    for message in messages:
        headers = dict(cast("list[tuple[str, bytes]]", message.headers() or []))
        place = (int(headers["everstate_partition"]), int(headers["everstate_offset"]))
        letters.append(Letter(place, message.key(), message.value()))
    return letters


def _seen(message: confluent_kafka.Message) -> Seen:
    partition, offset = message.partition(), message.offset()
    assert partition is not None
    assert offset is not None
    return Seen(partition, offset, message.key(), message.value())


def read_topic(config: Config, topic: str) -> tuple[list[confluent_kafka.Message], dict[int, int]]:
    """Committed records of all transactions that were begun before the call, and the ends.

    A producer's commit returns before the markers are in the partitions, and until then a reader
    of committed records does not see them.
    """
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": config.bootstrap_servers,
            "group.id": "fault-checker",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 10,
            "isolation.level": "read_committed",
        }
    )
    found = consumer.list_topics(topic, timeout=30).topics[topic]
    assert found.error is None, found.error
    high = _high_watermarks(config, topic, found.partitions)
    records: list[confluent_kafka.Message] = []
    ends: dict[int, int] = {}
    for partition in sorted(found.partitions):
        consumer.assign([TopicPartition(topic, partition, 0)])
        while partition not in ends:
            message = consumer.poll(30)
            assert message is not None, f"{topic}[{partition}]: no end within 30 s"
            error = message.error()
            if error is None:
                records.append(message)
            elif error.code() == confluent_kafka.KafkaError._PARTITION_EOF:
                if (message.offset() or 0) >= high[partition]:
                    ends[partition] = message.offset() or 0
            else:
                raise confluent_kafka.KafkaException(error)
    consumer.close()
    return records, ends


def _high_watermarks(config: Config, topic: str, partitions: Iterable[int]) -> dict[int, int]:
    settings = {"bootstrap.servers": config.bootstrap_servers, "group.id": "fault-checker"}
    consumer = confluent_kafka.Consumer({**settings, "isolation.level": "read_uncommitted"})
    found = {}
    for partition in partitions:
        asked = TopicPartition(topic, partition)
        _, found[partition] = consumer.get_watermark_offsets(asked, timeout=30, cached=False)
    consumer.close()
    return found


def read_account(config: Config) -> Account:
    """The core's counters, over its partitions."""
    query = (
        "SELECT sum(applied)::bigint, sum(duplicate)::bigint, sum(held)::bigint, "
        f"sum(dead)::bigint FROM {config.views.schema_name}.counters WHERE entity = %s"
    )
    with psycopg.connect(config.views_dsn) as connection:
        row = connection.execute(query.encode(), (ENTITY,)).fetchone()
    assert row is not None
    return Account(*row)


def read_tables(config: Config) -> Tables:
    """What readers of the views see, and the positions."""
    schema = config.views.schema_name
    tables = Tables()
    with psycopg.connect(config.views_dsn, options=f"-c search_path={schema}") as connection:

        def rows(query: str) -> list[tuple[Any, ...]]:
            return connection.execute(query.encode()).fetchall()

        for key, version, change_id, state in rows(
            f"SELECT key, version, change_id::text, state FROM {ENTITY}_latest__v1"
        ):
            tables.latest[key] = (version, change_id, state)
        for key, version, change_id, state in rows(
            f"SELECT key, version, change_id::text, state FROM {ENTITY}_history"
        ):
            tables.history[key, version] = (change_id, state)
        for region, parcels, fees, weight in rows(
            "SELECT region, parcels, fees, weight FROM fees_by_region"
        ):
            tables.regions[region] = (parcels, fees, int(weight))
        for key, region, weight in rows("SELECT _key, region, weight FROM heavy"):
            tables.heavy[key] = (region, weight)
        published = "JOIN view ON view.name = position.view AND view.version = position.version"
        for view, partition, offset in rows(
            f"SELECT view, partition, next_offset FROM position {published} WHERE published"
        ):
            tables.positions.setdefault(view, {})[partition] = offset
    return tables


def read_lake(config: Config, entity: str = ENTITY) -> Lake:
    """Rows and commits of the archive, by delta-rs."""
    table = DeltaTable(f"{config.archive_path}/{entity}")
    data = pa.table(
        table.to_pyarrow_dataset().to_table(columns=["partition", "offset", "raw_key", "raw_value"])
    )
    rows = [Seen(*row.values()) for row in data.to_pylist()]
    return Lake(rows, read_ranges(config, entity))


def read_ranges(config: Config, entity: str = ENTITY) -> list[tuple[int, int, int]]:
    """Partition, start and end of every append, from the notes in the archive's commits."""
    ranges = []
    table = DeltaTable(f"{config.archive_path}/{entity}")
    for commit in sorted(table.history(), key=lambda each: each["version"]):
        note = json.loads(commit.get("userMetadata") or "{}").get("everstate", {})
        ranges += [
            (each["partition"], each["start"], each["end"]) for each in note.get("ranges", ())
        ]
    return ranges


def problems(config: Config, acknowledged: Iterable[str], foreign: Foreign) -> list[str]:
    """Everything that is wrong, of a project at rest; empty when nothing is."""
    committed = read_committed_changes(config)
    log, ends = read_log(config)
    own = [record for record in log if (record.partition, record.offset) not in foreign]
    return [
        *acknowledged_problems(committed, acknowledged),
        *log_problems(committed, own),
        *state_problems(own, read_state(config)),
        *view_problems(own, read_tables(config), ends),
        *account_problems(log, foreign, read_account(config)),
        *dead_problems(log, foreign, read_dead(config)),
        *archive_problems(log, read_lake(config), ends),
    ]
