"""The interface of a view's plan for keeping, building, proving and reading, for every kind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Final, Literal, Protocol, TypeAlias

import pyarrow as pa

from everstate.errors import InvalidView
from everstate.views.definition import Definition, ViewDefinition
from everstate.views.images import RAW
from everstate.views.parsing import reading
from everstate.views.policies import NO_RULES, Rules
from everstate.views.tables import HOME, Image, KeptTable, PythonTable, Sum

BatchSource: TypeAlias = Literal["changes", "newest", "live"]
"""The input of a batch, at one position: every accepted change; the newest change of each key,
deleted entities included; live entities, with their fields as columns beside `__key` and
`__version`."""

OWN_COLUMNS: Final = ("id", "occurred_at", "recorded_at", "as_of", RAW)
COLUMNS_NEEDED: Final[Mapping[BatchSource, tuple[str, ...]]] = {
    "live": ("current",),
    "newest": OWN_COLUMNS,
    "changes": (*OWN_COLUMNS, "current", "original", "provenance", "event"),
}
"""Columns of the accepted changes that the batch of a view reads, by its source."""

EXACT: Final = "exact"
"""Type of a column of sums: a number of any size, without rounding."""


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column of a version's table; ``type`` is ``None`` for columns with a fixed type.

    ``shown``: the author's expression or name. ``words``: columns whose words this column has, in a
    language; the store computes it.
    """

    name: str
    type: pa.DataType | Literal["exact"] | None = None
    shown: str | None = None
    required: bool = False
    words: tuple[str, ...] = ()
    language: str = "simple"


@dataclass(frozen=True, slots=True)
class By:
    """A term of an order: PostgreSQL's text of a value, and where Spark puts its nulls."""

    text: str
    descending: bool = False
    nulls_first: bool = True

    @property
    def sql(self) -> str:
        """The term in an ORDER BY, or in an index."""
        way = "DESC" if self.descending else "ASC"
        return f"{self.text} {way} NULLS {'FIRST' if self.nulls_first else 'LAST'}"


@dataclass(frozen=True, slots=True)
class Index:
    """An index: the suffix of its name, its columns, and the condition of its rows."""

    name: str
    columns: tuple[str | By, ...]
    where: str | None = None
    of_words: bool = False
    """Whether it is a GIN index over a column of words."""
    group: tuple[str, ...] | None = None
    """Columns whose :func:`group_hash` is the first column of the index; nulls are equal in it."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The columns, key and indexes of a version's table, in any store."""

    columns: tuple[TableColumn, ...]
    key: tuple[str, ...]
    indexes: tuple[Index, ...] = ()
    beside_key: tuple[str, ...] = ()
    """Columns that the key's index includes, so that reading them needs no row."""
    is_rewritten: bool = True
    """Whether rows are updated often."""


@dataclass(frozen=True, slots=True)
class Explained:
    """What is stored for a view, what a change costs and what a read costs, in words."""

    kept: str
    change: str
    read: str


class Names(Protocol):
    """Texts of the relations and expressions of a store, for the queries of plans."""

    def view(self, name: str) -> str:
        """The relation that readers see under the name of a view."""

    def table(self, name: str) -> str:
        """The own table of the version that is read, for a view that has one."""

    def field(self, path: Sequence[Sequence[str]], kind: pa.DataType) -> str:
        """A typed field of a state, from the column `state` of `latest` and `history`.

        ``path``: as :meth:`EntityType.names_to` gives it.
        """


@dataclass(frozen=True)
class ViewPlan(ABC):
    """The plan of one view by its kind: columns, row deltas, batch, and reading.

    Its queries are texts in PostgreSQL's dialect over the :class:`Names` of a store, and its batch
    is Spark's SQL. A plan imports no driver.
    """

    name: str
    entity: str
    fingerprint: str
    """Equal for definitions with the same meaning (V10)."""
    declared: Definition | None = None
    """The author's declaration; ``None`` for views that are kept without one."""
    fields: tuple[str, ...] = ()
    """Fields of the entity that the SQL uses."""
    rules: Rules = field(default=NO_RULES, kw_only=True)
    """Which accepted changes it takes, and when."""
    store: str = field(default=HOME, kw_only=True)
    """Name of the store in which its rows are kept."""

    kind: ClassVar[str]
    """Its name in `views list`."""
    may_ride: ClassVar[bool] = True
    """Whether views of this kind may be written in the core's transaction; else they trail."""
    has_times: ClassVar[bool] = False
    """Whether its rows say from when to when they were valid: `valid_from`, `valid_to`."""
    is_plain_sql: ClassVar[bool] = True
    """Whether its SQL, run in batch, gives exactly the rows that readers see."""
    is_divided: ClassVar[bool] = True
    """Whether a proof may be divided by the text of the first column, which is the key."""
    batch_as_read: str = field(default="", kw_only=True)
    """The author's SQL as Spark runs it for a proof: without ORDER BY and LIMIT, and with the
    options of the declaration applied."""
    batch_as_shown: str = field(default="", kw_only=True)
    """The same with ORDER BY and LIMIT, and with tie-breakers: the rows that readers see."""
    is_ordered: bool = field(default=False, kw_only=True)
    """Whether the definition has an ORDER BY."""

    @property
    def sql(self) -> str:
        """The author's SQL; empty for views that are kept without a declaration."""
        return self.declared.sql if isinstance(self.declared, ViewDefinition) else ""

    @property
    def rides(self) -> bool:
        """Whether it is written in the core's transaction; else it always trails."""
        return self.may_ride and self.store == HOME

    @property
    def definition(self) -> Mapping[str, Any]:
        """Its definition in the registry, from which the plan can be made again."""
        stored = {"keeps": self.kind} if self.declared is None else self.declared.stored
        return {**stored, "inputs": list(self.inputs)} if self.inputs else stored

    def given(self, meaning: str) -> dict[str, Any]:
        """The fields of a plan that is made from this one, with another fingerprint."""
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"fingerprint": meaning}

    def ruled_table(self, version: int) -> KeptTable:
        """The description of a version's table for tasks, the rules of the view included."""
        table = self.table(version)
        if self.store != HOME:
            table = replace(table, store=self.store, outputs=self.outputs_stored)
        return replace(table, has_rules=True) if self.rules else table

    @property
    def replaces_rows(self) -> bool:
        """Whether each later change of a key replaces or deletes its row."""
        return self.table(0).merge == "row" and not self.rules

    @property
    def outputs_stored(self) -> tuple[tuple[str, str], ...]:
        """Readers' name and column of each output, where rows are read as they are stored.

        Raises InvalidView with the reason why readers see something else than the stored rows.
        """
        raise InvalidView(
            self.name,
            f"what readers see of a view of the kind {self.kind} is computed by PostgreSQL.",
            advice=f'Leave store="{self.store}" out.',
        )

    @property
    @abstractmethod
    def source(self) -> BatchSource:
        """The input of :meth:`batch`."""

    @property
    def columns_needed(self) -> tuple[str, ...]:
        """Columns of the accepted changes that its batch reads, besides their place and key."""
        return COLUMNS_NEEDED[self.source]

    def table(self, version: int) -> KeptTable:
        """The description of a version's table for tasks: its merge, and the merged columns.

        Only for a view with a table that tasks write, as :meth:`layout` and :meth:`columns`.
        """
        raise AssertionError(f"no task writes a table of {self.name}")

    def layout(self, types: Mapping[str, pa.DataType]) -> Layout:
        """The layout of the table; ``types``: Spark's types of the fields of :meth:`columns`.

        Raises InvalidView when a type cannot be stored.
        """
        raise AssertionError(f"no task writes a table of {self.name}")

    def columns(self, image: Image) -> str:
        """Spark SQL of the row delta of one image: a struct, or null when it gives no row.

        An array of structs where an image may give several rows. Only for the images of its table.
        """
        raise AssertionError(f"no image is planned for {self.name}")

    @abstractmethod
    def batch(self, tables: Sequence[str]) -> str:
        """Spark SQL of the rows of :meth:`compared`, or of the inputs of their sums.

        ``tables``: a table of the :attr:`source` for each of the :attr:`inputs`, or the only one.
        """

    def over(self, sql: str, tables: Sequence[str]) -> str:
        """A form of the author's SQL over the same tables."""
        (table,) = tables
        return reading(sql, table)

    @property
    @abstractmethod
    def key(self) -> tuple[str, ...]:
        """The key of the rows of :meth:`compared`, as the first of their columns."""

    @abstractmethod
    def compared(self, names: Names) -> str:
        """The query of the stored rows, in the columns of the batch, key columns first."""

    @abstractmethod
    def read(self, names: Names, *, limited: bool = True) -> str:
        """The query of the rows that readers see of a version.

        Without ``limited`` it has no LIMIT, for the comparison with the author's SQL.
        """

    def computed(self, names: Names) -> tuple[str, Sequence[tuple[str, str]]] | None:
        """A relation, and names with texts of outputs over it; ``None``: none is computed so."""
        return None

    @property
    def function(self) -> PythonTable | None:
        """The function that computes its rows, and what it gets; ``None``: there is none."""
        return None

    @property
    def sums_kept(self) -> tuple[tuple[str, ...], tuple[tuple[str, Sum], ...]] | None:
        """Groups and sums of the rows of :meth:`batch`; ``None``: they are not summed."""
        return None

    @property
    def is_shown(self) -> str:
        """Spark's condition on rows of the batch that readers see; see :attr:`is_plain_sql`."""
        return "true"

    @property
    def read_of_batch(self) -> tuple[tuple[str, str], ...]:
        """Columns of the batch that readers see, with their names."""
        return ()

    @property
    @abstractmethod
    def explained(self) -> Explained:
        """What is stored for it, and what that costs."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the views that it reads; empty: it reads changes, and has its own table.

        A view over other views is behind when one of them is. No change is planned for it, and it
        has no position.
        """
        return ()

    @property
    def parts(self) -> tuple[ViewPlan, ...]:
        """The plans of its inputs that were not declared.

        Their names are made of their fingerprints, so that views that need the same part share it,
        and a part is dropped when no version needs it any more.
        """
        return ()

    @property
    def defined(self) -> tuple[str, ...]:
        """Names of the columns of the author's SQL; empty: there is no SQL."""
        return ()

    @property
    def shown_key(self) -> tuple[str, ...] | None:
        """Columns that readers see and that no two rows have alike; ``None``: there are none."""
        return None


def quoted(name: str) -> str:
    """A name in SQL's quotes."""
    return '"{}"'.format(name.replace('"', '""'))


def identifiers(names: Iterable[str]) -> str:
    """Names of columns as an SQL list."""
    return ", ".join(map(quoted, names))


def output_text(output: tuple[str, str]) -> str:
    """An element of a SELECT list, of its text and its name."""
    text, name = output
    return f"{text} AS {quoted(name)}"


def group_hash(columns: Sequence[str], of: str = "") -> str:
    """PostgreSQL's text of a hash of a group, in which nulls are equal and -0.0 is 0.0.

    An index finds a group by its hash, but not by IS NOT DISTINCT FROM. Two groups may have the
    same hash. PostgreSQL partitions tables by this hash, so it is the same in every release.
    ``of``: alias of the table.
    """
    names = (f'{of}."{name}"' if of else f'"{name}"' for name in columns)
    return f"hash_record_extended(ROW({', '.join(names)}), 0)"


def same_group(columns: Sequence[str], one: str, other: str) -> str:
    """PostgreSQL's condition that rows of two tables are in one group; an index finds them.

    The CASE keeps the planner from assuming that few rows meet the second condition: it would then
    sort all rows of a group, instead of reading the first one by the index.
    """
    if not columns:
        return "true"
    alike = (f'{one}."{name}" IS NOT DISTINCT FROM {other}."{name}"' for name in columns)
    hashes = f"{group_hash(columns, one)} = {group_hash(columns, other)}"
    return f"{hashes} AND CASE WHEN {' AND '.join(alike)} THEN true END"
