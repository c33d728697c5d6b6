"""Commands: event sourcing on Kafka, with two pure functions for each entity type."""

from typing import TYPE_CHECKING

from everstate.lazily import loader

if TYPE_CHECKING:
    from everstate.declarations.commands import CommandGroup as CommandGroup
    from everstate.declarations.processes import Effect as Effect
    from everstate.declarations.processes import ProcessManager as ProcessManager
    from everstate.errors import Rejected as Rejected
    from everstate.sources.commands.answer import Answer as Answer
    from everstate.sources.commands.client import CommandClient as CommandClient
    from everstate.sources.commands.client import wait_all as wait_all
    from everstate.sources.commands.handler import CommandHandler as CommandHandler
    from everstate.sources.commands.parked import Parked as Parked
    from everstate.sources.commands.parked import read_parked as read_parked
    from everstate.sources.commands.parked import replay as replay
    from everstate.sources.commands.process import ProcessRunner as ProcessRunner
    from everstate.sources.commands.wire import Outcome as Outcome

__getattr__ = loader(__name__)
