"""When a captured database counts as another one, or as restored to an earlier copy."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstate.config import Config, load
from everstate.declarations.captures import Capture, Table
from everstate.errors import InvalidCapture, SourceReplaced
from everstate.sources.cdc import replaced
from everstate.sources.cdc.connectors import OwnTables
from everstate.sources.cdc.mariadb import MariaDatabase
from everstate.sources.cdc.postgres import PostgresDatabase, postgres_address
from everstate.sources.cdc.replaced import check_source, new_mark, renew_mark
from everstate.sources.cdc.shapes.places import stream_place
from everstate.sources.cdc.stream import StreamStanding
from tiers import counted

CAPTURE = Capture(
    name="shop",
    kind="postgresql",
    tables={"public.item": Table(entity="item")},
    dsn="postgresql://u@h/d",
)
CONFIG: Config = load()
ADDRESS = postgres_address("postgresql://u@h/d")[0]


class Database:
    """A captured database, as far as it is asked who it is."""

    def __init__(self) -> None:
        self.own = OwnTables("everstate_capture.signals")
        self.name, self.end = "system 1", 0
        self.text: str | None = None

    def identity(self) -> str:
        return self.name

    def went_back(self, place: bytes, offset: Mapping[str, Any]) -> str | None:
        return "its log ends before it" if self.end < offset.get("lsn", 0) else None

    def log_end(self) -> None:
        pass

    def read_mark(self) -> str | None:
        return self.text

    def write_mark(self, text: str, instead_of: str | None) -> bool:
        if instead_of not in (None, self.text):
            return False
        self.text, self.end = text, self.end + 1
        return True


class Source:
    """The database, the marks in the raw log, and the standing that cleaning has come to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch | None = None) -> None:
        self.database: Any = Database()
        self.raw: list[str] = []
        self.known = StreamStanding()
        if monkeypatch is not None:
            monkeypatch.setattr(replaced, "known_standing", lambda *_: self.known)

    def learns(self, **facts: Any) -> None:
        self.known = msgspec.structs.replace(self.known, **facts)

    def clean(self) -> None:
        for mark in self.raw:
            self.learns(mark=mark, identity="system 1")
        self.raw = []

    def renew(self) -> None:
        mark = renew_mark(self.database, self.known.mark)
        if mark is not None:
            self.raw.append(mark.mark)

    def check(self, lsn: int = 0, **options: Any) -> None:
        check_source(CONFIG, CAPTURE, self.database, {"lsn": lsn}, **options)


def test_another_server_is_another_database(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source(monkeypatch)
    source.check()  # of a capture of an earlier version nothing is known
    source.learns(identity="system 1")
    source.check()
    source.database.name = "system 2"
    for resumes in (True, False):
        with pytest.raises(SourceReplaced, match="it is system 2, and was system 1") as refused:
            source.check(resumes=resumes)
    assert "`everstate cdc snapshot shop --new-epoch`" in str(refused.value)


def test_a_log_that_ends_before_the_stored_position_is_of_a_restored_database(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = Source(monkeypatch)
    source.database.end = 500
    source.check(lsn=500)
    with pytest.raises(SourceReplaced, match="ends before it"):
        source.check(lsn=501)
    source.check(lsn=501, resumes=False)  # all rows are read: where it was does not matter
    source.check(lsn=501, epoch=2)  # a new epoch that cleaning has not come to


def test_an_earlier_copy_is_noticed_although_its_log_has_passed_the_stored_position(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = Source(monkeypatch)
    source.raw.append(new_mark(source.database).mark)
    source.clean()
    backup = copy.copy(source.database)
    source.renew()
    source.check()  # it is not known yet, and the one before is there
    source.clean()
    source.database = backup
    backup.end = 10_000
    with pytest.raises(SourceReplaced, match=r"an earlier copy.*everstate_capture\.signals"):
        source.check(lsn=5)
    source.database.text = None
    with pytest.raises(SourceReplaced, match="an earlier copy"):
        source.check(lsn=5)


def test_a_mark_that_cleaning_does_not_know_yet_is_told_again_and_stays() -> None:
    source = Source()
    first = new_mark(source.database).mark
    for _ in range(3):
        source.renew()
    assert source.raw == [first] * 3
    source.clean()
    before = source.database.text
    source.renew()
    assert source.database.text != before
    assert source.raw != [first]
    source.database.write_mark = lambda *_: False  # another process was faster
    source.clean()
    source.renew()
    assert source.raw == []


def test_a_check_during_which_the_marks_go_on_is_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = Source(monkeypatch)
    source.raw.append(new_mark(source.database).mark)
    source.clean()
    old = source.known
    source.renew()
    source.clean()
    source.renew()
    asked = iter([old, source.known])
    monkeypatch.setattr(replaced, "known_standing", lambda *_: next(asked))
    source.check()


STEPS = st.lists(st.sampled_from(["renew", "clean", "renew twice", "copy"]), max_size=40)


@settings(max_examples=counted(200, full=2_000), deadline=None)
@given(steps=STEPS)
def test_no_copy_that_lacks_the_known_mark_passes_and_no_database_is_refused_wrongly(
    steps: list[str],
) -> None:
    source, copies = Source(), list[Database]()
    source.raw.append(new_mark(source.database).mark)

    def passes(database: Any) -> bool:
        found = replaced.mark_of(database.text)
        return replaced.is_marked(source.known.mark, found)

    for step in steps:
        if step == "copy":
            copies.append(copy.copy(source.database))
        elif step == "clean":
            source.clean()
        else:
            source.renew()
            if step == "renew twice":  # by two processes, or again before cleaning goes on
                source.renew()
        assert passes(source.database)
    for each in copies:
        has_mark = source.known.mark is None or source.known.mark in (each.text or "")
        assert passes(each) == has_mark


def of_postgres(end: int) -> PostgresDatabase:
    database: Any = object.__new__(PostgresDatabase)
    database._capture, database.address = CAPTURE, ADDRESS
    database._rows = lambda *_: [{"lsn": str(end)}]
    return cast("PostgresDatabase", database)


def test_of_postgresql_the_later_of_last_row_and_stored_position_counts() -> None:
    """An idle capture's position goes on with heartbeats, and its last row stays where it was."""
    place = stream_place("postgresql", {"lsn": 300, "sequence": '["200","300"]'})
    assert place is not None
    assert of_postgres(300).went_back(place, {}) is None
    assert "ends at 299, and 300 was read" in (of_postgres(299).went_back(place, {}) or "")
    reason = of_postgres(400).went_back(place, {"lsn": 500})
    assert reason == "its log ends at 400, and 500 was read of it before"
    assert of_postgres(1).went_back(b"", {}) is None


def of_mariadb(file: str, size: int, gtids: str) -> MariaDatabase:
    answers = {
        "SHOW BINARY LOGS": [{"Log_name": file, "File_size": size}],
        "SELECT @@global.gtid_binlog_pos AS at": [{"at": gtids}],
    }
    database: Any = object.__new__(MariaDatabase)
    database._capture, database.address = CAPTURE, ADDRESS
    database._rows = lambda query, *_: answers[query]
    return cast("MariaDatabase", database)


@pytest.mark.parametrize(
    ("file", "size", "gtids", "offset", "reason"),
    [
        ("binlog.000004", 900, "0-1-70", {"file": "binlog.000004", "pos": 900}, None),
        ("binlog.000004", 900, "", {}, None),
        ("binlog.000004", 899, "", {"file": "binlog.000004", "pos": 900}, "position 899, and"),
        ("binlog.000003", 950, "", {"file": "binlog.000004", "pos": 4}, "4 of file 4 was read"),
        ("binlog.000009", 4, "0-1-70,1-1-9", {"gtids": "0-1-70"}, None),
        ("binlog.000009", 4, "0-2-70,1-1-9", {"gtids": "0-1-71"}, "70 of domain 0, and 71"),
        ("binlog.000009", 4, "0-2-70", {"gtids": "3-1-71"}, None),
    ],
)
def test_of_mariadb_file_position_and_gtids_of_the_binlog_count(
    file: str, size: int, gtids: str, offset: dict[str, Any], reason: str | None
) -> None:
    pytest.importorskip("pymysql")
    found = of_mariadb(file, size, gtids).went_back(b"", offset)
    assert (found is None) == (reason is None)
    assert (reason or "") in (found or "")


def test_an_epoch_is_declared_only_where_somebody_else_runs_the_connector() -> None:
    tables = {"public.item": Table(entity="item")}
    theirs = Capture(name="shop", kind="postgresql", tables=tables, epoch=2)
    assert theirs.epoch == 2
    with pytest.raises(InvalidCapture, match="--new-epoch"):
        Capture(name="shop", kind="postgresql", tables=tables, epoch=2, dsn="postgresql://u@h/d")
