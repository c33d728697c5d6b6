"""XA transactions of MariaDB: published at XA COMMIT and never else, whatever is killed (C10)."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, NamedTuple
from uuid import UUID, uuid5

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from clean_cases import CONFIG, MemoryCopy
from everstate.changes import EntityType
from everstate.declarations.captures import Aggregate, Capture, Outbox, Table
from everstate.log.topics import TopicNames
from everstate.sources.cdc import stream
from everstate.sources.cdc.balance import counted, held_rows
from everstate.sources.cdc.columns import Rows, Slices
from everstate.sources.cdc.fingerprint import SeenChanges, due
from everstate.sources.cdc.holding import HeldEntity
from everstate.sources.cdc.kinds import kind_of
from everstate.sources.cdc.mariadb import BinlogEvent, MariaDatabase
from everstate.sources.cdc.mariadb_unseen import look_at
from everstate.sources.cdc.reading import (
    BinlogLook,
    Fingerprint,
    SourceIdentity,
    encode_source,
)
from everstate.sources.cdc.replaced import Mark, mark_of, renew_mark
from everstate.sources.cdc.rows import KIND, SOURCE, TRANSACTION
from everstate.sources.cdc.states import States
from everstate.sources.cdc.stream import Stream, StreamStanding
from tiers import counted as in_tier

DSN = "mariadb://nobody@localhost/shop"
SPACE = UUID("4d47e190-0402-4048-bc2c-89dd54343cdc")
SAID = {"apiVersion": "v1", "serviceName": "shop", "identifier": "web-3"}
CHANGES = TopicNames(CONFIG.log.prefix).changes("item")
KEYS = ("1", "2", "3")
standing_json = msgspec.json.Encoder().encode
standing_of = msgspec.json.Decoder(StreamStanding).decode


class Item(BaseModel):
    """What is sold."""

    id: int
    amount: int


ITEMS = {"item": EntityType("item", Item, "id")}
TABLES = Capture(name="shop", kind="mariadb", dsn=DSN, tables={"shop.item": Table(entity="item")})
OUTBOX = Capture(
    name="shop", kind="mariadb", dsn=DSN,
    outbox=Outbox(table="shop.item", aggregates={"Item": Aggregate(entity="item")}),
)  # fmt: skip


class State(NamedTuple):
    """What a commit, or a statement without row events, made of a row; ``None``: no row."""

    amount: int | None
    is_seen: bool = True


def is_told(history: list[State], log: list[int | None], *, is_all: bool = False) -> bool:
    """Whether the log has the states of a key in their order, and no other.

    What changed without row events may be missing, and so what then is no change for the log.
    ``is_all``: the log has come to the end of the history.
    """
    at, known = {0}, None
    for amount in [*log, ...]:
        for start in list(at):
            for end, one in enumerate(history[start:], start + 1):
                if one.is_seen and one.amount != known:
                    break
                at.add(end)
        if amount is ...:
            return bool(at) and (not is_all or (len(history) in at and known == _last(history)))
        at = {each + 1 for each in at if each < len(history) and history[each].amount == amount}
        known = amount
    return False


def _last(history: list[State]) -> int | None:
    return history[-1].amount if history else None


@dataclass
class Open:
    """A transaction of a session: what it has written."""

    states: dict[str, int | None] = field(default_factory=dict)
    gtid: str = ""


class Server(MariaDatabase):
    """A pretended server: its rows and locks, its binlog, and what its connector makes of it."""

    def __init__(self, capture: Capture, chance: random.Random) -> None:
        self.capture, self.chance = capture, chance
        self.rows: dict[str, int] = {}
        self.altered = 0
        self.versions: dict[str, int] = dict.fromkeys(KEYS, 0)
        self.history: dict[str, list[State]] = {key: [] for key in KEYS}
        """Key → its states, in the order of the commits."""
        self.prepared: dict[str, Open] = {}
        self.binlog: list[BinlogEvent] = []
        self.mark = msgspec.json.encode(Mark("m", looked_at="b.000001:4")).decode()
        self.sent: list[tuple[int, Any, Any, Any]] = []
        """Records of the connector, each after the events before this position of the binlog."""
        self._gtid, self._value = count(11), count(100)

    def free(self) -> list[str]:
        locked = {key for one in self.prepared.values() for key in one.states}
        return [key for key in KEYS if key not in locked]

    def write(self, xid: str | None = None) -> None:
        """A transaction with some rows; with an ``xid`` it is prepared only."""
        free = self.free()
        keys = self.chance.sample(free, self.chance.randint(min(1, len(free)), len(free)))
        gtid = f"0-1-{next(self._gtid)}"
        begun = f"BEGIN GTID {gtid}" if xid is None else f"XA START {xid} GTID {gtid}"
        self._log("Gtid", begun)
        self._transacted("BEGIN", gtid)
        one = Open(gtid=gtid)
        for order, key in enumerate(keys, 1):
            self._row(one, key, order)
        if xid is None:
            self._log("Xid", "COMMIT /* xid=1 */")
            self._commit(one)
            self._transacted("END", gtid)
        else:
            self._log("Query", f"XA END {xid}")
            self._log("XA_prepare", f"XA PREPARE {xid}")
            self.prepared[xid] = one

    def end(self, xid: str, how: str) -> None:
        gtid = f"0-1-{next(self._gtid)}"
        self._log("Gtid", f"GTID {gtid}")
        self._transacted("BEGIN", gtid)
        self._log("Query", f"use `shop`; set foreign_key_checks=1; XA {how} {xid}")
        one = self.prepared.pop(xid)
        if how == "COMMIT":
            self._commit(one)

    def alter(self, amount: int) -> None:
        """A statement gives all rows a value without row events.

        It waits for locks of prepared transactions.
        """
        gtid = f"0-1-{next(self._gtid)}"
        self._log("Gtid", f"GTID {gtid}")
        self._transacted("BEGIN", gtid)
        self._log("Query", "use `shop`; ALTER TABLE item DROP amount, ADD amount int")
        self.altered += 1
        for key in self.rows:
            self.rows[key] = amount
            self.history[key].append(State(amount, is_seen=False))

    def snapshot(self, keys: Collection[str] = KEYS) -> None:
        """An incremental snapshot of rows: it sees none that is prepared only."""
        gtid = f"0-1-{next(self._gtid)}"
        at = self._log("Gtid", f"BEGIN GTID {gtid}")
        self._transacted("BEGIN", gtid)
        for key, amount in self.rows.items():
            if key not in keys:
                continue
            image = {"id": int(key), "amount": amount}
            source = {"connector": "mariadb", "db": "shop", "table": "item", "ts_us": 1_000_000,
                      "snapshot": "incremental"}  # fmt: skip
            value = {"op": "r", "before": None, "after": image, "source": source}
            name = json.dumps({"id": int(key)}).encode()
            self.sent.append((at, name, json.dumps(value).encode(), {}))
        self._log("Xid", "COMMIT /* xid=1 */")
        self._transacted("END", gtid)

    def _commit(self, one: Open) -> None:
        for key, state in one.states.items():
            self.history[key].append(State(state))
            self.versions[key] += 1
            if state is None:
                del self.rows[key]
            else:
                self.rows[key] = state

    def _row(self, one: Open, key: str, order: int) -> None:
        before = self.rows.get(key)
        after = None if before is not None and self.chance.random() < 0.3 else next(self._value)
        one.states[key] = after
        self._log("Table_map", "table_id: 18 (shop.item)")
        at = self._log("Write_rows_v1", "table_id: 18 flags: STMT_END_F")
        images = [None if a is None else {"id": int(key), "amount": a} for a in (before, after)]
        if self.capture.outbox is not None:
            version = self.versions[key] + 1
            body = json.dumps({"version": version, "originalEntityState": images[0],
                               "currentEntityState": images[1], "provenance": SAID})  # fmt: skip
            headers = {"aggregateType": b'"Item"', "id": str(uuid5(SPACE, f"{one.gtid} {key}")),
                       "eventType": b"Written"}  # fmt: skip
            self.sent.append((at, key.encode(), json.dumps(body).encode(), headers))
            return
        source = {"connector": "mariadb", "db": "shop", "table": "item", "file": "b.000001",
                  "pos": at, "row": 0, "gtid": one.gtid, "ts_us": 1_000_000 + at,
                  "snapshot": "false"}  # fmt: skip
        op = "c" if before is None else "d" if after is None else "u"
        value = {"op": op, "before": images[0], "after": images[1], "source": source,
                 "transaction": {"id": one.gtid, "total_order": order}}  # fmt: skip
        name = json.dumps({"id": int(key)}).encode()
        self.sent.append((at, name, json.dumps(value).encode(), {}))

    def _transacted(self, status: str, gtid: str) -> None:
        value = json.dumps({"status": status, "id": gtid}).encode()
        self.sent.append((4 + 10 * len(self.binlog), None, value, {KIND: TRANSACTION}))

    def _log(self, kind: str, info: str) -> int:
        at = 4 + 10 * len(self.binlog)
        place, end = (f"b.000001:{each}" for each in (at, at + 10))
        self.binlog.append(BinlogEvent(place, kind, info, end))
        return at

    def log_end(self) -> str:
        return f"b.000001:{4 + 10 * len(self.binlog)}"

    def read_mark(self) -> str | None:
        return self.mark

    def write_mark(self, text: str, instead_of: str | None) -> bool:
        del instead_of
        self.mark = text
        return True

    def events(self, place: str) -> Iterator[BinlogEvent]:
        yield from self.binlog[(int(place.rpartition(":")[2]) - 4) // 10 :]


def is_read(sent: tuple[int, Any, Any, Any]) -> bool:
    return b'"op": "r"' in sent[2]


class World:
    """The server, its connector, the looks at its binlog, and cleaning; each may be killed."""

    def __init__(self, capture: Capture, seed: int) -> None:
        self.chance, self.capture = random.Random(seed), capture
        self.server = Server(capture, self.chance)
        self.raw: list[tuple[Any, Any, Any]] = []
        self.written = self.stored = 0
        """How many of its records the connector has written, and from which one it would resume."""
        self.copy: Any = MemoryCopy()
        self.kept: dict[tuple[str, str], bytes] = {}
        self.log: dict[str, list[int | None]] = {key: [] for key in KEYS}
        self.fingerprint = Fingerprint("", "", {"": "0"})
        self.standing, self.offset = standing_json(StreamStanding()), 0
        self.large = self.chance.choice((1, 3, 100))
        """Transactions with more rows are counted before they are published."""
        self.begin()

    def begin(self) -> None:
        """A new process of cleaning, at the position of the last batch."""
        self.changed: SeenChanges = {}
        self.kind = kind_of(CONFIG, self.capture, ITEMS)
        self.held = {name: HeldEntity.decode(value) for name, value in self.kept.items()}
        self.stream, self.read_to = Stream("shop", standing_of(self.standing)), self.offset
        self.numbering = self.kind.numbering(self.held, epoch=1, is_trusted=True)

    def connect(self, records: int) -> None:
        sent = self.server.sent[self.written : self.written + records]
        self.raw += [record for _, *record in sent]  # type: ignore[misc]
        self.written += len(sent)
        if self.chance.random() < 0.5:
            self.stored = self.chance.randint(self.stored, self.written)

    def look(self) -> None:
        known, last = standing_of(self.standing), mark_of(self.server.mark)
        assert last is not None
        look = partial(look_at, self.capture, self.server, {}, passed=known.passed)
        mark = renew_mark(self.server, known.mark, look)
        assert mark is not None
        table = Fingerprint("", "", {"": str(self.server.altered)})
        changed = {} if table == self.fingerprint else {"shop.item": table}
        if last.mark == known.mark and due(changed, self.server, last.looked_at, self.changed):
            self.server.snapshot()
            self.fingerprint = table
        if self.chance.random() < 0.8:  # else the process ends before it has written the record
            source = SourceIdentity(identity="one", mark=mark.mark, look=mark.look)
            self.raw.append((None, encode_source(source), {KIND: SOURCE}))

    def clean(self, records: int) -> None:
        if self.chance.random() < 0.2:
            self.begin()
        self._read(min(len(self.raw), self.read_to + records))
        if self.stream.is_waiting and self.stream.waits > self.large:
            self._count()
        rows, states = self.stream.take(), States(self.copy)
        self.kind.records.begin(2_000_000_000.0)
        waiting = held_rows(self.held.values())
        batch = self.numbering.run(rows, [("raw", 0)], states, 0.0, None)
        counts = counted(
            {}, batch.read + waiting, batch.added, batch.outcomes, held_rows(self.held.values())
        )
        assert not any(one.vanished for one in counts.values())
        assert batch.refused == [], batch.refused
        if self.chance.random() < 0.2:  # killed before it has published
            self.begin()
            return
        for entity in batch.held_changed:
            self.kept.pop(entity, None)
            if entity in self.held:
                self.kept[entity] = self.held[entity].encode()
        self.copy.settle(states.rows())
        for record in self.kind.records.records():
            if record.topic == CHANGES:
                value = json.loads(record.value or b"")
                state = value["currentEntityState"]
                self.log[value["key"]].append(None if state is None else state["amount"])
        first = self.stream.first_offset
        self.offset = self.read_to if first is None else first
        self.standing = standing_json(self.stream.standing())

    def _read(self, end: int) -> None:
        self.stream.scan(self._rows(self.read_to, end))
        self.read_to = end

    def _count(self) -> None:
        counting, at, ended = self.stream.counting(), self.stream.first_offset, None
        assert at is not None
        while ended is None and at < len(self.raw):
            end = min(len(self.raw), at + 5)
            ended, at = counting.scan(self._rows(at, end), keep=False), end
        if ended is not None:
            self.stream.release(ended.count, ended.notes, ended.fate)

    def _rows(self, start: int, end: int) -> Rows:
        listed = []
        for offset, (key, value, headers) in enumerate(self.raw[start:end], start):
            wanted = [headers.get(name) for name in self.kind.reader.header_names]
            encoded = [each.encode() if isinstance(each, str) else each for each in wanted]
            listed.append((0, offset, key, value, tuple(encoded), 1_795_247_000_123))
        tables = {name: number for number, name in enumerate(self.capture.tables)}
        return Rows.of(Slices(self.kind.reader, [""], tables).begin().columns(listed))

    def step(self) -> None:
        server, chance = self.server, self.chance
        writes = ("write", "prepare", "end", "snapshot", "alter")
        kind = chance.choice((*writes, *("connect", "clean") * 2, "kill", "look"))
        xids = [f"X'7{number}',X'',1" for number in range(3)]
        if kind == "write" and server.free():
            server.write()
        elif kind == "alter" and self.capture.outbox is None and not server.prepared:
            former = [one.amount for key in KEYS for one in server.history[key][-3:] if one.amount]
            server.alter(chance.choice([*former, 999]))
        elif kind == "snapshot" and self.capture.outbox is None:
            server.snapshot()
        elif kind == "prepare" and (unused := [x for x in xids if x not in server.prepared]):
            server.write(chance.choice(unused))
        elif kind == "end" and server.prepared:
            server.end(chance.choice(list(server.prepared)), chance.choice(("COMMIT", "ROLLBACK")))
        elif kind == "connect":
            self.connect(chance.randint(1, 9))
        elif kind == "kill":
            # What a snapshot has read is read anew.
            sent = server.sent[self.stored : self.written]
            again = [one for one in sent if not is_read(one)]
            server.sent[self.stored : self.written] = again
            if again != sent:
                server.snapshot()
            self.written = self.stored
            # It begins with the BEGIN record of the transaction in which it resumes.
            begun = [sent for sent in server.sent[: self.stored] if sent[3] == {KIND: TRANSACTION}]
            if begun and b"BEGIN" in begun[-1][2]:
                self.raw.append(begun[-1][1:])
        elif kind == "look":
            self.look()
        elif kind == "clean":
            self.clean(chance.randint(1, 9))

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
            for key, found in self.log.items():
                assert is_told(self.server.history[key], found), "only what is committed"
        for xid in list(self.server.prepared):
            self.server.end(xid, "COMMIT" if self.chance.random() < 0.5 else "ROLLBACK")
        self.server.snapshot(())
        self.connect(10**6)
        for _ in range(30):
            self.look()
            self.clean(10**6)
            self.connect(10**6)
        for key, found in self.log.items():
            assert is_told(self.server.history[key], found, is_all=True), key
        assert self.held == {}


@settings(max_examples=in_tier(150, full=3_000), deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(5, 60), is_outbox=st.booleans())
def test_only_what_is_committed_is_published_once_and_in_order_whatever_is_killed(
    seed: int, steps: int, is_outbox: bool
) -> None:
    World(OUTBOX if is_outbox else TABLES, seed).run(steps)


@pytest.mark.parametrize("how", ["COMMIT", "ROLLBACK"])
@pytest.mark.parametrize("seed", range(10))
def test_what_changed_without_row_events_is_published_also_of_keys_of_a_transaction_before_it(
    seed: int, how: str
) -> None:
    _change_unseen(seed, how)


def test_the_checker_catches_a_table_that_is_read_again_while_rows_before_its_change_are_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "due", lambda changed, *_: list(changed))
    with pytest.raises(AssertionError):
        _change_unseen_of_all()


def _change_unseen_of_all() -> None:
    for seed in range(10):
        _change_unseen(seed, "COMMIT")


def _change_unseen(seed: int, how: str) -> None:
    """A statement gives a row what it had before a transaction that cleaning has not read."""
    world, xid = World(TABLES, seed), "X'70',X'',1"
    server = world.server
    for _ in range(3):
        server.write()
    for _ in range(20):
        world.connect(10**6)
        world.clean(10**6)
        world.look()
    world.clean(10**6)
    former = server.rows.get("1", 999)
    if how == "ROLLBACK":
        server.alter(former)
    server.write(xid)
    server.end(xid, how)
    if how == "COMMIT":
        server.alter(former)
    world.look()
    world.run(0)


@pytest.mark.parametrize("defect", ["published when prepared", "rolled back is forgotten"])
@pytest.mark.parametrize("capture", [TABLES, OUTBOX])
def test_the_checker_catches_a_planted_defect(
    defect: str, capture: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if defect == "published when prepared":
        monkeypatch.setattr(stream, "_fate", lambda _: "")
    else:
        monkeypatch.setattr(
            Mark, "look", property(lambda self: BinlogLook(self.looked, [*self.xa.values()]))
        )
    with pytest.raises(AssertionError):
        _run(capture)


def _run(capture: Capture) -> None:
    for seed in range(50):
        World(capture, seed).run(30)
