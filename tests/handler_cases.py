"""Handlers of orders, for tests: who runs them, and the effects that they leave in PostgreSQL."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from everstate.app import App
from everstate.config import Config
from everstate.handling.tables import HandlerTables
from everstate.handling.worker import HandlerWorker
from everstate.postgres import Connection
from kit.waiting import until
from reading_cases import Orders

EFFECTS = (
    "CREATE TABLE IF NOT EXISTS effect (id bigint GENERATED ALWAYS AS IDENTITY,"
    " handler text, call uuid, key text, version bigint, attempt int)"
)
INSERT = "INSERT INTO effect (handler, call, key, version, attempt) VALUES (%s, %s, %s, %s, %s)"


def remember(context: Any, change: Any, handler: str = "remember") -> None:
    """The effect of a call, in its transaction."""
    given = [handler, context.id, change.key, change.version, context.attempt]
    context.connection.execute(INSERT, given)


@contextmanager
def handling(orders: Orders, app: App, *titles: str) -> Iterator[list[HandlerWorker]]:
    """Workers of handlers, each in a thread; a title may come several times."""
    with psycopg.connect(orders.config.views_dsn, autocommit=True) as connection:
        connection.execute(EFFECTS)
    workers = [HandlerWorker(orders.config, app, app.handlers[title]) for title in titles]
    ends = [threading.Event() for _ in workers]
    failures: list[BaseException] = []

    def run(worker: HandlerWorker, end: threading.Event) -> None:
        try:
            with worker:
                worker.run(end)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=each) for each in zip(workers, ends, strict=True)]
    for thread in threads:
        thread.start()
    try:
        yield workers
    finally:
        for end in ends:
            end.set()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]


def rows(config: Config, query: str, *given: Any) -> list[tuple[Any, ...]]:
    with psycopg.connect(config.views_dsn, autocommit=True) as connection:
        found = connection.execute(query.encode(), given)
        return found.fetchall() if found.description is not None else []


def effects(config: Config, handler: str = "remember") -> dict[str, list[int]]:
    """The versions of each key in the order of the effects."""
    found: dict[str, list[int]] = {}
    query = "SELECT key, version FROM effect WHERE handler = %s ORDER BY id"
    for key, version in rows(config, query, handler):
        found.setdefault(key, []).append(version)
    return found


def until_effects(config: Config, wanted: dict[str, list[int]], handler: str = "remember") -> None:
    until(lambda: effects(config, handler) == wanted, 120)


def counts(tables: HandlerTables, connection: Connection) -> tuple[int, int]:
    """Changes that are parked until somebody decides, and those that wait."""
    ((parked, waiting, _),) = tables.run(connection, "counts").fetchall()
    return parked, waiting
