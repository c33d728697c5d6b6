"""Definitions of views, as they are declared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, Protocol

from everstate.views.tables import HOME

if TYPE_CHECKING:
    # Declaring a view does not need Arrow.
    from everstate.views.policies import Rules


@dataclass(frozen=True, slots=True)
class ViewDefinition:
    """A view's name and its SQL, in Spark's dialect, and options that SQL cannot express.

    ``FROM <entity>`` means the present state of every live entity. `latest` and `history` of an
    entity type are kept without a definition.
    """

    name: str
    sql: str
    scale: int | None = None
    """Decimal places in which floats are summed; ``None``: sums of floats are refused."""
    indexes: tuple[tuple[str, ...], ...] = ()
    """Columns by which readers look up rows, besides the key."""
    search: tuple[str, ...] = ()
    """Columns whose words readers can search."""
    language: str | None = None
    """Language of these words; ``None``: words are not stemmed."""
    ttl: str | None = None
    """How long after the last change of an entity its row exists; ``None``: for ever."""
    lateness: str | None = None
    """How long after it occurred a change may be recorded without being late."""
    is_part: bool = False
    """Whether it was not declared: it is an input of another view."""
    late: Literal["count", "aside"] | None = None
    """How a view of changes treats late changes; ``None``: they count like others."""
    rules: Rules | None = None
    """Trigger and policies; ``None``: it applies all accepted changes at once."""
    store: str = HOME
    """Name of the store in which its rows are kept; see :mod:`everstate.views.stores`."""

    @property
    def stored(self) -> dict[str, Any]:
        """The definition as the registry stores it: the SQL, and the options that are given."""
        options = {
            each.name: _listed(value)
            for each in fields(self)[2:]
            if each.name != "rules" and (value := getattr(self, each.name)) != each.default
        }
        return {"sql": self.sql, **options, **(self.rules.definition if self.rules else {})}

    @classmethod
    def of(cls, name: str, stored: Mapping[str, Any]) -> ViewDefinition:
        """The definition from its form in the registry."""
        # Imported here: it loads Arrow.
        from everstate.views.policies import Rules

        known = {each.name for each in fields(cls)}
        options = {each: _frozen(value) for each, value in stored.items() if each in known}
        return cls(name, **options, rules=Rules.from_stored(stored) or None)


@dataclass(frozen=True, slots=True)
class TimelineDefinition:
    """A timeline of some attributes of an entity type."""

    name: str
    entity: str
    attributes: tuple[str, ...]

    @property
    def stored(self) -> dict[str, Any]:
        """The definition as the registry stores it."""
        return {"timeline": list(self.attributes)}


@dataclass(frozen=True, slots=True)
class PythonDefinition:
    """A view in Python: a function of all changes of whole keys."""

    name: str
    entity: str
    function: Callable[[Any], Any] = field(compare=False)
    columns: tuple[Any, ...]
    """The columns of a row, as Arrow fields."""
    fields: tuple[str, ...] | None = None
    """Fields of the states that the function gets; ``None``: all of them."""
    version: int = 1
    """To be raised when code that the function calls has changed."""

    @property
    def stored(self) -> dict[str, Any]:
        """The definition as the registry stores it."""
        return {
            "python": f"{self.function.__module__}:{self.function.__qualname__}",
            "columns": {column.name: str(column.type) for column in self.columns},
            "version": self.version,
        }


class Definition(Protocol):
    """The declaration of a view, in any of the ways of :data:`everstate.views.plan.WAYS`."""

    @property
    def name(self) -> str:
        """Name of the view."""

    @property
    def stored(self) -> dict[str, Any]:
        """The definition as the registry stores it."""


def _listed(value: Any) -> Any:
    """A value with lists for tuples, for JSON."""
    return list(map(_listed, value)) if isinstance(value, tuple) else value


def _frozen(value: Any) -> Any:
    """A value with tuples for JSON's lists, as it was declared."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
