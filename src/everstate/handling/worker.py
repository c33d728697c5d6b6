"""Runs one handler: owns partitions, reads their accepted changes, and has them called."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from functools import partial
from typing import Final

from everstate.changes.tokens import Spot
from everstate.config import Config
from everstate.declarations.handlers import Handler, handlers_of
from everstate.errors import EverstateError
from everstate.handling.calling import FunctionCaller
from everstate.handling.tables import HandlerTables, Item, Owned
from everstate.log.members import GroupMember
from everstate.log.topics import Topics
from everstate.parts import PartRun
from everstate.postgres import Connection
from everstate.runtime.worker import Worker, part_of
from everstate.serving.changes import BEGINNING, Changes, has_room
from everstate.views.project import Project
from everstate.views.source import GENERATION

_ROUND_S: Final = 1.0
"""How long changes are handled before the group and parked changes are looked at."""
_PARKED_MAX: Final = 100_000
"""Parked changes with which no more is read: the handler is late until somebody decides."""
_WAIT_S: Final = 0.2
_POLL_S: Final = 0.05
_LOOK_S: Final = 0.5
_PASS_S: Final = 5.0


class HandlerWorker(Worker):
    """One handler in one process; any number of processes share its partitions.

    Raises LogIdentityChanged, LogTruncated and DataLoss when its position is not in the log.
    """

    idle_s = 0.0  # A step waits for records itself.
    retry_s = (0.5, 5.0)
    _pool: ThreadPoolExecutor
    _changes: Changes
    _member: GroupMember
    _connection: Connection

    def __init__(self, config: Config, project: Project, handler: Handler) -> None:
        self.doing = f"handler {handler.title}"
        self._config, self._project, self._handler = config, project, handler
        self._tables = HandlerTables(config, handler)
        self._caller = FunctionCaller(self._tables)
        self._opened = ExitStack()
        self._owned: dict[int, Owned] = {}
        self._sought: frozenset[int] = frozenset()
        self._running: set[Future[None]] = set()
        self._look_at_s, self._passed_at_s, self._parked = 0.0, 0.0, 0

    def open(self) -> None:
        """Create what is missing, and join the group."""
        self.close()
        config, tables, entity = self._config, self._tables, self._handler.entity_type.name
        enter = self._opened.enter_context
        self._pool = enter(ThreadPoolExecutor(self._handler.concurrency, "handler"))
        with Topics(config) as topics:
            topics.ensure([entity])
        self._changes = enter(Changes(config, self._project, entity, since=BEGINNING))
        connection = enter(tables.connected())
        place = {p: spot for (_, p), spot in self._changes.spots.items()}, self._changes.mark
        if not tables.positions(connection):
            place = begin(config, self._project, self._handler, self._handler.start)
        tables.place(*place)
        self._member = enter(GroupMember(config, tables.id, tables.topic, self._released))
        self._connection = connection

    def failed(self, error: EverstateError) -> None:
        """Take all partitions over again, from their stored positions, when no call runs."""
        self._released(self._owned)

    def close(self) -> None:
        """Finish the calls that run, leave the group, and close the connections."""
        self._released(self._owned)
        self._opened.close()
        self._caller.close()

    def step(self) -> int:
        """Handle changes for about a second; returns how many were handled or parked."""
        if self._connection.closed:
            # It leaves the group: who reaches the database may have its partitions meanwhile.
            self.open()
        self._member.poll(0.0 if self._owned else _WAIT_S)
        with self._tables.errors():
            if not self._member.owned == self._owned.keys() == self._sought:
                self._share()
            count = self._handle(self._due())
            pending = {p: each.pending for p, each in self._owned.items()}
            count += self._handle(pending, 0.0 if count else _WAIT_S)
            for each in self._owned.values():
                each.pending = [item for item in each.pending if not item.is_finished]
            if time.monotonic() - self._passed_at_s > _PASS_S:
                self._pass()
        return count

    def _share(self) -> None:
        """Release what this process owns no more, take over what is new, and read on in all."""
        self._sought = self._member.owned
        self._released(self._owned.keys() - self._sought)
        for number in sorted(self._sought - self._owned.keys()):
            self._owned[number] = self._tables.take(self._connection, number)
        for each in self._owned.values():
            each.pending.clear()
        self._changes.seek({number: min(each.spots) for number, each in self._owned.items()})
        self._look_at_s = 0.0

    def _pass(self) -> None:
        """Let lanes without pending changes pass what was read."""
        for number, each in self._owned.items():
            read_to, busy = self._changes.spots[GENERATION, number], {i.lane for i in each.pending}
            idle = {lane for lane, at in enumerate(each.spots) if at < read_to} - busy
            if self._tables.move(self._connection, each, dict.fromkeys(idle, read_to)):
                each.spots = [read_to if n in idle else at for n, at in enumerate(each.spots)]
        self._passed_at_s = time.monotonic()

    def _due(self) -> dict[int, list[Item]]:
        """Parked changes that are to be called now, by partition."""
        began_s = time.monotonic()
        if not self._owned or began_s < self._look_at_s:
            return {}
        stored = self._tables.positions(self._connection)
        if any(stored.get(p, (0, 0))[1] != each.epoch for p, each in self._owned.items()):
            # A reset has moved the positions, or another process takes a partition over.
            self._released(self._owned)
            return {}
        due, self._parked = self._tables.due(self._connection, self._owned)
        now_s = time.monotonic()
        self._look_at_s = 0.0 if due else now_s + max(_LOOK_S, 10 * (now_s - began_s))
        return due

    def _read(self, wait_s: float) -> None:
        """Read the next changes of partitions that have few pending ones."""
        if not self._owned or self._parked >= _PARKED_MAX:
            time.sleep(wait_s)
            return
        waiting = {p: [len(item.value) for item in each.pending] for p, each in self._owned.items()}
        room, is_idle = [p for p in waiting if has_room(waiting[p])], not any(waiting.values())
        for delivery in self._changes.read(wait_s * is_idle, room) if room else ():
            owned, record = self._owned.get(delivery.partition[1]), delivery.record
            if owned is not None:
                key, value = (record.key or b"").decode(), record.value or b""
                item = Item(key, value, delivery.spot)
                if delivery.spot > owned.spots[item.lane]:
                    owned.pending.append(item)

    def _handle(self, items: Mapping[int, Sequence[Item]], idle_s: float | None = None) -> int:
        """Handle changes by partition and lane; returns how many.

        With ``idle_s`` it reads the next ones meanwhile, and waits so long for one if it has none.
        """
        units = list[tuple[Owned, list[Item]]]()
        for number, each in items.items():
            found: dict[int, list[Item]] = {}
            for item in each:
                found.setdefault(item.lane % self._handler.concurrency, []).append(item)
            units += [(self._owned[number], unit) for unit in found.values()]
        most_s = _ROUND_S * min(1.0, self._handler.concurrency / max(1, len(units)))
        run = partial(self._caller.run, most_s=most_s)
        self._running = {self._pool.submit(run, owned, unit) for owned, unit in units}
        if idle_s is not None:
            self._read(0.0 if units else idle_s)
        while wait(self._running, _POLL_S).not_done:
            self._member.poll()
        for future in self._running:
            future.result()
        return sum(item.is_finished for _, unit in units for item in unit)

    def _released(self, partitions: Iterable[int]) -> None:
        """Stop the calls for partitions: those that have begun are finished and stored."""
        for number in self._owned.keys() & partitions:
            self._owned.pop(number).is_lost = True
        wait(self._running, 2 * self._handler.timeout_s)


def begin(
    config: Config, project: Project, handler: Handler, text: str
) -> tuple[dict[int, Spot], bytes]:
    """The position in each partition that a text names, and the log's mark.

    Raises InvalidToken, and DataLoss when neither log nor archive has what follows it.
    """
    with Changes(config, project, handler.entity_type.name, since=text, raw=True) as found:
        spots = {partition: spot for (_, partition), spot in found.spots.items()}
        found.seek(spots)
        return spots, found.mark


def handler_parts(config: Config, project: Project, groups: Iterable[str]) -> dict[str, PartRun]:
    """A part for each handler of some groups, or of all; raises InvalidHandler without any."""
    named = groups or dict.fromkeys(each.group for each in project.handlers.values()) or ("any",)
    return {
        each.title: part_of(partial(HandlerWorker, config, project, each))
        for group in named
        for each in handlers_of(project.handlers, group)
    }
