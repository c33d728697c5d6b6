"""A version of a derived topic that is built beside the published one does not disturb it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import MagicMock

import pytest

from everstate.config import Config, StoreConfig
from everstate.errors import ArchiveError, Fenced, ViewFailed
from everstate.log.derived import DerivedNote
from everstate.log.record import OutRecord
from everstate.pipeline.derive import deriver as module
from everstate.pipeline.derive.deriver import Deriver
from everstate.views.control import BUILDING, KEPT, LIVE, ViewVersion

CONFIG = Config(store=StoreConfig(dsn="postgresql://127.0.0.1:1/none"))
RECORD = OutRecord("topic", b"k", b"v")


def _version(number: int, fingerprint: str, status: str, **facts: Any) -> ViewVersion:
    given = {"kind": "topic", "definition": {"derives": 1}, "fields": (), **facts}
    return ViewVersion(
        name="patches",
        version=number,
        entity="order",
        fingerprint=fingerprint,
        status=status,
        **given,
    )


class Registry:
    """The two versions of a topic: the first one is published, the second one is built."""

    def __init__(self) -> None:
        self.rows = [
            _version(1, "first", LIVE, published=True),
            _version(2, "second", BUILDING),
        ]
        self.recorded: list[tuple[int, dict[str, Any]]] = []

    def versions(self, name: str) -> list[ViewVersion]:
        return self.rows

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        yield

    def core_vector(self, entity: str) -> dict[int, int]:
        return {0: 9}

    def vector(self, name: str, version: int) -> dict[int, int]:
        return {0: 9}

    def record(self, name: str, version: int, **facts: Any) -> None:
        self.recorded.append((version, facts))


class Reader:
    """Reads one record with each step, until it fails."""

    def __init__(self, vector: dict[int, int]) -> None:
        self.vector, self.read = vector, {0: 9}
        self.waiting, self.is_closed = 0, False
        self.reading: Future[None] | None = None
        self.read_error: Exception | None = None
        self.take_error: Exception | None = None

    def read_on(self) -> Future[None] | None:
        return self.reading

    def gather(self) -> None:
        if self.read_error is not None:
            raise self.read_error

    def take(self, control: Any, core: Any, upto: Any, most: int) -> list[Any]:
        if self.take_error is not None:
            raise self.take_error
        self.vector = {0: self.vector[0] + 1}
        return [RECORD]

    def progress(self, judged: Any) -> Any:
        return MagicMock()

    def close(self) -> Future[None] | None:
        self.is_closed = True
        return self.reading


class Keeper(Deriver):
    """A deriver with a registry in memory; the second version can be opened when it is told so."""

    published: list[tuple[list[OutRecord], DerivedNote]]
    opened: list[int]

    def _read(self, control: Any, version: int, vector: Any) -> None:
        self.opened.append(version)
        raise ArchiveError("a file of the archive is damaged")

    def _records(self, control: Any, version: int, taken: Any) -> list[OutRecord]:
        return list(taken)

    def _joinable(self, control: Any, version: int, judged: Any) -> Any:
        return judged

    def _knows(self, control: Any, row: Any) -> bool:
        return True


@pytest.fixture
def registry() -> Registry:
    return Registry()


@pytest.fixture
def keeper(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> Iterator[Keeper]:
    for name in ("Topics", "Offsets", "OncePublisher", "ControlConnection"):
        monkeypatch.setattr(module, name, MagicMock())
    declared = MagicMock()
    declared.name, declared.is_raw = "patches", False
    with Keeper(CONFIG, MagicMock(), declared) as made:
        made.published, made.opened = [], []
        made._known = {1: declared, 2: declared}
        monkeypatch.setattr(made._database, "connected", lambda: nullcontext(registry))
        made._note = DerivedNote({1: {0: 1}, 2: {0: 0}}, 1, {1: "first", 2: "second"})
        yield made


@pytest.mark.parametrize("where", ["read_error", "take_error"])
def test_a_version_that_cannot_be_built_does_not_stop_the_published_one(
    where: str, keeper: Keeper, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, built = Reader({0: 1}), Reader({0: 0})
    keeper._readers |= {1: live, 2: built}  # type: ignore[dict-item] # of the same shape
    error = ArchiveError("a file is damaged") if where == "read_error" else ViewFailed("order", "x")
    setattr(built, where, error)
    for number in range(1, 4):
        assert keeper.step() == 1
        assert keeper._note is not None
        assert keeper._note.versions == {1: {0: 1 + number}, 2: {0: 0}}
    assert built.is_closed
    assert not live.is_closed
    assert (2, {"error": error.message}) in registry.recorded
    assert keeper.opened == [], "it is tried again after a pause"
    monkeypatch.setattr(module, "_AGAIN_S", 0.0)
    keeper._failed[2] = (0.0, error.message)
    keeper.step()
    assert keeper.opened == [2]
    keeper.step()
    assert keeper.opened == [2, 2], "what failed again is tried again"
    registry.rows[1], registry.recorded = _version(2, "second", KEPT), []
    keeper.step()
    assert registry.recorded == [], "it is not wanted any more"
    assert keeper._note is not None
    assert keeper._note.published == 1


def test_a_keeper_without_a_version_to_read_does_not_ask_without_a_pause(keeper: Keeper) -> None:
    assert keeper.pause_s(0) > 0.0
    keeper._readers |= {1: Reader({0: 1})}  # type: ignore[dict-item] # of the same shape
    assert keeper.pause_s(0) == 0.0, "it waits for records itself"


def test_what_is_read_is_published_while_the_archive_of_another_version_is_sorted(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, built = Reader({0: 1}), Reader({0: 0})
    keeper._readers |= {1: live, 2: built}  # type: ignore[dict-item] # of the same shape
    live.reading, built.reading = Future(), Future()
    live.reading.set_result(None)
    monkeypatch.setattr(module, "_WAIT_S", 60.0)
    began = time.monotonic()
    assert keeper.step() == 2
    assert time.monotonic() - began < 30


def test_a_version_is_read_again_only_when_its_last_reading_has_ended(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_AGAIN_S", 0.0)
    live, built = Reader({0: 1}), Reader({0: 0})
    keeper._readers |= {1: live, 2: built}  # type: ignore[dict-item] # of the same shape
    built.read_error, built.reading = ArchiveError("a file is damaged"), Future()
    monkeypatch.setattr(module, "_WAIT_S", 0.01)
    keeper.step()
    keeper.step()
    assert keeper.opened == [], "an archive is still sorted"
    built.reading.set_result(None)
    keeper.step()
    assert keeper.opened == [2]


def test_an_error_of_the_published_version_ends_the_step(keeper: Keeper) -> None:
    live, built = Reader({0: 1}), Reader({0: 0})
    keeper._readers |= {1: live, 2: built}  # type: ignore[dict-item] # of the same shape
    live.read_error = ArchiveError("a file is damaged")
    with pytest.raises(ArchiveError):
        keeper.step()
    assert live.is_closed
    assert built.is_closed


def test_a_process_that_was_fenced_deletes_no_topic(keeper: Keeper, registry: Registry) -> None:
    keeper._readers |= {1: Reader({0: 1})}  # type: ignore[dict-item] # of the same shape
    registry.rows = registry.rows[:1]
    topics, publisher = keeper._topics, keeper._publisher
    assert isinstance(topics, MagicMock)
    assert isinstance(publisher, MagicMock)
    publisher.publish.side_effect = Fenced("another process keeps it")
    with pytest.raises(Fenced):
        keeper.step()
    topics.delete.assert_not_called()
    publisher.publish.side_effect = None
    keeper._note = DerivedNote({1: {0: 1}, 2: {0: 0}}, 1, {1: "first", 2: "second"})
    keeper._readers |= {1: Reader({0: 1})}  # type: ignore[dict-item] # of the same shape
    keeper.step()
    topics.delete.assert_called_once()
    assert keeper._note.versions.keys() == {1}
