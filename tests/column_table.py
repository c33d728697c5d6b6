"""The table of columns: each type of PostgreSQL and MariaDB, and what becomes of its values.

`test_cdc_types_captured` runs it on the servers, by snapshot and by stream, and compares with what
the database itself prints; `docs/generate.py` writes its part of `docs/reference/types.md` from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import date, datetime
from decimal import Decimal
from typing import Annotated, Any, Final
from uuid import UUID

import msgspec
from pydantic import Field, NaiveDatetime

from column_forms import (
    Circle,
    Drawn,
    Line,
    Point,
    Shape,
    bits,
    box,
    circle,
    coordinates,
    drawn,
    elements,
    from_hex,
    hstore,
    iso,
    iso_interval,
    listed,
    micros,
    numbers,
    octets,
    path,
    plain,
    ring,
    shape,
)
from everstate.declarations.captures import Convert

NULL = "NULL"
INFINITE = "infinity, or outside of the years 1 to 9999"
NOT_FINITE = "NaN and infinity are refused"
CALENDAR = "before 15 October 1582 Debezium writes it by another calendar"
EPOCH = (
    "it cannot be distinguished from a date with month 0 or day 0; "
    "`types` can say that there is none"
)


@dataclass(frozen=True, kw_only=True)
class Column:
    """A type of a column, the field for it, and its values in SQL."""

    type: str
    field: Any
    shown: str = "str"
    """The field's annotation, for people."""
    values: tuple[str, ...]
    """They arrive equal."""
    dead: Mapping[str, str] = field(default_factory=dict)
    """Value → why its row becomes a dead letter."""
    of_text: Callable[[str], Any] = str
    """The field's JSON, of the database's text of the value."""
    form: str = "the text"
    """What the field has, in words."""
    default: str | None = None
    check: str | None = None
    """A CHECK without which the column is refused."""
    types: Convert | None = None
    """Declared in ``Table.types``."""
    printed: str | None = None
    """SQL expression of the text that is compared, of the column's name; ``None``: a cast."""


TIMES = ("'1500-03-01 12:00:00.123456'", "'0001-01-01'", "'9999-12-31 23:59:59.999999'")
Exact = Annotated[Decimal, Field(max_digits=38, decimal_places=10)]
Large = Annotated[Decimal, Field(max_digits=20, decimal_places=0)]
_WHOLE: Final[dict[str, Any]] = {"field": int, "shown": "int", "of_text": int, "form": "the number"}
_FLOAT: Final[dict[str, Any]] = {
    "field": float,
    "shown": "float",
    "of_text": float,
    "form": "the number",
}
_DAY: Final[dict[str, Any]] = {"field": date, "shown": "date", "form": "the day"}
_LOCAL: Final[dict[str, Any]] = {
    "field": NaiveDatetime,
    "shown": "NaiveDatetime",
    "of_text": iso,
    "form": "the time",
}
_AT: Final[dict[str, Any]] = {"field": datetime, "shown": "datetime", "form": "the time in UTC"}
_CLOCK: Final[dict[str, Any]] = {
    "field": int,
    "shown": "int",
    "of_text": micros,
    "form": "microseconds",
}
_BYTES: Final[dict[str, Any]] = {"field": str, "form": "base64"}
_OCTETS: Final[dict[str, Any]] = {**_BYTES, "of_text": from_hex, "printed": "hex({})"}
_DRAWN: Final[dict[str, Any]] = {
    "field": Drawn,
    "shown": "a model with wkb, extensions",
    "form": "WKB in base64",
}
_BITS: Final[dict[str, Any]] = {
    "field": str,
    "of_text": octets,
    "form": "the bits as a number, its lowest byte first, in base64",
}
_FLAG: Final[dict[str, Any]] = {
    "field": bool,
    "shown": "bool",
    "of_text": "1".__eq__,
    "form": "true or false",
    "printed": "bin({})",
}
_SHAPE: Final[dict[str, Any]] = {
    "field": Shape,
    "shown": "a model with wkb, srid",
    "of_text": shape,
    "form": "WKB in base64, and the SRID or null",
    "printed": "concat(ST_SRID({0}), ' ', hex(ST_AsWKB({0})))",
}
_TEXTS: Final[dict[str, Any]] = {
    "field": list[str | None],
    "shown": "list[str]",
    "of_text": elements,
    "form": "the texts",
}
NESTED: Final = "it is a nested array"

POSTGRES: Final = {
    "i2": Column(type="smallint", values=(NULL, "-32768", "32767"), default="7", **_WHOLE),
    "i4": Column(type="int", values=("-2147483648", "2147483647"), **_WHOLE),
    "i8": Column(
        type="bigint", values=(NULL, "-9223372036854775808", "9223372036854775807"), default="7",
        **_WHOLE,
    ),
    "oid": Column(type="oid", values=("4294967295",), **_WHOLE),
    "f4": Column(
        type="real", values=("1.1", "3.4028235e38", "16777216"),
        dead=dict.fromkeys(("'NaN'", "'-Infinity'"), NOT_FINITE), **_FLOAT,
    ),
    "f8": Column(
        type="double precision", values=("0.1", "5e-324", "1.7976931348623157e308", "'-0'"),
        dead=dict.fromkeys(("'NaN'", "'Infinity'"), NOT_FINITE), **_FLOAT,
    ),
    "num": Column(
        type="numeric", field=str,
        values=(NULL, "12345678901234567890.1234567890", "1e-30", "0.00"),
        dead={"'NaN'": "`types` says 'numeric' for it"}, default="5", form="the digits",
    ),
    "nan": Column(
        type="numeric", field=str, values=("'NaN'", "'-Infinity'"), types="numeric",
        form="with `types` 'numeric': PostgreSQL's word",
    ),
    "dec": Column(
        type="numeric(38,10)", field=Exact, shown="Decimal",
        values=("1234567890123456789012345678.1234567890", "-0.0000000001"),
        dead={"'NaN'": NOT_FINITE}, of_text=lambda text: str(Decimal(text)), form="the number",
    ),
    "flag": Column(
        type="boolean", field=bool, shown="bool", values=(NULL, "false", "true"), default="true",
        of_text="true".__eq__, form="true or false",
    ),
    "word": Column(
        type="text", field=str, values=(NULL, "''", "'é😀'", "' a '"), default="'MANUAL'"
    ),
    "vc": Column(type="varchar(20)", field=str, values=("'a  '",)),
    "ch": Column(
        type="char(5)", field=str, values=("'a'",), of_text=lambda text: text.ljust(5),
        form="the text with its blanks",
    ),
    "ci": Column(type="citext", field=str, values=("'Ab'",)),
    "mood": Column(type="mood", field=str, values=(NULL, "'ok'"), default="'sad'"),
    "doc": Column(
        type="jsonb", field=str, values=(NULL, "'{\"a\": 1.10}'", "'12345678901234567890.12'"),
        default="'{}'",
    ),
    "js": Column(type="json", field=str, values=("'{\"b\": 1.10,  \"a\":1, \"a\":2}'",)),
    "xm": Column(type="xml", field=str, values=("'<a/>'",)),
    "by": Column(type="bytea", values=("'\\x00ff61'", "''"), of_text=from_hex, **_BYTES),
    "bit1": Column(
        type="bit(1)", field=bool, shown="bool", values=("B'1'", "B'0'"), of_text="1".__eq__,
        form="true or false",
    ),
    "bits": Column(
        type="bit(12)", field=str, values=("B'101010101011'", "B'000000000001'"), of_text=bits,
        form="the bits as a number, its lowest byte first, in base64",
    ),
    "day": Column(
        type="date", values=(NULL, "'1500-03-01'", "'0001-01-01'", "'9999-12-31'"),
        dead=dict.fromkeys(("'infinity'", "'10000-01-01'"), INFINITE), default="'2020-01-01'",
        **_DAY,
    ),
    "local": Column(
        type="timestamp",
        values=(NULL, *TIMES),
        dead=dict.fromkeys(("'infinity'", "'0044-03-15 BC'"), INFINITE), default="'2020-01-01'",
        **_LOCAL,
    ),
    "at": Column(
        type="timestamptz", of_text=lambda text: iso(text.replace("+00", "Z")),
        values=(NULL, "'1500-03-01 12:00:00.123456+00'", "'0001-01-01 00:00+00'"),
        dead=dict.fromkeys(("'-infinity'", "'10000-01-01 00:00+00'"), INFINITE),
        default="'2020-01-01'", **_AT,
    ),
    "clock": Column(type="time", values=("'00:00'", "'24:00'", "'23:59:59.999999'"), **_CLOCK),
    "uu": Column(
        type="uuid", field=UUID, shown="UUID", values=("'123e4567-e89b-12d3-a456-426655440000'",),
    ),
    "inet": Column(
        type="inet", field=str, values=("'10.1.2.3/8'", "'10.1.2.3'", "'::1'"),
        of_text=lambda text: text.removesuffix("/32").removesuffix("/128"),
    ),
    "cash": Column(
        type="money", field=str, values=("'-92233720368547758.08'", "'1.10'"), form="the digits",
        of_text=lambda text: text.replace("$", "").replace(",", ""),
    ),
    "span": Column(
        type="interval", field=str, of_text=iso_interval, form="ISO 8601, with all parts",
        values=("'1 year 2 months 3 days 04:05:06.789'", "'-1 month +2 days -00:00:00.000001'",
                "'100000 hours'", "'-178000000 years'", "'1 day -1 second'"),
    ),
    "spot": Column(
        type="point", field=Point, shown="a model with x, y", values=("'(1.5,-2)'",),
        dead={"'(NaN,Infinity)'": NOT_FINITE}, of_text=plain, form="its coordinates",
    ),
    "route": Column(
        type="path", field=Drawn, shown="a model with wkb, extensions", of_text=path,
        values=("'((0,0),(1.5,-2e30))'", "'[(0.1,1)]'", NULL),
        form="WKB in base64, and whether it is closed",
    ),
    "area": Column(
        type="polygon", values=("'((0,0),(1.5,0),(1,-1e-300))'",), **_DRAWN,
        of_text=lambda text: drawn("polygon", ring(coordinates(text))),
    ),
    "stretch": Column(
        type="lseg", values=("'[(0,0),(1.5,-2)]'",), **_DRAWN,
        of_text=lambda text: drawn("lseg", coordinates(text)),
    ),
    "frame": Column(type="box", values=("'(1.5,2),(0,-1)'",), of_text=box, **_DRAWN),
    "disc": Column(
        type="circle", field=Circle, shown="a model with center, radius", form="its numbers",
        values=("'<(1.5,-2),0.1>'",),
        dead={"'<(0,NaN),1>'": NOT_FINITE, "'<(0,0),infinity>'": NOT_FINITE}, of_text=circle,
    ),
    "endless": Column(
        type="line", field=Line, shown="a model with a, b, c", form="its numbers",
        values=("'{1,-1,0.5}'",),
        dead={"'{1,NaN,0}'": NOT_FINITE},
        of_text=lambda text: dict(zip("abc", numbers(text), strict=True)),
    ),
    "pairs": Column(
        type="hstore", field=dict[str, str | None], shown="dict[str, str]", of_text=hstore,
        values=("'a=>1,b=>NULL'",), form="the pairs",
    ),
    "cidr": Column(type="cidr", field=str, values=("'10.0.0.0/8'",)),
    "mac": Column(type="macaddr", field=str, values=("'08:00:2b:01:02:03'",)),
    "mac8": Column(type="macaddr8", field=str, values=("'08:00:2b:01:02:03:04:05'",)),
    "r4": Column(type="int4range", field=str, values=("'[1,5)'", "'empty'", "'(,5)'")),
    "r8": Column(type="int8range", field=str, values=("'[1,5)'",)),
    "rn": Column(type="numrange", field=str, values=("'[1.10,5)'",)),
    "rd": Column(type="daterange", field=str, values=("'[2020-01-01,infinity)'",)),
    "rt": Column(type="tsrange", field=str, values=("'[2020-01-01,2020-01-02)'",)),
    "rz": Column(
        type="tstzrange", field=str, values=("'[2020-01-01 00:00+00,2020-01-02 00:00+00)'",)
    ),
    "tsv": Column(type="tsvector", field=str, values=("'a:1 b:2A'",)),
    "tree": Column(type="ltree", field=str, values=("'a.b'",)),
    "days": Column(
        type="date[]", field=list[date], shown="list[date]", of_text=listed, form="the days",
        values=("'{2206-01-01,1500-03-01,0001-01-01}'",), dead={"'{10000-01-01}'": INFINITE},
        check="DATE '0001-01-01' <= ALL (days)",
    ),
    "times": Column(
        type="timestamp[]", field=list[NaiveDatetime], shown="list[NaiveDatetime]", of_text=listed,
        values=("'{1975-01-01 00:00:00.123456}'",), dead={"'{1500-03-01 12:00:00}'": CALENDAR},
        form="the times",
    ),
    "ats": Column(
        type="timestamptz[]", field=list[datetime], shown="list[datetime]", form="the times in UTC",
        values=("'{1500-01-01 00:00:00.000001+00}'",), dead={"'{10000-01-01 00:00+00}'": INFINITE},
        of_text=lambda text: [each.replace("+00", "Z") for each in listed(text)],
        check="TIMESTAMPTZ '0001-01-01 00:00:00+00' <= ALL (ats)",
    ),
    "ints": Column(
        type="int[]", field=list[int | None], shown="list[int]", of_text=numbers,
        values=("'{1,NULL,-2147483648}'",), dead={"'{{1,2},{3,4}}'": NESTED}, form="the numbers",
    ),
    "bigs": Column(
        type="bigint[]", field=list[int], shown="list[int]", of_text=numbers,
        values=("'{9223372036854775807}'",), form="the numbers",
    ),
    "texts": Column(
        type="text[]", values=("""'{a,NULL,"NULL","","a,b"}'""", NULL),
        dead={"'{{a,b},{c,d}}'": NESTED}, **_TEXTS,
    ),
    "uuids": Column(
        type="uuid[]", field=list[UUID], shown="list[UUID]", of_text=listed,
        values=("'{123e4567-e89b-12d3-a456-426655440000}'",), form="the UUIDs",
    ),
    "decs": Column(
        type="numeric[]", field=list[Exact], shown="list[Decimal]", form="the numbers",
        values=("'{1234567890123456789012345678.1234567890}'",),
        of_text=lambda text: text.strip("{}").split(","),
    ),
    "f8s": Column(
        type="double precision[]", field=list[float], shown="list[float]", of_text=numbers,
        values=("'{0.1,5e-324}'",), form="the numbers",
    ),
    "f4s": Column(
        type="real[]", field=list[float], shown="list[float]", of_text=numbers,
        values=("'{1.1,3.4028235e38}'",), form="the numbers",
    ),
    "i2s": Column(
        type="smallint[]", field=list[int], shown="list[int]", of_text=numbers,
        values=("'{-32768}'",), form="the numbers",
    ),
    "oids": Column(
        type="oid[]", field=list[int], shown="list[int]", of_text=numbers,
        values=("'{4294967295}'",), form="the numbers",
    ),
    "flags": Column(
        type="boolean[]", field=list[bool | None], shown="list[bool]", values=("'{t,f,NULL}'",),
        of_text=lambda text: [None if each is None else each == "t" for each in elements(text)],
        form="true or false",
    ),
    "bys": Column(
        type="bytea[]", field=list[str], shown="list[str]", form="base64",
        values=("ARRAY['\\x00ff61', '']::bytea[]",),
        of_text=lambda text: [from_hex(each or "") for each in elements(text)],
    ),
    "vcs": Column(type="varchar(5)[]", values=("'{a}'",), **_TEXTS),
    "chs": Column(type="char(5)[]", values=("'{a}'",), **_TEXTS),
    "cis": Column(type="citext[]", values=("'{Ab}'",), **_TEXTS),
    "moods": Column(type="mood[]", values=("'{sad,ok}'", "'{}'"), **_TEXTS),
    "jss": Column(type="json[]", values=("""ARRAY['{"a": 1.10}']::json[]""",), **_TEXTS),
    "jbs": Column(type="jsonb[]", values=("""ARRAY['{"a": 1.10}']::jsonb[]""",), **_TEXTS),
    "inets": Column(type="inet[]", values=("'{10.1.2.3/8,::1}'",), **_TEXTS),
    "cidrs": Column(type="cidr[]", values=("'{10.0.0.0/8}'",), **_TEXTS),
    "macs": Column(type="macaddr[]", values=("'{08:00:2b:01:02:03}'",), **_TEXTS),
    "mac8s": Column(type="macaddr8[]", values=("'{08:00:2b:01:02:03:04:05}'",), **_TEXTS),
    "r4s": Column(type="int4range[]", values=("""'{"[1,5)",empty}'""",), **_TEXTS),
    "r8s": Column(type="int8range[]", values=("""'{"[1,5)"}'""",), **_TEXTS),
    "rns": Column(type="numrange[]", values=("""'{"[1.10,5)"}'""",), **_TEXTS),
    "rds": Column(type="daterange[]", values=("""'{"[2020-01-01,infinity)"}'""",), **_TEXTS),
    "rts": Column(
        type="tsrange[]", values=("""'{"[2020-01-01,2020-01-02)"}'""",), **_TEXTS
    ),
    "rzs": Column(
        type="tstzrange[]", values=("""'{"[2020-01-01 00:00+00,2020-01-02 00:00+00)"}'""",),
        **_TEXTS,
    ),
    "trees": Column(type="ltree[]", values=("'{a.b}'",), **_TEXTS),
    "pairss": Column(
        type="hstore[]", field=list[dict[str, str | None]], shown="list[dict[str, str]]",
        values=("ARRAY['a=>1,b=>NULL']::hstore[]",), form="the pairs",
        of_text=lambda text: [hstore(each or "") for each in elements(text)],
    ),
    "whole": Column(type="whole", values=("7",), **_WHOLE),
    "moody": Column(type="moody", field=str, values=("'sad'",)),
    "wholes": Column(
        type="wholes", field=list[int], shown="list[int]", of_text=numbers, values=("'{1,2}'",),
        form="the numbers",
    ),
    "letter": Column(type='"char"', field=str, values=("'a'",)),
}  # fmt: skip
MARIADB: Final = {
    "ti": Column(type="tinyint", values=("-128", "127"), **_WHOLE),
    "tu": Column(type="tinyint unsigned", values=("255",), **_WHOLE),
    "si": Column(type="smallint", values=("-32768",), **_WHOLE),
    "mi": Column(type="mediumint unsigned", values=("16777215",), **_WHOLE),
    "iu": Column(type="int unsigned", values=("4294967295",), **_WHOLE),
    "iz": Column(type="int(8) unsigned zerofill", values=("42",), **_WHOLE),
    "bi": Column(type="bigint", values=(NULL, "-9223372036854775808"), default="7", **_WHOLE),
    "bu": Column(
        type="bigint unsigned", field=Large, shown="Decimal", values=(NULL, "18446744073709551615"),
        default="7", form="the number",
    ),
    "exact": Column(
        type="decimal(30,20)", field=str, values=(NULL, "12345678.12345678901234567890"),
        default="5", form="the digits",
    ),
    "wide": Column(
        type="decimal(65,30)", field=str, form="the digits",
        values=("99999999999999999999999999999999999.123456789012345678901234567890",),
    ),
    "db": Column(type="double", values=("0.1", "1.7976931348623157e308"), **_FLOAT),
    "flag": Column(
        type="boolean", field=bool, shown="bool, or int", values=(NULL, "0", "1"), default="true",
        of_text="1".__eq__, form="true or false",
    ),
    "word": Column(
        type="varchar(20)", field=str, values=(NULL, "''", "'a  '", "'é😀'"), default="'MANUAL'"
    ),
    "ch": Column(type="char(10)", field=str, values=("'a'",), form="the text without its blanks"),
    "latin": Column(type="varchar(9) character set latin1", field=str, values=("'é€'",)),
    "tx": Column(type="longtext", field=str, values=("'x\\ny'",)),
    "en": Column(type="enum('sad','ok')", field=str, values=(NULL, "'ok'"), default="'sad'"),
    "st": Column(type="set('x','y z','w')", field=str, values=("''", "'x,w'")),
    "js": Column(type="json", field=str, values=("'{\"a\": 1.10}'", "'12345678901234567890.12'")),
    "day": Column(
        type="date",
        values=(NULL, "'1500-03-01'", "'1582-10-10'", "'0001-01-01'", "'9999-12-31'"),
        dead={"'1970-01-01'": EPOCH}, default="'2020-01-01'", **_DAY,
    ),
    "local": Column(
        type="datetime(6)",
        values=(NULL, *TIMES),
        dead={"'1970-01-01'": EPOCH}, default="'2020-01-01'", **_LOCAL,
    ),
    "at": Column(
        type="timestamp(6)", of_text=lambda text: iso(text) + "Z",
        values=(NULL, "'2026-01-01 00:00:00.123456'", "'2026-01-01 00:00:00.1'"),
        default="'2020-01-01'", **_AT,
    ),
    "length": Column(
        type="time(6)", values=(NULL, "'838:59:59.999999'", "'-00:00:00.000001'"), **_CLOCK
    ),
    "y": Column(type="year", values=(NULL, "1901", "2155"), check="y >= 1901", **_WHOLE),
    "mt": Column(type="mediumint", values=("-8388608",), **_WHOLE),
    "su": Column(type="smallint unsigned", values=("65535",), **_WHOLE),
    "i4": Column(type="int", values=("-2147483648",), **_WHOLE),
    "dd": Column(type="double(10,2)", values=("1.25",), **_FLOAT),
    "t0": Column(type="time", values=("'-838:59:59'",), **_CLOCK),
    "tt": Column(type="tinytext", field=str, values=("'é'",)),
    "te": Column(type="text", field=str, values=("'é😀'", NULL)),
    "me": Column(type="mediumtext", field=str, values=("'é'",)),
    "u16": Column(type="varchar(9) character set utf16", field=str, values=("'é😀'",)),
    "f1": Column(type="bit(1)", values=(NULL, "b'0'", "b'1'"), **_FLAG),
    "b8": Column(
        type="bit(8)", values=("b'0'", "b'10000001'"), printed="lpad(bin({}), 8, '0')", **_BITS
    ),
    "b12": Column(
        type="bit(12)", values=(NULL, "b'1'", "b'101010101011'"), default="b'11'",
        printed="lpad(bin({}), 12, '0')", **_BITS,
    ),
    "b64": Column(
        type="bit(64)", values=("x'8000000000000001'",), printed="lpad(bin({}), 64, '0')", **_BITS
    ),
    "bin": Column(
        type="binary(4)", values=(NULL, "x'00ff61'", "x'00000000'", "'a'", "x'61200000'"),
        default="x'01'", **_OCTETS,
    ),
    "b16": Column(
        type="binary(16)", values=("x'000102030405060708090a0b0c0d0e00'",), **_OCTETS
    ),
    "vb": Column(
        type="varbinary(20)", values=(NULL, "x'00ff61'", "''", "x'610020'"), default="'x'",
        **_OCTETS,
    ),
    "tb": Column(type="tinyblob", values=("x'00ff61'", "''"), **_OCTETS),
    "bl": Column(
        type="blob", values=(NULL, "x'00ff61'", "''", "repeat(x'00ff', 9000)"), **_OCTETS
    ),
    "mb": Column(type="mediumblob", values=("x'00ff61'",), **_OCTETS),
    "lb": Column(type="longblob", values=("x'00ff61'",), **_OCTETS),
    "geo": Column(
        type="geometry", **_SHAPE,
        values=(NULL, "ST_GeomFromText('POINT(1.5 -2)')",
                "ST_GeomFromText('LINESTRING(0 0,1 1)', 4326)"),
    ),
    "spot": Column(
        type="point", values=("ST_GeomFromText('POINT(1.5 -2)', 4326)",), **_SHAPE,
    ),
    "xy": Column(
        type="point", field=Point, shown="a model with x, y", form="its coordinates",
        values=("ST_GeomFromText('POINT(1.5 -2)')",), of_text=plain,
        printed="concat(ST_X({0}), ',', ST_Y({0}))",
    ),
    "ln": Column(
        type="linestring", values=("ST_GeomFromText('LINESTRING(0 0,1 1)')",), **_SHAPE
    ),
    "poly": Column(
        type="polygon", values=("ST_GeomFromText('POLYGON((0 0,1 0,1 1,0 0))')",), **_SHAPE
    ),
    "spots": Column(
        type="multipoint", values=("ST_GeomFromText('MULTIPOINT(0 0,1 1)')",), **_SHAPE
    ),
    "mls": Column(
        type="multilinestring", values=("ST_GeomFromText('MULTILINESTRING((0 0,1 1))')",), **_SHAPE
    ),
    "mps": Column(
        type="multipolygon", **_SHAPE,
        values=("ST_GeomFromText('MULTIPOLYGON(((0 0,1 0,1 1,0 0)))')",),
    ),
    "mixed": Column(
        type="geometrycollection", **_SHAPE,
        values=("ST_GeomFromText('GEOMETRYCOLLECTION(POINT(1 1))')",),
    ),
}  # fmt: skip
_SEEN: Final = "concat(ST_SRID({0}), ' ', hex(ST_AsWKB({0}, 'axis-order=long-lat')))"
MYSQL: Final = {
    name: replace(column, printed=_SEEN) if column.field is Shape else column
    for name, column in MARIADB.items()
} | {
    "length": Column(
        type="time(6)", values=(NULL, "'838:59:59'", "'-00:00:00.000001'"), **_CLOCK
    ),
    "js": Column(
        type="json", field=str, types="json", form="the JSON without blanks",
        of_text=lambda text: msgspec.json.encode(msgspec.json.decode(text)).decode(),
        values=(NULL, '\'{"a": 1.10, "b": [1, "é", null, true, 1e100], "": {}}\'',
                "JSON_OBJECT('n', 18446744073709551615, 'd', CAST('1.10' AS DECIMAL(9,2)))"),
    ),
}  # fmt: skip
COLUMNS: Final = {"PostgreSQL": POSTGRES, "MariaDB": MARIADB, "MySQL": MYSQL}
_SAME: Final = (
    "A null arrives as null. A value is the same in a snapshot and in the stream, and the same as "
    "the database prints it. "
)
INTRODUCTION: Final = {
    "PostgreSQL": f"{_SAME}An array of days or of times with an offset needs the CHECK that `cdc "
    "add` shows. A subnormal `real` may have one digit more (`1.4e-45` for `1e-45`).",
    "MariaDB": f"{_SAME}A date that may be null needs a strict `sql_mode`, or `types`; a `year` "
    "needs the CHECK that `cdc add` shows, or `types`.",
    "MySQL": f"{_SAME}A date that may be null needs a strict `sql_mode`, or `types`; a `year` "
    "needs the CHECK that `cdc add` shows, or `types`. A point of a geographic SRID has its "
    "longitude first. A `json` column with a field of text needs `types`."
    " A time within JSON has its fraction in a snapshot, and not in a change.",
}
REFUSED: Final = {
    "PostgreSQL": {
        "timetz": "Debezium writes a timetz in UTC",
        "timetz[]": "Debezium writes a timetz in UTC",
        "time[]": "cuts the times of an array to milliseconds",
        "name": "leaves values of the type name out of changes",
        "bit varying": "loses the length of the bits",
        "date[]": "no CHECK of the table keeps such values out",
        "timestamptz[]": "no CHECK of the table keeps such values out",
        "pair": "carries no values of type pair",
        "int4multirange": "carries no values of type int4multirange",
        "jsonpath": "carries no values of type jsonpath",
        "tsquery": "carries no values of type tsquery",
        "pg_lsn": "carries no values of type pg_lsn",
        "pg_snapshot": "carries no values of type pg_snapshot",
        "xid": "carries no values of type xid",
        "xid8": "carries no values of type xid8",
        "tid": "carries no values of type tid",
        "regclass": "carries no values of type regclass",
        "interval[]": "carries no values of type interval[]",
        "money[]": "carries no values of type money[]",
        "xml[]": "carries no values of type xml[]",
        "bit(8)[]": "carries no values of type bit(8)[]",
        "point[]": "carries no values of type point[]",
        "box[]": "carries no values of type box[]",
        "bit varying(5)[]": "carries no values of type bit varying(5)[]",
        "tsvector[]": "carries no values of type tsvector[]",
        "name[]": "carries no values of type name[]",
        "pair[]": "carries no values of type pair[]",
        "moody[]": "carries no values of type moody[]",
        "whole[]": "carries no values of type whole[]",
        "int4multirange[]": "carries no values of type int4multirange[]",
        "int[][]": "cannot read nested arrays",
    },
    "MariaDB": {
        "float": "snapshots round a float to six digits",
        "year": "no CHECK of the table keeps it out",
        "uuid": "another uuid for a change than the table has",
        "inet4": "cannot read a table with a column of type inet4",
        "inet6": "cannot read a table with a column of type inet6",
    },
    "MySQL": {
        "float": "snapshots round a float to six digits",
        "year": "no CHECK of the table keeps it out",
    },
}
"""Type of a column → why `cdc add` refuses a field of it."""
