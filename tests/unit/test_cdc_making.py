"""When a capture that is added resumes at its position, and when it begins an epoch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from everstate.config import load
from everstate.declarations.captures import Capture, Table
from everstate.errors import SourceReplaced
from everstate.sources.cdc import capturing, replaced
from everstate.sources.cdc.capturing import Capturing
from everstate.sources.cdc.connectors import OwnTables, Peculiarities, TableShape
from everstate.sources.cdc.postgres import postgres_address
from everstate.sources.cdc.replaced import EPOCH
from everstate.sources.cdc.rest import NoSuchConnector
from everstate.sources.cdc.stream import StreamStanding

DSN = "postgresql://u@h/d"
CAPTURE = Capture(
    name="shop", kind="postgresql", tables={"public.item": Table(entity="item")}, dsn=DSN
)


class Connect:
    """A Connect cluster with at most one connector, whose position outlives it."""

    def __init__(self) -> None:
        self.settings: dict[str, str] | None = None
        self.position: dict[str, Any] = {}
        self.state = "RUNNING"

    def config(self, _name: str) -> dict[str, str]:
        if self.settings is None:
            raise NoSuchConnector
        return dict(self.settings)

    def offset(self, name: str) -> dict[str, Any]:
        self.config(name)
        return self.position

    def make_stopped(self, _name: str, settings: Mapping[str, str]) -> None:
        assert self.settings is None
        self.settings, self.state = dict(settings), "STOPPED"

    def put(self, _name: str, settings: Mapping[str, str]) -> None:
        self.settings = dict(settings)

    def resume(self, _name: str) -> None:
        self.state = "RUNNING"

    def stop(self, _name: str) -> None:
        self.state = "STOPPED"

    def forget_offsets(self, _name: str) -> None:
        assert self.state == "STOPPED"
        self.position = {}

    def delete(self, _name: str) -> None:
        self.settings, self.state = None, "RUNNING"

    def status(self, _name: str) -> dict[str, Any]:
        return {"connector": {"state": self.state}, "tasks": []}


class Database:
    """A captured database."""

    own = OwnTables("everstate_capture.signals")
    address = postgres_address(DSN)[0]

    def __init__(self) -> None:
        self.text: str | None = None
        self.is_behind = False

    def identity(self) -> str:
        return "system 1"

    def went_back(self, _place: bytes, _offset: Mapping[str, Any]) -> str | None:
        return "its log ends before it" if self.is_behind else None

    def read_mark(self) -> str | None:
        return self.text

    def write_mark(self, text: str, instead_of: str | None) -> bool:
        del instead_of
        self.text = text
        return True

    def prepare(self) -> list[Any]:
        return []

    def release(self) -> list[Any]:
        return []

    def remove(self) -> list[Any]:
        self.text = None
        return []

    def peculiarities(self) -> Peculiarities:
        return Peculiarities()

    def shapes(self, _: Mapping[str, str]) -> Mapping[str, TableShape]:
        return {}


class Rig:
    """A capture whose servers are those above; ``wrote``: epochs that the raw log was told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.connect, self.database = Connect(), Database()
        self.known, self.wrote = StreamStanding(), list[tuple[int, bool]]()
        monkeypatch.setattr(Capturing, "_connect", self.connect)
        monkeypatch.setattr(Capturing, "database", self.opened)
        monkeypatch.setattr(Capturing, "_table_findings", lambda *_: [])
        monkeypatch.setattr(Capturing, "_make_topics", lambda _self: [])
        monkeypatch.setattr(capturing, "forget_password", lambda *_: None)
        monkeypatch.setattr(capturing, "Topics", lambda _config: self.no_topics())
        monkeypatch.setattr(capturing, "password_reference", lambda *_, **__: "x")
        monkeypatch.setattr(capturing, "write_source", self.told)
        for module in (capturing, replaced):
            monkeypatch.setattr(module, "known_standing", lambda *_: self.known)
        config = load(log={"bootstrap_servers": "127.0.0.1:1"})
        self.capturing = Capturing(config, CAPTURE, local=False)

    @contextmanager
    def opened(self) -> Iterator[Any]:
        yield self.database

    @contextmanager
    def no_topics(self) -> Iterator[Any]:
        yield SimpleNamespace(existing=set, delete=lambda _names: None)

    def told(self, _config: Any, _names: Any, identity: str, epoch: int, mark: str | None) -> None:
        """Cleaning comes to it at once."""
        assert self.connect.settings is None or self.connect.state == "STOPPED"
        self.wrote.append((epoch, mark is not None))
        mark = mark if epoch > self.known.epoch else mark or self.known.mark
        self.known = StreamStanding(epoch=epoch, identity=identity, mark=mark, place=b"p")

    def add(self) -> None:
        self.capturing.add(wait_s=0)
        assert self.connect.state == "RUNNING"
        assert self.connect.settings is not None
        assert self.connect.settings[EPOCH] == str(self.known.epoch)

    def reads(self) -> None:
        self.connect.position = {"lsn": 5}


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    made = Rig(monkeypatch)
    made.add()
    made.reads()
    return made


def test_adding_a_capture_again_changes_nothing(rig: Rig) -> None:
    rig.add()
    assert rig.wrote == [(1, True)]


def test_a_capture_that_was_removed_and_kept_its_position_resumes_in_its_epoch(rig: Rig) -> None:
    rig.capturing.remove()
    rig.add()
    assert rig.wrote == [(1, True), (1, False)]


def test_a_capture_that_was_removed_with_its_position_begins_an_epoch(rig: Rig) -> None:
    rig.capturing.remove(drop=True)
    # All rows are read: where the log ends, and which mark it has, does not matter.
    rig.database.is_behind = True
    rig.add()
    assert rig.wrote == [(1, True), (2, True)]


def test_a_restored_database_is_not_resumed_and_nothing_is_left_of_the_attempt(rig: Rig) -> None:
    rig.capturing.remove()
    rig.database.text = None
    with pytest.raises(SourceReplaced):
        rig.add()
    assert rig.connect.settings is None
    assert rig.connect.position == {"lsn": 5}
    rig.capturing.begin_epoch(wait_s=0)
    assert rig.wrote[1:] == [(2, True)]
    assert rig.connect.position == {}, "it reads all rows"


def test_epochs_go_on_although_cleaning_does_not_know_the_last_one(rig: Rig) -> None:
    before = rig.known
    for _ in range(2):
        rig.capturing.begin_epoch(wait_s=0)
        rig.known = before
    assert [epoch for epoch, _ in rig.wrote] == [1, 2, 3]
    rig.capturing.check_source(renew=True)
    assert len(rig.wrote) == 3, "the mark of the newest epoch stays"


def test_an_addition_that_was_killed_half_way_is_completed(rig: Rig) -> None:
    rig.capturing.remove(drop=True)
    rig.connect.make_stopped("shop", {EPOCH: "0"})
    rig.add()
    assert rig.wrote == [(1, True), (2, True)]
