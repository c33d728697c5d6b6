"""The handler process: decides the commands of all entity types of an app that have commands."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime

from everstate.closing import Closing
from everstate.config import Config
from everstate.log.loop import Membership, TransactionalLoop
from everstate.log.slots import Slot
from everstate.log.topics import Topics
from everstate.sources.commands.worker import CommandWork
from everstate.views.project import Project


class CommandHandler(Closing):
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
        settings = config.commands
        group = f"{config.log.prefix}.{settings.group}"
        self._slot = Slot(config.commands_path / config.log.prefix / "handlers")
        self.work = CommandWork(config, app.command_groups, self._slot.path, clock=clock)
        self.work.check_topics()
        self.loop = TransactionalLoop(
            config,
            self.work,
            self.work.topics,
            Membership(
                group=group,
                instance=self._slot.name,
                session_timeout_s=settings.session_timeout_s,
                transaction_timeout_s=settings.transaction_timeout_s,
            ),
            batch_records_max=settings.batch_commands_max,
            batch_wait_s=settings.batch_wait_ms / 1000,
        )

    def run(self, stop: threading.Event) -> None:
        """Decide commands until ``stop`` is set; see :meth:`TransactionalLoop.run`."""
        self.loop.run(stop)

    def close(self) -> None:
        """Release partitions, connections and the folder."""
        try:
            self.loop.close()
        finally:
            self._slot.close()
