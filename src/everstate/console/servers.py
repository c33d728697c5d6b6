"""Captures and the log on pages: what each of them has read, and which server does not answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from everstate.app import App
from everstate.attention.looking import all_readers
from everstate.config import Config
from everstate.declarations.captures import Capture
from everstate.errors import EverstateError, Unavailable
from everstate.handling.tables import HandlerState, HandlerTables, handler_states
from everstate.log.lag import is_reachable
from everstate.serving import Reader
from everstate.serving.log_size import LogSize, log_size
from everstate.serving.log_state import LogReader, TopicState, topic_states
from everstate.sources.cdc.balance import Balance, read_balance
from everstate.sources.cdc.capturing import Capturing
from everstate.sources.cdc.status import CaptureStatus

_FAILED_MAX: Final = 100
"""Failed changes of all handlers that a page shows."""


@dataclass(frozen=True, slots=True)
class ShownCapture:
    """One capture: its declaration, and what is known of it."""

    capture: Capture
    status: CaptureStatus | None
    """``None``: another system runs it, or nothing is known."""
    balance: Balance | None
    """Outcome of its rows; ``None``: the log does not answer."""
    problems: tuple[str, ...]


def captures(config: Config, app: App) -> list[ShownCapture]:
    """The declared captures, each as `everstate cdc status` knows it.

    Cost: a request to Kafka Connect and one to the database of each capture.
    """
    return [_shown(config, app, each) for each in app.captures.values()]


def _shown(config: Config, app: App, capture: Capture) -> ShownCapture:
    status, balance, problems = None, None, list[str]()
    if capture.dsn is not None:
        found = Capturing(config, capture, local=False, entities=app.entities)
        if found.has_connect:
            try:
                status = found.status()
                problems += status.problems
                problems += [status.reason] if status.reason else []
            except EverstateError as error:
                problems.append(f"{error.public} {error.public_advice or ''}".strip())
        else:
            problems.append("This server knows no Kafka Connect; `everstate cdc status` says more.")
    if is_reachable(config):
        try:
            balance = read_balance(config, capture)
        except EverstateError as error:
            problems.append(error.public)
    else:
        problems.append("The log (Kafka) does not answer.")
    return ShownCapture(capture, status, balance, tuple(problems))


def handlers(config: Config, app: App) -> list[tuple[HandlerState, str, list[Any]]]:
    """The state of each handler, its entity type, and the first changes whose calls failed.

    Raises Unavailable. Cost: that of :func:`handler_states`, and a connection for each that has
    parked changes.
    """
    check_log_answers(config)
    found, declared = list[tuple[HandlerState, str, list[Any]]](), app.handlers.values()
    for state, handler in zip(handler_states(config, declared), declared, strict=True):
        failed = list[Any]()
        if state[3] or state[4]:
            tables = HandlerTables(config, handler)
            with tables.connected() as connection:
                most = max(1, _FAILED_MAX // len(declared))
                failed = tables.run(connection, "failed", most).fetchall()
        found.append((state, handler.entity_type.name, failed))
    return found


def check_log_answers(config: Config) -> None:
    """Raise Unavailable when no broker accepts a connection."""
    if not is_reachable(config):
        raise Unavailable("no broker answers.", public="the log (Kafka) does not answer.")


def naming_server(config: Config, error: Unavailable) -> Unavailable:
    """The error of a reader, whose public text names the server.

    Cost: an attempt to connect to the brokers, where it is not the views' database.
    """
    if error.public != error.fallback_message:
        return error  # it names the server itself
    who = error.server
    if who is None:
        if is_reachable(config):
            return error
        who = "the log (Kafka)"
    return Unavailable(error.message, public=f"{who} does not answer.")


@dataclass(frozen=True, slots=True)
class LogPage:
    """Topics and readers of the log."""

    topics: tuple[TopicState, ...]
    size: LogSize
    readers: tuple[LogReader, ...]
    unread: EverstateError | None
    """Why the readers are not known; ``None``: they are."""


def log_page(reader: Reader, app: App) -> LogPage:
    """Topics, and those who read them; raises Unavailable without a broker."""
    config = reader.config
    check_log_answers(config)
    topics = topic_states(config)
    size = log_size(config, topics)
    try:
        control = reader.connection.standings(reader.schema)
        readers = all_readers(config, app, control, topics, size)
    except EverstateError as error:
        return LogPage(tuple(topics), size, (), error)
    return LogPage(tuple(topics), size, tuple(readers), None)
