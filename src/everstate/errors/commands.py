"""Commands: refused, parked, or without an answer."""

from __future__ import annotations

from everstate.errors.base import EverstateError


class Rejected(EverstateError):
    """A domain rule refuses a command; ``decide`` raises or returns it, the sender is told.

    ``code`` is a short name that programs can test, ``data`` what they may want to show.
    """

    exit_code = 5
    http_status = 422

    def __init__(self, reason: str, *, code: str | None = None, **data: object) -> None:
        self.reason, self.code, self.data = reason, code, data
        super().__init__(reason)


class CommandTimedOut(EverstateError):
    """No answer came in time; the same command with the same id may be sent again."""

    retryable = True
    exit_code = 6
    http_status = 504

    def __init__(self, entity: str, key: str, command_id: str, timeout_s: float) -> None:
        self.entity, self.key, self.command_id = entity, key, command_id
        super().__init__(
            f"{entity} {key!r}: command {command_id} was not answered within {timeout_s:g} s.",
            advice="Send it again with the same command id: it is decided once, whatever happened.",
        )


class CommandParked(EverstateError):
    """A command could not be decided (unreadable, or its code failed); it waits for a repair."""

    http_status = 500

    def __init__(self, entity: str, key: str, command_id: str, reason: str) -> None:
        self.entity, self.key, self.command_id, self.reason = entity, key, command_id, reason
        super().__init__(
            f"{entity} {key!r}: command {command_id} is parked: {reason}",
            advice=f"See everstate commands parked {entity}; mend the code, then replay it.",
        )


class InvalidCommand(EverstateError):
    """A command is not one of those that its entity type takes; nothing was sent."""

    exit_code = 2
    http_status = 422


class ProcessFailed(EverstateError):
    """A process manager's function failed on a change; it stays there until it is mended."""

    retryable = True

    def __init__(self, process: str, entity: str, key: str, cause: Exception) -> None:
        self.process, self.entity, self.key = process, entity, key
        super().__init__(
            f"process manager {process}: {entity} {key!r}: {type(cause).__name__}: {cause}.",
            advice="Mend its function and start the commands role again; nothing was passed over.",
        )


class StateStoreFailed(EverstateError):
    """A handler's local state cannot be read or written; it is made again from the log."""

    retryable = True
