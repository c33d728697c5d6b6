"""When a capture that is added resumes at its position, and when it begins an epoch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from everstate.config import load
from everstate.declarations.captures import Capture, Table
from everstate.errors import CaptureFailed, SourceReplaced, TableMisread
from everstate.sources.cdc import capturing, connector, fingerprint, replaced
from everstate.sources.cdc.capturing import Capturing
from everstate.sources.cdc.connectors import OwnTables, TableShape, left_out_tables
from everstate.sources.cdc.database import ConnectorStanding, Finding
from everstate.sources.cdc.postgres import postgres_address
from everstate.sources.cdc.reading import SourceIdentity
from everstate.sources.cdc.replaced import EPOCH, Mark
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
        self.state, self.left = "RUNNING", 1_000
        self.tasks, self.restarts = list[dict[str, Any]](), 0

    def config(self, _name: str) -> dict[str, str]:
        if self.settings is None:
            raise NoSuchConnector
        return dict(self.settings)

    def offset(self, name: str) -> dict[str, Any]:
        self.config(name)
        return self.position

    def make_stopped(self, _name: str, settings: Mapping[str, str]) -> None:
        self.dies()
        assert self.settings is None
        self.settings, self.state = dict(settings), "STOPPED"

    def put(self, _name: str, settings: Mapping[str, str]) -> None:
        self.dies()
        self.settings = dict(settings)

    def resume(self, _name: str) -> None:
        self.dies()
        self.state = "RUNNING"

    def dies(self) -> None:
        """Count a request that changes something; the one before which `everstate` is killed."""
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt

    def stop(self, _name: str) -> None:
        self.dies()
        self.state = "STOPPED"

    def forget_offsets(self, _name: str) -> None:
        self.dies()
        assert self.state == "STOPPED"
        self.position = {}

    def delete(self, _name: str) -> None:
        self.dies()
        self.settings, self.state = None, "RUNNING"

    def status(self, _name: str) -> dict[str, Any]:
        return {"connector": {"state": self.state}, "tasks": self.tasks}

    def restart(self, _name: str) -> None:
        self.restarts += 1
        self.tasks = self.tasks[1:]


class Database:
    """A captured database."""

    own = OwnTables("everstate_capture.signals")
    address = postgres_address(DSN)[0]

    def __init__(self) -> None:
        self.text: str | None = None
        self.is_behind = False
        self.has_slot = False
        self.findings: list[Finding] = []

    def identity(self) -> str:
        return "system 1"

    def went_back(self, _place: bytes, _offset: Mapping[str, Any]) -> str | None:
        return "its log ends before it" if self.is_behind else None

    def log_end(self) -> str | None:
        return None

    def has_older_row(self, _part: str, seen: int) -> bool:
        return seen > 0

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
        self.text, self.has_slot = None, False
        return []

    def check(self) -> list[Finding]:
        return self.findings

    def begin_anew(self) -> list[Any]:
        self.has_slot = False
        return []

    def standing(self, offset: Mapping[str, Any]) -> ConnectorStanding:
        is_lost = bool(offset) and not self.has_slot
        return ConnectorStanding(self.has_slot, 0, 0, "there is no slot", is_lost=is_lost)

    def shapes(self, _: Mapping[str, str]) -> Mapping[str, TableShape]:
        return {}


class Rig:
    """A capture whose servers are those above; ``wrote``: epochs that the raw log was told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.connect, self.database = Connect(), Database()
        self.known, self.wrote = StreamStanding(), list[tuple[int, bool]]()
        monkeypatch.setattr(Capturing, "_connect", self.connect)
        monkeypatch.setattr(Capturing, "has_connect", True)
        monkeypatch.setattr(Capturing, "database", self.opened)
        monkeypatch.setattr(Capturing, "_table_findings", lambda *_: [])
        monkeypatch.setattr(Capturing, "_make_topics", lambda _self: [])
        monkeypatch.setattr(capturing, "forget_password", lambda *_: None)
        monkeypatch.setattr(capturing, "Topics", lambda _config: self.no_topics())
        monkeypatch.setattr(capturing, "password_reference", lambda *_, **__: "x")
        for module in capturing, fingerprint:
            monkeypatch.setattr(module, "write_source", self.told)
        monkeypatch.setattr(connector, "newest_lsn", lambda *_: 0)
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

    def told(self, _config: Any, _names: Any, source: SourceIdentity) -> None:
        """Cleaning comes to it at once."""
        identity, epoch, mark = source.identity, source.epoch, source.mark
        is_read = self.connect.settings is not None and self.connect.state != "STOPPED"
        assert not is_read or epoch == self.known.epoch
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
        self.database.has_slot = True


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    made = Rig(monkeypatch)
    made.add()
    made.reads()
    return made


def test_adding_a_capture_again_changes_nothing(rig: Rig) -> None:
    rig.add()
    assert rig.wrote == [(1, True)]


def test_a_task_that_fails_at_its_first_start_is_started_once_more(rig: Rig) -> None:
    # As one of MariaDB that began while its former one was ending: RejectedExecutionException.
    failed = {"state": "FAILED", "trace": "rejected from java.util.concurrent"}
    rig.connect.tasks = [failed, {"state": "RUNNING"}]
    rig.capturing.add(wait_s=30)
    assert rig.connect.restarts == 1
    rig.connect.tasks = [failed] * 3
    with pytest.raises(CaptureFailed, match="rejected from"):
        rig.capturing.add(wait_s=30)
    assert rig.connect.restarts == 2


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


def test_a_remedy_that_lacks_a_right_removes_nothing(rig: Rig) -> None:
    before = dict(rig.connect.settings or {})
    rig.database.findings = [Finding("replication", "fail", "u may not replicate")]
    with pytest.raises(CaptureFailed, match="may not replicate"):
        rig.capturing.begin_epoch(wait_s=0)
    rig.database.findings = []
    rig.database.prepare = refused  # type: ignore[method-assign]
    with pytest.raises(CaptureFailed, match="must be owner"):
        rig.capturing.begin_epoch(wait_s=0)
    assert (rig.connect.settings, rig.connect.position) == (before, {"lsn": 5})
    assert rig.connect.state == "RUNNING"
    assert rig.database.has_slot
    assert rig.wrote == [(1, True)]


def refused() -> list[Any]:
    reason = "must be owner of publication"
    raise CaptureFailed(reason)


@pytest.mark.parametrize("steps", range(4))
def test_a_new_epoch_that_was_killed_after_any_step_is_said_and_can_be_begun_again(
    rig: Rig, steps: int
) -> None:
    rig.known = rig.known.__class__(epoch=0)  # Cleaning does not know the connector's epoch yet.
    rig.connect.left = steps
    with pytest.raises(KeyboardInterrupt):
        rig.capturing.begin_epoch(wait_s=0)
    rig.connect.left, told = 1_000, rig.wrote[1:]
    if steps:
        with pytest.raises(CaptureFailed) as error:
            rig.capturing.resume(wait_s=0)
        assert "cdc snapshot shop --new-epoch" in str(error.value.advice)
        with pytest.raises(CaptureFailed):
            rig.capturing.add(wait_s=0)
    rig.capturing.begin_epoch(wait_s=0)
    assert rig.connect.state == "RUNNING"
    assert rig.connect.position == {}
    assert rig.connect.settings is not None
    epochs = [1, *(epoch for epoch, _ in told), int(rig.connect.settings[EPOCH])]
    assert epochs == sorted(epochs)
    assert epochs[-1] > 1, "no position of the former snapshot is taken for one of this"


def test_a_connector_behind_a_hole_of_its_slot_is_not_resumed(rig: Rig) -> None:
    rig.connect.stop("shop")
    rig.database.has_slot = False
    for way in (rig.capturing.resume, rig.capturing.add):
        with pytest.raises(CaptureFailed, match="there is no slot") as error:
            way(wait_s=0)
        assert "cdc snapshot shop --new-epoch" in str(error.value.advice)
    assert rig.connect.state == "STOPPED"


def test_what_the_connector_does_not_see_is_written_down_and_told_until_the_next_epoch(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(_capture: Any, _database: Any, _offset: Any, mark: Mark, **_passed: Any) -> Mark:
        return msgspec.structs.replace(mark, unseen={"public.item": "a session wrote"})

    def problems() -> tuple[str, ...]:
        with rig.opened() as database:
            return rig.capturing._problems(database, rig.connect.position, is_reachable=True)

    monkeypatch.setattr(capturing, "look_at", look)
    rig.add()
    assert problems() == ()
    rig.capturing.check_source(renew=True)
    assert problems() == ("public.item: a session wrote",)
    rig.connect.state = "STOPPED"
    rig.capturing.begin_epoch(wait_s=0)
    assert problems() == ()


def test_a_table_whose_rows_cannot_be_read_is_left_out_until_a_new_epoch(rig: Rig) -> None:
    other = {"public.other": Table(entity="item")}
    rig.capturing.capture = dataclasses.replace(CAPTURE, tables={**CAPTURE.tables, **other})
    rig.add()
    whole = dict(rig.connect.settings or {})
    trace = "Error processing row in other, internal schema size 3, but row size 1, restart"
    failed = {"connector": {"state": "RUNNING"}, "tasks": [{"state": "FAILED", "trace": trace}]}
    rig.connect.status = lambda _name: failed  # type: ignore[method-assign]
    assert rig.capturing.restart_failed() is None
    left = dict(rig.connect.settings or {})
    assert left["table.include.list"] == r"public\.item"
    (problem,) = left_out_tables(left).items()
    assert problem[0] == "public.other"
    assert problem[1].startswith("the binlog has rows of other with 1 columns")
    with pytest.raises(CaptureFailed, match="other is left out: the binlog has rows"):
        rig.capturing.refuse_left_out(["public.item", "public.other"])
    assert not rig.capturing.leave_out("public.item", "too"), "of an empty list it reads all"
    rig.connect.status = lambda _name: {"connector": {"state": "RUNNING"}, "tasks": []}  # type: ignore[method-assign]
    rig.add()
    assert rig.connect.settings == left, "what it missed meanwhile is read by a new epoch alone"
    rig.connect.state = "STOPPED"
    rig.connect.status = lambda _name: {"connector": {"state": rig.connect.state}, "tasks": []}  # type: ignore[method-assign]
    rig.capturing.begin_epoch(wait_s=0)
    assert rig.connect.settings == {**whole, EPOCH: "2"}


@pytest.mark.parametrize("has_others", [True, False])
def test_a_table_that_is_misread_is_left_out_unless_it_is_the_only_one(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, has_others: bool
) -> None:
    other = {"public.other": Table(entity="item")} if has_others else {}
    rig.capturing.capture = dataclasses.replace(CAPTURE, tables={**CAPTURE.tables, **other})
    rig.add()

    def misread(*_: Any) -> None:
        raise TableMisread("shop", "column 2 is a, and b in the table", "public.item")

    monkeypatch.setattr(Capturing, "_checked", misread)
    with pytest.raises(TableMisread):
        rig.capturing.check_source()
    if has_others:
        rig.capturing.check_source(renew=True)
    else:
        with pytest.raises(TableMisread):
            rig.capturing.check_source(renew=True)
    assert left_out_tables(rig.connect.settings).keys() == (
        {"public.item"} if has_others else set()
    )
