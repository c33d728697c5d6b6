"""Real files as entities, from the folder of EVERSTATE_BENCH_DATA; rows of their own when there."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from pydantic import BaseModel

from everstate.changes import EntityType


class InvoiceLine(BaseModel):
    """A line of online_retail.parquet."""

    line_no: int
    invoice_no: str
    stock_code: str
    description: str
    quantity: int
    invoice_ts: datetime
    unit_price: float
    customer_id: int | None
    country: str


class Booking(BaseModel):
    """A row of hotel_bookings.csv.gz, numbered, as it was booked and as it ended."""

    number: int
    hotel: str
    lead_time: int
    country: str | None
    market_segment: str
    adults: int
    room: str
    rate: float
    status: str


@dataclass(frozen=True, slots=True)
class RealFile:
    """One file: its entity type, and its states in their order."""

    path: Path
    entity_type: EntityType

    def states(self, limit: int | None = None) -> list[BaseModel]:
        """States of the file; a booking has two."""
        rows = _lines(self.path) if self.path.suffix == ".parquet" else _bookings(self.path)
        return list(islice(rows, limit))


def found(folder: Path | None) -> list[RealFile]:
    """The files that are there."""
    if folder is None:
        return []
    known = (
        RealFile(
            folder / "online_retail.parquet", EntityType("invoice_line", InvoiceLine, "line_no")
        ),
        RealFile(folder / "hotel_bookings.csv.gz", EntityType("booking", Booking, "number")),
    )
    return [each for each in known if each.path.is_file()]


def _lines(path: Path) -> Iterator[BaseModel]:
    for batch in pq.ParquetFile(path).iter_batches(10_000):
        for row in batch.to_pylist():
            row["invoice_ts"] = row["invoice_ts"].replace(tzinfo=UTC)
            yield InvoiceLine.model_construct(**row)


def _bookings(path: Path) -> Iterator[BaseModel]:
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.DictReader(file), 1):
            for status in ("Booked", row["reservation_status"]):
                yield _booking(number, row, status)


def _booking(number: int, row: dict[str, Any], status: str) -> Booking:
    return Booking.model_construct(
        number=number,
        hotel=row["hotel"],
        lead_time=int(row["lead_time"]),
        country=None if row["country"] == "NULL" else row["country"],
        market_segment=row["market_segment"],
        adults=int(row["adults"]),
        room=row["reserved_room_type"],
        rate=float(row["adr"]),
        status=status,
    )
