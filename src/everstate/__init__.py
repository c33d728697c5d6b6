"""everstate: every state your entities were ever in.

This module has all names that a project's own code imports, whatever package defines them.
"""

from typing import TYPE_CHECKING

from everstate.lazily import loader

if TYPE_CHECKING:
    from everstate.analysis import read as read
    from everstate.analysis import read_changes as read_changes
    from everstate.app import App as App
    from everstate.changes import Change as Change
    from everstate.changes import DomainEvent as DomainEvent
    from everstate.changes import Provenance as Provenance
    from everstate.changes.derived import joined as joined
    from everstate.changes.derived import notices_of as notices_of
    from everstate.changes.derived import patch_of as patch_of
    from everstate.changes.fields import Formerly as Formerly
    from everstate.changes.triggers import when as when
    from everstate.config import Config as Config
    from everstate.config import load as load
    from everstate.declarations.captures import Aggregate as Aggregate
    from everstate.declarations.captures import Outbox as Outbox
    from everstate.declarations.captures import Table as Table
    from everstate.declarations.captures import Translation as Translation
    from everstate.declarations.handlers import Context as Context
    from everstate.declarations.processes import Effect as Effect
    from everstate.errors import EverstateError as EverstateError
    from everstate.errors import Rejected as Rejected
    from everstate.errors import VersionConflict as VersionConflict
    from everstate.local import project_config as project_config
    from everstate.sources.commands import CommandClient as CommandClient
    from everstate.sources.outbox import emit as emit
    from everstate.sources.outbox import emit_event as emit_event
    from everstate.sources.stores.postgres import EntityStore as EntityStore
    from everstate.views.policies import ignore as ignore
    from everstate.views.policies import throttle as throttle

__version__ = "0.1.0"

# Lazy: importing everstate does not load the command line or Spark.
__getattr__ = loader(__name__)
