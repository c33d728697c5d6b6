"""The ways in: who writes what, which roles an app has, and a new way in is known everywhere."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

import pytest
from pydantic import BaseModel

from everstate.app import App
from everstate.changes import EntityType
from everstate.changes.drift import Truth
from everstate.config import Config, StoreConfig
from everstate.declarations.captures import Table
from everstate.errors import InvalidEntityType, Unavailable
from everstate.parts import PartRun
from everstate.roles import Role, processes_of, run_roles
from everstate.sources import ways
from everstate.sources.stores.cassandra.truth import CassandraTruth
from everstate.sources.stores.postgres.truth import PostgresTruth
from everstate.sources.way_in import Served, Serving, WayIn
from served_cases import WithoutRoutes

CONFIG = Config(store=StoreConfig(dsn="postgresql://127.0.0.1:1/none"))


class Thing(BaseModel):
    thing_id: str


class Make(BaseModel):
    pass


def everything() -> App:
    app = App("all")
    for source in ("store", "cassandra", "log", "commands", "capture"):
        app.entity(f"in_{source}", key="thing_id", source=source)(Thing)
    app.commands("in_commands", decide=lambda s, c: None, evolve=lambda s, f: s, commands=[Make])
    app.capture("shop", kind="postgresql", tables={"public.row": Table(entity="in_capture")})
    return app


def test_each_way_in_writes_its_entity_types() -> None:
    written = {
        type(each).__name__: [entity_type.name for entity_type in each.entity_types]
        for each in ways.ways_in(CONFIG, everything())
    }
    assert written == {
        "PostgresCrud": ["in_store"],
        "CassandraCrud": ["in_cassandra"],
        "Events": ["in_log"],
        "Commands": ["in_commands"],
        "OutboxRelay": ["in_store", "in_log"],
        "Captures": ["in_capture"],
    }


def test_an_app_has_the_roles_of_the_ways_in_that_it_uses() -> None:
    assert list(processes_of(CONFIG, App("none"))) == ["relay", "pipeline", "alerts"]
    assert processes_of(CONFIG, everything()) == {
        "relay": [Role.RELAY],
        "pipeline": [Role.PIPELINE, Role.CLEAN],
        "publisher": [Role.PUBLISHER],
        "commands": [Role.COMMANDS],
        "alerts": [Role.ALERTS],
    }


def test_stores_are_compared_with_the_log_and_nothing_else_is() -> None:
    truths = ways.truths_of(CONFIG, everything())
    assert {name: type(truth) for name, truth in truths.items()} == {
        "in_store": PostgresTruth,
        "in_cassandra": CassandraTruth,
    }


def test_the_role_of_commands_names_the_declaration_that_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("everstate.parts.private_folder", lambda _path: pytest.fail("it ran"))
    app = App("none")
    app.entity("bell", key="thing_id", source="commands")(Thing)
    with pytest.raises(InvalidEntityType, match="no entity type that takes commands"):
        run_roles([Role.COMMANDS], CONFIG, app, threading.Event())


class Files(WayIn):
    """A way in that the package does not have."""

    role = "relay"
    closed = 0

    @property
    def entity_types(self) -> tuple[EntityType, ...]:
        return self.project.entities_from("log")

    def parts(self) -> Mapping[str, PartRun]:
        return {"relay": lambda stop: stop.set()}

    def truths(self) -> Mapping[str, Truth]:
        return {"in_log": PostgresTruth.of(self.config, "in_log", 1)}

    def serve(self, serving: Serving) -> Served | None:
        return ServedFiles()


class ServedFiles(WithoutRoutes):
    def close(self) -> None:
        Files.closed += 1


class Away(Files):
    """Another one, whose server does not answer."""

    def serve(self, serving: Serving) -> Served | None:
        raise Unavailable("it is away.")


def use(monkeypatch: pytest.MonkeyPatch, listed: Iterable[type[WayIn]]) -> None:
    monkeypatch.setattr(ways, "WAYS_IN", tuple(listed))
    monkeypatch.setattr(Files, "closed", 0)


def test_a_way_in_that_is_listed_has_its_role_run_and_is_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    use(monkeypatch, [Files])
    monkeypatch.chdir(tmp_path_factory.mktemp("project"))
    stop = threading.Event()
    run_roles([Role.RELAY], Config(), everything(), stop)
    assert stop.is_set()
    assert list(processes_of(CONFIG, everything())) == ["relay", "pipeline", "alerts"]
    assert list(ways.truths_of(CONFIG, everything())) == ["in_log"]


def test_what_was_opened_is_closed_when_another_way_in_cannot_be_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use(monkeypatch, [Files])
    serving = Serving(*[None] * 4)  # type: ignore[arg-type]
    assert len(ways.serve_ways(ways.ways_in(CONFIG, everything()), serving)) == 1
    assert Files.closed == 0
    use(monkeypatch, [Files, Away])
    with pytest.raises(Unavailable, match="it is away"):
        ways.serve_ways(ways.ways_in(CONFIG, everything()), serving)
    assert Files.closed == 1
