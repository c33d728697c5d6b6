"""Requests over HTTP."""

from __future__ import annotations

from everstate.errors.base import EverstateError


class InvalidRequest(EverstateError):
    """A request cannot be read; names the part and what was expected."""

    exit_code = 2
    http_status = 400


class Unauthenticated(EverstateError):
    """A request names no caller that everstate.toml knows."""

    http_status = 401


class AlreadyExists(EverstateError):
    """An entity of that key is there already; carries its version."""

    exit_code = 5
    http_status = 409

    def __init__(self, entity: str, key: str, version: int) -> None:
        self.entity, self.key, self.version = entity, key, version
        super().__init__(
            f"{entity} {key!r} exists already, at version {version}.",
            advice="Change it with PUT or PATCH, or give another key.",
        )


class PreconditionFailed(EverstateError):
    """If-Match or If-None-Match does not hold; ``version`` 0: there is no such entity."""

    exit_code = 5
    http_status = 412

    def __init__(self, entity: str, key: str, condition: str, version: int) -> None:
        self.entity, self.key, self.condition, self.version = entity, key, condition, version
        found = f"the version is {version}" if version else "it does not exist"
        super().__init__(
            f"{entity} {key!r}: {condition} does not hold, {found}.",
            advice="Read the entity again and decide on its present state.",
        )


class RequestTooLarge(EverstateError):
    """The body is larger than any change may be; nothing was read further."""

    http_status = 413

    def __init__(self, limit: int) -> None:
        self.limit = limit
        super().__init__(f"the body is larger than log.message_bytes_max, which is {limit:,}.")


class UnsupportedMediaType(EverstateError):
    """The body is of a type that this method does not take."""

    http_status = 415

    def __init__(self, found: str, accepted: tuple[str, ...]) -> None:
        self.found, self.accepted = found, accepted
        super().__init__(
            f"the body is {found or 'of no declared type'}; expected {' or '.join(accepted)}."
        )


class InvalidBody(EverstateError):
    """A body is no entity; ``problems`` names each field and its reason."""

    exit_code = 2
    http_status = 422

    def __init__(self, entity: str, problems: tuple[tuple[str, str], ...]) -> None:
        self.entity, self.problems = entity, problems
        listed = "; ".join(f"{field}: {reason}" for field, reason in problems)
        super().__init__(f"no {entity}: {listed}")


class IdempotencyKeyReused(EverstateError):
    """The Idempotency-Key came before with another request; nothing was written."""

    http_status = 422

    def __init__(self, key: str) -> None:
        self.key = key
        super().__init__(
            f"Idempotency-Key {key!r} came before with another request.",
            advice="Use a new key for each request, and the same only to repeat one.",
        )


class EventConflict(EverstateError):
    """An event of that id was written with other content; the first one holds."""

    exit_code = 5
    http_status = 409

    def __init__(self, entity: str, key: str) -> None:
        self.entity, self.key = entity, key
        super().__init__(
            f"{entity} {key!r} was written with other content; events are never changed.",
            advice="Give each event an id of its own, and repeat one only as it was.",
        )
