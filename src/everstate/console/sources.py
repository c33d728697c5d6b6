"""Captures on a page: whether they read, how far behind, and what became of their rows."""

from __future__ import annotations

from dataclasses import dataclass

from everstate.app import App
from everstate.config import Config
from everstate.declarations.captures import Capture
from everstate.errors import EverstateError
from everstate.log.lag import is_reachable
from everstate.sources.cdc.balance import Balance, read_balance
from everstate.sources.cdc.capturing import Capturing
from everstate.sources.cdc.status import CaptureStatus


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
