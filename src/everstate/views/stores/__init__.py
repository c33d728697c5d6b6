"""Stores of views. The pipeline uses this module, and imports no store by its name."""

from everstate.views.stores.postgres.loading import LoadTask
from everstate.views.stores.postgres.refreshing import JoinTables, marking, stop_marking
from everstate.views.stores.postgres.refusals import view_refusals
from everstate.views.stores.postgres.session import close as close_store
from everstate.views.stores.postgres.store import (
    ViewTables,
    install_core,
    point_core,
)
from everstate.views.stores.postgres.transaction import PostgresViewStore


def view_store(dsn: str, schema_name: str) -> PostgresViewStore:
    """The store to which cores and views are written; for one thread."""
    return PostgresViewStore(dsn, schema_name)


__all__ = [
    "JoinTables",
    "LoadTask",
    "PostgresViewStore",
    "ViewTables",
    "close_store",
    "install_core",
    "marking",
    "point_core",
    "stop_marking",
    "view_refusals",
    "view_store",
]
