"""The order of a raw log: any transactions, any restarts of the connector and of clean (C10)."""

from __future__ import annotations

import struct
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import chain, count, repeat
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstate.errors import RowsUnplaced, SourceReplaced, TableReplaced
from everstate.sources.cdc import stream
from everstate.sources.cdc.columns import ENDED, NOTE, SOURCE, UNKNOWN, WHOLE, Rows, as_batch
from everstate.sources.cdc.reading import Fingerprint, SourceIdentity
from everstate.sources.cdc.rows import TransactionProvenance
from everstate.sources.cdc.stream import SEEN, Stream, StreamStanding
from tiers import counted

EXAMPLES = counted(100, full=1_000)
NOTHING = (None,) * 11
encode = msgspec.msgpack.Encoder().encode
standing_json = msgspec.json.Encoder().encode
standing_of = msgspec.json.Decoder(StreamStanding).decode


@dataclass
class Source:
    """A log of transactions, and the raw log that a connector makes of it.

    A transaction is a list of groups: rows of one group share their position, as rows of a COPY
    do. Positions of transactions that were open at once are interleaved.
    """

    transactions: list[list[int]]
    xa: set[int] | None = None
    """Of MariaDB, which has BEGIN records: numbers of the transactions without an END record."""
    log: list[tuple[Any, ...]] = field(default_factory=list)
    raw: list[tuple[Any, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        key, commit = count(1), 0
        for number, groups in enumerate(self.transactions, 1):
            tx = str(100 + number) if self.xa is None else f"0-1-{8 + number}"
            if self.xa is not None:
                self.log.append((ENDED, f"<{tx}", None, None, number))
            # Every second transaction began before the one that was committed before it.
            lsn = 1_000 * number - (1_500 if number % 2 == 0 else 0)
            for size in groups:
                lsn += 7
                place = struct.pack(">QQ", commit, lsn)
                for _ in range(size):
                    self.log.append((WHOLE, tx, str(next(key)), place, number))
            if self.xa is None or number not in self.xa:
                self.log.append((ENDED, tx, None, None, number))
            commit = 1_000 * number + 900
        if self.xa is not None:
            self.log.append((ENDED, "<0-1-99", None, None, 99))

    def run(self, start: int, end: int) -> None:
        """The connector writes the log from one record up to another one."""
        self.raw += self.log[start:end]

    def read(self, offset: int, end: int) -> Rows:
        """Columns of a piece of the raw log."""
        rows: list[tuple[Any, ...]] = []
        for at, (what, tx, key, place, time) in enumerate(self.raw[offset:end], offset):
            if what == WHOLE:
                whole = (None, None, None, tx, place, b'{"lsn":[1]}', time, None, None)
                rows.append((0, at, WHOLE, 0, "c", key, *whole))
            elif what == ENDED:
                rows.append((0, at, ENDED, -1, None, None, None, None, None, tx, *NOTHING[6:]))
            elif what == UNKNOWN:
                rows.append((0, at, UNKNOWN, -1, None, key, *NOTHING[2:]))
            elif what == SOURCE:
                rows.append((0, at, SOURCE, -1, None, None, None, None, key, *NOTHING[5:]))
            elif what == NOTE:
                said = TransactionProvenance(transaction=tx, prefix="p", fields={"actor": key})
                noted = (None, None, encode(said), tx, place, None, time, None, None)
                rows.append((0, at, NOTE, -1, "m", "p", *noted))
            else:
                rows.append((0, at, WHOLE, 0, "r", key, *NOTHING[2:]))
        return Rows.of(as_batch(rows))


def cleaned(source: Source, cuts: list[int], kills: set[int], large: int = 10**9) -> Any:
    """Rows as they go on: key, transaction, index and count; clean is killed after some cuts.

    A transaction of more than ``large`` rows is counted first, and goes on in cuts.
    """
    out: list[tuple[str, str | None, int | None, int | None]] = []
    note, offset = standing_json(StreamStanding()), 0
    now, read_to = Stream("shop", standing_of(note)), 0
    steps = chain(cuts, repeat(7))  # A kill reads again: no number of steps is enough for all.
    for number in count():
        end = min(len(source.raw), read_to + next(steps))
        now.scan(source.read(read_to, end))
        read_to = end
        if now.is_waiting and now.waits > large:
            counting, at = now.counting(), now.first_offset
            assert at is not None
            closed = None
            while closed is None and at < len(source.raw):
                closed = counting.scan(source.read(at, at + 5), keep=False)
                at += 5
            if closed is not None:
                now.release(closed.count, closed.notes)
        rows = now.take()
        for at, block in enumerate(rows.block):
            if rows.what[at] == WHOLE and block is not SEEN:
                told = (None, None) if block is None else (block.id, block.count)
                out.append((rows.key[at] or "", told[0], rows.index[at], told[1]))
        # Published: the note goes out with these rows.
        first = now.first_offset
        offset, note = read_to if first is None else first, standing_json(now.standing())
        if number in kills:
            now, read_to = Stream("shop", standing_of(note)), offset
        elif read_to >= len(source.raw):
            break
    return out, now


def wanted(source: Source, upto: int | None = None) -> list[tuple[str, str, int, int]]:
    """Each row of the log once, with its transaction."""
    listed: dict[str, list[str]] = defaultdict(list)
    for what, tx, key, _, _ in source.log[:upto]:
        if what == WHOLE:
            listed[tx].append(key)
    return [
        (key, tx, index, len(keys))
        for tx, keys in listed.items()
        for index, key in enumerate(keys, 1)
    ]


TRANSACTIONS = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=5), min_size=1, max_size=8)
RUNS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=4)
"""Of each run that is killed: after how many records, and how many of them come again."""
CUTS = st.lists(st.integers(1, 9), max_size=30)
KILLS = st.sets(st.integers(0, 25), max_size=5)


def run_connector(source: Source, runs: list[tuple[int, int]]) -> None:
    at = 0
    for written, again in runs:
        source.run(at, at + written)
        at = max(0, min(len(source.log), at + written) - again)
    source.run(at, len(source.log))


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    transactions=TRANSACTIONS,
    runs=RUNS,
    cuts=CUTS,
    kills=KILLS,
    large=st.integers(1, 12),
    xa=st.none() | st.sets(st.integers(1, 8)),
)
def test_every_row_goes_on_once_in_order_with_its_block_whatever_is_killed(
    transactions: list[list[int]],
    runs: list[tuple[int, int]],
    cuts: list[int],
    kills: set[int],
    large: int,
    xa: set[int] | None,
) -> None:
    source = Source(transactions, xa)
    run_connector(source, runs)
    for limit in (10**9, large):
        out, _ = cleaned(source, cuts, kills, limit)
        assert out == wanted(source)


def killed_everywhere() -> list[str]:
    """What is wrong when connector and clean are killed at each place once; empty: nothing."""
    wrong = []
    for killed in range(1, 22):
        for again in (0, 1, 3, 6):
            source = Source([[2, 1], [1, 3], [2], [1, 1, 2], [3]])
            run_connector(source, [(killed, again)])
            for kills in (set[int](), {1}, {0, 2, 3}):
                for limit in (10**9, 2):
                    out, _ = cleaned(source, [4, 3, 2], kills, limit)
                    if out != wanted(source):
                        wrong.append(f"killed after {killed}, {again} again, {kills}, {limit}")
    return wrong


def planted(monkeypatch: pytest.MonkeyPatch, defect: str) -> None:
    """A defect that a plausible first version has."""
    scan = Stream.scan
    if defect == "rows are ordered by their positions alone":

        def by_position(self: Stream, rows: Rows, *, keep: bool = True) -> Any:
            rows.place = [None if one is None else one[8:] for one in rows.place]
            return scan(self, rows, keep=keep)

        monkeypatch.setattr(Stream, "scan", by_position)
    elif defect == "rows of one position are taken for one":

        def one_row(self: Stream, rows: Rows, *, keep: bool = True) -> Any:
            rows.key = [None if what == WHOLE else key for what, key in zip(rows.what, rows.key)]  # noqa: B905
            return scan(self, rows, keep=keep)

        monkeypatch.setattr(Stream, "scan", one_row)
    elif defect == "what was read before is not known after a restart":
        monkeypatch.setattr(Stream, "standing", lambda self: StreamStanding(open=self._now().open))
    elif defect == "the place is noted of rows that wait":
        monkeypatch.setattr(Stream, "standing", lambda self: self._now())
    else:
        monkeypatch.setattr(
            Stream,
            "_now",
            lambda self, now=Stream._now: msgspec.structs.replace(now(self), group=[]),
        )


@pytest.mark.parametrize(
    "defect",
    [
        "rows are ordered by their positions alone",
        "rows of one position are taken for one",
        "what was read before is not known after a restart",
        "the place is noted of rows that wait",
        "the rows of the last position are not noted",
    ],
)
def test_the_checker_catches_a_planted_defect(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert killed_everywhere() == []
    planted(monkeypatch, defect)
    try:
        assert killed_everywhere() != []
    except (SourceReplaced, AssertionError):
        pass  # found out by the stream itself


def test_rows_of_an_incremental_snapshot_stand_between_and_belong_to_no_transaction() -> None:
    source = Source([[1, 1], [1]])
    source.raw = [source.log[0], (99, None, "77", None, None), *source.log[1:]]
    out, _ = cleaned(source, [1], set())
    assert out == [
        ("1", "101", 1, 2),
        ("77", None, None, None),
        ("2", "101", 2, 2),
        ("3", "102", 1, 1),
    ]


def test_an_unfinished_transaction_waits_and_goes_without_its_block_when_that_is_said() -> None:
    source = Source([[1, 1, 1]])
    source.log.insert(0, (NOTE, "101", "ann", struct.pack(">QQ", 0, 1), 1))
    source.run(0, 3)
    out, now = cleaned(source, [], set())
    assert (out, now.is_waiting, now.first_offset) == ([], True, 0)
    (counting := now.counting()).scan(source.read(0, 3), keep=False)
    assert counting.notes == now.notes == {"actor": "ann"}
    now.release(None, {"reason": "audit"})
    told = {(one.count, *one.notes.items()) for one in now.take().block if one is not None}
    assert told == {(None, ("actor", "ann"), ("reason", "audit"))}
    source.run(2, 5)
    rest = Stream("shop", standing_of(standing_json(now.standing())))
    rest.scan(source.read(3, 6))
    rows = rest.take()
    assert (rows.key, rows.block[0], rows.block[2]) == (["2", "3", None], SEEN, None)
    assert rows.block[1] is not None
    assert (rows.block[1].count, *rows.block[1].notes) == (None, "actor", "reason")


def test_provenance_of_a_transaction_is_known_to_all_its_rows_after_any_restart() -> None:
    source = Source([[1, 1], [1]])
    place = struct.pack(">QQ", 0, 1)
    source.log.insert(0, (NOTE, "101", "ann", place, 1))
    for killed in range(1, 6):
        source.raw = []
        run_connector(source, [(killed, 2)])
        for limit in (10**9, 1):
            now, found, offset = Stream("shop"), [], 0
            while offset < len(source.raw):
                now.scan(source.read(offset, offset + 1))
                if now.is_waiting and now.waits > limit:
                    counting = now.counting()
                    first = now.first_offset
                    assert first is not None
                    closed = counting.scan(source.read(first, len(source.raw)), keep=False)
                    assert closed is not None
                    now.release(closed.count, closed.notes)
                rows = now.take()
                offset += 1
                for at, block in enumerate(rows.block):
                    if rows.what[at] == WHOLE and block is not SEEN and block is not None:
                        found.append((rows.key[at], dict(block.notes)))
                first = now.first_offset
                now = Stream("shop", standing_of(standing_json(now.standing())))
                offset = offset if first is None else first
                if first is not None:
                    now.scan(source.read(first, len(source.raw)))
                    offset = len(source.raw)
                    continue
            rows = now.take()
            for at, block in enumerate(rows.block):
                if rows.what[at] == WHOLE and block is not SEEN and block is not None:
                    found.append((rows.key[at], dict(block.notes)))
            assert found == [("1", {"actor": "ann"}), ("2", {"actor": "ann"}), ("3", {})]


def test_a_transaction_that_a_first_snapshot_interrupts_has_no_block() -> None:
    """Its connector was killed before it had stored that the snapshot is done."""
    source = Source([[3]])
    source.run(0, 2)
    source.raw.append((-1, None, "7", None, None))
    now = Stream("shop")
    rows = source.read(0, 3)
    rows.position[-1] = b'{"lsn":[9]}'
    now.scan(rows)
    taken = now.take()
    assert len(taken) == 3
    assert taken.block[0] is not None
    assert taken.block[0].count is None


def read_again(source: Source, position: bytes = b'{"snapshot lsn":[9]}') -> Rows:
    """All of a raw log; its rows of snapshots are those of a first one."""
    rows = source.read(0, len(source.raw))
    rows.position = [position if op == "r" else at for op, at in zip(rows.op, rows.position)]  # noqa: B905
    return rows


def test_a_first_snapshot_that_is_taken_again_is_compared_before_the_rows_behind_it() -> None:
    """Its connector was stopped before it had stored a position; places begin anew behind it."""
    source, later = Source([[1], [1]]), Source([[2], [1]])
    source.run(0, 3)
    source.raw += [(-1, None, key, None, None) for key in "78"]
    start = len(source.raw)
    source.raw += [(what, tx, key, place, 50 + t) for what, tx, key, place, t in later.log]
    now = Stream("shop")
    now.scan(read_again(source))
    assert now.ended is not None
    assert (now.ended.first, now.ended.end, now.first_offset) == (3, start, start)
    assert [key for key in now.take().key if key] == ["1", "2", "7", "8"]
    again = Stream("shop", standing_of(standing_json(now.standing())))
    again.scan(source.read(start, len(source.raw)))
    assert again.ended == now.ended, "clean was killed before the comparison was published"
    now.compared({"s.a": "too many"})
    published = standing_of(standing_json(now.standing()))
    assert published.gone == {"s.a": "too many"}
    behind = Stream("shop", published)
    behind.scan(source.read(start, len(source.raw)))
    now.resume()
    for each in (now, behind):
        assert each.ended is None
        rows = each.take()
        whole = [at for at, what in enumerate(rows.what) if what == WHOLE]
        assert [rows.key[at] for at in whole] == ["1", "2", "3"]
        assert all(rows.block[at] is not SEEN for at in whole)


def test_a_first_snapshot_is_not_compared_when_nothing_was_read_before_it() -> None:
    source = Source([[1]])
    source.raw = [(-1, None, "7", None, None), *source.log]
    now = Stream("shop")
    now.scan(read_again(source))
    assert now.ended is None
    assert len(now.take()) == 3
    assert now.standing().snapshot is None


def test_a_first_snapshot_that_is_begun_twice_is_compared() -> None:
    source = Source([[1]])
    source.raw = [(-1, None, key, None, None) for key in "789"] + source.log
    rows = read_again(source)
    rows.position[0] = b'{"snapshot lsn":[5]}'
    now = Stream("shop")
    now.scan(rows)
    assert now.ended is not None
    assert (now.ended.first, now.ended.end) == (1, 3)


def test_a_first_snapshot_without_rows_is_compared_once_and_places_begin_anew_behind_it() -> None:
    source, later = Source([[1], [2]]), Source([[2], [1]])
    source.run(0, 4)
    start = len(source.raw)
    source.raw += [(what, tx, key, place, 50 + t) for what, tx, key, place, t in later.log]
    rows = source.read(0, len(source.raw))
    rows.insert_snapshot_end(start, is_empty=True)
    now = Stream("shop")
    now.scan(rows)
    assert now.ended is not None
    assert (now.ended.first, now.ended.end, now.first_offset) == (start, start, start)
    assert [key for key in now.take().key if key] == ["1", "2", "3"]
    killed = Stream("shop", standing_of(standing_json(now.standing())))
    now.compared({})
    published = Stream("shop", standing_of(standing_json(now.standing())))
    now.resume()
    for each, is_compared in ((killed, False), (published, True)):
        rows = source.read(start, len(source.raw))
        rows.insert_snapshot_end(start, is_empty=True)
        each.scan(rows)
        assert (each.ended is None) == is_compared
    for each in (now, published):
        rows = each.take()
        assert [key for key in rows.key if key] == ["1", "2", "3"]
        assert SEEN not in rows.block
        assert each.standing().snapshot is None


def test_a_first_snapshot_is_compared_at_its_end_when_nothing_is_streamed_after_it() -> None:
    source = Source([[1]])
    source.run(0, 2)
    source.raw += [(-1, None, key, None, None) for key in "78"]
    rows = read_again(source)
    now = Stream("shop")
    now.scan(rows)
    assert now.ended is None
    again = Stream("shop")
    rows = read_again(source)
    rows.insert_snapshot_end(4, is_empty=False)
    again.scan(rows)
    assert again.ended is not None
    assert (again.ended.first, again.ended.end) == (2, 4)


def test_a_first_snapshot_without_rows_closes_a_transaction_that_was_cut_off() -> None:
    source = Source([[2]])
    source.run(0, 1)
    rows = source.read(0, 1)
    rows.insert_snapshot_end(1, is_empty=True)
    now = Stream("shop")
    now.scan(rows)
    assert [key for key in now.take().key if key] == ["1"]
    assert now.ended is not None


def test_a_first_snapshot_without_rows_is_not_compared_when_nothing_was_read_before_it() -> None:
    source = Source([[1]])
    source.run(0, 2)
    rows = source.read(0, 2)
    rows.insert_snapshot_end(0, is_empty=True)
    now = Stream("shop")
    now.scan(rows)
    assert now.ended is None
    assert [key for key in now.take().key if key] == ["1"]


def restored(source: Source) -> list[tuple[Any, ...]]:
    """Rows that a database wrote after it was set back: earlier places, later times."""
    return [(what, tx, key, place, 50 + time) for what, tx, key, place, time in source.log[:4]]


def test_rows_of_a_restored_database_are_never_taken_for_rows_that_were_read_before() -> None:
    source = Source([[1], [1], [1]])
    source.run(0, len(source.log))
    source.raw += restored(source)
    out, now = cleaned(source, [], set())
    assert out == wanted(source)
    assert now.first_offset == len(source.log)
    with pytest.raises(SourceReplaced, match="--new-epoch"):
        now.raise_replaced()
    again = Stream("shop", now.standing())
    again.scan(source.read(len(source.log), len(source.raw)))
    with pytest.raises(SourceReplaced):
        again.raise_replaced()


def test_rows_that_have_no_positions_are_never_taken_for_rows_that_were_read_before() -> None:
    source = Source([[3]])
    source.run(0, 3)
    rows = source.read(0, 3)
    # Two events of one transaction: the position is that of the transaction, rows begin again.
    rows.place = [struct.pack(">QQQQ", 1, 900, *each) for each in ((0, 1), (1, 2), (0, 3))]
    now = Stream("shop")
    now.scan(rows)
    assert now.first_offset == 2
    assert [key for key in now.take().key if key] == ["1", "2"]
    with pytest.raises(RowsUnplaced, match="binlog_legacy_event_pos"):
        now.raise_replaced()


@pytest.mark.parametrize("together", [1, 3, 100])
def test_a_new_epoch_goes_on_behind_the_rows_of_a_restored_database(together: int) -> None:
    source = Source([[1], [1], [1]])
    source.run(0, len(source.log))
    source.raw += restored(source)
    said = encode(SourceIdentity(identity="new", epoch=2))
    source.raw.append((SOURCE, None, said, None, None))
    source.raw += restored(source)
    now, found = Stream("shop"), []
    for at in range(0, len(source.raw), together):
        now.scan(source.read(at, min(at + together, len(source.raw))))
        rows = now.take()
        found += [
            rows.key[i]
            for i, what in enumerate(rows.what)
            if what == WHOLE and rows.block[i] is not SEEN
        ]
    now.raise_replaced()
    assert found == ["1", "2", "3", "1", "2"]
    assert now.passed == {0: 2}
    assert now.standing().epoch == 2


def test_another_database_without_a_new_epoch_is_refused() -> None:
    first, second = (encode(SourceIdentity(identity=name)) for name in ("one", "two"))
    source = Source([[1]])
    source.raw = [(SOURCE, None, first, None, None), *source.log]
    now = Stream("shop")
    now.scan(source.read(0, 3))
    source.raw.append((SOURCE, None, first, None, None))
    now.scan(source.read(3, 4))
    source.raw.append((SOURCE, None, second, None, None))
    source.raw += restored(source)
    now.scan(source.read(4, 5))
    with pytest.raises(SourceReplaced, match="it is two"):
        now.raise_replaced()
    assert now.first_offset == 4
    third = encode(SourceIdentity(identity="two", epoch=2))
    source.raw.append((SOURCE, None, third, None, None))
    now.scan(source.read(5, len(source.raw)))
    now.raise_replaced()
    assert now.standing().identity == "two"
    assert stream.SEEN.count is None


def test_what_is_told_of_tables_is_kept_until_a_new_epoch() -> None:
    first, second = (Fingerprint(name, "", {"1": "2"}) for name in "ab")
    told = [
        SourceIdentity(identity="one", tables={"s.a": first, "s.b": first}, seen=5),
        SourceIdentity(identity="one", tables={"s.a": second}),
        SourceIdentity(identity="", epoch=0, tables={"s.b": None}, gone={"s.b": "renamed"}),
        SourceIdentity(identity="one", epoch=2, tables={"s.a": first}, seen=9, may_delete=3),
    ]
    source, found = Source([]), []
    now = Stream("shop")
    for at, one in enumerate(told):
        source.raw.append((SOURCE, None, encode(one), None, None))
        now.scan(source.read(at, at + 1))
        known = standing_of(standing_json(now.standing()))
        found.append((known.tables, known.seen, known.gone, known.may_delete))
    assert found[1:] == [
        ({"s.a": second, "s.b": first}, 5, {}, 0),
        ({"s.a": second, "s.b": Fingerprint("a", "", {})}, 5, {"s.b": "renamed"}, 0),
        ({"s.a": first}, 9, {}, 3),
    ]


def test_rows_behind_an_unknown_table_wait_for_a_new_epoch() -> None:
    source = Source([[1], [1]])
    source.raw = [*source.log[:2], (UNKNOWN, None, "s.items", None, None), *source.log[2:]]
    now = Stream("shop")
    now.scan(source.read(0, len(source.raw)))
    with pytest.raises(TableReplaced, match=r"the name s\.items to a table that was there before"):
        now.raise_replaced()
    assert now.first_offset == 2
    source.raw.append((SOURCE, None, encode(SourceIdentity(identity="one", epoch=2)), None, None))
    now.scan(source.read(5, 6))
    assert now.passed == {0: 1}


def test_an_xa_transaction_without_an_end_goes_on_whole_when_a_later_one_begins() -> None:
    source = Source([])
    row = [(WHOLE, "0-1-11", key, place, 1) for key, place in (("a", b"1"), ("b", b"2"))]
    begun = [(ENDED, f"<{gtid}", None, None, 1) for gtid in ("0-1-11", "0-1-10", "0-1-12")]
    now = Stream("shop")
    source.raw = [begun[0], row[0], begun[1], begun[0], *row, begun[2]]
    now.scan(source.read(0, 6))
    assert (now.is_waiting, now.ready) == (True, 1), "it was written once more, and goes on"
    now.scan(source.read(6, 7))
    assert not now.is_waiting
    rows = now.take()
    blocks = {block.count for block in rows.block if block is not None and block is not SEEN}
    assert (blocks, [each for each in rows.index if each]) == ({2}, [1, 2])


def test_the_newest_mark_of_the_database_is_part_of_the_standing() -> None:
    def said(**facts: Any) -> tuple[Any, ...]:
        return (SOURCE, None, encode(SourceIdentity(**facts)), None, None)

    source = Source([[1]])
    source.raw = [
        *(said(identity="one", mark="a"), *source.log),
        *(said(identity="one"), said(identity="one", mark="b"), said(identity="two", mark="c")),
    ]
    now, marks = Stream("shop"), list[str | None]()
    for at in range(len(source.raw) - 1):
        now.scan(source.read(at, at + 1))
        now.take()
        marks.append(standing_of(standing_json(now.standing())).mark)
    assert marks == ["a", "a", "a", "a", "b"]
    now.scan(source.read(len(source.raw) - 1, len(source.raw)))
    assert now.standing().mark == "b", "another database is refused, and its mark with it"
    source.raw.append(said(identity="two", epoch=2))
    now.scan(source.read(len(source.raw) - 1, len(source.raw)))
    assert now.standing().mark is None
