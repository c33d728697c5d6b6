"""Commands: event sourcing on Kafka, in two pure functions an entity type."""

from everstate.errors import Rejected
from everstate.sources.commands.answer import Answer
from everstate.sources.commands.client import CommandClient, wait_all
from everstate.sources.commands.group import CommandGroup
from everstate.sources.commands.handler import CommandHandler
from everstate.sources.commands.parked import Parked, read_parked, replay
from everstate.sources.commands.process import Effect, ProcessManager, ProcessRunner
from everstate.sources.commands.wire import Outcome

__all__ = [
    "Answer",
    "CommandClient",
    "CommandGroup",
    "CommandHandler",
    "Effect",
    "Outcome",
    "Parked",
    "ProcessManager",
    "ProcessRunner",
    "Rejected",
    "read_parked",
    "replay",
    "wait_all",
]
