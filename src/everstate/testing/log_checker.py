"""Checks that the log has what was committed, with an oracle that shares no code with the relay."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import psycopg

from everstate.config import Config
from everstate.log.consumer import Consumer
from everstate.log.positions import Offsets
from everstate.log.record import Record
from everstate.log.topics import TopicNames

_PROBLEMS_MAX = 50
_SETTLE_S = 10.0

_OUTBOX = """
SELECT change_id::text, entity, key, version, kind, before, after, 'pg:' || xid::text
FROM everstate_store.outbox WHERE entity = %s ORDER BY id
"""


@dataclass
class LogReport:
    """Result of the check; no problems: the log has exactly what was committed."""

    changes: int = 0
    problems: list[str] = field(default_factory=list)

    def tell(self, problem: str) -> None:
        """Add a problem; the first fifty are kept."""
        if len(self.problems) < _PROBLEMS_MAX:
            self.problems.append(problem)


def check_log(config: Config, entities: Iterable[str], *, complete: bool = True) -> LogReport:
    """Compare the logs of these entity types with the outbox of the store.

    The log must have every committed change once, with its states; the versions of a key in order;
    each transaction whole, with right numbers in its block; `.state` must end with each key's
    newest change. With ``complete=False`` changes may still be missing, if no later change of
    their key is in the log. The outbox must not have been trimmed. Memory: all changes.
    """
    report = LogReport()
    blocks: dict[str, list[tuple[int, int]]] = defaultdict(list)
    committed_blocks: dict[str, int] = defaultdict(int)
    with psycopg.connect(config.store_dsn) as connection:
        for entity in entities:
            outbox = connection.execute(_OUTBOX, [entity]).fetchall()
            for row in outbox:
                committed_blocks[row[7]] += 1
            check_changes(config, entity, outbox, report, blocks, complete)
    for block, members in blocks.items():
        count = committed_blocks[block]
        if sorted(members) != [(index, count) for index in range(1, count + 1)]:
            report.tell(f"transaction {block} of {count} changes came as {sorted(members)[:5]}…")
    return report


def check_changes(
    config: Config,
    entity: str,
    committed: list[tuple[Any, ...]],
    report: LogReport,
    blocks: dict[str, list[tuple[int, int]]],
    complete: bool = True,
) -> None:
    """Compare one entity type's log with what was committed.

    Rows of ``committed``: change id, entity, key, version, kind, JSON text before and after, and
    the transaction's id (``None``: the source has none). The changes found of each transaction are
    added to ``blocks``.
    """
    names = TopicNames(config.log.prefix)
    expected = {row[0]: row for row in committed}
    seen: set[str] = set()
    newest: dict[str, tuple[int, bytes]] = {}
    for record in read_topic(config, names.changes(entity)):
        assert record.value is not None
        assert record.key is not None
        message = json.loads(record.value)
        report.changes += 1
        where = f"{entity} {message['key']!r} version {message['version']}"
        row = expected.get(message["id"])
        if message["id"] in seen:
            report.tell(f"{where}: doubled at {record.partition}@{record.offset}")
            continue
        seen.add(message["id"])
        if row is None:
            report.tell(f"{where}: was never committed")
            continue
        _check_message(where, message, row, record, report)
        last = newest.get(message["key"], (0, b""))[0]
        if message["version"] != last + 1:
            report.tell(f"{where}: follows version {last}")
        newest[message["key"]] = (max(last, message["version"]), record.value)
        block = message["provenance"].get("transaction")
        if block is not None:
            blocks[block["id"]].append((block["index"], block["count"]))
    missing = [row for change_id, row in expected.items() if change_id not in seen]
    if complete:
        for row in missing:
            report.tell(f"{entity} {row[2]!r} version {row[3]}: missing")
    state = {
        (record.key or b"").decode(): record.value
        for record in read_topic(config, names.state(entity))
    }
    if state != {key: value for key, (_, value) in newest.items()}:
        different = [key for key, (_, value) in newest.items() if state.get(key) != value]
        report.tell(f"{entity}: .state differs from .changes at {different[:5]}")


def _check_message(
    where: str, message: dict[str, Any], row: tuple[Any, ...], record: Record, report: LogReport
) -> None:
    _, entity, key, version, kind, before, after, block = row
    found = {
        "entity": message["entity"],
        "key": message["key"],
        "version": message["version"],
        "kind": message["kind"],
        "record key": (record.key or b"").decode(),
        "block": (message["provenance"].get("transaction") or {}).get("id"),
        "original": message["originalEntityState"],
        "current": message["currentEntityState"],
    }
    wanted = {
        "entity": entity,
        "key": key,
        "version": version,
        "kind": kind,
        "record key": key,
        "block": block,
        "original": None if before is None else json.loads(before),
        "current": None if after is None else json.loads(after),
    }
    for name, value in wanted.items():
        if found[name] != value:
            report.tell(f"{where}: {name} is {found[name]!r}, committed was {value!r}")


def read_topic(config: Config, topic: str) -> list[Record]:
    """Every committed record of a topic, partition by partition.

    A commit is final before all readers see it: waits at most ten seconds until no transaction is
    open on the topic.
    """
    deadline = time.monotonic() + _SETTLE_S
    with Offsets(config) as offsets:
        while (ends := offsets.stable_ends([topic])) != offsets.high_watermarks([topic]):
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        starts = offsets.beginnings([topic])
    with Consumer(config) as consumer:
        return [
            record
            for place, end in sorted(ends.items())
            for record in consumer.read(topic, place[1], starts[place], end)
        ]
