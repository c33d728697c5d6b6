"""Stores of views. The pipeline uses this module, and imports no store by its name."""

from everstate.config import Config
from everstate.views.stores.postgres.refreshing import JoinTables as JoinTables
from everstate.views.stores.postgres.refreshing import marking as marking
from everstate.views.stores.postgres.refreshing import stop_marking as stop_marking
from everstate.views.stores.postgres.refusals import view_refusals as view_refusals
from everstate.views.stores.postgres.session import close_store as close_store
from everstate.views.stores.postgres.store import ViewTables as ViewTables
from everstate.views.stores.postgres.store import install_core as install_core
from everstate.views.stores.postgres.store import point_core as point_core
from everstate.views.stores.postgres.transaction import PostgresViewStore as PostgresViewStore
from everstate.views.stores.registry import store_class as store_class
from everstate.views.stores.store import LoadRows as LoadRows
from everstate.views.stores.store import ViewStore as ViewStore
from everstate.views.stores.versioned import VersionedStore as VersionedStore
from everstate.views.tables import HOME


def versioned_store(config: Config, view: str, name: str, attempt: str = "") -> VersionedStore:
    """Another store than PostgreSQL; raises InvalidView when there is none of that name.

    ``attempt``: the one that filled, or fills, the table of a version.
    """
    home = PostgresViewStore(config.views_dsn, config.views.schema_name)
    return VersionedStore(name, home, store_class(view, name)(config), attempt)


def store_of(
    config: Config, view: str, name: str, attempt: str = ""
) -> PostgresViewStore | VersionedStore:
    """The store that has the rows of a view; raises InvalidView when there is none of that name."""
    if name == HOME:
        return PostgresViewStore(config.views_dsn, config.views.schema_name)
    return versioned_store(config, view, name, attempt)
