"""Requests over HTTP."""

from __future__ import annotations

from everstate.errors.base import EverstateError


class InvalidRequest(EverstateError):
    """A request is invalid; names the part and what was expected."""

    exit_code = 2
    http_status = 400


class Unauthenticated(EverstateError):
    """A request has no token of a caller in everstate.toml."""

    http_status = 401


class NotPermitted(EverstateError):
    """A caller lacks a permission; ``missing`` names it."""

    http_status = 403

    def __init__(self, caller: str | None, missing: str) -> None:
        self.caller, self.missing = caller, missing
        super().__init__(
            f"caller {caller or 'without a token'} is not permitted this: it lacks {missing}.",
            advice="The operator of this server gives permissions in [api.tokens].",
        )


class TooManyRequests(EverstateError):
    """A caller sends more requests than api.requests_per_s; try again after ``wait_s`` seconds."""

    retryable = True
    http_status = 429

    def __init__(self, wait_s: float) -> None:
        self.wait_s = wait_s
        super().__init__("the caller sends more requests than api.requests_per_s permits.")


class AlreadyExists(EverstateError):
    """An entity with this key exists already; has its version."""

    exit_code = 5
    http_status = 409

    def __init__(self, entity: str, key: str, version: int) -> None:
        self.entity, self.key, self.version = entity, key, version
        super().__init__(
            f"{entity} {key!r} exists already, at version {version}.",
            advice="Change it with PUT or PATCH, or use another key.",
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
            advice="Read the entity again and decide on its current state.",
        )


class PageGone(EverstateError):
    """A page of a feed whose changes are neither in the log nor in the archive any more."""

    exit_code = 4
    http_status = 410

    def __init__(self, feed: str, page: int) -> None:
        self.feed, self.page = feed, page
        super().__init__(
            f"the changes of page {page} of feed {feed} are not stored any more.",
            advice="Begin with the present rows, and continue with the feed's next pages.",
        )


class RequestTooLarge(EverstateError):
    """The body is larger than a change may be; the rest of it was not read."""

    http_status = 413

    def __init__(self, limit: int) -> None:
        self.limit = limit
        super().__init__(f"the body is larger than log.message_bytes_max, which is {limit:,}.")


class UnsupportedMediaType(EverstateError):
    """The method does not accept bodies of this media type."""

    http_status = 415

    def __init__(self, found: str, accepted: tuple[str, ...]) -> None:
        self.found, self.accepted = found, accepted
        super().__init__(
            f"the body has {f'type {found}' if found else 'no Content-Type'}; expected "
            f"{' or '.join(accepted)}."
        )


class InvalidBody(EverstateError):
    """A body is not a valid entity; ``problems`` names each field and the reason."""

    exit_code = 2
    http_status = 422

    def __init__(self, entity: str, problems: tuple[tuple[str, str], ...]) -> None:
        self.entity, self.problems = entity, problems
        listed = "; ".join(f"{field}: {reason}" for field, reason in problems)
        super().__init__(f"the body is not a valid {entity}: {listed}")


class IdempotencyKeyReused(EverstateError):
    """The Idempotency-Key was used with another request before; nothing was written."""

    http_status = 422

    def __init__(self, key: str) -> None:
        self.key = key
        super().__init__(
            f"Idempotency-Key {key!r} was used with another request before.",
            advice="Use a new key for each request, and the same key only to repeat a request.",
        )


class EventConflict(EverstateError):
    """An event with this id was written before with other content; the first one counts."""

    exit_code = 5
    http_status = 409

    def __init__(self, entity: str, key: str) -> None:
        self.entity, self.key = entity, key
        super().__init__(
            f"{entity} {key!r} was written before with other content; events never change.",
            advice="Give each event its own id, and repeat an event only with the same content.",
        )
