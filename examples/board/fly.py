"""Writes departures, and what happens to them, a change every second."""

import time
from datetime import UTC, datetime, timedelta
from itertools import count

from airport import Departure, app

from everstate import EntityStore, Provenance, project_config

tower = Provenance(api_version="v1", service_name="tower", identifier="controller-2")
plans = [("OS 201", "Graz"), ("LH 1235", "München"), ("AF 1139", "Paris"), ("BA 705", "London")]

with EntityStore(project_config(), app.entity_type("departure")) as store:
    store.install()
    for number in count():
        flight, destination = plans[number % len(plans)]
        departure = Departure(
            departure_id=f"{flight} {number}",
            departs=datetime.now(UTC) + timedelta(minutes=40),
            flight=flight,
            destination=destination,
        )
        for change in (
            {},
            {"gate": f"B{number % 30 + 1}"},
            {"status": "delayed" if number % 3 == 0 else "boarding"},
            {"status": "departed"},
        ):
            departure = departure.model_copy(update=change)
            store.put(departure, provenance=tower)
            time.sleep(1)
