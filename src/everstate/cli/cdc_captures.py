"""A capture as a verb takes it: declared in the app, with the address of the Connect that runs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from everstate.cli.console import config_of, err, load_app
from everstate.config import Config
from everstate.errors import CaptureFailed, EverstateError, LocalStackError
from everstate.local import ConsoleProgress, Stack

if TYPE_CHECKING:
    from everstate.sources.cdc.capturing import CaptureStatus, Capturing


def capturing_of(
    context: typer.Context, name: str, app: str | None, *, start: bool = False
) -> Capturing:
    """The capture, with Connect's address; ``start``: a local worker is started when needed."""
    given = config_of(context)
    found = declared_capture(context, name, app, given)
    if found.has_connect:
        return found
    if start:
        Stack(given, also=("connect",)).start(ConsoleProgress(err))
    found = declared_capture(context, name, app, connected(context))
    if not found.has_connect:
        raise _no_connect(given, name)
    return found


def declared_capture(
    context: typer.Context, name: str, app: str | None, config: Config
) -> Capturing:
    """The capture as it is declared; it knows Connect's address as far as ``config`` does."""
    from everstate.sources.cdc.capturing import Capturing

    given = config_of(context)
    project = load_app(app, given)
    capture = project.capture_of(name)
    local = (capture.connect_url or given.capture.connect_url) is None
    return Capturing(config, capture, local=local, entities=project.entities)


def status_of(context: typer.Context, name: str, app: str | None) -> CaptureStatus:
    """How a capture is; without a Connect that runs, the reason says why there is none."""
    found = declared_capture(context, name, app, connected(context))
    if found.has_connect:
        return found.status()
    missing = _no_connect(config_of(context), name)
    state = "absent" if isinstance(missing, CaptureFailed) else "unreachable"
    return replace(found.status(), state=state, reason=f"{missing.message} {missing.advice}")


def _no_connect(given: Config, name: str) -> EverstateError:
    """Why no Connect runs for a capture."""
    crashed = Stack(given).has_crashed("connect")
    if crashed is None:
        return CaptureFailed(
            f"capture {name} was not added.", advice=f"`everstate cdc add {name}` does that."
        )
    if crashed:
        return LocalStackError(
            f"the local connect is gone, so that capture {name} reads nothing.",
            advice="`everstate run` starts it again by itself, `everstate up` now; why it ended "
            f"is in {given.project.data_dir / 'logs' / 'connect.log'}.",
        )
    return LocalStackError(
        f"the local connect was stopped, so that capture {name} reads nothing.",
        advice="`everstate up` starts it.",
    )


def connected(context: typer.Context) -> Config:
    """The settings, with the addresses of the servers that run."""
    return Stack(config_of(context)).connect()
