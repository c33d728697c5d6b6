"""Writes a few guests and their changes."""

from hotel import Guest, app

from everstate import EntityStore, Provenance, VersionConflict, project_config

config = project_config()
desk = Provenance(api_version="v1", service_name="front-desk", identifier="clerk-7")

with EntityStore(config, app.entity_type("guest")) as store:
    store.install()
    store.put(Guest(guest_id="g1", name="Eva", city="Wien"), provenance=desk)
    store.put(Guest(guest_id="g1", name="Eva", city="Wien", nights=3), provenance=desk)
    store.put(Guest(guest_id="g2", name="Tom", city="Graz", nights=1), provenance=desk)
    store.delete("g2", provenance=desk)
    try:
        store.put(Guest(guest_id="g1", name="Eve"), provenance=desk, expected_version=1)
    except VersionConflict as conflict:
        print(conflict)  # expected version 1, found 2
