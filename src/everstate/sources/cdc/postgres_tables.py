"""Captured tables of PostgreSQL: checks that each can be captured correctly and stays writable.

PostgreSQL refuses UPDATE and DELETE of a published table whose log would not identify the row (by
its *replica identity*). That is checked for each table that stores rows: for the partitions of a
partitioned table, and also for the tables that inherit from a captured one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from everstate.declarations.captures import Capture
from everstate.sources.cdc.connectors import SourceColumn, TableShape
from everstate.sources.cdc.database import ONE_ENTITY, Finding, RunQuery, quoted, quoted_name
from everstate.sources.cdc.postgres_types import ColumnType

_IDENTITIES: Final = {"d": "default", "n": "nothing", "f": "full", "i": "index"}
_GENERATED_IN_IDENTITY: Final = 180_000
"""Since this version a full identity may hold no generated column that is not published."""

_FAMILY: Final = """\
WITH RECURSIVE family AS (
  SELECT c.oid AS root, c.oid FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
  WHERE n.nspname || '.' || c.relname = ANY (%s) AND c.relkind IN ('r', 'p')
  UNION
  SELECT f.root, i.inhrelid FROM family f JOIN pg_inherits i ON i.inhparent = f.oid
)"""

_FAMILIES: Final = f"""\
{_FAMILY}
SELECT rn.nspname || '.' || r.relname AS root, n.nspname || '.' || c.relname AS name,
  c.relkind::text AS kind, c.relpersistence = 'u' AS is_unlogged,
  c.relispartition AS is_partition, c.relreplident::text AS identity,
  ARRAY(SELECT a.attname::text FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attnum > 0
    AND NOT a.attisdropped AND a.attgenerated <> '' ORDER BY a.attnum) AS generated,
  ARRAY(SELECT a.attname::text FROM pg_partitioned_table p JOIN pg_attribute a
    ON a.attrelid = p.partrelid AND a.attnum = ANY (p.partattrs::int2[])
    WHERE p.partrelid = c.oid) AS parted_by,
  ARRAY(SELECT a.attname::text FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
    WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
    AND c.reltoastrelid <> 0 AND t.typlen = -1 AND t.typstorage <> 'p'
    -- A value that was stored apart stays there when the column's storage becomes PLAIN.
    AND (a.attstorage <> 'p' OR pg_relation_size(c.reltoastrelid) > 0)) AS apart,
  ARRAY(SELECT jsonb_build_object('name', x.relname, 'is_primary', i.indisprimary,
      'is_identity', i.indisreplident, 'is_immediate', i.indimmediate,
      'constraint', (SELECT pg_get_constraintdef(o.oid) FROM pg_constraint o
        WHERE o.conindid = i.indexrelid AND o.contype IN ('p', 'u')),
      'columns', jsonb_agg(a.attname ORDER BY k.place), 'is_filled', bool_and(a.attnotnull))
    FROM pg_index i JOIN pg_class x ON x.oid = i.indexrelid,
      unnest(i.indkey::int2[]) WITH ORDINALITY AS k(number, place), pg_attribute a
    WHERE i.indrelid = c.oid AND i.indisunique AND i.indisvalid
      AND i.indpred IS NULL AND i.indexprs IS NULL
      AND a.attrelid = i.indrelid AND a.attnum = k.number AND k.place <= i.indnkeyatts
    GROUP BY i.indexrelid, x.relname ORDER BY x.relname) AS indexes
FROM family f JOIN pg_class r ON r.oid = f.root JOIN pg_namespace rn ON rn.oid = r.relnamespace
JOIN pg_class c ON c.oid = f.oid JOIN pg_namespace n ON n.oid = c.relnamespace
ORDER BY f.root, c.oid <> f.root, name"""

COLUMNS: Final = """\
WITH RECURSIVE typed AS (
  SELECT n.nspname || '.' || c.relname AS table, c.oid, a.attnum, a.attname::text AS name,
    a.attnotnull AS is_required, a.attgenerated <> '' AS is_generated,
    format_type(a.atttypid, a.atttypmod) AS text, a.atttypid AS type, a.atttypmod AS size,
    a.attndims::int AS dimensions, false AS is_domain
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
  JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
  WHERE n.nspname || '.' || c.relname = ANY (%s) AND c.relkind IN ('r', 'p')
  UNION ALL
  SELECT d.table, d.oid, d.attnum, d.name, d.is_required OR t.typnotnull, d.is_generated, d.text,
    t.typbasetype, t.typtypmod, t.typndims::int, true
  FROM typed d JOIN pg_type t ON t.oid = d.type AND t.typtype = 'd'
)
SELECT d.table, d.name, d.text AS type, d.is_required, d.is_generated,
  array_position(p.indkey::int2[], d.attnum) AS key_place,
  ARRAY(SELECT pg_get_constraintdef(k.oid) FROM pg_constraint k WHERE k.conrelid = d.oid
    AND k.contype = 'c' AND k.convalidated AND k.conkey = ARRAY[d.attnum]) AS checks,
  jsonb_build_object('text', d.text, 'name', coalesce(b.typname, e.typname, t.typname),
    'kind', coalesce(b.typtype, e.typtype, t.typtype), 'is_array', e.oid IS NOT NULL,
    'is_domain', d.is_domain, 'is_domain_inside', b.oid IS NOT NULL,
    'dimensions', d.dimensions, 'size', d.size) AS kind
FROM typed d JOIN pg_type t ON t.oid = d.type AND t.typtype <> 'd'
LEFT JOIN pg_type e ON e.typarray = t.oid
LEFT JOIN pg_type b ON e.typtype = 'd' AND b.oid = e.typbasetype
LEFT JOIN pg_index p ON p.indrelid = d.oid AND p.indisprimary
ORDER BY d.oid, d.attnum"""
"""Columns of tables. ``kind`` has the fields of a ColumnType, and ``checks`` are those of this
column alone."""

# One statement, so that all of it is of one moment. A partition that was detached and attached
# again has another entry in `pg_inherits`.
STATES: Final = f"""\
{_FAMILY}
SELECT rn.nspname || '.' || r.relname AS name,
  txid_snapshot_xmin(txid_current_snapshot()) AS seen,
  (SELECT jsonb_object_agg(a.attname, concat_ws(' ', a.attnum,
      format_type(a.atttypid, a.atttypmod),
      (SELECT jsonb_agg(e.enumlabel ORDER BY e.enumsortorder) FROM pg_type t JOIN pg_enum e
       ON e.enumtypid IN (t.oid, t.typelem, t.typbasetype) WHERE t.oid = a.atttypid)))
   FROM pg_attribute a WHERE a.attrelid = r.oid AND a.attnum > 0 AND NOT a.attisdropped) AS columns,
  ARRAY(SELECT a.attname::text FROM pg_attribute a WHERE a.attrelid = r.oid AND a.attnum > 0
   AND NOT a.attisdropped AND a.attgenerated <> '') AS generated,
  (SELECT jsonb_object_agg(concat_ws('.', c.oid, i.xmin::text), concat(c.relfilenode,
      CASE WHEN c.relkind = 'p' OR pg_relation_size(c.oid) = 0 THEN ' empty' END))
   FROM family f JOIN pg_class c ON c.oid = f.oid LEFT JOIN pg_inherits i ON i.inhrelid = c.oid
   WHERE f.root = r.oid) AS parts
FROM pg_class r JOIN pg_namespace rn ON rn.oid = r.relnamespace
WHERE r.oid IN (SELECT root FROM family)"""


@dataclass(frozen=True, slots=True)
class _Index:
    """A unique index of all rows, on plain columns."""

    name: str
    columns: Sequence[str]
    is_primary: bool
    is_identity: bool
    is_immediate: bool
    """False: it is deferrable, and therefore cannot be a replica identity."""
    is_filled: bool
    """All its columns are NOT NULL."""
    constraint: str | None
    """The constraint that it is of, such as ``UNIQUE (a) DEFERRABLE``."""

    def at_once(self, table: str) -> str:
        """Statement that gives its deferrable constraint anew, as NOT DEFERRABLE."""
        made = (self.constraint or "").removesuffix(" INITIALLY DEFERRED")
        name, made = quoted_name(self.name), made.removesuffix(" DEFERRABLE")
        alter = f"ALTER TABLE {quoted(table)} DROP CONSTRAINT {name}"
        return f"{alter}, ADD CONSTRAINT {name} {made} NOT DEFERRABLE;"


@dataclass(frozen=True, slots=True)
class Relation:
    """A captured table, or one that is a part of it: a partition, or a table that inherits."""

    name: str
    kind: str
    is_unlogged: bool
    is_partition: bool
    identity: str
    generated: Sequence[str]
    apart: Sequence[str]
    """Columns whose long values it may store apart from the row."""
    parted_by: Sequence[str]
    """Columns that decide in which of its partitions a row is."""
    indexes: Sequence[_Index]

    @property
    def primary(self) -> Sequence[str]:
        """Columns of the primary key; empty: it has none."""
        return next((index.columns for index in self.indexes if index.is_primary), ())

    @property
    def logged_columns(self) -> Sequence[str] | None:
        """Columns of the row before that the log contains; ``None``: all of them."""
        if self.identity == "f":
            return None
        for index in self.indexes:
            wanted = {"d": index.is_primary, "i": index.is_identity}
            if wanted.get(self.identity) and index.is_immediate:
                return index.columns
        return ()

    @property
    def is_writable(self) -> bool:
        """Whether UPDATE and DELETE work while it is published."""
        return self.kind != "r" or self.logged_columns is None or bool(self.logged_columns)

    def tells(self, key: Iterable[str]) -> bool:
        """Whether the log contains these columns of a row that is updated or deleted."""
        return (
            self.kind != "r" or self.logged_columns is None or set(key) <= set(self.logged_columns)
        )

    def leaves_out(self, column: str) -> bool:
        """Whether the log of an update may lack a value of this column that did not change."""
        told = self.logged_columns
        return self.kind == "r" and column in self.apart and told is not None and column not in told

    def remedy(self, key: Sequence[str]) -> str:
        """Statement that sets the cheapest replica identity that contains these columns."""
        usable = [i for i in self.indexes if i.is_immediate and i.is_filled]
        usable = [index for index in usable if set(key) <= set(index.columns)]
        identity = f"USING INDEX {quoted_name(usable[0].name)}" if usable else "FULL"
        identity = "DEFAULT" if any(index.is_primary for index in usable) else identity
        return f"ALTER TABLE {quoted(self.name)} REPLICA IDENTITY {identity};"


def families(run: RunQuery, tables: Iterable[str]) -> dict[str, list[Relation]]:
    """Table → itself first, then its partitions and heirs; tables that do not exist are left out.

    Cost: one round trip.
    """
    found: dict[str, list[Relation]] = {}
    for row in run(_FAMILIES, list(tables)):
        indexes = [_Index(**each) for each in row.pop("indexes")]
        found.setdefault(row.pop("root"), []).append(Relation(**row, indexes=indexes))
    return found


def shapes(
    run: RunQuery, capture: Capture, publication: str, settings: Mapping[str, str]
) -> dict[str, TableShape]:
    """Columns and key of each captured table that exists; cost: three round trips.

    ``settings``: those of the connector, as far as it has others than `everstate cdc` makes.
    """
    found = families(run, capture.tables)
    lists = {row["name"]: row["columns"] for row in published_parts(run, publication)}
    columns = defaultdict[str, list[SourceColumn]](list)
    for row in run(COLUMNS, list(found)):
        table, kind = row["table"], ColumnType(**row["kind"])
        column = SourceColumn(
            row["name"],
            absent=kind.untold,
            is_generated=row["is_generated"],
            is_required=row["is_required"],
            numbers=kind.numbers,
            fails=kind.fails,
            kind=kind.form,
        )
        listed = lists.get(table)
        bad = [each for each in found[table] if each.leaves_out(column.name)]
        if listed is not None and column.name not in listed and not column.is_generated:
            absent = f"the column list of publication {publication} leaves it out"
            column = replace(column, absent=absent, sql=published_whole(publication, table))
        elif bad and not kind.is_marked(settings) and not column.is_generated:
            unmarked = f"a long value of type {kind.text} is stored apart from the row of "
            unmarked += f"{_names(bad)}, and the log leaves it out where it did not change"
            column = replace(column, unmarked=unmarked, sql=_with_full_identity(bad))
        columns[table].append(column)
    return {
        table: TableShape(
            tuple(columns[table]),
            capture.tables[table].key_columns or tuple(family[0].primary),
            bool(family[0].primary),
        )
        for table, family in found.items()
    }


def published_parts(run: RunQuery, publication: str) -> list[dict[str, Any]]:
    """Name of each table of a publication, also of one of all tables, and what it has of the table.

    Its ``columns``, and the ``rowfilter`` of its rows, which is None where it has all of them, as
    always before PostgreSQL 15; the ``columns`` are None then.
    """
    return run(
        "SELECT schemaname || '.' || tablename AS name, to_jsonb(p) -> 'attnames' AS columns, "
        "to_jsonb(p) ->> 'rowfilter' AS rowfilter FROM pg_publication_tables p WHERE pubname = %s",
        publication,
    )


def published_whole(publication: str, table: str) -> tuple[str, ...]:
    """Statements that publish all columns and rows of a table."""
    alter = f"ALTER PUBLICATION {quoted_name(publication)}"
    return tuple(f"{alter} {what} TABLE {quoted(table)};" for what in ("DROP", "ADD"))


class TableChecks:
    """What the doctor finds in the captured tables, whose families are given."""

    def __init__(
        self, version: int, capture: Capture, found: Mapping[str, Sequence[Relation]]
    ) -> None:
        """``version``: of the server, such as 150004."""
        self._version, self._capture, self._found = version, capture, found

    def of(self, table: str) -> Iterator[Finding]:
        """Findings about one table that exists."""
        family = self._found[table]
        key = self._capture.tables[table].key_columns or family[0].primary
        yield self._key(table, family, key)
        yield self._identity(table, family, key)
        yield from self._parts(table, family)

    def _key(self, table: str, family: Sequence[Relation], key: Sequence[str]) -> Finding:
        name, itself, listed = f"key of {table}", family[0], ", ".join(key)
        if not key:
            return self._no_key(name, itself)
        if computed := sorted(set(key) & set(itself.generated)):
            advice = "Declare key_columns that the database does not generate."
            found = f"{', '.join(computed)} is generated, and not in the log"
            return Finding(name, "fail", found, advice=advice)
        within = [index for index in itself.indexes if set(index.columns) <= set(key)]
        if any(index.is_immediate for index in within):
            return Finding(name, "ok", f"it has {listed}")
        if within:
            found = f"{within[0].name} is DEFERRABLE: two rows may have one key within a "
            found += "transaction, and the log of a delete does not say which of them is gone"
            advice = "Or declare key_columns that another unique key has."
            return Finding(name, "fail", found, (within[0].at_once(itself.name),), advice)
        parted_by = {column for each in family for column in each.parted_by}
        if beside := [each for each in itself.primary if each not in {*key, *parted_by}]:
            found = f"the primary key is {', '.join(itself.primary)}, and the declared key_columns "
            found += f"lack {', '.join(beside)}: rows that differ there would become one entity"
            advice = "Declare key_columns that no two rows share, or none."
            return Finding(name, "fail", found, advice=advice)
        found = f"nothing in the database keeps {listed} unique"
        return Finding(name, "warn", found, advice=ONE_ENTITY)

    def _no_key(self, name: str, itself: Relation) -> Finding:
        found, statements = "there is no primary key", tuple[str, ...]()
        unique = [i for i in itself.indexes if i.is_filled and i.is_immediate]
        if unique:
            found += f", but the unique index {unique[0].name}"
            advice = f"Declare its Table with key_columns={tuple(unique[0].columns)!r}."
        else:
            statements = (f'ALTER TABLE {quoted(itself.name)} ADD PRIMARY KEY ("id");',)
            advice = "With the columns that name a row. Where it can have none: declare its Table "
            advice += "with key_columns, and give it REPLICA IDENTITY FULL."
        return Finding(name, "fail", found, statements, advice)

    def _identity(self, table: str, family: Sequence[Relation], key: Sequence[str]) -> Finding:
        name, is_keyed = f"identity of {table}", bool(family[0].primary)
        if bad := [each for each in family if not each.is_writable]:
            found = f"UPDATE and DELETE of {_names(bad)} fail while it is published: its log would "
            found += f"not name the row ({_IDENTITIES[bad[0].identity]}, no key that can be used)"
        elif bad := [each for each in family if not each.tells(key)]:
            found = f"the log of a delete of {_names(bad)} has "
            found += f"{', '.join(bad[0].logged_columns or ())}, and not the key {', '.join(key)}"
        else:
            return self._before(name, family, is_keyed=is_keyed)
        return Finding(name, "fail", found, tuple(each.remedy(key) for each in bad), _FULL_COSTS)

    def _before(self, name: str, family: Sequence[Relation], *, is_keyed: bool) -> Finding:
        """The log identifies each row; check whether it also contains the row before."""
        stored = [each for each in family if each.kind == "r"]
        partial = [each for each in stored if each.logged_columns is not None]
        bad = [each for each in stored if each.logged_columns is None and each.generated]
        if bad and self._version >= _GENERATED_IN_IDENTITY:
            found = f"UPDATE and DELETE of {_names(bad)} fail while it is published: its full "
            found += "identity holds a generated column"
            return Finding(name, "fail", found, advice="Give it a key, or an index as identity.")
        if not is_keyed and family[0].kind == "p":
            advice = "Give each new partition REPLICA IDENTITY FULL before its rows are changed."
            found = "each partition has its own; one that is made later has none"
            return Finding(name, "warn", found, advice=advice)
        if not partial:
            return Finding(name, "ok", "full")
        # Missing columns are completed from our newest state, if there is one.
        statements = _with_full_identity(partial)
        advice = "The log lacks the row before; it is completed from the entity's last version."
        return Finding(name, "warn", _IDENTITIES[partial[0].identity], statements, advice)

    def _parts(self, table: str, family: Sequence[Relation]) -> Iterator[Finding]:
        """Tables whose changes are in no log, or under another name than the captured one."""
        others = {t: members for t, members in self._found.items() if t != table}
        if heirs := [each for each in family[1:] if not each.is_partition]:
            found = f"{_names(heirs)} inherit from it, and the log has their changes under their "
            advice = f"Declare these tables instead of {table}, with the same entity."
            yield Finding(f"parts of {table}", "fail", f"{found}names", advice=advice)
        above = [t for t, all_of in others.items() if table in [each.name for each in all_of]]
        if above and family[0].is_partition:
            found = f"it is a partition of {above[0]}, and its changes are logged under that name"
            advice = f"Declare only {above[0]}."
            yield Finding(f"parts of {table}", "fail", found, advice=advice)
        if unlogged := [each for each in family if each.is_unlogged]:
            statements = tuple(f"ALTER TABLE {quoted(t.name)} SET LOGGED;" for t in unlogged)
            found = f"{_names(unlogged)} is UNLOGGED: its changes are not in the server's log"
            yield Finding(f"log of {table}", "fail", found, statements)
        if foreign := [each for each in family if each.kind == "f"]:
            found = f"{_names(foreign)} is of another server, as is the log of its changes"
            advice = "Capture that table where it is."
            yield Finding(f"log of {table}", "fail", found, advice=advice)


_FULL_COSTS: Final = (
    "FULL writes the whole row before to the log at each UPDATE and DELETE; a primary key, or a "
    "unique index of columns without nulls, costs less."
)


def _names(relations: Iterable[Relation]) -> str:
    return ", ".join(relation.name for relation in relations)


def _with_full_identity(relations: Iterable[Relation]) -> tuple[str, ...]:
    return tuple(f"ALTER TABLE {quoted(each.name)} REPLICA IDENTITY FULL;" for each in relations)
