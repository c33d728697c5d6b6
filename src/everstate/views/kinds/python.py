"""Views in Python: rows that a pure function computes from all changes of a key."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, ClassVar, Final

import pyarrow as pa

from everstate.changes import EntityType
from everstate.changes.keys import column_fault
from everstate.errors import InvalidView
from everstate.views.definition import PythonDefinition
from everstate.views.kinds.kind import (
    BatchSource,
    Explained,
    Layout,
    Names,
    TableColumn,
    ViewPlan,
    identifiers,
)
from everstate.views.names import length_fault
from everstate.views.tables import Image, PythonTable, history_of, meaning_of
from everstate.views.whole_keys import PLACE

_FORMAT: Final = 1
_OWN: Final = ("key", PLACE)


@dataclass(frozen=True)
class PythonPlan(ViewPlan):
    """A view whose rows a function returns for each key.

    It never rides: the project's own code must not run in the core's transaction.
    """

    columns_given: tuple[pa.Field, ...] = ()
    state: tuple[pa.Field, ...] = ()
    """Fields of the states that the function gets."""
    kind: ClassVar[str] = "python"
    source: ClassVar[BatchSource] = "changes"
    key: ClassVar[tuple[str, ...]] = _OWN
    is_plain_sql: ClassVar[bool] = False
    may_ride: ClassVar[bool] = False

    @property
    def defined(self) -> tuple[str, ...]:
        """Columns that the function returns."""
        return tuple(column.name for column in self.columns_given)

    def table(self, version: int) -> PythonTable:
        """The rows of a key are replaced when it changes."""
        assert isinstance(self.declared, PythonDefinition)
        return PythonTable(
            view=self.name,
            version=version,
            fingerprint=self.fingerprint,
            function=self.declared.function,
            returned=self.columns_given,
            fields=self.state,
            history=history_of(self.entity),
        )

    @property
    def function(self) -> PythonTable:
        """The function, and what it gets."""
        return self.table(0)

    def layout(self, types: Mapping[str, pa.DataType]) -> Layout:
        """Key, place, and the columns that the function returns."""
        columns = (TableColumn(column.name, column.type) for column in self.columns_given)
        own = (TableColumn("key"), TableColumn(PLACE, pa.int32(), required=True))
        return Layout((*own, *columns), _OWN)

    def columns(self, image: Image) -> str:
        """The part of the function's argument that is not in the columns of every change."""
        states = ", ".join(f"'{side}', {self._state(side)}" for side in ("current", "original"))
        whole = (
            f"named_struct('event', GET_JSON_OBJECT(event, '$.type'), 'provenance', provenance, "
            f"{states})"
        )
        return f"CASE WHEN reason IS NULL THEN {whole} END"

    def _state(self, side: str) -> str:
        fields = ", ".join(f"'{f.name}', {side}.`{f.name}`" for f in self.state)
        return f"CASE WHEN {side} IS NOT NULL THEN named_struct({fields}) END"

    def batch(self, tables: Sequence[str]) -> str:
        """All changes as the function's argument; a task has all changes of its keys, sorted."""
        (table,) = tables
        own = "key, version, kind, occurred_at, recorded_at"
        return (
            f"SELECT {own}, {self.columns('change')} AS argument FROM {table} "
            "DISTRIBUTE BY key SORT BY key, version"
        )

    @property
    def read_of_batch(self) -> tuple[tuple[str, str], ...]:
        """The columns that the function returns, and the key."""
        return (*((name, name) for name in self.defined), ("key", "_key"))

    def compared(self, names: Names) -> str:
        """All columns."""
        return f"SELECT {identifiers((*_OWN, *self.defined))} FROM {names.table(self.name)}"

    def read(self, names: Names, *, limited: bool = True) -> str:
        """The columns that the function returns, and the key."""
        return f"SELECT {identifiers(self.defined)}, key AS _key FROM {names.table(self.name)}"

    @property
    def explained(self) -> Explained:
        """What is stored for it, and what that costs."""
        return Explained(
            f"the rows that the function returns for each {self.entity}",
            "all changes of its key are read from the history, and the function is called",
            "by _key: its rows, by index; all: one pass",
        )


def python_plan(definition: PythonDefinition, entity_type: EntityType) -> PythonPlan:
    """The plan of a view in Python; raises InvalidView."""
    schema = entity_type.read_schema
    names = definition.fields if definition.fields is not None else tuple(schema.names)
    for name in names:
        if name not in schema.names:
            raise InvalidView(
                definition.name,
                f"{entity_type.name} has no field {name!r}.",
                advice=f"Its fields are {', '.join(schema.names)}.",
            )
    meaning = _meaning(definition.function)
    if meaning is None or not hasattr(definition.function, "__qualname__"):
        raise InvalidView(
            definition.name,
            f"{definition.function!r} is no function, so a change of its code cannot be seen.",
            advice="Decorate a function (def), which may call it.",
        )
    given = tuple(definition.columns)
    if not given or len({f.name.lower() for f in given} | set(_OWN)) != len(given) + len(_OWN):
        raise InvalidView(
            definition.name,
            "each column needs a name that no other has; key and place are everstate's own "
            "columns.",
            advice="Give other names to the columns.",
        )
    for field in given:
        if fault := column_fault(field.name) or length_fault(field.name):
            raise InvalidView(
                definition.name,
                f"the name of the column {field.name!r} {fault}.",
                advice="Give it another name.",
            )
    state = tuple(map(schema.field, names))
    parts = [f"python/{_FORMAT}", entity_type.name, str(definition.version)]
    parts += [str(field) for field in (*state, *given)] + [meaning]
    return PythonPlan(
        definition.name,
        entity_type.name,
        meaning_of(parts),
        definition,
        fields=tuple(sorted(names)),
        columns_given=given,
        state=state,
    )


def _meaning(function: Callable[..., Any]) -> str | None:
    """The code of a function without layout, comments and docstring; not of what it calls.

    ``None``: it is no function, and has no code of its own.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        code = getattr(function, "__code__", None)
        return None if code is None else _code_text(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []
            if ast.get_docstring(node) is not None:
                node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def _code_text(code: CodeType) -> str:
    """Compiled code as a text that is the same in every process."""
    return f"{code.co_code.hex()} {_constant_text(code.co_consts)} {code.co_names!r}"


def _constant_text(value: Any) -> str:
    """A constant as `repr` shows it, but with its sets sorted, and code without its address."""
    if isinstance(value, CodeType):
        return f"<{_code_text(value)}>"
    if isinstance(value, frozenset):
        return f"frozenset({{{', '.join(sorted(map(_constant_text, value)))}}})"
    if isinstance(value, tuple):
        return f"({', '.join(map(_constant_text, value))}{',' * (len(value) == 1)})"
    return repr(value)
