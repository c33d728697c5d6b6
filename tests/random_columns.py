"""Types of columns with random values, and when a field's value equals what the database prints."""

from __future__ import annotations

import base64
import json
import random
import re
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Annotated, Any, NamedTuple
from uuid import UUID

from pydantic import Field, NaiveDatetime

Chance = random.Random
Value = Callable[[Chance], str]
"""Makes a random value, as an SQL literal."""


class Rule(NamedTuple):
    """When a printed text and a field's JSON value are equal: both functions give the same."""

    printed: Callable[[str], Any] = str
    told: Callable[[Any], Any] = lambda value: value


def _micros(text: str) -> int:
    hours, minutes, seconds = text.split(":")
    whole, _, fraction = seconds.partition(".")
    found = (int(hours) * 60 + int(minutes)) * 60 + int(whole)
    return found * 1_000_000 + int(fraction.ljust(6, "0") or 0)


def _instant(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(UTC)


def _interval(text: str) -> tuple[int, int, Decimal]:
    """Months, days and seconds of an ISO interval."""
    dates, _, times = text.removeprefix("P").partition("T")
    found = {unit: Decimal(number) for number, unit in re.findall(r"(-?[\d.]+)([YMWD])", dates)}
    parts = {unit: Decimal(number) for number, unit in re.findall(r"(-?[\d.]+)([HMS])", times)}
    months = int(found.get("Y", 0) * 12 + found.get("M", 0))
    seconds = parts.get("H", 0) * 3600 + parts.get("M", 0) * 60 + parts.get("S", 0)
    return months, int(found.get("D", 0)), Decimal(seconds)


SAME: dict[str, Rule] = {
    "text": Rule(),
    "whole": Rule(int),
    "number": Rule(float),
    "truth": Rule(lambda text: text in ("t", "1")),
    "bit": Rule(lambda text: int(text, 2) == 1),
    "decimal": Rule(Decimal, Decimal),  # a field of Decimal has the value, not the digits
    "money": Rule(lambda text: text.replace("$", "").replace(",", "")),
    "instant": Rule(_instant, _instant),
    "utc": Rule(lambda text: _instant(f"{text}+00:00"), _instant),  # printed by a session in UTC
    "local": Rule(datetime.fromisoformat, datetime.fromisoformat),
    "micros": Rule(_micros),
    "interval": Rule(_interval, _interval),
    "hex": Rule(lambda text: bytes.fromhex(text.removeprefix("\\x")), base64.b64decode),
    "bits": Rule(
        lambda text: int(text, 2), lambda told: int.from_bytes(base64.b64decode(told), "little")
    ),
    "json": Rule(json.loads),  # of to_json(…), for arrays and hstore
    "document": Rule(json.loads, json.loads),
}  # fmt: skip
"""All rules of comparison. Everything else is the printed text itself."""


class Kind(NamedTuple):
    """A type of a column."""

    type: str
    field: Any
    same: str
    values: Value
    long: str | None = None
    """An SQL expression for a value that is stored apart from its row."""
    refused: str | None = None
    """Why no field may have values of it."""
    needs_full: bool = False
    """Debezium does not mark an unchanged value that is stored apart."""
    shown: str = "{}"
    """SQL expression that prints a value of it, of the column's name."""
    unit: Any = None
    """How it is declared, which says that no date of it has month 0, day 0 or the year 0000."""


WORDS = (
    "", "plain", "two words", "it's \"quoted\"", "back\\slash", "tab\tand\nline", "größe 東京 🙂",
    "NULL", "0", " blanks ", "{}", "a,b;c", "%s %d", "\u2028", "</x>&amp;",
)  # fmt: skip


def quoted(text: str, *, escapes: bool = False) -> str:
    """An SQL literal; ``escapes``: of MariaDB, where a backslash escapes the next sign."""
    if escapes:
        text = text.replace("\\", "\\\\")
    return "'" + text.replace("'", "''") + "'"


def one_of(*values: str) -> Value:
    return lambda chance: chance.choice(values)


def whole(least: int, most: int) -> Value:
    return lambda chance: str(chance.choice((least, most, 0, chance.randint(least, most))))


def word(longest: int = 40, *, escapes: bool = False) -> Value:
    return lambda chance: quoted(chance.choice(WORDS)[:longest], escapes=escapes)


def exact(digits: int, scale: int) -> Value:
    def make(chance: Chance) -> str:
        number = chance.randrange(10 ** chance.randint(1, digits))
        return str(Decimal(chance.choice((1, -1)) * number).scaleb(-scale))

    return make


def double(chance: Chance) -> str:
    return chance.choice(("0", "-0.1", "1e100", "2.5e-10", repr(chance.uniform(-1e6, 1e6))))


def day(least: str, most: str) -> Value:
    """Days; those that the calendar left out in October 1582 are not among them."""
    first, last = date.fromisoformat(least), date.fromisoformat(most)

    def make(chance: Chance) -> str:
        found = first + timedelta(chance.choice((0, (last - first).days, chance.randrange(9000))))
        if (found.year, found.month) == (1582, 10):
            found = first
        return f"'{found.isoformat()}'"

    return make


def moment(least: str, most: str, suffix: str = "") -> Value:
    first, last = datetime.fromisoformat(least), datetime.fromisoformat(most)

    def make(chance: Chance) -> str:
        found = first + timedelta(microseconds=chance.randrange(10**17))
        return f"'{chance.choice((first, last, min(found, last))).isoformat(' ')}{suffix}'"

    return make


def clock(chance: Chance) -> str:
    seconds = chance.randrange(86_400)
    hours = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    return f"'{chance.choice(('00:00:00', '23:59:59.999999', f'{hours}.{seconds:06}', hours))}'"


def uuid(chance: Chance) -> str:
    return f"'{UUID(int=chance.getrandbits(128), version=4)}'"


def octets(chance: Chance) -> bytes:
    return chance.choice((b"", b"\x00\xff'\\", chance.randbytes(chance.randint(1, 20))))


def document(chance: Chance, *, escapes: bool = False) -> str:
    made: dict[str, Any] = {
        "a": chance.choice((1, 1.5, None, [])),
        "ü": chance.choice(WORDS),
        "b": {"c": True},
    }
    return quoted(json.dumps(made, ensure_ascii=chance.random() < 0.5), escapes=escapes)


def array(value: Value, type_: str) -> Value:
    def make(chance: Chance) -> str:
        listed = [value(chance) for _ in range(chance.randint(0, 4))]
        if listed and chance.random() < 0.3:
            # Not nulls alone: Debezium writes a nested array so.
            listed.append("NULL")
        return f"ARRAY[{', '.join(listed)}]::{type_}[]"

    return make


def list_of(item: Any) -> Any:
    return list[item | None]


LONG = "(SELECT string_agg(md5(i::text), '') FROM generate_series(1, 300) i)"
LONG_MARIA = "(SELECT GROUP_CONCAT(MD5(seq) SEPARATOR '') FROM seq_1_to_30)"
_MANY = "(SELECT array_agg({}) FROM generate_series(1, 2000) i)"
_JSON = "to_json({})"
POSTGRES = (
    Kind("smallint", int, "whole", whole(-(2**15), 2**15 - 1)),
    Kind("integer", int, "whole", whole(-(2**31), 2**31 - 1)),
    Kind("bigint", int, "whole", whole(-(2**63), 2**63 - 1)),
    Kind("oid", int, "whole", whole(0, 2**32 - 1)),
    Kind("boolean", bool, "truth", one_of("true", "false")),
    Kind("text", str, "text", word(), LONG),
    Kind("varchar(40)", str, "text", word()),
    Kind("char(8)", str, "text", word(8)),
    Kind("citext", str, "text", word(), LONG),
    Kind("word", str, "text", word(), LONG),
    Kind("xml", str, "text", one_of("'<a/>'", "'<a b=\"1\">ü &amp; x</a>'"),
         f"('<a>' || {LONG} || '</a>')::xml"),
    Kind("numeric", str, "text", lambda c: exact(30, c.randint(0, 12))(c),
         f"('1' || translate({LONG}, 'abcdef', '123456'))::numeric"),
    Kind("numeric(12,4)", str, "text", exact(12, 4)),
    Kind("numeric(18,2)", Annotated[Decimal, Field(max_digits=18, decimal_places=2)], "decimal",
         exact(18, 2)),
    Kind("money", str, "money", exact(14, 2)),
    Kind("real", float, "number", one_of("0", "0.1", "-1.5", "3.4e38", "1e-30", "16777216")),
    Kind("double precision", float, "number", double),
    Kind("date", date, "text", day("0001-01-01", "9999-12-31")),
    Kind("timestamp", NaiveDatetime, "local", moment("0001-01-01", "9999-12-31 23:59:59.999999")),
    Kind("timestamp(3)", NaiveDatetime, "local", moment("1500-03-01", "2100-01-01")),
    Kind("timestamptz", datetime, "instant",
         moment("0001-01-02", "9999-12-30 23:59:59.999999", "+00")),
    Kind("timestamptz(0)", datetime, "instant", moment("1500-03-01", "2100-01-01", "-07:30")),
    Kind("time", int, "micros", clock),
    Kind("interval", str, "interval",
         one_of("'1 year 2 mons 3 days 04:05:06.789'", "'-5 days'", "'0'", "'-1 mon +2 days'")),
    Kind("uuid", UUID, "text", uuid),
    Kind("json", str, "text", document, f"to_json({LONG})"),
    Kind("jsonb", str, "text", document, f"to_jsonb({LONG})"),
    Kind("bytea", str, "hex", lambda c: f"'\\x{octets(c).hex()}'", f"{LONG}::bytea"),
    Kind("bit(1)", bool, "bit", one_of("B'0'", "B'1'")),
    Kind("bit(12)", str, "bits", lambda c: f"B'{c.getrandbits(12):012b}'"),
    Kind("mood", str, "text", one_of("'happy'", "'so so'", "'sad'")),
    Kind("inet", str, "text", one_of("'10.0.0.1'", "'10.1.0.0/16'", "'2001:db8::1'")),
    Kind("cidr", str, "text", one_of("'10.0.0.0/8'", "'2001:db8::/32'")),
    Kind("macaddr", str, "text", one_of("'08:00:2b:01:02:03'")),
    Kind("int4range", str, "text", one_of("'empty'", "'[1,5)'", "'(,7]'")),
    Kind("daterange", str, "text", one_of("'[2020-01-01,2020-02-01)'", "'empty'")),
    Kind("tsvector", str, "text", one_of("'a:1 b:2'", "''"),
         LONG.replace("''", "' '") + "::tsvector"),
    Kind("hstore", dict[str, str | None], "json", one_of("'a=>1'", "''", "'x=>NULL,\"y z\"=>ü'"),
         shown="hstore_to_json({})"),
    Kind("text[]", list_of(str), "json", array(word(), "text"), _MANY.format("md5(i::text)"),
         shown=_JSON),
    Kind("integer[]", list_of(int), "json", array(whole(-9, 9), "integer"), _MANY.format("i"),
         shown=_JSON),
    Kind("uuid[]", list_of(UUID), "json", array(uuid, "uuid"), shown=_JSON),
    Kind("float8[]", list_of(float), "json", array(one_of("1.5", "-2"), "float8"),
         _MANY.format("i * 1.5::float8"), needs_full=True, shown=_JSON),
    Kind("timetz", str, "text", one_of("'12:00+02'"), refused="in UTC"),
    Kind("time[]", list_of(int), "json", array(clock, "time"), refused="milliseconds"),
    Kind("name", str, "text", one_of("'n'"), refused="left out"),
    Kind("int4multirange", str, "text", one_of("'{}'"), refused="carries no values"),
)  # fmt: skip

_LARGE = Annotated[Decimal, Field(max_digits=20, decimal_places=0)]
_HEX = "HEX({})"
MARIADB = (
    Kind("tinyint", int, "whole", whole(-128, 127)),
    Kind("smallint unsigned", int, "whole", whole(0, 2**16 - 1)),
    Kind("mediumint", int, "whole", whole(-(2**23), 2**23 - 1)),
    Kind("int", int, "whole", whole(-(2**31), 2**31 - 1)),
    Kind("int unsigned", int, "whole", whole(0, 2**32 - 1)),
    Kind("bigint", int, "whole", whole(-(2**63), 2**63 - 1)),
    Kind("bigint unsigned", _LARGE, "decimal", whole(0, 2**64 - 1)),
    Kind("boolean", int, "whole", one_of("0", "1")),
    Kind("varchar(80)", str, "text", word(escapes=True)),
    Kind("char(20)", str, "text", lambda c: quoted(c.choice(WORDS).rstrip(" "), escapes=True)),
    Kind("text", str, "text", word(escapes=True), LONG_MARIA),
    Kind("longtext", str, "text", word(escapes=True), LONG_MARIA),
    Kind("varchar(80) CHARACTER SET latin1", str, "text", one_of("'größe'", "'ÿ'", "''")),
    Kind("decimal(20,6)", str, "text", exact(20, 6)),
    Kind("decimal(12,2)", Annotated[Decimal, Field(max_digits=12, decimal_places=2)], "decimal",
         exact(12, 2)),
    Kind("double", float, "number", double),
    Kind("date", date, "text", day("1971-01-01", "9999-12-31"), unit="days"),
    Kind("datetime(6)", NaiveDatetime, "local",
         moment("1000-01-01", "9999-12-31 23:59:59.999999"), unit="us"),
    Kind("datetime", NaiveDatetime, "local", moment("1971-01-01", "2100-01-01"),
         unit="us"),
    Kind("timestamp(6)", datetime, "utc", moment("1971-01-01", "2037-12-31 23:59:59.999999"),
         unit="us"),
    Kind("time(6)", int, "micros", clock),
    Kind("year", int, "whole", one_of("1901", "2026", "2155"), unit=int),
    Kind("enum('a', 'b c', 'ü')", str, "text", one_of("'a'", "'b c'", "'ü'")),
    Kind("set('x', 'y', 'z')", str, "text", one_of("''", "'x'", "'x,z'")),
    Kind("json", str, "text", lambda c: document(c, escapes=True)),
    Kind("varbinary(40)", str, "hex", lambda c: f"x'{octets(c).hex()}'", shown=_HEX),
    Kind("blob", str, "hex", lambda c: f"x'{octets(c).hex()}'", shown=_HEX),
    Kind("bit(1)", bool, "truth", one_of("b'0'", "b'1'"), shown="{} + 0"),
)  # fmt: skip
MYSQL = tuple(
    kind._replace(same="document", unit="json") if kind.type == "json" else kind for kind in MARIADB
)
KINDS = {"postgresql": POSTGRES, "mariadb": MARIADB, "mysql": MYSQL}
