"""From source rows to rows of an entity type: names, values, codes, keys, provenance. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Final, NamedTuple
from uuid import UUID

import msgspec
from pydantic import TypeAdapter, ValidationError

from everstate.changes import EntityType
from everstate.changes.fields import tree_of
from everstate.changes.keys import check_key, key_text
from everstate.declarations.captures import OUTBOX_KINDS, Capture, Table, Translation
from everstate.errors import InvalidChange
from everstate.sources.cdc.convert import (
    Converter,
    converter,
    inferred,
    never_epoch,
    of_decimal,
    unnested,
)
from everstate.sources.cdc.rows import PROVENANCE, SourceRow, Unreadable, position_in, value_in

_SNAKE: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|[\s\-.]+")
_SHAPES_MAX: Final = 1_000
"""Limit of the cache: sources that give only changed columns give many combinations of them."""
_NO_CODES: Final[dict[str, Any]] = {}
_NO_TYPES: Final[Mapping[str, str]] = {}
_RELATIONAL: Final = ("postgresql", "mariadb", "mysql", "oracle", "sqlserver", "db2")
"""Kinds whose tables have columns; a document of MongoDB may lack a field."""
NO_COLUMN: Final = "has no column for this field"
_SAMPLES: Final[tuple[tuple[Any, Any], ...]] = (
    (1, 2),
    ("a", "b"),
    (str(UUID(int=1, version=4)), str(UUID(int=2, version=4))),
)
"""Pairs of values that a key column may have."""
USER: Final = "user"
"""In :attr:`CleanRow.who`: the database's user that wrote the row."""
_USERS: Final = ("user_name", "user", "username")


class CleanRow(msgspec.Struct, array_like=True, tag=True, kw_only=True, gc=False):
    """One source row as a row of its entity; small enough to be sent and kept by thousands.

    Either ``state`` (the whole state after, encoded) or ``known`` (the fields known after) is set,
    or neither (deleted). ``before`` is the whole state before, where the before image is trusted.
    """

    table: str
    op: str
    key: str
    columns: dict[str, Any]
    """Key columns as the source has them, with which a snapshot of the row is requested."""
    state: bytes | None = None
    known: Mapping[str, Any] | None = None
    covers: bool = False
    """Whether ``known`` has all fields, so that only names of codes have to be looked up."""
    codes: dict[str, Any] = {}
    """Field → code, whose name is looked up in entities of another type."""
    before: bytes | None = None
    moved_from: str | None = None
    position: dict[str, list[int | str]] = {}
    """Source position, by scheme; the driver puts the epoch in front of each."""
    order: tuple[int, ...] = ()
    """How many rows of its record before it have its key and operation; empty: none."""
    transaction: str | None = None
    index: int | None = None
    time_us: int | None = None
    is_snapshot: bool = False
    provenance: dict[str, str] = {}
    """Provenance from the row itself."""
    user: str | None = None
    parents: list[tuple[str, str]] = []
    """Entity type and key of each parent that the row refers to."""
    at: tuple[str, int, int] | None = None
    """Topic, partition and offset of its record, once it has been held."""
    count: int | None = None
    """Rows of its transaction, once it has been held."""
    place: bytes | None = None
    """Its place in the stream that its connector writes (``shapes/places``)."""
    was: bytes | None = None
    """Not used any more: rows that an earlier version holds have it at this place."""
    prepared: str | None = None
    """GTID of its transaction, while that may be a prepared one which has not ended."""
    skipped: str | None = None
    """Why it changes nothing, once its transaction has ended."""

    @property
    def who(self) -> dict[str, str]:
        """Provenance from the row, and the database's user that wrote it."""
        return self.provenance if self.user is None else {**self.provenance, USER: self.user}

    @property
    def is_plain(self) -> bool:
        """Whether plain columns can hold all of it: it is whole, and its key was not changed."""
        return (
            (self.state is not None or self.op == "d")
            and self.known is None
            and self.moved_from is None
            and not self.order
            and self.is_snapshot == (self.op == "r")
        )


@dataclass(slots=True)
class _Column:
    """How one column is mapped: its field, and how its values are converted."""

    field: str
    convert: Converter | None
    names: Mapping[Any, Any] | None
    translation: Translation | None


class _Shape(NamedTuple):
    """How the columns of an image are mapped, computed once for all images with these columns."""

    columns: tuple[_Column | None, ...]
    is_plain: bool
    """Whether the image itself can be used as the fields: no name and no value is converted."""


class TableMapping:
    """Maps the rows of one table to its entity type."""

    def __init__(self, capture: Capture, name: str, table: Table, entity_type: EntityType) -> None:
        self.capture, self.name, self.table = capture, name, table
        self.entity_type = entity_type
        self.model_fields = {each.given: each for each in tree_of(entity_type.model).fields}
        """The model's fields by their names in the input."""
        fields = self.model_fields.values()
        self._former = {was: each.given for each in fields for was in each.former}
        columns = table.columns.items()
        self._named = {column.lower(): self._former.get(was, was) for column, was in columns}
        self._dropped = {column.lower() for column in table.drop}
        self._types = {column.lower(): kind for column, kind in table.types.items()}
        self._codes = {column.lower(): by for column, by in table.translations.items()}
        self._columns: dict[tuple[str, str | None], _Column | None] = {}
        self._shapes: dict[tuple[tuple[Any, ...], ...], _Shape] = {}
        self._keys: dict[str, Callable[[Any], Any]] = {}
        audit = table.provenance
        self._audit = {
            field: column.lower() for field, column in audit.columns.items() if field in PROVENANCE
        }
        self._source = {f: name for f, name in audit.source.items() if f in PROVENANCE}
        self.believes_before = table.before == "whole" or (
            table.before == "auto" and capture.kind != "postgresql"
        )
        self.asks_source, self.audits = bool(self._source), bool(self._audit)
        """Whether provenance is taken from the message's source block, or from columns."""
        self._digits: tuple[bytes, int] | None = None
        """Start of a message's key up to the number that is the entity's key, and its length."""
        dropped = {self._named.get(column.lower()) or self._field(column) for column in table.drop}
        self._needed = frozenset(self.model_fields) - set(table.computed) - dropped
        """Fields that have their values of a column."""
        self._has_all_columns = capture.form == "debezium" and capture.kind in _RELATIONAL
        """Whether an image has each column of its table, or it is told which values are unknown."""

    def key_if_present(self, row: SourceRow) -> tuple[str | None, dict[str, Any]]:
        """Entity key and key columns of a row that could not be mapped, if the row has them."""
        try:
            columns = self._key_columns(row)
            return self.key_of(columns), columns
        except Unreadable:
            return None, {}

    def translation(self, field: str) -> Translation:
        """Translation by which a field gets its name."""
        for column, by in self.table.translations.items():
            named = self._named.get(column.lower(), self._field(column))
            if isinstance(by, Translation) and field == named:
                return by
        raise KeyError(field)

    def named(self, row: SourceRow) -> CleanRow:
        """The row with its key, position and transaction only; raises Unreadable as :meth:`map`."""
        columns = self._key_columns(row) if row.op != "t" else {}
        return CleanRow(
            table=self.name,
            op=row.op,
            key=self.key_of(columns) if columns else "",
            columns=columns,
            position=position_in(row),
            transaction=row.transaction,
            time_us=row.time_us,
            is_snapshot=row.is_snapshot,
            place=row.place,
        )

    def map(self, row: SourceRow) -> CleanRow:
        """Row of the entity type; raises Unreadable with the reason it cannot be one.

        Cost: about 8 µs for a row of six columns, half of it the model's.
        """
        clean = self.named(row)
        if row.op == "t":
            return clean
        key = clean.key
        if row.moved_from is not None:
            clean.moved_from = self._former_key(row.moved_from, key)
        clean.provenance, clean.user = self._provenance(row)
        if row.before and self.believes_before:
            clean.before = self.whole(row.before, row.types)
        if row.op == "d":
            return clean
        if row.after is None:
            raise Unreadable("it does not say what the row is now")
        fields, codes = self.fields(row.after, row.types)
        if self.table.parents and self.capture.parents_first:
            clean.parents = self.parents(fields)
        has_all = self.has_all(fields)
        if not has_all and self._has_all_columns:
            # A field that has no column would get an invented value.
            untold = {column.field for name in row.unknown if (column := self._column(name, None))}
            if missing := self._needed - fields.keys() - untold:
                raise Unreadable(f"{min(missing)}: {self.name} {NO_COLUMN}")
        if row.is_whole or has_all:
            if codes:
                clean.known, clean.codes, clean.covers = fields, codes, True
            else:
                clean.state = self.encode(fields, key)
        else:
            clean.known, clean.codes = fields, codes
        return clean

    def encode(self, fields: Mapping[str, Any], key: str | None) -> bytes:
        """JSON of a whole state, with computed fields added and validated by the model.

        ``key``: that of its key columns, which must be the model's; ``None``: they are not known.
        """
        state = fields
        if self.table.computed:
            state = dict(fields)
            for field, function in self.table.computed.items():
                state[field] = self._computed(field, function, state)
        try:
            entity = self._validated(state)
            found = None if key is None else self.entity_type.key_of(entity)
            encoded = self.entity_type.encode(entity, "made")
        except InvalidChange as cause:
            raise Unreadable(f"{cause.field}: {cause.reason}") from cause
        if found != key:
            raise Unreadable(f"its key is {found!r} by the model and {key!r} by its key columns")
        return encoded

    def has_all(self, fields: Mapping[str, Any]) -> bool:
        """Whether these are all fields that have a column."""
        return self._needed <= fields.keys()

    def sources(self, columns: Sequence[str]) -> dict[str, str | None]:
        """Each field that needs a column → its column of these; ``None``: it has none.

        Raises Unreadable when two columns would become one field.
        """
        found = self._by_place(columns, _NO_TYPES)
        named = {column.field: name for name, column in zip(columns, found, strict=True) if column}
        return {field: named.get(field) for field in sorted(self._needed)}

    def columns_beside_key(self, key: Sequence[str]) -> list[str]:
        """Columns of a row's key that the entity's key does not depend on.

        A computed key is tried with values of each column; what it refuses is not known.
        """
        wanted = self.entity_type.key
        if wanted in self.model_fields and wanted not in self.table.computed:
            fields = {name: self._named.get(name.lower()) or self._field(name) for name in key}
            return [name for name in key if fields[name] != wanted]
        for pairs in product(_SAMPLES, repeat=len(key)):
            values = {name: pair[0] for name, pair in zip(key, pairs, strict=True)}
            others = {name: pair[1] for name, pair in zip(key, pairs, strict=True)}
            try:
                first = self.key_of(values)
                changed = {name: self.key_of({**values, name: others[name]}) for name in key}
            except Unreadable:
                continue
            return [name for name in key if changed[name] == first]
        return []

    def reads(self, column: str) -> bool:
        """Whether a field, or what computes one, may have the values of a column."""
        return self._column(column, None) is not None

    def field_of(self, column: str) -> str | None:
        """Field that has a column's values; ``None``: there is none, or it is computed."""
        found = self._column(column, None)
        if (
            found is None
            or found.field in self.table.computed
            or found.field not in self.model_fields
        ):
            return None
        return found.field

    def _validated(self, state: Mapping[str, Any]) -> Any:
        if not state.keys() <= self.model_fields.keys():
            state = {name: value for name, value in state.items() if name in self.model_fields}
        return self.entity_type.validate_exactly(state)

    def quick_key(self, key: bytes) -> str | None:
        """Entity key of a message's key that is one whole number; ``None``: ask :meth:`key_of`."""
        if self._digits is None:
            self._digits = self._number_key(key)
        prefix, length = self._digits
        number = key[length:-1]
        if length and number.isdigit() and key.startswith(prefix):
            return number.decode()
        return None

    def _number_key(self, key: bytes) -> tuple[bytes, int]:
        """Start, and its length, of message keys whose one column is the entity's ``int`` key."""
        name, _, _ = key.partition(b":")
        column = self._column(msgspec.json.decode(name[1:]), None)
        fits = (
            column is not None
            and column.convert is None
            and column.field == self.entity_type.key
            and column.field not in self.table.computed
            and column.field in self.model_fields
            and self._annotation(column.field) is int
        )
        prefix = name + b":" if fits else b""
        return prefix, len(prefix)

    def _annotation(self, field: str) -> Any:
        """What the model declares, so with the rules of an alias or within `Optional`."""
        info = self.model_fields[field].info
        return None if info is None else info.annotation

    def key_of(self, columns: Mapping[str, Any]) -> str:
        """Entity key of the values of the key columns."""
        fields = {}
        for name, value in columns.items():
            column = self._column(name, None)
            if column is None:
                continue
            fields[column.field] = self._checked(column, value)
        wanted = self.entity_type.key
        if wanted in self.table.computed:
            found = self._computed(wanted, self.table.computed[wanted], fields)
        else:
            found = fields.get(wanted)
        if found is None and wanted not in self.model_fields:
            try:
                found = getattr(self.entity_type.model.model_construct(**fields), wanted)
            except (AttributeError, TypeError, ValueError) as cause:
                raise Unreadable(f"key {wanted}: not from the key columns: {cause}") from cause
        if found is None:
            raise Unreadable(
                f"key {wanted} does not follow from the key columns {', '.join(columns) or 'none'}"
            )
        try:
            return check_key(self.entity_type.name, key_text(found))
        except InvalidChange as cause:
            raise Unreadable(f"key {wanted}: {cause.reason}") from cause

    def _former_key(self, columns: Mapping[str, Any], key: str) -> str | None:
        """The key that a row had before, if it was another one under which an entity can be."""
        try:
            former = self.key_of(columns)
        except Unreadable:
            return None  # no change was ever published under it
        return None if former == key else former

    def _checked(self, column: _Column, value: Any) -> Any:
        field = column.field
        if column.convert is not None:
            value = self._converted(column, value)
        if field not in self.model_fields:
            return value
        annotation = self._annotation(field)
        if value.__class__ is annotation:
            return value  # validation would give it back as it is
        if field not in self._keys:
            self._keys[field] = TypeAdapter(annotation).validate_python
        try:
            return self._keys[field](value)
        except ValidationError as cause:
            raise Unreadable(f"{field}: {cause.errors()[0]['msg']}") from cause

    def _computed(self, field: str, function: Callable[[Any], Any], state: dict[str, Any]) -> Any:
        try:
            return function(state)
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as cause:
            raise Unreadable(f"computed field {field}: {type(cause).__name__} {cause}") from cause

    def _key_columns(self, row: SourceRow) -> dict[str, Any]:
        names = self.table.key_columns or row.key
        if not names:
            raise Unreadable("the message has no key, and no key_columns are declared")
        after = None if row.op == "d" else row.after
        found = {}
        for name in names:
            value = None if after is None else after.get(name)
            if value is None:
                sides = (value_in(side, name) for side in (after, row.key, row.before) if side)
                value = next((one for one in sides if one is not None), None)
            if value is None:
                raise Unreadable(f"key column {name} is missing or null")
            found[name] = value
        return found

    def fields(
        self, image: Mapping[str, Any], types: Mapping[str, str]
    ) -> tuple[Mapping[str, Any], dict[str, Any]]:
        """Fields and codes of an image's columns."""
        named = (tuple(image), tuple(types.items()))
        shape = self._shapes.get(named)
        if shape is None:
            if len(self._shapes) >= _SHAPES_MAX:
                self._shapes.clear()
            shape = self._shapes[named] = self._shape(image, types)
        if shape.is_plain:
            return image, _NO_CODES
        fields: dict[str, Any] = {}
        codes: dict[str, Any] = {}
        for column, value in zip(shape.columns, image.values(), strict=True):
            if column is None:
                continue
            if value is not None:
                if column.convert is not None:
                    value = self._converted(column, value)
                if column.names is not None and value is not None:
                    if value not in column.names:
                        why = f"code {value!r} has no name in the translation"
                        raise Unreadable(f"{column.field}: {why}")
                    value = column.names[value]
                if column.translation is not None and value is not None:
                    codes[column.field] = str(value)
            fields[column.field] = value
        return fields, codes

    def _shape(self, image: Mapping[str, Any], types: Mapping[str, str]) -> _Shape:
        columns = self._by_place(tuple(image), types)
        is_plain = all(
            column == _Column(name, None, None, None)
            for name, column in zip(image, columns, strict=True)
        )
        return _Shape(columns, is_plain)

    def _by_place(
        self, names: Sequence[str], types: Mapping[str, str]
    ) -> tuple[_Column | None, ...]:
        """How each column is mapped. Of two that differ by spelling the exact name has the field.

        Raises Unreadable when neither has it.
        """
        found = [self._column(name, types.get(name)) for name in names]
        rivals: dict[str, list[str]] = {}
        for name, column in zip(names, found, strict=True):
            if column is not None:
                rivals.setdefault(column.field, []).append(name)
        for field, columns in rivals.items():
            if len(columns) == 1:
                continue
            exact = [name for name in columns if self.table.columns.get(name) == field]
            exact = exact or [name for name in columns if name == field]
            if len(exact) != 1:
                raise Unreadable(f"{field}: the columns {' and '.join(columns)} both become it")
            for name in set(columns) - set(exact):
                found[names.index(name)] = None
        return tuple(found)

    def _converted(self, column: _Column, value: Any) -> Any:
        assert column.convert is not None
        try:
            return column.convert(value)
        except Unreadable as cause:
            raise Unreadable(f"{column.field}: {cause}") from cause
        except (ValueError, TypeError, OverflowError) as cause:
            raise Unreadable(f"{column.field}: {value!r} cannot be converted: {cause}") from cause

    def _column(self, name: str, declared: str | None) -> _Column | None:
        """How a column is mapped, computed once; ``declared``: its type in the schema."""
        if (name, declared) in self._columns:
            return self._columns[name, declared]
        lower = name.lower()
        field = self._named.get(lower) or self._field(name)
        found = None
        if field in self.model_fields and lower not in self._dropped:
            kind = self._types.get(lower) or declared
            wanted = self.model_fields[field].tree
            codes = self._codes.get(lower)
            if kind is not None:
                convert: Converter | None = converter(kind, wanted)
            else:
                convert = inferred(wanted, self.capture.times)
                if self.capture.form != "debezium":
                    convert = convert or of_decimal(wanted)
                elif convert is not None and self.capture.kind in OUTBOX_KINDS:
                    convert = never_epoch(convert, wanted)
                if convert is not None and self.capture.kind == "postgresql":
                    convert = unnested(convert)
            dynamic = codes if isinstance(codes, Translation) else None
            names = None if dynamic is not None or codes is None else codes
            found = _Column(field, convert, names, dynamic)  # type: ignore[arg-type]
        elif (
            lower not in self._dropped
            and declared is None
            and name in self.table.key_columns
            and self.entity_type.key in self.table.computed
        ):
            # It has no field, and a computed key is made of it.
            found = _Column(field, None, None, None)
        self._columns[name, declared] = found
        return found

    def _field(self, name: str) -> str:
        found = name if self.table.naming == "as_is" else name.lower()
        if self.table.naming == "snake":
            found = _SNAKE.sub("_", name).lower()
        # Until a column is renamed too, it has the name that the field had before.
        return self._former.get(found, found)

    def whole(self, image: Mapping[str, Any] | None, types: Mapping[str, str]) -> bytes | None:
        """State of a before image; ``None`` if there is none, or it is incomplete or invalid."""
        if not image:
            return None
        try:
            fields, codes = self.fields(image, types)
            if codes or not self.has_all(fields):
                return None
            return self.encode(fields, None)
        except Unreadable:
            return None

    def parents(self, fields: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Entity type and key of each parent that a row refers to."""
        return [
            (entity, str(fields[field]))
            for field, entity in self.table.parents.items()
            if fields.get(field) is not None
        ]

    def audit(self, image: Mapping[str, Any]) -> dict[str, str]:
        """Provenance from the audit columns of a row."""
        lower = {column.lower(): value for column, value in image.items()}
        return {
            field: str(lower[column])
            for field, column in self._audit.items()
            if lower.get(column) not in (None, "")
        }

    def _provenance(self, row: SourceRow) -> tuple[dict[str, str], str | None]:
        source, found = row.source, {}
        for field, name in self._source.items():
            if source.get(name) not in (None, ""):
                found[field] = str(source[name])
        image = row.after if row.after is not None else row.before
        if self._audit and image is not None:
            found |= self.audit(image)
        for name in _USERS:
            if source.get(name):
                return found, str(source[name])
        return found, None


def mapping_of(
    capture: Capture, table: str, entities: Mapping[str, EntityType]
) -> TableMapping | None:
    """The mapping of a table; ``None``: it is not declared, or its entity type is not known."""
    declared = capture.tables.get(table)
    if declared is None or declared.entity not in entities:
        return None
    return TableMapping(capture, table, declared, entities[declared.entity])
