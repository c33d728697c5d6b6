"""Declares a project's views: compiles them at once or when needed, or stores the refusal."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from traceback import extract_stack
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, cast

from everstate.changes import EntityType
from everstate.changes.triggers import Trigger
from everstate.errors import InvalidView, UnknownView
from everstate.views.definition import (
    Definition,
    PythonDefinition,
    TimelineDefinition,
    ViewDefinition,
)
from everstate.views.option_types import check_option_types
from everstate.views.tables import HOME

if TYPE_CHECKING:
    import pyarrow as pa

    from everstate.views.kinds import ViewPlan
    from everstate.views.policies import Policy, Rules

F = TypeVar("F", bound=Callable[[Any], Any])

_PACKAGE: Final = str(Path(__file__).parents[1])

_compiled_later: ContextVar[bool] = ContextVar("views are compiled later", default=False)
_refusals_recorded: ContextVar[bool] = ContextVar("refused views are recorded", default=False)


@contextmanager
def views_compiled_later() -> Iterator[None]:
    """Views that are declared in the block are compiled when they are first needed.

    For commands that only read entities: the SQL parser would take half of their time. An error
    in a view's SQL is raised when the view is needed.
    """
    token = _compiled_later.set(True)
    try:
        yield
    finally:
        _compiled_later.reset(token)


@contextmanager
def refused_views_recorded() -> Iterator[None]:
    """A view or topic that is declared in the block and refused does not stop the others.

    It is in :attr:`App.refused_views`; using it raises the error.
    """
    token = _refusals_recorded.set(True)
    try:
        yield
    finally:
        _refusals_recorded.reset(token)


class _LaterPlan:
    """A plan that compiles its view at the first access to an attribute."""

    def __init__(self, app: Declares, name: str) -> None:
        self._app, self._name = app, name

    def __getattr__(self, attribute: str) -> object:
        return getattr(self._app.view_plan(self._name), attribute)


class Declares(ABC):
    """Declares views and has their plans; a subclass has the entity types."""

    def __init__(self) -> None:
        self._views: dict[str, Definition] = {}
        self._plans: dict[str, ViewPlan] = {}
        self._refused: dict[str, InvalidView] = {}

    @property
    @abstractmethod
    def entities(self) -> Mapping[str, EntityType]:
        """Entity types by name."""

    @abstractmethod
    def keeps_history(self, entity: str) -> bool:
        """Whether an entity type has a history in the store."""

    @abstractmethod
    def _taken(self) -> set[str]:
        """Names that already exist in the views' schema."""

    @property
    def views(self) -> Mapping[str, ViewPlan]:
        """Compiled views by name, in the order in which they were declared; none is refused."""
        self._compile_all()
        return MappingProxyType({n: self._plans[n] for n in self._views if n in self._plans})

    @property
    def refused_views(self) -> Mapping[str, InvalidView]:
        """Declared views and derived topics that cannot be kept, each with the reason, by name."""
        self._compile_all()
        return MappingProxyType(self._refused)

    def _compile_all(self) -> None:
        for name in self._views:
            if name in self._plans or name in self._refused:
                continue
            try:
                self.view_plan(name)
            except InvalidView as refusal:
                self._refused[name] = refusal

    def view(
        self,
        name: str,
        *,
        sql: str,
        scale: int | None = None,
        indexes: Sequence[str | Sequence[str]] = (),
        search: Sequence[str] = (),
        language: str | None = None,
        ttl: str | None = None,
        lateness: str | None = None,
        late: Literal["count", "aside"] | None = None,
        when: Trigger | None = None,
        policies: Sequence[Policy] = (),
        store: str = HOME,
    ) -> ViewPlan:
        """Declare a view in SQL; it is kept from the before and after images of each change.

        ``scale``: decimal places in which floats are summed. ``indexes``: columns by which rows are
        looked up, each a name or several. ``search``: columns whose words are searched (the first
        ones weigh more), in a ``language`` of PostgreSQL's full text search. ``ttl``: how long
        after the last change of an entity its row exists (a cache). ``late``: how a view of changes
        treats changes that were recorded more than ``lateness`` after they occurred; with
        ``"aside"`` they are in a view of their own, `<name>_late`.

        With a trigger (``when``) the view is over the changes that fire, not over states: sums
        count each of these changes once, and rows show an entity as of the last one. ``policies``
        ignore or throttle changes by provenance (:mod:`everstate.views.policies`). ``store``: where
        its rows are kept; in another store than PostgreSQL they are read with that store's clients.

        Raises InvalidView with the reason, and the nearest form that can be kept, when it cannot be
        kept change by change.
        """
        rules: Rules | None = None
        texts = {"language": language, "ttl": ttl, "lateness": lateness, "late": late}
        plain: dict[str, Any] = {"sql": sql, "scale": scale, **texts, "store": store}
        try:
            check_option_types(name, {**plain, "indexes": indexes, "search": search})
            if when is not None or policies:
                # Imported here: it loads Arrow.
                from everstate.views.policies import Rules

                rules = Rules.declared(name, when, policies)
        except InvalidView as refusal:
            return self._refuse(refusal)
        definition = ViewDefinition(
            name,
            **plain,
            indexes=tuple((i,) if isinstance(i, str) else tuple(i) for i in indexes),
            search=(search,) if isinstance(search, str) else tuple(search),
            rules=rules,
        )
        plan = self.declare(definition)
        if late == "aside":
            # Imported here: the SQL parser takes a fifth of a second.
            from everstate.views.late import aside

            if (beside := aside(definition)) is not None:
                self.declare(beside)
        return plan

    def timeline(self, name: str, entity: str, *attributes: str) -> ViewPlan:
        """Declare a timeline: from when to when attributes of an entity had which values.

        A row for each change of one of them: `key`, the attributes (`place.city` names a nested
        field), `valid_from`, `valid_to` (null: still valid), `changed_by` and `identifier` of the
        change's provenance, its `actor`, `reason` and `event`, and `version`. It has no table of
        its own: it is read from the history. Raises InvalidView.
        """
        try:
            check_option_types(name, {"attributes": attributes})
            self._check_history(name, entity, "a timeline is read from the history")
            if not attributes:
                raise InvalidView(
                    name, "it names no attribute; a timeline shows the values of at least one."
                )
        except InvalidView as refusal:
            return self._refuse(refusal)
        return self.declare(TimelineDefinition(name, entity, attributes))

    def python_view(
        self,
        name: str,
        *,
        of: str,
        columns: Sequence[pa.Field] | pa.Schema,
        fields: Sequence[str] | None = None,
        version: int = 1,
    ) -> Callable[[F], F]:
        """Declare a view in Python; used as a decorator of a pure function.

        The function is given an Arrow table with all changes of some keys of the entity type
        ``of``, by key and version: `key`, `version`, `kind`, `event`, `occurred_at`, `recorded_at`,
        `provenance`, and the states `current` and `original`, with all fields or only ``fields``.
        It returns an Arrow table with `key` and the ``columns``: any number of rows for each key,
        which may depend only on the changes of that key.

        A change of the function's own code builds a new version; raise ``version`` when code that
        the function calls has changed. Raises InvalidView.
        """

        def declared(function: F) -> F:
            try:
                check_option_types(name, {"columns": columns, "fields": fields, "version": version})
                self._check_history(name, of, "a view in Python reads the history")
            except InvalidView as refusal:
                self._refuse(refusal)
                return function
            wanted = None if fields is None else tuple(fields)
            self.declare(PythonDefinition(name, of, function, tuple(columns), wanted, version))
            return function

        return declared

    def _check_history(self, view: str, entity: str, why: str) -> None:
        """Raise InvalidView when an entity type is not registered, or has no history."""
        if not isinstance(entity, str) or entity not in self.entities:
            known = ", ".join(self.entities) or "none"
            raise InvalidView(view, f"unknown entity type {entity!r} (registered: {known}).")
        if not self.keeps_history(entity):
            raise InvalidView(
                view,
                f"{why}, and {entity} was registered without one.",
                advice="Register it without history=False.",
            )

    def declare(self, definition: Definition) -> ViewPlan:
        """Declare a view by its definition; under `refused_views_recorded` a refusal is stored.

        For a way to declare that :data:`everstate.views.plan.WAYS` has; raises InvalidView.
        """
        name = definition.name
        if name in self._taken():
            taken = InvalidView(
                name,
                "another view or an entity type already has this name.",
                advice="Choose another name.",
            )
            return self._refuse(taken)
        self._views[name] = definition
        if _compiled_later.get():
            return self._later(name)
        try:
            return self.view_plan(name)
        except InvalidView as refusal:
            if not _refusals_recorded.get():
                del self._views[name]
            return self._refuse(refusal)

    def _refuse(self, refusal: InvalidView) -> ViewPlan:
        if not _refusals_recorded.get():
            raise refusal
        own = [each for each in extract_stack() if not each.filename.startswith(_PACKAGE)]
        refusal.declared_at = f"{own[-1].filename}:{own[-1].lineno}" if own else None
        self._refused[refusal.view] = refusal
        return self._later(refusal.view)

    def _later(self, name: str) -> ViewPlan:
        return cast("ViewPlan", _LaterPlan(self, name))

    def view_plan(self, name: str) -> ViewPlan:
        """View of that name; raises UnknownView, and InvalidView for one that is refused."""
        if name in self._refused and name not in self._plans:
            raise self._refused[name]
        if name not in self._views:
            raise UnknownView(name, tuple(self._views))
        if name not in self._plans:
            # Imported here: the SQL parser takes a fifth of a second, also in apps without views.
            from everstate.views.plan import compile_view

            self._plans[name] = compile_view(self._views[name], self.entities)
        return self._plans[name]
