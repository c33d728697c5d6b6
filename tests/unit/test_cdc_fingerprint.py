"""Tables that change without row events: what is compared, what is read again, what is told."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest
from msgspec import structs
from pydantic import BaseModel

from clean_cases import CONFIG
from everstate.changes import EntityType
from everstate.declarations.captures import Capture, Table
from everstate.sources.cdc import fingerprint
from everstate.sources.cdc.database import CapturedDatabase, TableState
from everstate.sources.cdc.fingerprint import (
    CHANGED,
    SeenChanges,
    difference,
    fingerprints,
    gone_problems,
    watch_tables,
)
from everstate.sources.cdc.reading import Fingerprint, RawReader, RefusedRow, SourceIdentity
from everstate.sources.cdc.replaced import CheckedSource, Mark
from everstate.sources.cdc.rows import SCHEMA
from everstate.sources.cdc.stream import StreamStanding


class Item(BaseModel):
    id: int
    note: str | None = None


ENTITIES = {"item": EntityType("item", Item, "id")}
CAPTURE = Capture(
    name="shop",
    kind="postgresql",
    dsn="postgresql://u@h/d",
    tables={"s.items": Table(entity="item")},
)


class Database:
    """A captured database, as far as it is asked: a table of two partitions, one without a row."""

    def __init__(self) -> None:
        self.columns = {"id": "1 integer", "note": "2 text", "other": "3 text"}
        self.generated: list[str] = []
        self.parts = {"10": "0 empty", "11.5": "100", "12.5": "200 empty"}
        self.rewritten: set[str] = set()
        self.signals: list[list[str]] = []
        self.mark, self.seen, self.log_end = Mark("a"), 7, 20
        self.before: SeenChanges = {}

    def table_states(self) -> tuple[int, dict[str, TableState]]:
        state = TableState(dict(self.columns), list(self.generated), dict(self.parts))
        return self.seen, {"s.items": state}

    def has_older_row(self, part: str, seen: int) -> bool:
        assert seen == 7, "of the last look"
        return part in self.rewritten

    def signal(self, _id: str, _kind: str, data: str) -> None:
        self.signals.append(json.loads(data)["data-collections"])

    def read_mark(self) -> str:
        return json.dumps({"mark": self.mark.mark, "looked_at": self.mark.looked_at})

    def log_place(self) -> int:
        return self.log_end

    def has_passed(self, offset: dict[str, Any], place: int) -> bool:
        return int(offset["pos"]) >= place

    def write_mark(self, text: str, instead_of: str | None) -> bool:
        del text, instead_of
        return True


GONE = "a partition was detached or dropped, or another table took its name"
TRUNCATED = "a partition was truncated"
PLAIN = "a generated column, whose field is `computed`, became plain, or the reverse"
CASES: list[tuple[str, dict[str, Any], str | None]] = [
    ("nothing", {}, None),
    ("a column that no field has", {"columns": {"other": "4 text", "more": "5 text"}}, None),
    ("columns made anew", {"columns": {"note": "4 text"}}, CHANGED),
    ("a label renamed", {"columns": {"note": '2 mood ["sad"]'}}, CHANGED),
    ("a column plain", {"generated": ["note"]}, PLAIN),
    ("one that no field has", {"generated": ["other"]}, None),
    ("an empty partition made", {"parts": {"13.6": "300 empty"}}, None),
    ("an empty one dropped", {"parts": {"12.5": None}}, None),
    ("an empty one filled", {"parts": {"12.5": "200"}}, None),
    ("its rows deleted", {"parts": {"11.5": "100 empty"}}, None),
    ("one with rows attached", {"parts": {"13.6": "300"}}, CHANGED),
    ("one with rows dropped", {"parts": {"11.5": None}}, GONE),
    ("detached and attached again", {"parts": {"11.5": None, "11.6": "100"}}, GONE),
    ("exchanged", {"parts": {"11.5": None, "13.6": "300"}}, GONE),
    ("truncated", {"parts": {"11.5": "101 empty"}}, TRUNCATED),
    ("truncated and filled", {"parts": {"11.5": "101"}}, TRUNCATED),
    ("VACUUM FULL", {"parts": {"11.5": "101"}, "rewritten": {"11.5"}}, None),
    (
        "VACUUM FULL of all",
        {"parts": {"11.5": "101", "12.5": "201 empty"}, "rewritten": {"11.5"}},
        None,
    ),
    (
        "all truncated, and filled since",
        {"parts": {"11.5": "101", "12.5": "201 empty"}},
        TRUNCATED,
    ),
    ("filled and truncated since", {"parts": {"12.5": "201 empty"}}, TRUNCATED),
    ("filled, truncated and filled", {"parts": {"12.5": "201"}}, TRUNCATED),
    ("retyped", {"columns": {"note": "2 date"}, "parts": {"11.5": "101"}}, CHANGED),
    (
        "retyped with the empty one",
        {"columns": {"note": "2 date"}, "parts": {"11.5": "101", "12.5": "201 empty"}},
        CHANGED,
    ),
    (
        "retyped after its rows were truncated",
        {"columns": {"note": "2 date"}, "parts": {"11.5": "101 empty", "12.5": "201 empty"}},
        TRUNCATED,
    ),
]


@pytest.mark.parametrize(("_what", "change", "expected"), CASES, ids=[one[0] for one in CASES])
def test_what_a_table_may_have_had_without_row_events(
    _what: str, change: dict[str, Any], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = Database()
    known = StreamStanding(mark="a", seen=7, tables=dict(now(database)))
    for name, value in change.items():
        if isinstance(value, dict):
            value = {k: v for k, v in {**getattr(database, name), **value}.items() if v is not None}
        setattr(database, name, value)
    database.seen = 9
    wrote = looked(database, known, monkeypatch)
    assert database.signals == ([["s.items"]] if expected == CHANGED else [])
    is_gone = expected not in (None, CHANGED)
    other = {} if is_gone or now(database) == known.tables else now(database)
    assert wrote[1:] == (other, 0 if is_gone else 9)
    told = told_of(database, known)
    anew = "`everstate cdc snapshot shop --new-epoch` brings them to what the table"
    assert [one.startswith(f"s.items: {expected}") and anew in one for one in told] == (
        [True] if is_gone else []
    )


def test_the_file_of_a_table_that_is_no_partition_may_be_any_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """TRUNCATE is an event of it, and ALTER TABLE writes all rows anew."""
    database = Database()
    database.parts = {"10": "100"}
    known = StreamStanding(mark="a", seen=7, tables=dict(now(database)))
    database.parts = {"10": "101"}
    looked(database, known, monkeypatch)
    assert (database.signals, told_of(database, known)) == ([["s.items"]], [])
    database.signals, database.rewritten = [], {"10"}
    looked(database, known, monkeypatch)
    assert database.signals == [], "VACUUM FULL"
    database.parts = {"20": "100"}
    assert GONE in told_of(database, known)[0]


def test_after_truncate_columns_are_compared_and_files_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    database = Database()
    table, one = next(iter(now(database).items()))
    known = StreamStanding(mark="a", seen=7, tables={table: structs.replace(one, parts={})})
    looked(database, known, monkeypatch)
    assert (database.signals, told_of(database, known)) == ([], [])
    database.columns["note"] = "4 text"
    looked(database, known, monkeypatch)
    assert database.signals == [["s.items"]], "it was made anew, with a default"


def test_a_table_is_read_again_when_cleaning_knows_a_look_at_what_was_before_the_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    database = Database()
    known = StreamStanding(mark="a", seen=7, tables=dict(now(database)))
    made_anew = ("4 text", "5 text", "5 text", "5 text")
    ends, looks = (20, 30, 40, 50), ("b.1:19", "b.1:20", "b.1:29", "b.1:30")
    wrote = []
    for column, database.log_end, at in zip(made_anew, ends, looks, strict=True):
        database.columns["note"] = column
        database.mark = Mark("a", looked_at=at)
        wrote.append(looked(database, known, monkeypatch)[1:])
    assert database.signals == [["s.items"]]
    assert wrote == [*[({}, 0)] * 3, (now(database), 7)]


@pytest.mark.parametrize(
    ("parts", "older", "expected"),
    [
        ({"": "2", "table 6": ""}, set(), CHANGED),
        ({"": "2", "table 3": ""}, {"table 3"}, GONE),
        ({"": "2", "table 5": ""}, {"table 5"}, CHANGED),
        ({"": "1"}, set(), None),
    ],
    ids=["built anew", "another took its name", "altered", "the right PROCESS was revoked"],
)
def test_a_table_of_mariadb_has_a_time_and_an_id(
    parts: dict[str, str], older: set[str], expected: str | None
) -> None:
    known, now = (Fingerprint("", "", one) for one in ({"": "1", "table 5": ""}, parts))
    assert difference(known, now, older.__contains__) == expected


def test_a_look_waits_until_cleaning_knows_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    database = Database()
    known = StreamStanding(mark="before", seen=7, tables=dict(now(database)))
    database.parts["13.6"] = "300"
    assert looked(database, known, monkeypatch)[1:] == ({}, 0)
    assert database.signals == []
    first = StreamStanding(mark="a")
    assert looked(database, first, monkeypatch)[1:] == (now(database), 7), "none was known"
    assert database.signals == []


def test_what_the_raw_log_tells_stays_told() -> None:
    known = StreamStanding(gone={"s.items": "the table was renamed"})
    assert told_of(Database(), known) == ["s.items: the table was renamed"]


@pytest.mark.parametrize(
    ("change", "ddl", "snapshot", "said"),
    [
        ("DROP", "DROP TABLE items", "false", "was dropped"),
        ("CREATE", "CREATE TABLE items (id int)", "false", "was made anew"),
        ("ALTER", "RENAME TABLE x TO items", "false", "was renamed"),
        ("ALTER", "alter table x rename items", "false", "was renamed"),
        ("ALTER", "ALTER TABLE items RENAME COLUMN a TO b, rename  index c to d", "false", ""),
        ("ALTER", "ALTER TABLE items ADD COLUMN renamed int", "false", ""),
        ("ALTER", "ALTER TABLE items\n drop  partition p1", "false", "by DROP PARTITION"),
        ("ALTER", "alter table items TRUNCATE PARTITION ALL", "false", "by TRUNCATE PARTITION"),
        ("ALTER", "ALTER TABLE items EXCHANGE PARTITION p WITH TABLE o", "false", "EXCHANGE"),
        ("ALTER", "ALTER TABLE items CONVERT TABLE o TO PARTITION p", "false", "CONVERT"),
        ("ALTER", "ALTER TABLE items ADD PARTITION (PARTITION p3)", "false", ""),
        ("ALTER", "ALTER TABLE items REORGANIZE PARTITION p INTO (PARTITION q)", "false", ""),
        ("DROP", "DROP TABLE IF EXISTS items", "true", ""),
    ],
)
def test_a_table_that_is_another_one_now_is_told(
    change: str, ddl: str, snapshot: str, said: str
) -> None:
    tables = {"s.items": Table(entity="item")}
    capture = Capture(name="shop", kind="mariadb", dsn="mariadb://u@h/s", tables=tables)
    reader = RawReader(capture, ENTITIES)
    names = ('"s"."items"', '"s"."some""body""s"')
    changes = [{"type": change, "id": name, "table": None} for name in names]
    source = {"connector": "mariadb", "db": "s", "snapshot": snapshot, "file": "b.1"}
    value = {"source": source, "ddl": ddl, "tableChanges": changes}
    found = reader.read("", None, json.dumps(value).encode(), (SCHEMA, None))
    assert len(found) == 2 * bool(said)
    if not found:
        return
    assert isinstance(told := found.pop(), SourceIdentity)
    assert [said in how for how in told.gone.values()] == [True]
    for each in found:
        assert isinstance(each, RefusedRow)
        assert (each.table, said in each.reason) == ("s.items", True)
        assert "`everstate cdc snapshot shop --new-epoch`" in each.reason


def now(database: Database) -> dict[str, Fingerprint]:
    return fingerprints(CAPTURE, ENTITIES, cast(CapturedDatabase, database))[0]


def told_of(database: Database, known: StreamStanding) -> list[str]:
    return gone_problems(CAPTURE, ENTITIES, cast(CapturedDatabase, database), known)


def looked(
    database: Database, known: StreamStanding, monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, ...]:
    """One look of the clean role; out: the mark, the tables and the moment that it told."""
    wrote: list[SourceIdentity] = []
    monkeypatch.setattr(fingerprint, "write_source", lambda *told: wrote.append(told[2]))
    found = CheckedSource("system 1", known)
    watch_tables(
        CONFIG, CAPTURE, ENTITIES, cast(CapturedDatabase, database), found, database.before
    )
    (told,) = wrote
    return told.mark, told.tables, told.seen
