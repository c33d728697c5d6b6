"""The Arrow schema of an entity type, derived from the fields of its model.

Spark's schema and the archive's typed columns come from this one schema. A model is checked when it
is declared, but the Arrow schema is built at its first use: importing Arrow takes half a second,
which a process that only writes or sends changes does not need to spend.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, get_args

from pydantic import BaseModel, FutureDate, FutureDatetime, RootModel

from everstate.changes.change import PROVENANCE_FIELDS
from everstate.changes.fields import FieldTree, FieldType, ModelField, tree_of
from everstate.changes.keys import column_fault
from everstate.errors import InvalidEntityType

if TYPE_CHECKING:
    import pyarrow as pa

_FUTURE: Final = (FutureDate, FutureDatetime)
_BITS: Final = 2**63
_DIGITS_MAX: Final = 38
_PLAIN: Final[dict[FieldType | None, str]] = {
    "text": "string",
    "integer": "int64",
    "float": "float64",
    "boolean": "bool_",
    "date": "date32",
}
"""Types whose Arrow type has no parameters, and the function of pyarrow that makes it."""


def arrow_schema(tree: FieldTree, *, is_read: bool = False) -> pa.Schema:
    """The typed columns of an object's JSON; ``is_read``: every part may be null.

    Messages of an older model may lack any field.
    """
    import pyarrow

    return pyarrow.schema(list(arrow_type(tree, is_read)))


@lru_cache(maxsize=4096)
def arrow_type(tree: FieldTree, is_read: bool = False) -> pa.DataType:
    """The type of a column with such values, as :func:`arrow_schema` has it."""
    import pyarrow

    if tree.type in _PLAIN:
        made: pa.DataType = getattr(pyarrow, _PLAIN[tree.type])()
        return made
    if tree.type == "decimal":
        assert tree.digits is not None
        return pyarrow.decimal128(tree.digits, tree.places)
    if tree.type == "timestamp":
        return pyarrow.timestamp("us", "UTC" if tree.is_zoned else None)
    if tree.type == "struct":
        parts = ((each, arrow_type(each.tree, is_read)) for each in tree.columns)
        return pyarrow.struct(
            [pyarrow.field(f.written, kind, is_read or not f.is_required) for f, kind in parts]
        )
    assert tree.element is not None
    inner = arrow_type(tree.element, is_read)
    if tree.type == "map":
        return pyarrow.map_(pyarrow.string(), inner)
    return pyarrow.list_(pyarrow.field("element", inner, is_read or tree.has_null_elements))


def change_columns(state: Iterable[pa.Field[Any]]) -> list[pa.Field[Any]]:
    """The columns of changes in the SQL and the functions of views, with both states."""
    import pyarrow as pa

    text, moment, states = pa.string(), pa.timestamp("us", "UTC"), pa.struct(list(state))
    columns = [
        *(("key", text), ("version", pa.int64()), ("kind", text), ("event", text)),
        *(("occurred_at", moment), ("recorded_at", moment), ("id", text)),
        ("provenance", pa.struct([(name, text) for name in PROVENANCE_FIELDS.values()])),
        *(("current", states), ("original", states)),
    ]
    return [pa.field(name, kind) for name, kind in columns]


def shapes(fields: Sequence[ModelField]) -> dict[str, Any]:
    """The JSON type of each column, for a validator that has neither Python nor Arrow."""
    found = {each.written: _shape(each.tree, is_required=each.is_required) for each in fields}
    for each in fields:
        if each.former:
            found[each.written]["former"] = list(each.former)
    return found


def _shape(tree: FieldTree, *, is_required: bool = False) -> dict[str, Any]:
    """JSON type of a column, and of its parts."""
    shape: dict[str, Any] = {"type": tree.type, "required": is_required}
    if tree.type == "decimal":
        shape |= {"digits": tree.digits, "places": tree.places}
    elif tree.type == "timestamp":
        shape["zoned"] = tree.is_zoned
    elif tree.type == "struct":
        shape["fields"] = shapes(tree.columns)
    elif tree.element is not None:
        shape["element"] = _shape(tree.element)
    return shape


def check_columns(model: type[BaseModel], entity: str) -> None:
    """Raise InvalidEntityType, naming field and nearest supported type, for one without a column.

    Also where two columns would have one name, and where a field is not read as it is written.
    """
    if issubclass(model, RootModel):
        raise InvalidEntityType(
            f"{entity}: {model.__name__} is a RootModel, and a state is an object",
            advice="Use a model with fields; one of them may be a RootModel.",
        )
    _check_object(tree_of(model), entity, ())


def _check_object(tree: FieldTree, entity: str, parents: tuple[FieldTree, ...]) -> None:
    model = tree.model
    assert model is not None
    _check_texts(model, entity)
    for each in tree.columns:
        where = f"{entity}: {model.__name__}.{each.name}"
        _check_type(each.tree, where, entity, (*parents, tree))
        if each in tree.unread:
            raise InvalidEntityType(
                f"{where} is written as {each.written!r}, and the model does not read this name",
                advice=f"Write Field(alias={each.written!r}), or name {each.written!r} among the"
                " names that are read: validation_alias=AliasChoices(…).",
            )
    names = [each.written for each in tree.columns]
    if not names:
        raise InvalidEntityType(f"{entity}: {model.__name__} has no fields")
    named = [*names, *(name for each in tree.fields for name in each.former)]
    for name in named:
        if fault := column_fault(name, is_inner=bool(parents)):
            raise InvalidEntityType(
                f"{entity}: {model.__name__}: the name {name!r} {fault}.",
                advice="Give the field another name, or another alias.",
            )
    alike = Counter(name.lower() for name in named)
    twice = [name for name in named if alike[name.lower()] > 1]
    if twice:
        raise InvalidEntityType(
            f"{entity}: the fields {', '.join(twice)} of {model.__name__} have one name in SQL",
            advice="Give one of them another name, or an alias. A former name belongs to one field,"
            " and no present one may have it: nothing would tell which of them a state means.",
        )


def _check_type(tree: FieldTree, where: str, entity: str, parents: tuple[FieldTree, ...]) -> None:
    if any(tree is parent for parent in parents):
        name: Any = tree.named[0] if tree.named else tree.model
        raise InvalidEntityType(
            f"{entity}: {name.__name__} contains itself; a column type must be finite"
        )
    for name in tree.named:
        if isinstance(name, type) and issubclass(name, BaseModel):
            _check_texts(name, entity)
    if tree.type == "struct":
        _check_object(tree, entity, parents)
    elif tree.values is not None:
        _check_values(tree, where)
    elif tree.type == "decimal":
        if tree.digits is None or tree.places is None or tree.digits > _DIGITS_MAX:
            raise InvalidEntityType(
                f"{where}: a Decimal needs max_digits (at most {_DIGITS_MAX}) and decimal_places",
                advice="Write Annotated[Decimal, Field(max_digits=12, decimal_places=2)].",
            )
    elif (expected := _expected(tree)) is not None:
        raise InvalidEntityType(
            f"{where}: {tree.annotation!r} has no column type.", advice=f"Use {expected}."
        )
    elif tree.element is not None:
        _check_type(tree.element, where, entity, (*parents, tree))


def _expected(tree: FieldTree) -> str | None:
    """What to write instead of a type without a column; ``None``: it has one."""
    parts = get_args(tree.annotation)
    if tree.is_any:
        return (
            "dict[str, …] or list[…] with one type for all values, or a model with these fields. "
            "JSON of any form is kept as its text: str"
        )
    if tree.type == "map":
        return None if parts[0] is str else "dict[str, …]: JSON keys are text"
    if tree.type == "list":
        is_one = len(parts) - parts.count(Ellipsis) == 1
        return None if is_one else "list[…] of one type, or a nested model"
    if tree.options:
        return "one type, or one type | None"
    if tree.annotation in _FUTURE:
        return "date or datetime: no date stays in the future"
    if tree.type is not None:
        return None
    return (
        "bool, int, float, str, Decimal, date, datetime, UUID, Enum, Literal, a URL, EmailStr, an "
        "IP address, a model, list[…] or dict[str, …]"
    )


def _check_texts(model: type[BaseModel], entity: str) -> None:
    """Raise InvalidEntityType for a model that writes times in a form that columns do not read."""
    form = model.model_config.get("ser_json_temporal", "iso8601")
    if form != "iso8601":
        raise InvalidEntityType(
            f"{entity}: {model.__name__} has ser_json_temporal={form!r}; typed columns read"
            " 'iso8601'",
            advice="Leave ser_json_temporal out of the model's config.",
        )


def _check_values(tree: FieldTree, where: str) -> None:
    """Raise InvalidEntityType for values of an enum or a `Literal` that have no one type."""
    values = tree.values or ()
    if any(not -_BITS <= value < _BITS for value in values if isinstance(value, int)):
        raise InvalidEntityType(
            f"{where}: some of the values {values!r} are beyond 64 bits",
            advice="Write the values as text.",
        )
    if tree.type is None:
        raise InvalidEntityType(f"{where}: the values {values!r} are not all text, int or bool")
