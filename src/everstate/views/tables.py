"""Descriptions of kept views for a store: table and columns; small, and pickled to tasks.

A view is (name, version). The name of its table always has the version, so that a new version is
built beside the one that readers see (C28).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Final, Literal, TypeAlias
from uuid import UUID

LATEST_COLUMNS: Final = (
    *("key", "version", "change_id", "kind", "as_of", "occurred_at", "recorded_at"),
    *("generation", "partition", "offset", "provenance", "state"),
)
HISTORY_COLUMNS: Final = (
    *("key", "version", "change_id", "kind", "as_of", "occurred_at", "recorded_at"),
    *("schema_version", "generation", "partition", "offset"),
    *("provenance", "transaction", "event", "state"),
)
HISTORY_FINGERPRINT: Final = "history/2"

Image: TypeAlias = Literal["original", "current", "change"]
"""The part of a change that a view uses: the state before, the state after, or the change."""
Sum: TypeAlias = Literal["count", "sum", "max", "min"]
"""How values are aggregated; the last two only where nothing is ever subtracted."""
Merge: TypeAlias = Literal["row", "cache", "keys", "sum", "append", "periods", "history"]
"""How a batch is merged.

`row`: the newest version of a key wins; `cache`: the same for rows that expire; `keys`: all rows of
a key are replaced; `sum`: sums are added; `append`: a row for each change is appended; `periods`:
the same, with the time of the next change of its key; `history`: the changes themselves are. Every
kind of view (:mod:`everstate.views.kinds`) uses one of them.
"""


HOME: Final = "postgresql"
"""The store of cores, control tables, and views that are declared without another store."""


def physical(name: str, version: int = 1, attempt: str = "") -> str:
    """Name of the table behind a version of a view (C28); ``attempt``: the one that filled it."""
    return f"{name}__v{version}_{attempt}" if attempt else f"{name}__v{version}"


def attempt_text(attempt: UUID) -> str:
    """An attempt to build a version, in the name of its table: 8 letters or digits."""
    return attempt.hex[:8]


def meaning_of(texts: Iterable[str]) -> str:
    """The fingerprint of a meaning that is written in these texts."""
    return sha256("\n".join(texts).encode()).hexdigest()[:32]


def placed(fingerprint: str, attempt: str) -> str:
    """The fingerprint of positions: in another store they are those of one attempt's table."""
    return f"{fingerprint}/{attempt}" if attempt else fingerprint


def latest_of(entity: str) -> str:
    """Name of the view that is the core of an entity type."""
    return f"{entity}_latest"


def history_of(entity: str) -> str:
    """Name of the view that keeps every version of an entity type's entities."""
    return f"{entity}_history"


@dataclass(frozen=True, slots=True)
class KeptTable:
    """The table of one version of a view."""

    view: str
    version: int
    fingerprint: str
    merge: Merge
    columns: tuple[str, ...] = ()
    """Columns of a row delta, where each image gives one row at most."""
    images: tuple[Image, ...] = ()
    """The images that have a row delta; none where changes are stored as they are."""
    groups: tuple[str, ...] = ()
    sums: tuple[tuple[str, Sum], ...] = ()
    """Sums by their kind, of each group and of a shard per partition."""
    lifetime_us: int = 0
    """Microseconds that a row of a `cache` is kept after its entity's last change."""
    has_rules: bool = False
    """Whether planned changes have a column with the treatment by the view's rules."""
    store: str = HOME
    outputs: tuple[tuple[str, str], ...] = ()
    """Readers' names with their columns, for a store in which rows are read as they are stored."""
    attempt: str = ""
    """The attempt that filled it, where each has a table of its own."""

    @property
    def name(self) -> str:
        """Name of the table behind the view."""
        return physical(self.view, self.version, self.attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonTable(KeptTable):
    """The rows that a function returns for each key, computed from all changes of the key."""

    merge: Merge = "keys"
    images: tuple[Image, ...] = ("change",)
    function: Callable[[Any], Any] = field(compare=False)
    returned: tuple[Any, ...]
    """The columns of a row, as Arrow fields."""
    fields: tuple[Any, ...]
    """The fields of the states that the function gets, as Arrow fields."""
    history: str
    """Name under which the history is read, for the changes before a batch."""
    call_s_max: float = 60.0
    """Seconds after which a call of the function with up to 20,000 changes is given up."""


def planned_columns(table: KeptTable) -> tuple[str, ...]:
    """Columns of planned changes that belong to a view."""
    images = tuple(planned_column(table, image) for image in table.images)
    return (*images, rule_column(table)) if table.has_rules else images


def packed_column(table: KeptTable) -> str:
    """Column of planned changes in which all columns of a view are packed."""
    return f"{table.name}__packed"


def rule_column(table: KeptTable) -> str:
    """Column of planned changes with a view's treatment: taken, ignored or deferred."""
    return f"{table.name}__rule"


def planned_column(table: KeptTable, image: Image) -> str:
    """Column of planned changes with the row delta of an image for a view.

    Its name has the version's table and fingerprint: a held change is applied only to views for
    which it was planned, also when the number of a version was used before (V2).
    """
    return f"{table.name}__{table.fingerprint}__{image}"


@dataclass(frozen=True, slots=True)
class Core:
    """The core of an entity type: `latest`, which judges every record, and the views that ride.

    A rider is written in the core's transaction when its position is the start of the range.
    """

    entity: str
    topic: str
    riders: tuple[KeptTable, ...] = ()
    ids: KeptTable | None = None
    """The history in which ids of older versions are looked up, if there is one."""
    generation: int = 1
    version: int = 1
    held_max: int = 10_000

    @property
    def view(self) -> str:
        """Name of the core's view."""
        return latest_of(self.entity)

    @property
    def table(self) -> str:
        """The table of `latest`, which is the version gate."""
        return physical(self.view, self.version)


CORE_FINGERPRINT: Final = "core/2"

Vector: TypeAlias = Mapping[int, int]
"""Partition → next offset, exclusive, within one generation."""


def covers(ahead: Vector, behind: Vector) -> bool:
    """Whether a vector is at or past another in every partition."""
    return all(ahead.get(partition, 0) >= offset for partition, offset in behind.items())


def lacking(tables: Sequence[KeptTable], names: Sequence[str]) -> list[KeptTable]:
    """Tables whose columns are missing among these names of columns of a planned change."""
    present = set(names)
    return [table for table in tables if not present.issuperset(planned_columns(table))]


Row: TypeAlias = tuple[Any, ...]
