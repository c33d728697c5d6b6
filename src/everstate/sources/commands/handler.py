"""The handler process: decides the commands of all entity types of an app that have commands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from everstate.config import Config
from everstate.log.loop import Membership, TransactionalLoop, Work
from everstate.log.slots import Slot
from everstate.log.topics import Topics
from everstate.sources.commands.worker import CommandWork
from everstate.views.project import Project


class SlotLoop(TransactionalLoop):
    """A member of a group of command handlers or process managers, with the name of its slot."""

    def __init__(
        self, config: Config, work: Work, topics: Sequence[str], slot: Slot, group: str
    ) -> None:
        settings = config.commands
        self._slot = slot
        member = Membership(
            group=f"{config.log.prefix}.{settings.group}{group}",
            instance=slot.name,
            session_timeout_s=settings.session_timeout_s,
            transaction_timeout_s=settings.transaction_timeout_s,
        )
        wait_s, records_max = settings.batch_wait_ms / 1000, settings.batch_commands_max
        super().__init__(
            config, work, topics, member, batch_records_max=records_max, batch_wait_s=wait_s
        )

    def close(self) -> None:
        """Release partitions, connections and the slot."""
        try:
            super().close()
        finally:
            self._slot.close()


class CommandHandler(SlotLoop):
    """Reads commands, decides them, and writes changes, states, answers and its own progress.

    The results of a batch are one Kafka transaction. Any number of handlers share the partitions.
    A handler that is killed and restarted takes its partitions back at once; otherwise another
    handler takes them over after ``commands.session_timeout_s``.
    """

    def __init__(
        self,
        config: Config,
        app: Project,
        *,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        with Topics(config) as topics:
            topics.ensure_commands(app.command_groups)
        slot = Slot(config.commands_path / config.log.prefix / "handlers")
        self.work = CommandWork(config, app.command_groups, slot.path, clock=clock)
        self.work.check_topics()
        super().__init__(config, self.work, self.work.topics, slot, "")
