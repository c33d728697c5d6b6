"""The rows of a handler in PostgreSQL: its positions, and its parked changes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias
from zlib import crc32

from everstate.changes.codec import decode_wire
from everstate.changes.tokens import Spot
from everstate.config import Config, expanded
from everstate.declarations.handlers import LANES, Handler
from everstate.errors import EverstateError, LogIdentityChanged, TopicResized, Unavailable
from everstate.log.lag import Lag, ReaderPosition
from everstate.log.topics import TopicNames
from everstate.postgres import Connection, ReadCursor, connect, refusals, views_errors

WAITS: Final = ""
"""The reason of a change that is parked behind another one of its key."""
_DDL: Final = Path(__file__).with_name("schema.sql").read_bytes()
_STATEMENTS: Final = Path(__file__).with_name("statements.sql").read_text("utf-8")
_SQL: Final = {
    name: statement.encode()
    for name, statement in re.findall(r"^-- name: (\w+)\n(.*?);$", _STATEMENTS, re.M | re.S)
}


@dataclass(eq=False, slots=True)
class Item:
    """A change to be handled.

    ``spot``: the position after it, ``None`` if it is parked already; ``attempts``: calls that
    failed; ``reason``: why it is parked from now on; ``is_final``: without retries.
    """

    key: str
    value: bytes
    spot: Spot | None = None
    parked_id: int = 0
    attempts: int = 0
    reason: str | None = None
    is_final: bool = False
    is_finished: bool = False

    @property
    def lane(self) -> int:
        """The lane of its key, in which changes are handled one after the other."""
        return crc32(self.key.encode()) % LANES


@dataclass(eq=False, slots=True)
class Owned:
    """A partition of one handler that this process owns.

    ``spots``: the position of each lane; ``blocked``: keys whose new changes wait behind a parked
    one; ``pending``: changes that were read, in their order.
    """

    number: int
    epoch: int
    spots: list[Spot]
    blocked: set[str] = field(default_factory=set)
    pending: list[Item] = field(default_factory=list)
    is_lost: bool = False


class HandlerTables:
    """The rows of one handler; its calls are made within :meth:`errors`."""

    def __init__(self, config: Config, handler: Handler) -> None:
        self.config, self.handler = config, handler
        self.topic = TopicNames(config.log.prefix).changes(handler.entity_type.name)
        self.id = f"{config.log.prefix}.handlers.{handler.title}"
        dsn = handler.dsn
        self.dsn = config.views_dsn if dsn is None else expanded(dsn, f"dsn of {handler.title}")

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Raise Unavailable for errors of the server in the block, and StatementRefused."""
        with refusals(), views_errors(self.dsn):
            yield

    def opened(self) -> Connection:
        """A connection; its transactions end when they are idle because a process was stopped."""
        options = f"-c idle_in_transaction_session_timeout={int(self.handler.timeout_s * 2000)}"
        return connect(self.dsn, options=options, application_name="everstate-handler")

    @contextmanager
    def connected(self) -> Iterator[Connection]:
        """A connection for the block, with the tables; raises Unavailable."""
        with self.errors(), self.opened() as connection:
            if connection.execute(_SQL["is_installed"]).fetchone() == (False,):
                with connection.transaction():
                    connection.execute(_SQL["lock"])
                    connection.execute(_DDL)
            yield connection

    def place(self, spots: Mapping[int, Spot], log: bytes, *, again: bool = False) -> None:
        """Store positions in all partitions of the topic, if it has none, or ``again``.

        Parked changes after them are dropped: they are read again. Those of another log stay, as
        nothing tells which of them this log has. Raises LogIdentityChanged when present positions
        belong to another log, TopicResized when they are of fewer partitions.
        """
        with self.connected() as connection, connection.transaction():
            connection.execute(_SQL["lock"])
            logs = {bytes(each) for (each,) in self.run(connection, "logs")}
            if logs - {log} and not again:
                raise LogIdentityChanged(
                    f"handler {self.handler.title}: its positions belong to another log.",
                    advice="`everstate handlers reset` gives it positions in the present one.",
                )
            if logs == {log} and len(stored := self.positions(connection)) < len(spots):
                raise TopicResized(self.topic, len(stored), len(spots))
            for number, spot in spots.items() if again or not logs else ():
                self.run(connection, "place", number, *spot, log, LANES)
                if logs == {log}:
                    self.run(connection, "forget", number, *spot)
            if logs - {log}:
                self.run(connection, "carry", len(spots))

    def run(self, connection: Connection, name: str, *given: Any) -> ReadCursor:
        """Run a statement of `statements.sql`, whose first value is the handler's id."""
        return connection.execute(_SQL[name], [self.id, *given])

    def positions(self, connection: Connection) -> dict[int, tuple[int, int]]:
        """The lowest next offset and the epoch of each partition; empty: it never ran."""
        return {p: (at, epoch) for p, at, epoch in self.run(connection, "positions")}

    def take(self, connection: Connection, number: int) -> Owned:
        """Take a partition over: no transaction of a former owner can commit from now on.

        Waits for one that is committing just now. Raises TopicResized for a partition that the
        topic did not have when positions were placed.
        """
        rows = sorted(self.run(connection, "take", number))
        if not rows:
            raise TopicResized(self.topic, len(self.positions(connection)), number + 1)
        return Owned(number, rows[0][3], [Spot(at, done) for _, at, done, _ in rows])

    def move(self, connection: Connection, owned: Owned, spots: Mapping[int, Spot]) -> bool:
        """Store positions of lanes; false: another process has taken the partition over."""
        lanes = [lane + 1 for lane in spots]
        moved = lanes, [at for at, _ in spots.values()], [done for _, done in spots.values()]
        found = self.run(connection, "move", owned.number, owned.epoch, *moved)
        return found.rowcount == len(spots)

    def settle(self, connection: Connection, owned: Owned, items: Sequence[Item]) -> None:
        """Store that changes are handled or parked, in the transaction of their effects.

        Raises Unavailable when another process has taken the partition over: then nothing may be
        committed. A parked change that was skipped meanwhile stays skipped.
        """
        spots = {item.lane: item.spot or owned.spots[item.lane] for item in items}
        if not self.move(connection, owned, spots):
            raise Unavailable(
                f"handler {self.handler.title}: another process, or a command, has moved partition"
                f" {owned.number}. Nothing was stored; its position is read again."
            )
        if handled := [each.parked_id for each in items if each.parked_id and each.reason is None]:
            self.run(connection, "skip", handled, handled)
        for item in items:
            if item.reason is not None:
                attempts = item.attempts + (item.reason != WAITS)
                pause_s = None if item.is_final else self.handler.pause_s(attempts)
                known = item.reason, attempts, pause_s
                if item.parked_id:
                    self.run(connection, "fail", item.parked_id, *known)
                else:
                    assert item.spot is not None, "only a parked change has none"
                    change = *item.spot, item.key, decode_wire(item.value).version, item.value
                    self.run(connection, "park", owned.number, *change, *known)

    def due(
        self, connection: Connection, owned: Mapping[int, Owned]
    ) -> tuple[dict[int, list[Item]], int]:
        """Parked changes to be called now by partition, those of a key in their order.

        Also how many wait in all. Renews the blocked keys of the partitions. Cost: a pass over all
        that are parked there.
        """
        for each in owned.values():
            each.blocked.clear()
        found: dict[int, list[Item]] = {}
        passes = self.handler.on_parked == "pass"
        rows = self.run(connection, "waiting", list(owned), passes).fetchall()
        for number, key, parked_id, attempts, value in rows:
            owned[number].blocked.add(key)
            if value is not None:
                item = Item(key, bytes(value), None, parked_id, attempts)
                found.setdefault(number, []).append(item)
        return found, len(rows)


HandlerState: TypeAlias = tuple[str, int | None, float | None, int | None, int | None, str | None]
"""Title, changes and seconds behind the log (``None``: it never ran), parked and waiting changes,
and why nothing is known of it."""


def handler_states(config: Config, handlers: Iterable[Handler]) -> list[HandlerState]:
    """The state of each handler, also when the database of one does not answer.

    Raises Unavailable for the log. Cost: a connection and some queries for each handler, and that
    of Lag.
    """
    found = list[HandlerState]()
    with Lag(config) as lag:
        for each in handlers:
            try:
                tables = HandlerTables(config, each)
                with tables.connected() as connection:
                    at = tables.positions(connection).items()
                    ((*counts, calls),) = tables.run(connection, "counts").fetchall()
            except EverstateError as error:
                found.append((each.title, None, None, None, None, error.message))
                continue
            lags = lag.rows(ReaderPosition(each.title, tables.topic, p, o) for p, (o, _) in at)
            late_s = max((row.lag_seconds for row in lags), default=None)
            if calls and late_s is not None:
                # So long at least the change has failed for which it was called most often.
                late_s = max(late_s, sum(each.pause_s(n) or 0 for n in range(1, calls)))
            behind = sum(row.lag_changes for row in lags) if at else None
            found.append((each.title, behind, late_s, *counts, None))
    return found
