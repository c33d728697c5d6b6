"""What an app or a configuration declares, and cannot be."""

from __future__ import annotations

from everstate.errors.base import EverstateError


class InvalidConfig(EverstateError):
    """A setting cannot be what it was set to."""

    exit_code = 2
    http_status = 500

    def __init__(self, field: str, value: object, expected: str) -> None:
        self.field, self.value, self.expected = field, value, expected
        super().__init__(
            f"{field} is {value!r}; expected {expected}.",
            advice="Set it in everstate.toml or by its environment variable.",
        )


class InvalidEntityType(EverstateError):
    """An entity type cannot be registered; the message names model, field and reason."""

    exit_code = 2


class InvalidView(EverstateError):
    """A view's SQL cannot be kept incrementally; the advice is the nearest form that can."""

    exit_code = 2

    def __init__(self, view: str, reason: str, *, advice: str | None = None) -> None:
        self.view, self.reason = view, reason
        super().__init__(f"view {view}: {reason}", advice=advice)


class InvalidCapture(EverstateError):
    """A capture cannot be declared; the message names capture, table and reason."""

    exit_code = 2

    def __init__(self, capture: str, reason: str, *, advice: str | None = None) -> None:
        self.capture, self.reason = capture, reason
        super().__init__(f"capture {capture}: {reason}", advice=advice)


class UnknownEntity(EverstateError):
    """No entity type of that name is registered with the app."""

    exit_code = 2
    http_status = 404

    def __init__(self, name: str, known: tuple[str, ...] = ()) -> None:
        self.name, self.known = name, known
        listing = ", ".join(known) if known else "none"
        super().__init__(f"unknown entity type {name!r} (registered: {listing}).")


class UnknownView(EverstateError):
    """No view of that name is declared by the app."""

    exit_code = 2
    http_status = 404

    def __init__(self, name: str, known: tuple[str, ...] = ()) -> None:
        self.name, self.known = name, known
        listing = ", ".join(known) if known else "none"
        super().__init__(f"unknown view {name!r} (declared: {listing}).")


class UnknownCapture(EverstateError):
    """No capture of that name is declared by the app."""

    exit_code = 2
    http_status = 404

    def __init__(self, name: str, known: tuple[str, ...] = ()) -> None:
        self.name, self.known = name, known
        listing = ", ".join(known) if known else "none"
        super().__init__(f"unknown capture {name!r} (declared: {listing}).")


class WrongSource(EverstateError):
    """An entity type is written only through its one source of truth; nothing was written."""

    exit_code = 2
    http_status = 409

    def __init__(self, entity: str, declared: str, asked: str) -> None:
        self.entity, self.declared, self.asked = entity, declared, asked
        super().__init__(
            f"the source of truth of {entity} is {declared!r}; this would write it as {asked!r}.",
            advice="Write it through its source of truth, or migrate it to another one.",
        )
