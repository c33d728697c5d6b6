"""Random tables, random statements, and a check that entities equal their rows as printed.

Nothing here is shared with what reads the raw log. One seed gives one world.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pydantic import create_model

from everstate.app import App
from everstate.declarations.captures import Table
from random_columns import KINDS, SAME, Kind
from random_databases import Database
from random_keys import KEYS, Key, KeyShape, one_column

Printed = dict[str, dict[str, str | None]]
"""Entity key → field → what the database prints."""
MARKER = "marker"
"""A table whose one row is written last."""
DROPPED = "dropped"
"""A table that the connector captures, and that the declaration of the clean role has no more."""
_NAMES = (("plain{}", "plain{}"), ("orderNo{}", "order_no{}"), ("unit price {}", "unit_price_{}"),
          ("größe{}", "größe{}"), ("select{}", "select{}"), ("x-{}", "mapped_{}"))  # fmt: skip
_SUFFIXES = ("", " lines", "Ö", "'s", "Select", "$a")
_REFUSED_SUFFIXES = {"postgresql": (",x", '"q"', "(2)"), "mariadb": (",x", "(2)")}
_REFUSED_SUFFIXES["mysql"] = _REFUSED_SUFFIXES["mariadb"]
_LARGE_IN_MYSQL = ("text", "longtext", "blob", "json")
"""Types whose default is an expression."""
_NULLS = 0.25
_TWO_PHASES = 0.1
"""How many transactions are prepared first."""
_SETTINGS = 0.15
"""How many transactions come after another setting."""


@dataclass(frozen=True)
class Column:
    """A column of a random table."""

    name: str
    field: str
    kind: Kind
    is_required: bool
    default: str | None
    """An SQL literal."""


@dataclass(frozen=True)
class RandomTable:
    """A table, its declaration, and whether a capture must refuse it."""

    name: str
    entity: str
    key: KeyShape
    columns: tuple[Column, ...]
    identity: str
    """Replica identity of PostgreSQL, as ALTER TABLE has it."""
    refused: str | None
    form: str = ""
    """``parted``, ``unlogged`` or ``generated``; "": a plain table."""
    truncate: bool = False

    def declaration(self) -> Table:
        """Its declaration in the capture."""
        columns = {c.name: c.field for c in self.columns if c.field.startswith("mapped")}
        keys = tuple(name for name, _, _ in self.key.columns) if self.key.declared else ()
        return Table(
            entity=self.entity,
            key_columns=keys,
            columns=columns,
            types={c.name: c.kind.unit for c in self.columns if c.kind.unit is not None},
            computed={"id": self.key.computed} if self.key.computed else {},
            truncate="delete" if self.truncate else "refuse",
        )

    def declare(self, app: App) -> None:
        """Register its entity type."""
        fields: dict[str, Any] = {name: (kind, ...) for name, _, kind in self.key.columns}
        if self.key.computed:
            fields["id"] = (str, ...)
        for each in self.columns:
            own = (each.kind.field, ...) if each.is_required else (each.kind.field | None, None)
            fields[each.field] = own
        if self.form == "generated":
            fields["twice"] = (int | None, None)
        app.entity(self.entity, key="id", source="capture")(create_model(self.entity, **fields))


class World:
    """Random tables of one seed, and what happens to their rows."""

    def __init__(self, database: Database, seed: int, count: int) -> None:
        self.database, self._chance = database, random.Random(seed)
        self.sure = 1
        """How many tables are never refused, the first ones: the planted defects show there."""
        self.tables = [self._table(number) for number in range(count)]
        self._next = dict.fromkeys((table.name for table in self.tables), 1)
        self._prepared = 0
        self.statements: list[str] = []
        """All statements that were run, for whoever looks into a failure."""

    @property
    def captured(self) -> list[RandomTable]:
        """The tables that a capture must not refuse."""
        return [table for table in self.tables if table.refused is None]

    def _table(self, number: int) -> RandomTable:
        chance, kind = self._chance, self.database.kind
        name = f"t{number:03}{chance.choice(_SUFFIXES)}"
        shape_name = chance.choice([*KEYS[kind], "int", "int"])
        shape_name = "int" if number < self.sure else shape_name
        shape, refused, form, identity = KEYS[kind][shape_name], None, "", ""
        columns = [
            self._column(each, is_sure=number < self.sure) for each in range(chance.randint(1, 7))
        ]
        if number == 0:
            # A table in which each of the planted defects shows.
            text = next(each for each in KINDS[kind] if each.type == "text")
            columns.append(Column("note", "note", text, False, "'MANUAL'"))
        if kind != "postgresql":
            if number >= self.sure and chance.random() < 0.1:
                shape, refused = one_column("int", int, str, constraint=""), "no primary key"
        else:
            identity = chance.choice(("", "FULL"))
            if shape_name in ("int", "bigint") and number >= self.sure and chance.random() < 0.3:
                form = chance.choice(("parted", "unlogged", "generated"))
            if shape.needs_full or any(each.kind.needs_full for each in columns):
                identity = "FULL"
            elif shape_name == "unique":
                identity = chance.choice(("FULL", f"USING INDEX e{number:03}_key"))
            if form == "parted":
                # A shift of all keys would meet the key of the next row on its way.
                shape = (
                    KEYS[kind]["bigint"] if shape_name == "bigint" else one_column("int", int, str)
                )
            if form in ("unlogged", "generated"):
                refused = form
            elif "DEFERRABLE" in shape.constraint:
                refused = "deferrable"
            elif number >= self.sure and chance.random() < 0.1:
                identity, refused = "NOTHING", "UPDATE fails"
        bad = [each.kind.refused for each in columns if each.kind.refused]
        if bad:
            refused = refused or bad[0]
        elif number >= self.sure and chance.random() < 0.04:
            name, refused = name + chance.choice(_REFUSED_SUFFIXES[kind]), "a sign in its name"
        return RandomTable(
            name, f"e{number:03}", shape, tuple(columns), identity, refused, form,
            truncate=chance.random() < 0.4,
        )  # fmt: skip

    def _column(self, number: int, *, is_sure: bool) -> Column:
        chance, all_kinds = self._chance, KINDS[self.database.kind]
        common = [kind for kind in all_kinds if kind.refused is None]
        kind = chance.choice(common if is_sure or chance.random() < 0.9 else all_kinds)
        name, named = chance.choice(_NAMES)
        may_default = not (self.database.kind == "mariadb" and kind.type == "json")
        default = kind.values(chance) if may_default and chance.random() < 0.5 else None
        if (kind.type, default) == ("blob", "x''"):
            default = None  # a table with it is refused
        return Column(
            name.format(number), named.format(number), kind, chance.random() < 0.2, default
        )

    def app(
        self, dsn: str, tables: list[RandomTable] | None = None, *, dropped: bool = True
    ) -> App:
        """The project with a capture of these tables; ``None``: of all.

        ``dropped``: it declares the table :data:`DROPPED`, too.
        """
        app = App("shop")
        declared = {}
        for each in self.tables if tables is None else tables:
            each.declare(app)
            declared[f"{self.database.schema}.{each.name}"] = each.declaration()
        for name in (MARKER, *([DROPPED] if dropped else [])):
            app.entity(name, key="id", source="capture")(create_model(name, id=(int, ...)))
            declared[f"{self.database.schema}.{name}"] = Table(entity=name)
        app.capture("shop", kind=self.database.kind, dsn=dsn, tables=declared)
        return app

    def make(self) -> None:
        """Make all tables."""
        with self.database.connect() as connection, connection.cursor() as cursor:
            plain = [f"CREATE TABLE {name} (id int PRIMARY KEY)" for name in (MARKER, DROPPED)]
            for statement in (*self.database.prelude, *plain):
                self._run(cursor, statement)
            for table in self.tables:
                for statement in (self.creation(table), *self.database.extra(table)):
                    self._run(cursor, statement)
            connection.commit()

    def creation(self, table: RandomTable) -> str:
        """The statement that makes a table."""
        quote = self.database.name
        lines = [f"{name} {type_}" for name, type_, _ in table.key.columns]
        if table.form == "generated":
            lines.append("twice int GENERATED ALWAYS AS (id % 1000 * 2) STORED")
        for each in table.columns:
            default = "" if each.default is None else f" DEFAULT {each.default}"
            if default and self.database.kind == "mysql" and each.kind.type in _LARGE_IN_MYSQL:
                default = f" DEFAULT ({each.default})"
            # The first timestamp of MariaDB would be NOT NULL otherwise.
            null = " NOT NULL" if each.is_required else " NULL"
            lines.append(f"{quote(each.name)} {each.kind.type}{null}{default}")
        if table.key.constraint:
            names = ", ".join(name for name, _, _ in table.key.columns)
            made = table.key.constraint.format(names)
            lines.append(f"CONSTRAINT {table.entity}_key {made}")
        kind = "UNLOGGED TABLE" if table.form == "unlogged" else "TABLE"
        parted = " PARTITION BY RANGE (id)" if table.form == "parted" else ""
        return f"CREATE {kind} {quote(table.name)} ({', '.join(lines)}){parted}"

    def _run(self, cursor: Any, statement: str) -> None:
        self.statements.append(statement)
        cursor.execute(statement.encode() if self.database.kind == "postgresql" else statement)

    def fill(self, rows: int) -> None:
        """Insert rows into every table."""
        with self.database.connect() as connection, connection.cursor() as cursor:
            for table in self.tables:
                for _ in range(rows):
                    self._insert(cursor, table)
            self._run(cursor, f"INSERT INTO {DROPPED} VALUES (1)")
            connection.commit()

    def plant(self) -> None:
        """Write a null where the first table has a default.

        Rows of :data:`DROPPED` change in the same transaction.
        """
        with self.database.connect() as connection, connection.cursor() as cursor:
            self._insert(cursor, self.tables[0])
            keys = self._keys(cursor, self.tables[0])
            name = self.database.name(self.tables[0].name)
            where = self._where(self.tables[0], keys[-1])
            self._run(cursor, f"UPDATE {name} SET note = NULL WHERE {where}")
            # Nothing but its own insert makes the entity of this row.
            self._insert(cursor, self.tables[0])
            self._run(cursor, f"INSERT INTO {DROPPED} VALUES (2)")
            self._run(cursor, f"DELETE FROM {DROPPED} WHERE id = 1")
            connection.commit()

    def write(self, transactions: int) -> None:
        """Run random transactions over all captured tables; some are rolled back.

        Some are prepared first, and settings of session, role and database change between them.
        """
        with self.database.connect() as connection:
            for _ in range(transactions):
                if self._chance.random() < _SETTINGS:
                    with connection.cursor() as cursor:
                        self._run(cursor, self._chance.choice(self.database.settings))
                    connection.commit()
                with self._transaction(connection), connection.cursor() as cursor:
                    for _ in range(self._chance.randint(1, 6)):
                        self._statement(cursor, self._chance.choice(self.captured))

    @contextmanager
    def _transaction(self, connection: Any) -> Iterator[None]:
        is_kept = self._chance.random() >= 0.1
        if self._chance.random() < _TWO_PHASES:
            self._prepared += 1
            yield from self.database.two_phases(connection, self._prepared, is_kept=is_kept)
            return
        yield
        connection.commit() if is_kept else connection.rollback()

    def unseen(self, count: int) -> None:
        """Run statements that change rows without row events, each in its own transaction.

        The first tables are left as they are: their raw rows alone are compared, too.
        """
        for _ in range(count):
            table = self._chance.choice(self.captured[self.sure :])
            name = self.database.name(table.name)
            if table.form == "parted":
                part = self.database.name(f"{table.entity}_{self._chance.randrange(2)}")
                statements = [f"TRUNCATE {part}"]
            else:
                loose = [each for each in table.columns if not each.is_required]
                if not loose:
                    continue
                column = self._chance.choice(loose)
                quoted_name = self.database.name(column.name)
                default = column.kind.values(self._chance)
                if default == "x''":
                    default = "NULL"  # Debezium cannot read the statement, which status reports
                statements = [
                    f"ALTER TABLE {name} DROP COLUMN {quoted_name}, "
                    f"ADD COLUMN {quoted_name} {column.kind.type} NULL DEFAULT {default}",
                    *self.database.extra(table),
                ]
            with self.database.connect() as connection, connection.cursor() as cursor:
                for statement in statements:
                    self._run(cursor, statement)
                connection.commit()

    def finish(self) -> None:
        """Write the row of the last table."""
        with self.database.connect() as connection, connection.cursor() as cursor:
            self._run(cursor, f"INSERT INTO {MARKER} VALUES (1)")
            connection.commit()

    def _statement(self, cursor: Any, table: RandomTable) -> None:
        chance, name = self._chance, self.database.name(table.name)
        keys = self._keys(cursor, table)
        if not keys or chance.random() < 0.35:
            for _ in range(chance.choice((1, 1, 4))):
                self._insert(cursor, table)
            return
        key = chance.choice(keys)
        match chance.choice(("update", "update", "update", "many", "move", "delete", "again",
                             "shift", "truncate", "same")):  # fmt: skip
            case "update":
                self._update(cursor, table, [key])
            case "many":
                self._update(cursor, table, chance.sample(keys, min(len(keys), 5)))
            case "move":
                self._move(cursor, table, key, self._new_key(table))
            case "delete":
                self._run(cursor, f"DELETE FROM {name} WHERE {self._where(table, key)}")
            case "again":
                # Another row moves to the key of a row that is deleted.
                other = chance.choice(keys)
                if other != key:
                    self._run(cursor, f"DELETE FROM {name} WHERE {self._where(table, other)}")
                    self._move(cursor, table, key, other)
            case "shift" if table.key.is_shifted:
                self._shift(cursor, table)
            case "truncate" if table.truncate and chance.random() < 0.3:
                if self.database.kind == "postgresql":  # MariaDB commits before it.
                    self._run(cursor, f"TRUNCATE {name}")
            case "same":
                column = self.database.name(table.columns[0].name)
                self._run(cursor, f"UPDATE {name} SET {column} = {column}")

    def _shift(self, cursor: Any, table: RandomTable) -> None:
        """Each row gets the key of the next one, in one statement where the database allows it."""
        name = self.database.name(table.name)
        if self.database.kind != "postgresql":
            self._run(cursor, f"UPDATE {name} SET id = id + 1 ORDER BY id DESC")
        else:
            self._run(cursor, f"UPDATE {name} SET id = id + 5000")
            self._run(cursor, f"UPDATE {name} SET id = id - 4999")
        self._next[table.name] += 1

    def _new_key(self, table: RandomTable) -> Key:
        number = self._next[table.name]
        self._next[table.name] += 1
        return table.key.values(number)

    def _keys(self, cursor: Any, table: RandomTable) -> list[Key]:
        names = ", ".join(name for name, _, _ in table.key.columns)
        cursor.execute(f"SELECT {names} FROM {self.database.name(table.name)} ORDER BY {names}")
        return [tuple(map(str, row)) for row in cursor.fetchall()]

    def _where(self, table: RandomTable, key: Key) -> str:
        return " AND ".join(
            f"{name} = {self.database.literal(value)}"
            for (name, _, _), value in zip(table.key.columns, key, strict=True)
        )

    def _value(self, column: Column) -> str:
        chance = self._chance
        if not column.is_required and chance.random() < _NULLS:
            return "NULL"
        if column.kind.long is not None and chance.random() < 0.2:
            return column.kind.long
        return column.kind.values(chance)

    def _insert(self, cursor: Any, table: RandomTable) -> None:
        given: dict[str, str] = {}
        if not (table.key.is_generated and self._chance.random() < 0.5):
            key = self._new_key(table)
            for (name, _, _), value in zip(table.key.columns, key, strict=True):
                given[name] = self.database.literal(value)
        for each in table.columns:
            may_miss = not each.is_required or each.default is not None
            if not (may_miss and self._chance.random() < 0.3):
                given[self.database.name(each.name)] = self._value(each)
        if not given:
            given[self.database.name(table.columns[0].name)] = self._value(table.columns[0])
        name = self.database.name(table.name)
        self._run(
            cursor, f"INSERT INTO {name} ({', '.join(given)}) VALUES ({', '.join(given.values())})"
        )

    def _update(self, cursor: Any, table: RandomTable, keys: list[Key]) -> None:
        chosen = self._chance.sample(table.columns, self._chance.randint(1, len(table.columns)))
        sets = ", ".join(f"{self.database.name(c.name)} = {self._value(c)}" for c in chosen)
        where = " OR ".join(f"({self._where(table, key)})" for key in keys)
        self._run(cursor, f"UPDATE {self.database.name(table.name)} SET {sets} WHERE {where}")

    def _move(self, cursor: Any, table: RandomTable, key: Key, new: Key) -> None:
        sets = ", ".join(
            f"{name} = {self.database.literal(value)}"
            for (name, _, _), value in zip(table.key.columns, new, strict=True)
        )
        name = self.database.name(table.name)
        self._run(cursor, f"UPDATE {name} SET {sets} WHERE {self._where(table, key)}")

    def printed(self, table: RandomTable) -> Printed:
        """The rows of a table as the database prints them."""
        keys = [name for name, _, _ in table.key.columns]
        shown = [*keys, *(each.kind.shown.format(self.database.name(each.name))
                          for each in table.columns)]  # fmt: skip
        names = [*keys, *(each.field for each in table.columns)]
        rows = {}
        for found in self.database.printed(
            f"SELECT {', '.join(shown)} FROM {self.database.name(table.name)}"
        ):
            row = dict(zip(names, found, strict=True))
            key = row["id"] if table.key.computed is None else table.key.computed(row)
            assert key is not None
            rows[key] = row
        return rows


def differences(
    table: RandomTable, printed: Printed, states: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """Where the newest states of a table's entities are not its rows, value by value.

    ``states``: key → state of each entity that is not deleted.
    """
    where, found = f"{table.name} ({table.entity})", []
    found += [f"{where} {key}: no entity" for key in printed.keys() - states.keys()]
    found += [f"{where} {key}: no row" for key in states.keys() - printed.keys()]
    for key in printed.keys() & states.keys():
        state = states[key]
        for each in table.columns:
            text = printed[key][each.field]
            if each.field not in state:
                found.append(f"{where} {key}: {each.field} is missing")
                continue
            value, rule = state[each.field], SAME[each.kind.same]
            wanted = None if text is None else rule.printed(text)
            if (value is None) != (text is None) or (
                text is not None and rule.told(value) != wanted
            ):
                found.append(f"{where} {key}: {each.field} ({each.kind.type}) is {value!r:.200} "
                             f"and not {text!r:.200}")  # fmt: skip
        found += [
            f"{where} {key}: {name} is {state[name]!r} and not {printed[key][name]!r}"
            for name, _, _ in table.key.columns
            if str(state[name]) != printed[key][name]
        ]
    return found
