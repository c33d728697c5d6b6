"""Sends requests to the running pipeline, which has the only Spark session."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from everstate import errors
from everstate.cli.console import Telling
from everstate.config import Config
from everstate.errors import EverstateError, RequestCancelled
from everstate.pipeline.spark.progress import Progress
from everstate.views.control import Control, opened_control

if TYPE_CHECKING:
    from uuid import UUID

_POLL_S: Final = 0.3
_GONE_S: Final = 120.0
"""How long a killed pipeline may take until it is running again."""


@contextmanager
def control_of(config: Config) -> Iterator[Control]:
    """The control tables of the project's views, in the present form."""
    with opened_control(config) as control:
        control.update()
        yield control


class PipelineAbsence:
    """How long no pipeline has run, for a command that waits for one."""

    def __init__(self, control: Control, verb: str, *, kept: str = "") -> None:
        """``kept``: what stays although the command ends, for the message."""
        self._control, self._verb, self._kept = control, verb, kept
        self._seen = time.monotonic()

    def check(self) -> None:
        """Raise RequestCancelled when no pipeline has run for two minutes."""
        if self._control.is_on_duty("answers"):
            self._seen = time.monotonic()
        elif time.monotonic() - self._seen > _GONE_S:
            raise RequestCancelled(
                self._verb, f"no pipeline has run for {_GONE_S:.0f} s{self._kept}"
            )


def ask_pipeline(
    control: Control,
    verb: str,
    arguments: Mapping[str, Any],
    tell: Telling,
    show: Callable[[Mapping[str, Any]], None] = lambda _answer: None,
) -> Mapping[str, Any]:
    """Send a request and wait for the answer; ``show`` gets partial results meanwhile.

    Raises the pipeline's errors, and RequestCancelled when no pipeline is running any more.
    """
    asked = control.ask(verb, arguments)
    try:
        return _awaited(control, verb, asked, tell, show)
    except BaseException:
        control.cancel_request(asked)
        raise


def _awaited(
    control: Control,
    verb: str,
    asked: UUID,
    tell: Telling,
    show: Callable[[Mapping[str, Any]], None],
) -> Mapping[str, Any]:
    absence = PipelineAbsence(control, verb)
    while True:
        request = control.request(asked)
        if request is None or request.state == "cancelled":
            raise RequestCancelled(verb, "another user cancelled it")
        answer = request.answer or {}
        show(answer)
        if request.state == "done":
            return answer
        if request.state == "failed":
            error = EverstateError(answer["message"], advice=answer["advice"])
            error.exit_code = getattr(errors, answer["error"], EverstateError).exit_code
            raise error
        absence.check()
        if answer.get("progress"):
            tell.now(Progress(**answer["progress"]).text)
        time.sleep(_POLL_S)
