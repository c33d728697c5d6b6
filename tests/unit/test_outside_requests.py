"""Requests that no client library sends: each is answered, and each refusal has a reason.

The servers behind the API are away, so what a request may do before it reaches them is tested.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn

import outside_app as project
from everstate.api.application import create_api
from everstate.api.guards import timed_protocol
from everstate.config import load
from everstate.sources.stores.postgres import EntityStore
from outside_doors import HttpDoor

SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 20))]
_SLOW = ("stream", "explain")
"""Routes that wait for Kafka, or for the lake, before they answer."""


@pytest.fixture
def port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A server of the project on a free port of this machine."""
    monkeypatch.setattr(EntityStore, "install", lambda *_: None)
    monkeypatch.setattr(
        HttpDoor, "_READ", [p for p in HttpDoor._READ if not any(s in p for s in _SLOW)]
    )
    config = load(
        tmp_path,
        log={"bootstrap_servers": "127.0.0.1:1"},
        store={"dsn": "postgresql://u@127.0.0.1:1/x"},
    )
    made = uvicorn.Config(
        create_api(config, project.app),
        log_config=None,
        lifespan="off",
        http=timed_protocol(60, 60, 100),
    )
    server = uvicorn.Server(made)
    logging.disable(logging.CRITICAL)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        yield listener.getsockname()[1]
        server.should_exit = True
        thread.join()
    logging.disable(logging.NOTSET)


def sent(folder: Path, seed: int, port: int) -> HttpDoor:
    door = HttpDoor(load(folder), seed, port)
    for _ in range(300):
        door.step()
    return door


@pytest.mark.parametrize("seed", SEEDS)
def test_each_request_is_answered(tmp_path: Path, port: int, seed: int) -> None:
    door = sent(tmp_path, seed, port)
    assert door.found == []
    assert door.outcomes.keys() >= {"http 200", "http 400", "http 422", "http 503"}


def test_a_planted_defect_is_found(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everstate.sources.crud.bodies.accept", project.accept_text)
    assert "http: 500" in sent(tmp_path, 0, port).found[0]
