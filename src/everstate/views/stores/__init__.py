"""Stores of views. The pipeline asks here, and imports no store by its name."""

from everstate.views.stores.postgres.store import (
    PostgresStore,
    close_store,
    core_tables,
    kept_query,
    view_tables,
)


def view_store(dsn: str, schema_name: str) -> PostgresStore:
    """Where cores and views are written; for one thread."""
    return PostgresStore(dsn, schema_name)


__all__ = ["PostgresStore", "close_store", "core_tables", "kept_query", "view_store", "view_tables"]
