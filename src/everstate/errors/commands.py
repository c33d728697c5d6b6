"""Commands: refused, parked, or without an answer."""

from __future__ import annotations

from everstate.errors.base import EverstateError, described


class Rejected(EverstateError):
    """A domain rule rejects a command: ``decide`` raises or returns it, and the sender gets it.

    ``code`` is a short name that programs can test, ``data`` what they may want to show.
    """

    exit_code = 5
    http_status = 422

    def __init__(self, reason: str, *, code: str | None = None, **data: object) -> None:
        self.reason, self.code, self.data = reason, code, data
        super().__init__(reason)


class CommandTimedOut(EverstateError):
    """No answer arrived in time; the command may be sent again with the same id."""

    retryable = True
    exit_code = 6
    http_status = 504

    def __init__(self, entity: str, key: str, command_id: str, timeout_s: float) -> None:
        self.entity, self.key, self.command_id = entity, key, command_id
        super().__init__(
            f"{entity} {key!r}: command {command_id} was not answered within {timeout_s:g} s.",
            advice="Send it again with the same command id: everstate decides each id only once.",
        )


class CommandParked(EverstateError):
    """A command could not be decided (it is unreadable, or its code failed), and is parked."""

    http_status = 500

    def __init__(self, entity: str, key: str, command_id: str, reason: str) -> None:
        self.entity, self.key, self.command_id, self.reason = entity, key, command_id, reason
        super().__init__(
            f"{entity} {key!r}: command {command_id} is parked: {reason}",
            advice=f"`everstate commands parked {entity}` shows it. Correct the code, then replay.",
        )


class ChangeParked(EverstateError):
    """A handler raises it for a change that no retry helps: it is parked at once."""


class InvalidCommand(EverstateError):
    """The entity type does not accept this command; nothing was sent."""

    exit_code = 2
    http_status = 422


class ProcessFailed(EverstateError):
    """The function of a process manager failed on a change; it continues after a correction."""

    retryable = True

    def __init__(self, process: str, entity: str, key: str, cause: BaseException) -> None:
        self.process, self.entity, self.key = process, entity, key
        super().__init__(
            f"process manager {process}: {entity} {key!r}: {described(cause)}.",
            advice="Correct its function and restart the commands role. No change was skipped.",
        )


class StateStoreFailed(EverstateError):
    """A handler's local state cannot be read or written; it is rebuilt from the log."""

    retryable = True
