"""What the field of a column has, of the text that the database prints: models and readers."""

from __future__ import annotations

import base64
import json
import re
import struct
from decimal import Decimal
from typing import Any

from pydantic import BaseModel


def listed(text: str) -> list[str]:
    return [each.strip('"').replace(" ", "T") for each in text.strip("{}").split(",")]


def elements(text: str) -> list[str | None]:
    """The elements of an array with one dimension, as PostgreSQL prints it."""
    found = re.finditer(r'"((?:[^"\\]|\\.)*)"|([^,{}]+)', text)
    return [
        (None if each[2] == "NULL" else each[2])
        if each[1] is None
        else re.sub(r"\\(.)", r"\1", each[1])
        for each in found
    ]


def iso(text: str) -> str:
    return text.replace(" ", "T").removesuffix(".000000")


def micros(text: str) -> int:
    hours, minutes, seconds = text.lstrip("-").split(":")
    found = (int(hours) * 60 + int(minutes)) * 60_000_000
    found += int(Decimal(seconds) * 1_000_000)
    return -found if text.startswith("-") else found


def from_hex(text: str) -> str:
    return base64.b64encode(bytes.fromhex(text.removeprefix(r"\x"))).decode()


def bits(text: str) -> str:
    """The bits as a number, its lowest byte first, in base64."""
    number = int(text, 2)
    return base64.b64encode(number.to_bytes(-(-number.bit_length() // 8), "little")).decode()


def octets(text: str) -> str:
    """The bits as a number, its lowest byte first, in base64; each value has all its bytes."""
    number = int(text, 2).to_bytes(-(-len(text) // 8), "little")
    return base64.b64encode(number).decode()


def shape(text: str) -> dict[str, Any]:
    """Of the SRID and the WKB in hex; an SRID of 0 is null."""
    srid, wkb = text.split()
    return {"wkb": from_hex(wkb), "srid": int(srid) or None}


def iso_interval(text: str) -> str:
    """An interval with all its parts in the form of ISO 8601."""
    found = {unit: number for number, unit in re.findall(r"([-+]?\d+) (year|mon|day)s?", text)}
    clock = re.search(r"([-+]?)(\d+):(\d\d):(\d\d(?:\.\d+)?)", text)
    sign, *parts = ("", "0", "0", "0") if clock is None else clock.groups()
    numbers = [Decimal(f"{sign}{part}").normalize() + 0 for part in parts]
    hours, minutes, seconds = (format(number, "f") for number in numbers)
    years, months, days = (found.get(unit, "0").lstrip("+") for unit in ("year", "mon", "day"))
    return f"P{years}Y{months}M{days}DT{hours}H{minutes}M{seconds}S"


def hstore(text: str) -> Any:
    return json.loads("{" + text.replace("=>", ":").replace("NULL", "null") + "}")


def plain(numbers: str) -> dict[str, float]:
    """Coordinates of a point."""
    x, y = (float(each) for each in numbers.strip("()").split(","))
    return {"x": x, "y": y}


class Point(BaseModel):
    """A point, of which Debezium writes more than its coordinates."""

    x: float
    y: float


class Shape(BaseModel):
    """A geometry."""

    wkb: str
    srid: int | None


class Drawn(BaseModel):
    """What Debezium makes of a path, a polygon, a segment or a box of PostgreSQL."""

    wkb: str
    extensions: dict[str, str]
    """Its type, and whether a path is closed."""


class Circle(BaseModel):
    """A circle of PostgreSQL."""

    center: Point
    radius: float


class Line(BaseModel):
    """A line of PostgreSQL: Ax + By + C = 0."""

    a: float
    b: float
    c: float


Coordinates = list[tuple[float, float]]


def coordinates(text: str) -> Coordinates:
    """All points in the text of a geometric value."""
    found = [float(each) for each in re.findall(r"[-+.\de]+", text)]
    return list(zip(found[::2], found[1::2], strict=True))


def ring(points: Coordinates) -> Coordinates:
    """A polygon of WKB ends where it begins."""
    return [*points, points[0]]


def drawn(kind: str, points: Coordinates, **more: str) -> dict[str, Any]:
    """A line of WKB, or a polygon with one ring, in base64."""
    is_area = kind in ("polygon", "box")
    head = (
        struct.pack("<BIII", 1, 3, 1, len(points))
        if is_area
        else (struct.pack("<BII", 1, 2, len(points)))
    )
    wkb = head + b"".join(struct.pack("<dd", *point) for point in points)
    return {"wkb": base64.b64encode(wkb).decode(), "extensions": {"type": kind, **more}}


def path(text: str) -> dict[str, Any]:
    return drawn("path", coordinates(text), closed="true" if text.startswith("(") else "false")


def box(text: str) -> dict[str, Any]:
    """Its corners, from the one with the highest numbers on."""
    (right, upper), (left, lower) = coordinates(text)
    return drawn("box", ring([(right, upper), (right, lower), (left, lower), (left, upper)]))


def circle(text: str) -> dict[str, Any]:
    x, y, radius = (
        float(each) for each in text.translate(str.maketrans("", "", "<>()")).split(",")
    )
    return {"center": {"x": x, "y": y}, "radius": radius}


def numbers(text: str) -> list[Any]:
    return [None if each == "NULL" else json.loads(each) for each in text.strip("{}").split(",")]
