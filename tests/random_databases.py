"""The two kinds of databases in which :mod:`random_tables` are made, and how these print values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

import psycopg
import pymysql

from capture_cases import TRUSTING
from everstate.declarations.captures import DatabaseKind
from random_columns import quoted

if TYPE_CHECKING:
    from random_tables import RandomTable


class Database(Protocol):
    """What differs between the two kinds of databases."""

    kind: DatabaseKind
    schema: str

    @property
    def prelude(self) -> list[str]:
        """Statements that make the types of :data:`random_columns.KINDS`."""

    def name(self, name: str) -> str:
        """An identifier as SQL."""

    def literal(self, text: str) -> str:
        """A text as SQL."""

    def extra(self, table: RandomTable) -> list[str]:
        """Statements after CREATE TABLE."""

    @property
    def settings(self) -> list[str]:
        """Statements after which sessions print or read values in another way."""

    def connect(self) -> Any:
        """A connection whose cursors run statements, without autocommit."""

    def two_phases(self, connection: Any, number: int, *, is_kept: bool) -> Iterator[None]:
        """Prepare what is run at the ``yield``, then commit it, or not."""

    def printed(self, query: str) -> list[tuple[str | None, ...]]:
        """Rows of a query, each value as the database prints it."""


@dataclass
class Postgres:
    """A database of PostgreSQL."""

    dsn: str
    kind: DatabaseKind = "postgresql"
    schema: str = "public"

    @property
    def prelude(self) -> list[str]:
        return [
            "CREATE EXTENSION citext", "CREATE EXTENSION hstore",
            "CREATE TYPE mood AS ENUM ('happy', 'so so', 'sad')",
            "CREATE DOMAIN word AS text DEFAULT 'of the domain'",
        ]  # fmt: skip

    def name(self, name: str) -> str:
        return '"' + name.replace('"', '""') + '"'

    def literal(self, text: str) -> str:
        return quoted(text)

    def extra(self, table: RandomTable) -> list[str]:
        name = self.name(table.name)
        made = [f"ALTER TABLE {name} REPLICA IDENTITY {table.identity}"] if table.identity else []
        if table.form == "parted":
            made = []
            for number, span in enumerate(("(MINVALUE) TO (10)", "(10) TO (MAXVALUE)")):
                part = self.name(f"{table.entity}_{number}")
                made.append(f"CREATE TABLE {part} PARTITION OF {name} FOR VALUES FROM {span}")
                if table.identity:
                    made.append(f"ALTER TABLE {part} REPLICA IDENTITY {table.identity}")
            return made
        # Not compressed: a long value is stored apart.
        return made + [
            f"ALTER TABLE {name} ALTER {self.name(each.name)} SET STORAGE EXTERNAL"
            for each in table.columns
            if each.kind.long is not None and each.kind.type != "numeric"
        ]

    @property
    def settings(self) -> list[str]:
        chosen = (
            "bytea_output = escape", "intervalstyle = sql_standard", "intervalstyle = iso_8601",
            "extra_float_digits = -15", "datestyle = 'German, DMY'", "datestyle = 'SQL, MDY'",
            "timezone = 'Asia/Kathmandu'", "timezone = 'America/New_York'", "xmlbinary = hex",
            "synchronous_commit = off", "default_transaction_isolation = 'repeatable read'",
        )  # fmt: skip
        name = self.name(urlsplit(self.dsn).path.removeprefix("/"))
        whose = (f"ALTER DATABASE {name} SET", f"ALTER ROLE CURRENT_USER IN DATABASE {name} SET")
        return [f"{each} {one}" for each in ("SET", *whose) for one in chosen]

    def connect(self) -> Any:
        return psycopg.connect(self.dsn)

    def two_phases(self, connection: Any, number: int, *, is_kept: bool) -> Iterator[None]:
        connection.tpc_begin(f"{urlsplit(self.dsn).path} {number}")
        yield
        connection.tpc_prepare()
        connection.tpc_commit() if is_kept else connection.tpc_rollback()

    def printed(self, query: str) -> list[tuple[str | None, ...]]:
        fixed = (
            "intervalstyle=iso_8601",
            "bytea_output=hex",
            "extra_float_digits=1",
            "datestyle=ISO",
        )
        options = " ".join(f"-c {each}" for each in (*fixed, "timezone=UTC"))
        with psycopg.connect(self.dsn, options=options) as connection:
            found = connection.execute(query.encode()).pgresult
        assert found is not None
        return [
            tuple(
                None if (value := found.get_value(row, column)) is None else value.decode()
                for column in range(found.nfields)
            )
            for row in range(found.ntuples)
        ]


@dataclass
class Maria:
    """A database of MariaDB, or of MySQL."""

    dsn: str
    schema: str
    kind: DatabaseKind = "mariadb"
    prelude: list[str] = field(default_factory=list)

    def name(self, name: str) -> str:
        return "`" + name.replace("`", "``") + "`"

    def literal(self, text: str) -> str:
        return quoted(text, escapes=True)

    def extra(self, table: RandomTable) -> list[str]:
        return []

    @property
    def settings(self) -> list[str]:
        chosen = (
            "time_zone = '+05:45'", "time_zone = '-09:00'", "sql_mode = 'ANSI_QUOTES'",
            "sql_mode = 'STRICT_ALL_TABLES,PIPES_AS_CONCAT'", "sql_mode = ''",
            "transaction_isolation = 'SERIALIZABLE'", "foreign_key_checks = OFF",
        )  # fmt: skip
        return [f"SET SESSION {each}" for each in chosen]

    def connect(self) -> Any:
        parts = urlsplit(self.dsn)
        return pymysql.connect(
            host=parts.hostname, port=parts.port or 3306, user=parts.username,
            password=parts.password or "", database=self.schema, charset="utf8mb4",
            init_command="SET time_zone = '+00:00', sql_mode = 'STRICT_ALL_TABLES'",
            ssl=TRUSTING if self.kind == "mysql" else None,
        )  # fmt: skip

    def two_phases(self, connection: Any, number: int, *, is_kept: bool) -> Iterator[None]:
        with connection.cursor() as cursor:
            name = f"'{self.schema} {number}'"
            cursor.execute(f"XA START {name}")
            yield
            for each in ("END", "PREPARE", "COMMIT" if is_kept else "ROLLBACK"):
                cursor.execute(f"XA {each} {name}")

    def printed(self, query: str) -> list[tuple[str | None, ...]]:
        # Without converters the driver gives the text that the server sends.
        with self.connect() as connection:
            connection.decoders = {}
            with connection.cursor() as cursor:
                cursor.execute(query)
                return [tuple(map(_text, row)) for row in cursor.fetchall()]


def _text(value: Any) -> str | None:
    return value.decode() if isinstance(value, bytes) else value
