"""Apps under fault with views in another store: `redis` is the app whose store is Redis."""

from __future__ import annotations

from fault_app import ENTITY, Parcel

from everstate.app import App

HEAVY = "heavy_elsewhere"
MOVES = "moves_elsewhere"


def app_in(store: str) -> App:
    """Views of present rows and of changes in a store, and the rows in PostgreSQL, too."""
    app = App("faults")
    app.entity(ENTITY, key="parcel_id", schema_version=1)(Parcel)
    rows = "SELECT region, weight FROM {} WHERE weight >= 50"
    app.view("heavy", sql=rows.format(ENTITY))
    app.view(HEAVY, sql=rows.format(ENTITY), store=store)
    app.view(MOVES, sql=rows.format(f"{ENTITY}_changes"), store=store)
    return app


def __getattr__(name: str) -> App:
    """The app of a store, by the name of the store."""
    if name.startswith("_"):
        raise AttributeError(name)
    return app_in(name)
