"""The app under fault: parcels, a linear view and a row view of them; and the load on it."""

from __future__ import annotations

import random
import sys
import time
import uuid
from dataclasses import replace
from decimal import Decimal
from typing import Annotated, TextIO

from pydantic import BaseModel, Field

from everstate.app import App
from everstate.changes import Provenance
from everstate.config import Config
from everstate.errors import NotFound, Unavailable
from everstate.local import project_config
from everstate.sources.stores.postgres import EntityStore

ENTITY = "parcel"
KEYS = 400
REGIONS = ("north", "south", "east", "west", None)
CLERK = Provenance(api_version="v1", service_name="faults", identifier="load")

app = App("faults")


@app.entity(ENTITY, key="parcel_id", schema_version=1)
class Parcel(BaseModel):
    """A parcel; its region changes, and may be unknown."""

    parcel_id: str
    region: str | None
    fee: Annotated[Decimal, Field(max_digits=10, decimal_places=2)]
    weight: int


app.view(
    "fees_by_region",
    sql="SELECT region, count(*) AS parcels, sum(fee) AS fees, sum(weight) AS weight "
    "FROM parcel GROUP BY region",
)
app.view("heavy", sql="SELECT region, weight FROM parcel WHERE weight >= 50")


def parcel(rng: random.Random) -> Parcel:
    """Some state of some parcel."""
    return Parcel(
        parcel_id=f"p-{rng.randrange(KEYS)}",
        region=rng.choice(REGIONS),
        fee=Decimal(rng.randrange(100_000)).scaleb(-2),
        weight=rng.randrange(100),
    )


def write(config: Config, acknowledged: TextIO, seed: int, pause_s: float) -> None:
    """Write for ever; each commit that was acknowledged becomes a line of the file.

    The line has the change's id, or of a set-based write the call's id (its correlation id) and
    how many changes it made. Goes on by itself when the database was away. A write whose outcome
    is unknown has no line.
    """
    rng = random.Random(seed)
    with EntityStore(config, app.entity_type(ENTITY)) as store:
        store.install()
        while True:
            try:
                one_write(store, rng, acknowledged)
            except Unavailable:
                time.sleep(0.1)
            time.sleep(pause_s)


def one_write(store: EntityStore, rng: random.Random, acknowledged: TextIO) -> None:
    """One transaction: mostly one parcel, at times fifty, at times a deletion."""
    chance = rng.random()
    if chance < 0.06:
        call = uuid.uuid4().hex
        clerk = replace(CLERK, correlation_id=call)
        many = store.put_many([parcel(rng) for _ in range(50)], provenance=clerk)
        tell(acknowledged, f"{call} {many.changes}")
        return
    if chance < 0.16:
        try:
            written = store.delete(f"p-{rng.randrange(KEYS)}", provenance=CLERK)
        except NotFound:
            return
    else:
        written = store.put(parcel(rng), provenance=CLERK)
    if written.change_id is not None:
        tell(acknowledged, str(written.change_id))


def tell(acknowledged: TextIO, line: str) -> None:
    """Note an acknowledgement at once."""
    acknowledged.write(f"{line}\n")
    acknowledged.flush()


if __name__ == "__main__":
    folder, path, seed = sys.argv[1:]
    with open(path, "a", encoding="utf-8") as lines:
        write(project_config(folder), lines, int(seed), 0.04)
