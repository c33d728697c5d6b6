"""Checks that the log has what was committed, with an oracle that shares no code with the relay."""

from __future__ import annotations

import json
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from typing import Any, NamedTuple

from everstate.config import Config
from everstate.log.consumer import Consumer
from everstate.log.positions import Offsets
from everstate.log.record import Record
from everstate.log.topics import TopicNames
from everstate.postgres import connect

_PROBLEMS_MAX = 50
_SETTLE_S = 10.0

_OUTBOX = """
SELECT change_id::text, entity, key, version, kind, before, after, 'pg:' || xid::text,
       provenance, event, occurred_at
FROM everstate_store.outbox ORDER BY id
"""


class Committed(NamedTuple):
    """A change as its source has it; ``before`` and ``after`` are JSON texts."""

    id: str
    entity: str
    key: str
    version: int
    kind: str
    before: str | None
    after: str | None
    transaction: str | None
    """The transaction's id; ``None``: the source has none."""
    also: Mapping[str, Any] = {}
    """Other members of the message; the provenance without its transaction."""


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
    with connect(config.store_dsn) as connection:
        outbox = [_committed(row) for row in connection.execute(_OUTBOX).fetchall()]
    wanted: dict[str, list[tuple[int, int]]] = defaultdict(list)
    counts = Counter(row.transaction for row in outbox)
    places: Counter[str | None] = Counter()
    checked = set(entities)
    for row in outbox:
        # A transaction also counts its changes of entity types that are not checked.
        places[row.transaction] += 1
        if row.entity in checked:
            wanted[str(row.transaction)].append((places[row.transaction], counts[row.transaction]))
    for entity in sorted(checked):
        check_changes(
            config,
            entity,
            [row for row in outbox if row.entity == entity],
            report,
            blocks,
            complete,
        )
    for block, members in blocks.items():
        if sorted(members) != wanted[block]:
            report.tell(
                f"transaction {block} of {counts[block]} changes came as {sorted(members)[:5]}…"
            )
    return report


def _committed(row: tuple[Any, ...]) -> Committed:
    written, event, occurred_at = row[8:]
    # The outbox names members as Python does.
    provenance = {
        re.sub("_(.)", lambda found: found[1].upper(), name): value
        for name, value in exact(written).items()
    }
    also = {"provenance": provenance, "event": exact(event or "null"), "occurredAt": occurred_at}
    return Committed._make((*row[:8], also))


def check_changes(
    config: Config,
    entity: str,
    committed: Iterable[Committed],
    report: LogReport,
    blocks: dict[str, list[tuple[int, int]]],
    complete: bool = True,
) -> None:
    """Compare one entity type's log with what was committed.

    The changes found of each transaction are added to ``blocks``.
    """
    names = TopicNames(config.log.prefix)
    expected = {row.id: row for row in committed}
    seen: set[str] = set()
    newest: dict[str, tuple[int, bytes]] = {}
    partition_of: dict[str, int] = {}
    for record in read_topic(config, names.changes(entity)):
        report.changes += 1
        try:
            message = exact(record.value or b"")
        except ValueError:
            report.tell(f"{entity} {record.partition}@{record.offset}: not a change")
            continue
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
        home = partition_of.setdefault(message["key"], record.partition)
        if record.partition != home:
            report.tell(f"{where}: in partition {record.partition}, others in {home}")
        last = newest.get(message["key"], (0, b""))[0]
        if message["version"] != last + 1:
            report.tell(f"{where}: follows version {last}")
        newest[message["key"]] = (max(last, message["version"]), record.value or b"")
        block = message["provenance"].get("transaction")
        if block is not None:
            blocks[block["id"]].append((block["index"], block["count"]))
    missing = [row for change_id, row in expected.items() if change_id not in seen]
    if complete:
        for row in missing:
            report.tell(f"{entity} {row.key!r} version {row.version}: missing")
    state = {
        (record.key or b"").decode(): record.value
        for record in read_topic(config, names.state(entity))
    }
    if state != {key: value for key, (_, value) in newest.items()}:
        different = [key for key, (_, value) in newest.items() if state.get(key) != value]
        report.tell(f"{entity}: .state differs from .changes at {different[:5]}")


def _check_message(
    where: str, message: dict[str, Any], row: Committed, record: Record, report: LogReport
) -> None:
    provenance = dict(message["provenance"])
    block = provenance.pop("transaction", None)
    found = {
        **message,
        "record key": (record.key or b"").decode(),
        "block": (block or {}).get("id"),
        "provenance": provenance,
        "original": message["originalEntityState"],
        "current": message["currentEntityState"],
    }
    wanted = {
        "entity": row.entity,
        "key": row.key,
        "version": row.version,
        "kind": row.kind,
        "record key": row.key,
        "block": row.transaction,
        "original": exact(row.before or "null"),
        "current": exact(row.after or "null"),
        **row.also,
    }
    for name, value in wanted.items():
        if _said(name, found.get(name)) != _said(name, value):
            report.tell(f"{where}: {name} is {found.get(name)!r}, committed was {value!r}")


def _said(name: str, value: Any) -> str:
    """What a member says: a null in the provenance says nothing, and UTC has two spellings."""
    if name == "provenance":
        value = {member: said for member, said in value.items() if said is not None}
    if name == "occurredAt" and value is not None:
        value = datetime.fromisoformat(value).isoformat()
    return exact_text(value)


def exact(json_text: str | bytes) -> Any:
    """A JSON value with all digits of its numbers; raises ValueError."""
    return json.loads(json_text, parse_float=Decimal)


def exact_text(value: Any) -> str:
    """A value as a text that differs for ``1``, ``1.0`` and ``true``, which Python calls equal."""
    return json.dumps(value, sort_keys=True, default=repr)


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
