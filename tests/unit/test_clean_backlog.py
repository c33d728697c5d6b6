"""Queues of clean: whatever is read first, and whenever it is killed, transactions are whole."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clean_cases import capture_of
from everstate.errors import LogError
from everstate.sources.cdc import backlog as backlog_module
from everstate.sources.cdc.backlog import Backlog
from everstate.sources.cdc.declaration import Capture, ProvenanceFrom, Table
from everstate.sources.cdc.gate import Place, Told, TransactionGate
from everstate.sources.cdc.mapping import CleanRow
from everstate.sources.cdc.reading import EndedTransaction, NotedProvenance, Parsed

TABLE, ENDS, MESSAGES = "raw.item", "raw.transaction", "raw.message"
TOPICS = {TABLE: "item", ENDS: "transaction", MESSAGES: "message"}
PLACES: tuple[Place, ...] = ((TABLE, 0), (TABLE, 1), (TABLE, 2), (ENDS, 0), (MESSAGES, 0))
CAPTURE = capture_of(
    "debezium", transactions=True, table={"provenance": ProvenanceFrom(message_prefix="everstate")}
)
ROWS_MAX = 3
WAIT_S = CAPTURE.transaction_wait_s

Log = dict[Place, list[Parsed]]


def log_of(transactions: list[list[int]]) -> Log:
    """What a capture wrote: for each transaction the partitions of its rows, in order."""
    log: Log = {place: [] for place in PLACES}
    order = 0
    for number, partitions in enumerate(transactions):
        name = f"t{number}"
        if number % 2:
            noted = NotedProvenance(transaction=name, prefix="everstate", fields={"actor": name})
            log[MESSAGES, 0].append(noted)
        for index, partition in enumerate(partitions, 1):
            order += 1
            key = f"{name}-{index}"
            row = CleanRow(
                table="public.item", op="c", key=key, columns={}, order=(order,),
                transaction=name, index=index,
            )  # fmt: skip
            log[TABLE, partition].append(row)
        count = len(partitions)
        log[ENDS, 0].append(EndedTransaction(id=name, count=count, expected=count))
    return log


@dataclass
class Run:
    """A clean role that is killed at times: what survives is what it noted."""

    log: Log
    now_s: float = 0.0
    at: dict[Place, int] = field(default_factory=lambda: dict.fromkeys(PLACES, 0))
    begun: dict[str, Told] = field(default_factory=dict)
    taken: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.backlog = Backlog(CAPTURE, TOPICS, self.at, self.begun)

    def kill(self) -> None:
        self.backlog = Backlog(CAPTURE, TOPICS, self.at, self.begun)

    def read(self, place: Place, count: int) -> None:
        first = self.backlog.read_to()[place]
        records = [(at, [self.log[place][at]]) for at in range(first, len(self.log[place]))]
        read = records[:count]
        self.backlog.add(place, read, first, first + len(read), self.now_s)

    def tell(self) -> None:
        self.backlog.ends_at({place: len(said) for place, said in self.log.items()}, self.now_s)

    def step(self) -> int:
        taken = self.backlog.ready(ROWS_MAX, is_full=False)
        rows = self.backlog.in_source_order(taken)
        for _, row in rows:
            assert isinstance(row, CleanRow)
            assert row.transaction is not None
            self.taken.append(row.key)
            size = sum(
                isinstance(one, CleanRow) and one.transaction == row.transaction
                for said in self.log.values()
                for one in said
            )
            if self.backlog.gate.count(row.transaction) != size:
                self.broken.append(f"{row.key} goes on without its block")
            if int(row.transaction[1:]) % 2 and not self.backlog.gate.notes(row.transaction):
                self.broken.append(f"{row.key} goes on without its provenance")
        self.backlog.forget(taken)
        self.at, self.begun = self.backlog.needed_from(), self.backlog.begun()
        return len(rows)

    def finish(self) -> None:
        for place in reversed(PLACES):
            self.read(place, len(self.log[place]))
        self.tell()
        while self.step():
            pass


def test_a_gap_in_what_was_read_is_refused_and_nothing_is_passed_over() -> None:
    run = Run(log_of([[0], [0], [0]]))
    run.read((TABLE, 0), 1)
    later = [(2, run.log[TABLE, 0][2:])]
    with pytest.raises(LogError, match=r"from offset 2 were read, and those from 1 were not"):
        run.backlog.add((TABLE, 0), later, 2, 3, run.now_s)
    assert run.backlog.read_to()[TABLE, 0] == 1
    run.read((TABLE, 0), 2)
    assert run.backlog.waiting == 3


transactions = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=8)
moves = st.lists(
    st.one_of(
        st.tuples(st.just("read"), st.sampled_from(PLACES), st.integers(1, 4)),
        st.tuples(st.sampled_from(["step", "step", "kill", "tell"]), st.none(), st.none()),
    ),
    min_size=8,
    max_size=60,
)


def play(log: Log, moves: list[Any]) -> Run:
    run = Run(log)
    for move, place, count in moves:
        run.now_s += WAIT_S * 3
        match move:
            case "read":
                run.read(place, count)
            case "step":
                run.step()
            case "kill":
                run.kill()
            case _:
                run.tell()
    run.finish()
    return run


@given(transactions, moves)
@settings(max_examples=400, deadline=None)
def test_whatever_is_read_first_and_however_often_killed_rows_go_once_with_their_block(
    transactions: list[list[int]], moves: list[Any]
) -> None:
    log = log_of(transactions)
    run = play(log, moves)
    wanted = Counter(one.key for said in log.values() for one in said if isinstance(one, CleanRow))
    assert Counter(run.taken) == wanted
    assert run.broken == []
    orders = defaultdict(list)
    for (topic, partition), said in log.items():
        for one in said:
            if isinstance(one, CleanRow):
                orders[topic, partition].append(one.key)
    for keys in orders.values():
        assert [key for key in run.taken if key in set(keys)] == keys


def test_without_the_note_of_what_has_begun_rows_after_a_restart_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = log_of([[0, 0, 0, 0, 0]])
    moves: list[Any] = [
        ("read", (TABLE, 0), 5), ("read", (ENDS, 0), 1),
        *[(move, None, None) for move in ("tell", "step", "kill")],
    ]  # fmt: skip
    assert len(play(log, moves).taken) == 5
    monkeypatch.setattr(TransactionGate, "begun", lambda *_: {})
    assert len(play(log, moves).taken) < 5, "the planted defect: they wait for what is gone"


def test_only_what_lags_is_read_where_rows_or_ends_run_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backlog_module, "_AHEAD_MAX", 3)
    everything = frozenset(PLACES)
    run = Run(log_of([[0], [0], [0], [0], [0], [0]]))
    run.tell()
    assert run.backlog.wanted(100) == everything
    run.read((TABLE, 0), 3)
    assert run.backlog.wanted(100) == {(ENDS, 0), (MESSAGES, 0)}, "three rows wait for their ends"
    run.read((ENDS, 0), 3)
    run.read((MESSAGES, 0), 9)
    run.tell()
    assert run.step() == 3
    assert run.backlog.wanted(100) == everything
    run.read((ENDS, 0), 3)
    tables = {place for place in PLACES if place[0] == TABLE}
    assert run.backlog.wanted(100) == tables, "three ends wait for their rows"
    run.read((TABLE, 0), 3)
    assert run.backlog.wanted(100) == everything
    assert run.backlog.wanted(3) == frozenset(), "so much waits that it has to go first"


def test_time_does_not_run_out_for_what_the_capture_wrote_and_nobody_read() -> None:
    run = Run(log_of([[0]]))
    run.read((TABLE, 0), 1)
    run.now_s += 10 * WAIT_S
    run.tell()
    assert run.step() == 0, "its end was written, and is not read"
    del run.log[ENDS, 0][0]
    run.now_s += 1
    run.read((MESSAGES, 0), 9)
    run.tell()
    assert run.step() == 0, "the first mark is still to be reached"


def test_an_end_that_was_not_written_is_waited_for_until_the_time_is_over() -> None:
    log = log_of([[0]])
    log[ENDS, 0] = []
    run = Run(log)
    run.read((TABLE, 0), 1)
    run.tell()
    assert run.step() == 0
    run.now_s += WAIT_S + 1
    assert run.step() == 0, "nobody has looked since"
    run.tell()
    assert run.step() == 1
    assert run.broken == ["t0-1 goes on without its block"]
    assert run.backlog.gate.overdue == 1


def test_a_row_that_could_not_be_read_takes_no_block_from_its_neighbours() -> None:
    log = log_of([[0, 1, 1]])
    log[TABLE, 0] = []
    run = Run(log)
    run.finish()
    assert run.taken == []
    run.now_s += WAIT_S + 1
    run.tell()
    run.step()
    assert run.taken == ["t0-2", "t0-3"]
    gate = run.backlog.gate
    assert (gate.count("t0"), gate.overdue) == (3, 1)


def test_what_is_noted_of_transactions_stays_small() -> None:
    gate = TransactionGate(WAIT_S)
    for number in range(100):
        name = f"t{number}"
        for index in (1, 2):
            gate.row(name, index, 0.0)
        gate.end(name, 2, 2, (ENDS, 0), number, 0.0)
        gate.gone(name)
    assert len(gate.begun(10**6)) == 100
    assert list(gate.begun(100)) == ["t0", "t1", "t2", "t3", "t4"], "the oldest come first"


FAMILY = Capture(
    name="shop", kind="postgresql", transactions=False, parents_first=True,
    tables={
        "public.child": Table(entity="child", parents={"parent_id": "parent"}),
        "public.parent": Table(entity="parent", parents={"root_id": "root"}),
        "public.root": Table(entity="root"),
    },
)  # fmt: skip
KINDS = ("root", "parent", "child")
HOMES: tuple[Place, ...] = tuple((kind, partition) for kind in KINDS for partition in (0, 1))
births = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 99), st.booleans()), max_size=40)
reads = st.lists(st.tuples(st.sampled_from(HOMES), st.integers(0, 4), st.booleans()), max_size=60)


def family_log(births: list[tuple[int, int, bool]]) -> Log:
    """Rows of three generations in the source's order; each names one that was born before."""
    log: Log = {home: [] for home in HOMES}
    born: list[list[str]] = [["root-0"], [], []]
    first = CleanRow(table="public.root", op="c", key="root-0", columns={}, order=(1,))
    log["root", 0].append(first)
    for order, (generation, choice, has_place) in enumerate(births, 2):
        ancestors = born[generation - 1] if generation else []
        if generation and not ancestors:
            continue
        key = f"{KINDS[generation]}-{order}"
        parents = (
            [(KINDS[generation - 1], ancestors[choice % len(ancestors)])] if generation else []
        )
        row = CleanRow(
            table=f"public.{KINDS[generation]}", op="c", key=key, columns={}, parents=parents,
            # A row of an incremental snapshot has no place of its own, and waits for no parent.
            order=(order,) if has_place or parents else (),
        )  # fmt: skip
        born[generation].append(key)
        log[KINDS[generation], choice % 2].append(row)
    return log


@given(births, reads, st.integers(1, 12))
@settings(max_examples=400, deadline=None)
def test_whatever_is_read_first_no_child_goes_before_its_parent(
    births: list[tuple[int, int, bool]], reads: list[tuple[Place, int, bool]], records_max: int
) -> None:
    log = family_log(births)
    ends = {home: len(rows) for home, rows in log.items()}
    backlog = Backlog(FAMILY, {kind: kind for kind in KINDS}, dict.fromkeys(HOMES, 0))
    gone: list[str] = []
    now_s = 0.0

    def take(home: Place, most: int) -> None:
        at = backlog.read_to()[home]
        records = [(offset, [log[home][offset]]) for offset in range(at, ends[home])][:most]
        backlog.add(home, records, at, at + len(records), now_s)

    def step(is_full: bool) -> bool:
        taken = backlog.ready(ROWS_MAX, is_full=is_full)
        for _, row in backlog.in_source_order(taken):
            assert isinstance(row, CleanRow)
            assert all(parent in gone for _, parent in row.parents), (row.key, gone)
            gone.append(row.key)
        backlog.forget(taken)
        return bool(taken)

    for home, most, is_told in reads:
        now_s += 1
        take(home, most)
        if is_told:
            backlog.ends_at(ends, now_s)
        step(is_full=False)
    while len(gone) < sum(ends.values()):
        now_s += 1
        backlog.ends_at(ends, now_s)
        for home in backlog.wanted(records_max):
            take(home, 2)
        backlog.ends_at(ends, now_s)
        if not step(is_full=False) and not backlog.wanted(records_max):
            assert step(is_full=True) or not backlog.waiting
    born = [row.key for rows in log.values() for row in rows if isinstance(row, CleanRow)]
    assert sorted(gone) == sorted(born)
