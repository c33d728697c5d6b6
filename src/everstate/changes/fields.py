"""A model's fields as one tree, made once: types, names and parts of its values. Pure.

Typed columns, the rules for input and for equal states, names in JSON, conditions, patches and
captures all follow from this tree. Nothing else looks through annotations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from dataclasses import fields as fields_of
from datetime import date, datetime
from decimal import Decimal
from enum import Enum
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, TypeAlias, Union, get_args, get_origin
from uuid import UUID

from pydantic import (
    AliasChoices,
    AliasPath,
    AnyUrl,
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    EmailStr,
    IPvAnyAddress,
    NaiveDatetime,
    PastDate,
    PastDatetime,
    PlainValidator,
    RootModel,
    WrapValidator,
)
from pydantic.fields import FieldInfo
from typing_inspection.typing_objects import is_newtype, is_typealiastype

FieldType: TypeAlias = Literal[
    "text", "integer", "float", "boolean", "decimal", "date", "timestamp", "struct", "list", "map"
]
ValuePath: TypeAlias = tuple[str | int, ...]
PythonType: TypeAlias = type
Model: TypeAlias = type[BaseModel]
_LEAVES: Final[Mapping[FieldType, tuple[Any, ...]]] = {
    "boolean": (bool,),
    "integer": (int,),
    "float": (float,),
    "text": (str, UUID, AnyUrl, EmailStr, IPv4Address, IPv6Address, IPvAnyAddress),
    "decimal": (Decimal,),
    "timestamp": (datetime, AwareDatetime, NaiveDatetime),
    "date": (date,),
}
"""Python's types by what their values are in JSON; the first one that fits is meant.

Values of the first one of a row are not changed by the row's rule for what is given.
"""
_ONLY_EXACT: Final = (bool, Decimal, datetime, date, UUID)
"""Types of which a subclass has no type here, since its JSON may be another one."""
_FREE: Final = (Any, object, dict, list, tuple, set, frozenset, Mapping, Sequence)
"""Annotations that do not name the type of their values."""
_OWN_RULES: Final = (BeforeValidator, PlainValidator, WrapValidator)
_MEANT: Final[dict[Any, Any]] = {PastDate: date, PastDatetime: datetime}
_TEXTS: Final = (str, bytes, bytearray)

Rule: TypeAlias = Callable[["FieldTree", Any, ValuePath], Any]
"""Returns what a value is replaced by."""


class Formerly:
    """Names that a field had before, as ``city: Annotated[str, Formerly("city_name")]``."""

    def __init__(self, *names: str) -> None:
        self.names = names


@dataclass(frozen=True, slots=True, eq=False)
class ModelField:
    """A field of a model, or a computed field."""

    name: str
    info: FieldInfo | None
    """``None``: it is computed."""
    tree: FieldTree
    takes_null: bool
    written: str
    """Its name in a state's JSON."""
    read: frozenset[str] = frozenset()
    """The names from which the model reads it."""
    aliases: tuple[str, ...] = ()
    """The names in the input that are, or contain, its value."""
    former: tuple[str, ...] = ()
    """The names that it had in states before, see :mod:`everstate.changes.former`."""

    @property
    def names(self) -> tuple[str, ...]:
        """Every name of it in states: first the written one."""
        return self.written, self.name, *self.aliases, *self.former

    @property
    def is_required(self) -> bool:
        """Whether each state has a value; those from before a field was added lack it."""
        return self.info is not None and self.info.is_required() and not self.takes_null

    @property
    def declared(self) -> Any:
        """The annotation of a field with its constraints."""
        return None if self.info is None else _declared(self.info)

    @property
    def given(self) -> str:
        """The name with which Python's callers give it."""
        return (self.info and self.info.alias) or self.name


@dataclass(slots=True, eq=False)
class FieldTree:
    """What a value may be, at any depth; a model's own tree is that of the whole object."""

    annotation: Any = None
    """The type that is meant, without names for it, constraints and `None`."""
    type: FieldType | None = None
    """``None``: any JSON, one of several types (``options``), or a type without a JSON type."""
    digits: int | None = None
    places: int | None = None
    """Of a decimal number, as far as they are declared."""
    is_zoned: bool = True
    """Whether a time may have an offset."""
    values: tuple[Any, ...] | None = None
    """The values of an enum or a `Literal`."""
    model: Model | None = None
    fields: list[ModelField] = field(default_factory=list)
    computed: list[ModelField] = field(default_factory=list)
    """Of an object that is a model."""
    options: tuple[FieldTree, ...] = ()
    """The types of which a value has one, if they are several."""
    element: FieldTree | None = None
    """Of the elements of a list or a set, or the values of a mapping."""
    has_null_elements: bool = False
    is_set: bool = False
    named: tuple[Any, ...] = ()
    """Other names of this type: aliases, and root models."""
    is_made: bool = True
    """False while the tree of a type that names itself is made."""
    rule: FieldType | None = None
    """The rule for values of it; `text`: a text that a model makes of a number too."""
    has_own_rules: bool = False
    """Whether the model itself converts what is given here."""
    is_any: bool = False
    """Whether it is any JSON, as commands may have it; a rule is asked for the whole value."""
    keeps_unknown: bool = False
    """Whether fields that the model does not have are kept."""
    converts_input: bool = False
    """Whether the model converts its whole input itself, so that it may read any name."""
    members: dict[str, FieldTree] = field(default_factory=dict)
    """Of an object, by every name that the input may use, without those that have no rule."""
    known: frozenset[str] = frozenset()
    """Of an object: every name that the input may use."""
    plain: PythonType | None = None
    """The type of values that no rule changes."""

    def __post_init__(self) -> None:
        self.plain = None if self.rule is None else _LEAVES[self.rule][0]

    @property
    def choices(self) -> tuple[FieldTree, ...]:
        """The types of which a value has one: only this tree, if it is not one of several."""
        return tuple(part for each in self.options for part in each.choices) or (self,)

    @property
    def types(self) -> set[FieldType | None]:
        """The JSON types of which a value has one."""
        return {each.type for each in self.choices}

    @property
    def may_have_rules(self) -> bool:
        """Whether a rule may be for a part of such a value."""
        return any(
            each.rule or each.is_any or each.model or not each.is_made for each in self.walk()
        )

    @property
    def takes_others(self) -> bool:
        """Whether a value may also be of a type without a rule, such as a boolean."""
        return not all(each.may_have_rules for each in self.options)

    @property
    def columns(self) -> list[ModelField]:
        """The fields that JSON of an object has, in the order of the model."""
        return [*self.fields, *self.computed]

    @property
    def unread(self) -> list[ModelField]:
        """The fields that are written with a name from which the model does not read them."""
        return [
            each
            for each in self.fields
            if each.written not in each.read
            and not self.converts_input
            and not (each.info and each.info.exclude)
        ]

    def walk(self, *, computed: bool = False) -> Iterator[FieldTree]:
        """This tree and all that are in it, each once; ``computed``: of computed fields too."""
        seen, rest = set[int](), [self]
        while rest:
            tree = rest.pop()
            if id(tree) not in seen:
                seen.add(id(tree))
                yield tree
                rest += [each.tree for each in (tree.columns if computed else tree.fields)]
                rest += [*tree.options, *([tree.element] if tree.element else [])]

    def holds(self, *types: FieldType) -> bool:
        """Whether a value may have one of these types, or fields that are not known, in it."""
        return any(
            each.keeps_unknown or (each.type in types and each.values is None)
            for each in self.walk(computed=True)
        )

    def apply(self, value: Any, rule: Rule, at: ValuePath = ()) -> Any:
        """The value with the rule applied in each place of it; a changed part is copied.

        The rule is not asked for values of the very type that the place has. It is asked for an
        iterator, which can be read only once, and not for what that gives.
        """
        if self.is_any:
            return value if self.has_own_rules else rule(self, value, at)
        element = self.element
        if isinstance(value, Mapping):
            changed = {}
            inside = self.members if element is None else dict.fromkeys(value, element)
            for name, part in inside.items():
                given = value.get(name)
                if given is None or given.__class__ is part.plain:
                    continue
                after = part.apply(given, rule, (*at, name))
                if after is not given:
                    changed[name] = after
            if self.keeps_unknown and not self.has_own_rules:
                for name in value.keys() - self.known:
                    rule(self, value[name], (*at, name))
            return {**value, **changed} if changed else value
        if isinstance(value, (list, tuple)):
            if element is None:
                return value
            plain = element.plain
            made = [
                each
                if each is None or each.__class__ is plain
                else element.apply(each, rule, (*at, n))
                for n, each in enumerate(value)
            ]
            is_same = all(one is other for one, other in zip(made, value, strict=True))
            return value if is_same else made
        if element is not None and isinstance(value, Iterable) and not isinstance(value, _TEXTS):
            if isinstance(value, Iterator):
                return rule(self, value, at)
            # No JSON: a set, a view of a mapping, or a queue.
            self.apply(list(value), rule, at)
            return value
        return value if self.rule is None else rule(self, value, at)


@lru_cache(maxsize=1024)
def tree_of(model: Model) -> FieldTree:
    """The tree of a model's values."""
    return _tree(model, {}, (), texts=False)[0]


@lru_cache(maxsize=1024)
def ruled_tree(model: Model) -> FieldTree | None:
    """The tree of a model that has rules; ``None``: it has none."""
    tree = tree_of(model)
    has_rules = any(each.rule or each.is_any or each.keeps_unknown for each in tree.walk())
    return tree if has_rules else None


@lru_cache(maxsize=1024)
def has_rule(model: Model, *rules: FieldType) -> bool:
    """Whether one of these rules is for a part of a model's values."""
    return any(each.rule in rules for each in tree_of(model).walk())


def objects_of(model: Model) -> dict[Model, FieldTree]:
    """The tree of a model, and of those that its values may hold at any depth."""
    return {each.model: each for each in tree_of(model).walk() if each.model is not None}


def meant(annotation: Any) -> Any:
    """The annotation without `NewType`, the alias of a type, or `PastDate`.

    Any other annotation is returned unchanged; its parts may have such names too.
    """
    while True:
        origin = get_origin(annotation)
        if is_newtype(annotation):
            annotation = annotation.__supertype__
        elif is_typealiastype(annotation):
            annotation = annotation.__value__
        elif is_typealiastype(origin):
            annotation = origin.__value__[get_args(annotation)]
        elif isinstance(annotation, type):
            return _MEANT.get(annotation, annotation)
        else:
            return annotation


_Known: TypeAlias = dict[Any, FieldTree]
_Found: TypeAlias = tuple[FieldTree, bool]
"""A tree, and whether a value may be null too."""


def _tree(annotation: Any, known: _Known, metadata: tuple[Any, ...], *, texts: bool) -> _Found:
    """The tree of an annotation; ``texts``: whether its texts are made of numbers too."""
    name, annotation = annotation, meant(annotation)
    origin, parts = get_origin(annotation), get_args(annotation)
    if name is not annotation:
        return _named(name, annotation, known, metadata, texts=texts)
    if origin is Annotated:
        own = [
            each
            for one in parts[1:]
            for each in (one.metadata if isinstance(one, FieldInfo) else (one,))
        ]
        found, takes_null = _tree(parts[0], known, (*metadata, *own), texts=texts)
        if any(isinstance(each, _OWN_RULES) for each in own):
            found = replace(found, has_own_rules=True)
        return found, takes_null
    if origin in (Union, UnionType):
        members = [part for part in parts if part is not NoneType]
        options = [_tree(each, known, metadata, texts=texts) for each in members]
        takes_null = len(members) < len(parts) or any(null for _, null in options)
        return _one_of(annotation, [tree for tree, _ in options]), takes_null
    if annotation in _FREE or (origin is not None and not parts):
        return FieldTree(annotation, is_any=True), False
    if origin is Literal:
        return _choice(annotation, parts), False
    if isinstance(annotation, type) and origin is None:
        if issubclass(annotation, RootModel):
            info = annotation.model_fields["root"]
            return _named(
                annotation, _declared(info), known, (), texts=_makes_texts(annotation, info)
            )
        if issubclass(annotation, BaseModel):
            return _object(annotation, known), False
        if issubclass(annotation, Enum):
            return _choice(annotation, tuple(each.value for each in annotation)), False
        return _leaf(annotation, metadata, texts=texts), False
    if isinstance(origin, type) and issubclass(origin, Mapping) and len(parts) == 2:
        inside, _ = _tree(parts[1], known, (), texts=texts)
        return FieldTree(annotation, "map", element=inside), False
    if isinstance(origin, type) and issubclass(origin, (Sequence, AbstractSet)):
        inner = [_tree(each, known, (), texts=texts) for each in parts if each is not Ellipsis]
        return FieldTree(
            annotation,
            "list",
            element=_one_of(annotation, [tree for tree, _ in inner]),
            has_null_elements=any(null for _, null in inner),
            is_set=issubclass(origin, AbstractSet),
        ), False
    return FieldTree(annotation), False


def _named(
    name: Any, annotation: Any, known: _Known, metadata: tuple[Any, ...], *, texts: bool
) -> _Found:
    """The tree of a type that has a name, by which it may be a part of itself."""
    if name in known:
        return known[name], False
    tree = known[name] = FieldTree(is_made=False)
    found, takes_null = _tree(annotation, known, metadata, texts=texts)
    for each in fields_of(FieldTree):
        setattr(tree, each.name, getattr(found, each.name))
    tree.named = (name, *found.named)
    del known[name]
    return tree, takes_null


def _object(model: Model, known: _Known) -> FieldTree:
    if model in known:
        return known[model]
    tree = known[model] = FieldTree(model, "struct", model=model)
    decorators = model.__pydantic_decorators__
    converted = {
        name
        for each in decorators.field_validators.values()
        if each.info.mode != "after"
        for name in each.info.fields
    }
    tree.converts_input = any(
        each.info.mode != "after" for each in decorators.model_validators.values()
    )
    for name, info in model.model_fields.items():
        found, takes_null = _tree(_declared(info), known, (), texts=_makes_texts(model, info))
        if found.rule and (tree.converts_input or not converted.isdisjoint({name, "*"})):
            found = replace(found, has_own_rules=True)
        written = info.serialization_alias or info.alias or name
        paths = _alias_paths(info)
        whole = [path[0] for path in paths if len(path) == 1]
        tree.fields.append(
            ModelField(
                name,
                info,
                found,
                takes_null,
                written,
                _read_names(model, name, info, whole),
                tuple(path[0] for path in paths),
                tuple(n for m in info.metadata if isinstance(m, Formerly) for n in m.names),
            )
        )
        given = {name, info.alias or name, *whole}
        tree.known |= given
        if found.may_have_rules:
            tree.members.update(dict.fromkeys(given, found))
    for name, computed in model.model_computed_fields.items():
        found, takes_null = _tree(computed.return_type, known, (), texts=False)
        written = computed.alias or name
        tree.computed.append(ModelField(name, None, found, takes_null, written))
    tree.keeps_unknown = model.model_config.get("extra") == "allow"
    return tree


def _declared(info: FieldInfo) -> Any:
    """A field's annotation with its constraints."""
    annotation: Any = info.annotation
    return Annotated[annotation, *info.metadata] if info.metadata else annotation


def _alias_paths(info: FieldInfo) -> list[tuple[Any, ...]]:
    """The places in the input that a field's aliases name."""
    alias: Any = info.validation_alias
    choices = alias.choices if isinstance(alias, AliasChoices) else [alias] if alias else []
    return [tuple(one.path) if isinstance(one, AliasPath) else (one,) for one in choices]


def _read_names(model: Model, name: str, info: FieldInfo, aliases: Sequence[str]) -> frozenset[str]:
    """The names from which a model reads a field."""
    config = model.model_config
    names = set(aliases) if config.get("validate_by_alias") is not False else set()
    if not info.validation_alias or config.get("validate_by_name", config.get("populate_by_name")):
        names.add(name)
    return frozenset(names)


def _makes_texts(model: Model, info: FieldInfo) -> bool:
    """Whether a text field of a model takes numbers; a strict model takes none."""
    config = model.model_config
    if config.get("strict"):
        return False
    own = (getattr(each, "coerce_numbers_to_str", None) for each in info.metadata)
    return any(own) or bool(config.get("coerce_numbers_to_str"))


def _leaf(annotation: type, metadata: tuple[Any, ...], *, texts: bool) -> FieldTree:
    leaves = ((plain, kind) for kind, plains in _LEAVES.items() for plain in plains)
    found = next((each for each in leaves if issubclass(annotation, each[0])), None)
    if found is None:
        return FieldTree(annotation)
    plain, kind = found
    is_ruled = texts and annotation is str if kind == "text" else kind != "boolean"
    tree = FieldTree(
        annotation,
        None if plain in _ONLY_EXACT and annotation is not plain else kind,
        is_zoned=plain is not NaiveDatetime,
        rule=kind if is_ruled else None,
    )
    for each in metadata if kind == "decimal" else ():
        tree.digits = getattr(each, "max_digits", None) or tree.digits
        places = getattr(each, "decimal_places", None)
        tree.places = tree.places if places is None else places
    return tree


def _choice(annotation: Any, values: tuple[Any, ...]) -> FieldTree:
    """The tree of an enum or a `Literal`, whose values may be of several types."""
    kinds: Mapping[type, FieldType] = {str: "text", int: "integer", bool: "boolean"}
    found = {type(value) for value in values}
    kind = kinds.get(found.pop()) if len(found) == 1 else None
    return FieldTree(annotation, kind, values=values)


def _one_of(annotation: Any, options: Sequence[FieldTree]) -> FieldTree:
    """The tree of a value that has one of several types."""
    if len(options) == 1:
        return options[0]
    ruled = [each for each in options if each.may_have_rules]
    rules = {each.rule for each in ruled if each.rule is not None}
    rule = rules.pop() if len(rules) == 1 else None
    if rules == {"date", "timestamp"}:
        rule = "timestamp"
    elif rules == {"integer", "decimal"}:
        rule = "decimal"
    members = {name: part for each in ruled[::-1] for name, part in each.members.items()}
    elements = [each.element for each in ruled if each.element is not None]
    return FieldTree(
        annotation,
        options=tuple(options),
        rule=None if any(each.annotation is str for each in options) else rule,
        members=members,
        element=elements[0] if elements and not members else None,
    )
