"""Captures for verbs: declared in the app, with the address of the running Connect."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from everstate.cli.console import AppSession, Session, err
from everstate.config import Config
from everstate.errors import CaptureFailed, EverstateError, LocalStackError
from everstate.local import ConsoleProgress, Stack

if TYPE_CHECKING:
    from everstate.sources.cdc.capturing import Capturing
    from everstate.sources.cdc.status import CaptureStatus


def capturing_of(session: AppSession, name: str, *, start: bool = False) -> Capturing:
    """The capture, with Connect's address; ``start``: starts a local worker if needed."""
    given = session.config
    found = declared_capture(session, name, given)
    if found.has_connect:
        return found
    if start:
        Stack(given, also=("connect",)).start(ConsoleProgress(err))
    found = declared_capture(session, name, connected(session))
    if not found.has_connect:
        raise _no_connect(given, name)
    return found


def declared_capture(session: AppSession, name: str, config: Config) -> Capturing:
    """The capture as declared; it has Connect's address only if ``config`` has it."""
    from everstate.sources.cdc.capturing import Capturing

    given = session.config
    project = session.app()
    capture = project.capture_of(name)
    local = (capture.connect_url or given.capture.connect_url) is None
    return Capturing(config, capture, local=local, entities=project.entities)


def status_of(session: AppSession, name: str) -> CaptureStatus:
    """Status of a capture; without a running Connect, its reason is why none runs."""
    found = declared_capture(session, name, connected(session))
    if found.has_connect:
        return found.status()
    missing = _no_connect(session.config, name)
    state = "absent" if isinstance(missing, CaptureFailed) else "unreachable"
    return replace(found.status(), state=state, reason=f"{missing.message} {missing.advice}")


def _no_connect(given: Config, name: str) -> EverstateError:
    """Why no Connect runs for a capture."""
    crashed = Stack(given).has_crashed("connect")
    if crashed is None:
        return CaptureFailed(
            f"capture {name} was not added.", advice=f"`everstate cdc add {name}` adds it."
        )
    if crashed:
        return LocalStackError(
            f"the local connect crashed, so that capture {name} reads nothing.",
            advice="`everstate run` restarts it, `everstate up` starts it now; the reason is "
            f"in {given.project.data_dir / 'logs' / 'connect.log'}.",
        )
    return LocalStackError(
        f"the local connect was stopped, so that capture {name} reads nothing.",
        advice="`everstate up` starts it.",
    )


def connected(session: Session, needs: Collection[str] | None = None) -> Config:
    """The settings, with the addresses of running servers; ``needs``: see :func:`resolve`."""
    return Stack(session.config).resolve(needs)
