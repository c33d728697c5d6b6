"""PostgreSQL as source of truth: the store, the import of files, and the schema with the outbox."""

from typing import TYPE_CHECKING

from everstate.lazily import loader

if TYPE_CHECKING:
    from everstate.sources.stores.postgres.files import guesses as guesses
    from everstate.sources.stores.postgres.importing import Checked as Checked
    from everstate.sources.stores.postgres.importing import Imported as Imported
    from everstate.sources.stores.postgres.importing import check_file as check_file
    from everstate.sources.stores.postgres.importing import import_file as import_file
    from everstate.sources.stores.postgres.schema import install as install
    from everstate.sources.stores.postgres.settling import Missing as Missing
    from everstate.sources.stores.postgres.store import EntityStore as EntityStore

__getattr__ = loader(__name__)
