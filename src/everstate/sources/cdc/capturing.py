"""What `everstate cdc` does: add, look at, pause, resume and remove the capture of a database."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from uuid_utils.compat import uuid7

from everstate.changes import EntityType
from everstate.config import Config, expanded
from everstate.errors import (
    CaptureFailed,
    EverstateError,
    InvalidCapture,
    InvalidConfig,
    Unavailable,
)
from everstate.log.client import raw_bytes_max
from everstate.log.topics import Topics
from everstate.sources.cdc.connectors import connector_settings, not_left_out
from everstate.sources.cdc.database import CapturedDatabase, Finding, Standing, Step
from everstate.sources.cdc.declaration import Capture
from everstate.sources.cdc.halted import (
    has_failed_reading,
    source_time_s,
    tables_to_read,
    without_first_table,
)
from everstate.sources.cdc.mariadb import MariaDatabase, mariadb_address
from everstate.sources.cdc.names import CaptureNames, names_of, table_topics
from everstate.sources.cdc.notifications import (
    first_of,
    first_snapshot,
    notifications,
    tell_given_up,
    unread_of,
)
from everstate.sources.cdc.postgres import PostgresDatabase, postgres_address
from everstate.sources.cdc.refusing import generated_findings, refuse_failed
from everstate.sources.cdc.rest import Connect, NoSuchConnector
from everstate.sources.cdc.secrets import forget_password, password_reference
from everstate.telemetry import without_secret

_POLL_S: Final = 0.2
_STARTING: Final = ("RUNNING", "UNASSIGNED", "RESTARTING")
"""States of a connector that may read soon."""
_HOUR_MS: Final = 3_600_000
_INTERRUPTED: Final = (
    "the first snapshot was begun again while its slot was there already, so a transaction that "
    "was committing at that moment may be missing: read all rows once more with"
)
_OWN_CLUSTER: Final = "no connect_url is set, and no local worker runs"


@dataclass(frozen=True, slots=True)
class Added:
    """What `add` did."""

    capture: str
    connector: str
    steps: tuple[Step, ...]
    topics: Mapping[str, str]
    """Table → raw topic."""
    warnings: tuple[Finding, ...] = ()
    """What the doctor says of the tables that does not keep them from being captured."""

    @property
    def changed(self) -> bool:
        """False when everything was as it should be already."""
        return any(step.done != "there" for step in self.steps)


@dataclass(frozen=True, slots=True)
class CaptureStatus:
    """How one capture is: what Connect says, and what the database says of the same connector."""

    capture: str
    state: str
    """Connect's word for the connector, ``absent``, or ``unreachable`` when Connect is."""
    task: str | None
    connected: bool | None
    """A session reads the database's log; None: the database cannot be asked."""
    behind_s: float | None
    """Age of the newest source transaction that is stored as done. An idle PostgreSQL is written
    to by heartbeats, so this stays near `capture.heartbeat_s`; an idle MariaDB has 0."""
    behind_bytes: int | None
    held_bytes: int | None
    reason: str | None
    """First line of what is wrong."""
    snapshot: str | None = None
    """What was told last of the first snapshot, such as ``IN_PROGRESS``; None: nothing."""
    reads_snapshot: bool = False
    reads_again: tuple[str, ...] = ()
    """Tables that an incremental snapshot has still to read."""
    position: Mapping[str, Any] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    """What is wrong with captured tables, so that rows are lost or cannot be written."""

    @property
    def reads(self) -> bool:
        """Running, and connected or reading its first snapshot."""
        running = self.state == "RUNNING" and self.task == "RUNNING"
        return running and (self.connected is True or self.reads_snapshot)

    @property
    def well(self) -> bool:
        """It reads, and every table of it can be captured right."""
        return self.reads and not self.problems


class Capturing:
    """One declared capture, its connector, and its database.

    ``config`` has the addresses of the running servers. A capture without ``dsn`` is somebody
    else's to run: every method that needs the database raises InvalidCapture.
    """

    def __init__(
        self,
        config: Config,
        capture: Capture,
        *,
        local: bool,
        entities: Mapping[str, EntityType] | None = None,
    ) -> None:
        """``local``: Connect is the local stack's worker, whose files we can write.

        ``entities``: the registered entity types; without them nobody checks whether a model
        needs a column that the database's log does not have.
        """
        self._config, self.capture, self._local = config, capture, local
        self._entities = entities or {}
        self.names: CaptureNames = names_of(config.log.prefix, capture)

    @property
    def _connect(self) -> Connect:
        """Connect's REST interface; raises InvalidConfig while there is no address."""
        if self._url is None:
            raise InvalidConfig("capture.connect_url", None, f"an address; {_OWN_CLUSTER}")
        return Connect(self._url)

    @property
    def has_connect(self) -> bool:
        """Whether an address of Connect is known."""
        return self._url is not None

    @property
    def _url(self) -> str | None:
        return self.capture.connect_url or self._config.capture.connect_url

    def add(self, *, snapshot: bool = True, wait_s: float = 60.0) -> Added:
        """Make topics, publication and our tables, and the connector; wait until it reads.

        The same again changes nothing; another declaration changes the connector. Raises
        CaptureFailed with the connector's reason when its task fails, and Unavailable when it is
        not connected after ``wait_s``. Raises CaptureFailed before anything is made when a table
        cannot be captured right, or could not be written any more.
        """
        with self.database() as database:
            findings = self._table_findings(database)
            refuse_failed(self.capture, findings)
            steps = database.prepare()
            steps += self._make_topics()
            steps.append(self._put_connector(database, snapshot))
            if wait_s > 0:
                self._wait_until_connected(database, wait_s)
        topics = table_topics(self.names, self.capture)
        # What SQL could mend is left to those who ask the doctor.
        warned = tuple(each for each in findings if each.outcome == "warn" and not each.sql)
        return Added(self.capture.name, self.names.connector, tuple(steps), topics, warned)

    def refuse_unfit(self) -> None:
        """Raise CaptureFailed, as `add` does, when a table cannot be captured right."""
        with self.database() as database:
            refuse_failed(self.capture, self._table_findings(database))

    def status(self) -> CaptureStatus:
        """Ask Connect and the database; what cannot be asked is told as unknown."""
        offset: dict[str, Any] = {}
        try:
            state, task, reason = _states(self._connect.status(self.names.connector))
            offset = self._connect.offset(self.names.connector)
        except NoSuchConnector:
            return self._absent()
        except (Unavailable, InvalidConfig) as error:
            state, task, reason = "unreachable", None, f"{error.message} {error.advice or ''}"
        standing: Standing | None = None
        problems: tuple[str, ...] = ()
        try:
            with self.database() as database:
                standing = database.standing(offset)
                problems = self._problems(database, is_reachable=state != "unreachable")
        except EverstateError as error:
            reason = reason or error.message
        told = notifications(self._config, self.names)
        first = first_of(told)
        if first.interrupted and reason is None:
            reason = f"{_INTERRUPTED} `everstate cdc snapshot {self.capture.name}`"
        for table, why in unread_of(told).items():
            again = f"`everstate cdc snapshot {self.capture.name} --table {table}` asks again"
            reason = reason or f"the last snapshot of {table} failed ({why}): {again}"
        return CaptureStatus(
            capture=self.capture.name,
            state=state,
            task=task,
            connected=standing.connected if standing else None,
            behind_s=0.0 if standing and standing.idle else _age_s(offset, time.time()),
            behind_bytes=standing.behind_bytes if standing else None,
            held_bytes=standing.held_bytes if standing else None,
            reason=self._safe((standing.note if standing else None) or reason),
            snapshot=first.state,
            reads_snapshot=first.under_way and standing is not None,
            reads_again=tables_to_read(offset),
            position=offset,
            problems=problems,
        )

    def _problems(self, database: CapturedDatabase, *, is_reachable: bool) -> tuple[str, ...]:
        """What became wrong with the tables since they were added."""
        failed = [each for each in self._table_findings(database) if each.outcome == "fail"]
        problems = [f"{each.name}: {each.found}" for each in failed]
        if is_reachable:
            settings = self._connect.config(self.names.connector)
            for column in not_left_out(settings, database.peculiarities()):
                add = f"`everstate cdc add {self.capture.name}` leaves it out"
                problems.append(f"{column} is generated, and its table cannot be read again: {add}")
        return tuple(problems)

    def check(self) -> list[Finding]:
        """Look at everything the connector needs of the database."""
        try:
            with self.database() as database:
                return [*database.check(), *self._generated(database)]
        except (Unavailable, CaptureFailed) as error:
            return [Finding("connection", "fail", error.message, advice=error.advice)]

    def pause(self, wait_s: float = 30.0) -> None:
        """Stop reading; the database holds its log until :meth:`resume`."""
        self._known(self._connect.pause)
        self._wait_for("PAUSED", wait_s)

    def resume(self, wait_s: float = 60.0) -> None:
        """Go on reading where it was paused; see :meth:`restart_failed` for what had failed."""
        self._known(self._connect.resume)
        self._wait_for("RUNNING", wait_s)
        if self.failure() is not None:
            self.restart_failed()

    def failure(self) -> str | None:
        """Why the connector or its task has failed; one request to Connect.

        ``None``: neither has, or it is paused, or nobody has added it yet. Raises Unavailable.
        """
        if self._url is None:
            return None
        try:
            state, task, reason = _states(self._connect.status(self.names.connector))
        except NoSuchConnector:
            return None
        has_failed = state == "FAILED" or (state == "RUNNING" and task == "FAILED")
        return (self._safe(reason) or "no reason is told") if has_failed else None

    def restart_failed(self) -> str | None:
        """Start what failed again; it goes on at the stored position.

        Out: the table that was given up, if it failed because an incremental snapshot cannot read
        it, for it would fail so for ever. Raises Unavailable while the database does not answer,
        and CaptureFailed when it has no more what follows the position: a connector would begin
        behind the hole and say nothing.
        """
        connector = self.names.connector
        position = self._connect.offset(connector)
        with self.database() as database:
            standing = database.standing(position)
        if standing.is_lost:
            raise CaptureFailed(
                f"capture {self.capture.name}: {standing.note}.",
                advice=f"`everstate cdc remove {self.capture.name} --drop`, then `cdc add`, "
                "reads all rows again.",
            )
        told = self._connect.status(connector)
        if tables_to_read(position) and has_failed_reading(_trace(told)):
            return self._give_up(tables_to_read(position)[0], self._safe(_states(told)[2]))
        self._connect.restart(connector)
        return None

    def running_position(self) -> dict[str, Any]:
        """The stored source position; empty while connector or task does not run.

        Two requests to Connect; raises Unavailable.
        """
        if self._told()[:2] != ("RUNNING", "RUNNING"):
            return {}
        return self._connect.offset(self.names.connector)

    def nudge(self) -> None:
        """Give the connector something to read, that moves its position and nothing else."""
        with self.database() as database:
            database.signal(f"everstate-{uuid7()}", "log", '{"message": "still there?"}')

    def restart_reading(self) -> None:
        """Have the connector begin to read anew at its stored position, snapshots included."""
        self._connect.restart_all(self.names.connector)

    def _give_up(self, table: str, reason: str | None) -> str | None:
        """Take the table that cannot be read out of the stored snapshot; say so in its topic."""
        connector = self.names.connector
        self._connect.stop(connector)
        try:
            self._wait_for("STOPPED", 30.0)
            position = self._connect.offset(connector)
            if tables_to_read(position)[:1] != (table,):
                return None
            without = without_first_table(position)
            self._once_stopped(lambda: self._connect.alter_offset(connector, without))
        finally:
            self._connect.resume(connector)
        why = reason or "no reason is told"
        tell_given_up(self._config, self.names, table, why)
        return f"{table}: {why}"

    def remove(self, *, drop: bool = False, topics: bool = False) -> list[Step]:
        """Delete the connector; with ``drop`` its position, slot, publication and our tables too.

        Without ``drop`` the slot goes on holding the database's log, and a later `add` continues
        where this one ended. ``topics`` deletes the raw topics.
        """
        steps = [self._delete_connector(forget=drop)]
        forget_password(self._config, self.capture.name)
        with self.database() as database:
            if drop:
                steps += database.remove()
            else:
                steps += database.release()
                if self.capture.kind == "postgresql":
                    steps.append(Step(f"slot {self.names.identifier}", "kept"))
        doomed = [self.names.schema_history] if drop else []
        if topics:
            doomed += self._topics()
        with Topics(self._config) as admin:
            doomed = sorted(set(doomed) & admin.existing())
            admin.delete(doomed)
        return [*steps, *(Step(f"topic {name}", "removed") for name in doomed)]

    @contextmanager
    def database(self) -> Iterator[CapturedDatabase]:
        """The captured database, spoken to as the connector's user."""
        dsn = self._dsn()
        opened: CapturedDatabase
        if self.capture.kind == "postgresql":
            opened = PostgresDatabase(self.capture, self.names, dsn)
        elif self.capture.kind == "mariadb":
            opened = MariaDatabase(self.capture, self.names, dsn)
        else:
            reason = f"no connector for {self.capture.kind} is at hand"
            advice = "Run one of your own and declare the capture without dsn."
            raise InvalidCapture(self.capture.name, reason, advice=advice)
        try:
            yield opened
        finally:
            opened.close()

    def require_running(self, wait_s: float = 20.0) -> None:
        """Raise CaptureFailed unless the connector runs and is connected.

        One that was started a moment ago is given ``wait_s`` to connect.
        """
        deadline = time.monotonic() + wait_s
        while not (status := self.status()).reads:
            is_starting = status.state in _STARTING and status.task != "FAILED"
            if not is_starting or time.monotonic() > deadline:
                state = f"{status.state}, task {status.task}, connected: {status.connected}"
                raise CaptureFailed(
                    f"capture {self.capture.name} does not read now ({state}).",
                    advice=status.reason
                    or f"`everstate cdc status {self.capture.name}` tells more.",
                )
            time.sleep(_POLL_S)

    def _table_findings(self, database: CapturedDatabase) -> list[Finding]:
        return [*database.check_tables(), *self._generated(database)]

    def _generated(self, database: CapturedDatabase) -> list[Finding]:
        generated = database.peculiarities().generated
        return generated_findings(self.capture, self._entities, generated)

    def _dsn(self) -> str:
        if self.capture.dsn is None:
            reason = "it is declared without dsn: its connector is somebody else's"
            raise InvalidCapture(self.capture.name, reason)
        return expanded(self.capture.dsn, f"dsn of capture {self.capture.name}")

    def _make_topics(self) -> list[Step]:
        config = self._config
        size = {"max.message.bytes": str(raw_bytes_max(config))}
        kept = {"retention.ms": str(int(config.capture.retention_hours * _HOUR_MS)), **size}
        single = [self.names.transactions, self.names.notifications, self.names.heartbeats]
        if any(table.provenance.message_prefix for table in self.capture.tables.values()):
            single.append(self.names.messages)
        rows = table_topics(self.names, self.capture).values()
        with Topics(config) as topics:
            made = topics.ensure_raw(rows, partitions=config.log.partitions, settings=kept)
            made += topics.ensure_raw(single, partitions=1, settings=kept)
            topics.raise_sizes(rows, raw_bytes_max(config))
            if self.capture.kind == "mariadb":
                # The connector cannot read its binlog without the tables' whole past.
                for_ever = {"retention.ms": "-1", **size}
                made += topics.ensure_raw(
                    [self.names.schema_history], partitions=1, settings=for_ever
                )
        return [Step(f"topic {name}", "made") for name in made]

    def _put_connector(self, database: CapturedDatabase, snapshot: bool) -> Step:
        dsn = self._dsn()
        address = postgres_address if self.capture.kind == "postgresql" else mariadb_address
        reference = password_reference(
            self._config, self.capture.name, address(dsn)[1], local=self._local
        )
        settings = connector_settings(
            self._config,
            self.capture,
            self.names,
            database.address,
            database.own,
            password=reference,
            brokers=self._config.bootstrap_servers,
            snapshot=snapshot,
            peculiar=database.peculiarities(),
        )
        what = f"connector {self.names.connector}"
        try:
            if self._connect.config(self.names.connector) == settings:
                return Step(what, "there")
            done = "changed"
        except NoSuchConnector:
            done = "made"
        try:
            self._connect.put(self.names.connector, settings)
        except CaptureFailed as error:
            raise CaptureFailed(str(self._safe(error.message))) from error
        return Step(what, "changed" if done == "changed" else "made")

    def _wait_until_connected(self, database: CapturedDatabase, wait_s: float) -> None:
        deadline = time.monotonic() + wait_s
        while True:
            state, task, reason = self._told()
            if task == "FAILED" or state == "FAILED":
                advice = f"`everstate cdc doctor {self.capture.name}` looks for the cause."
                raise CaptureFailed(
                    f"capture {self.capture.name}: the connector failed: {self._safe(reason)}",
                    advice=advice,
                )
            if state in ("PAUSED", "STOPPED"):
                return
            if task == "RUNNING" and self._reads(database):
                return
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"capture {self.capture.name} is not connected after {wait_s:g} s "
                    f"(connector {state}, task {task}).",
                    advice=f"Look again with `everstate cdc status {self.capture.name}`.",
                )
            time.sleep(_POLL_S)

    def _reads(self, database: CapturedDatabase) -> bool:
        """Whether a session reads the log, or a first snapshot is under way, which comes first."""
        if database.standing({}).connected:
            return True
        return first_snapshot(self._config, self.names).under_way

    def _told(self) -> tuple[str, str | None, str | None]:
        try:
            return _states(self._connect.status(self.names.connector))
        except NoSuchConnector:
            # A new connector has no status for a moment.
            return "UNASSIGNED", None, None

    def _wait_for(self, state: str, wait_s: float) -> None:
        deadline = time.monotonic() + wait_s
        while True:
            found, task, reason = self._told()
            if found == state and task in (state, None, "FAILED"):
                return
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"capture {self.capture.name} is {found} (task {task}), not {state}, "
                    f"after {wait_s:g} s.",
                    advice=self._safe(reason),
                )
            time.sleep(_POLL_S)

    def _delete_connector(self, *, forget: bool) -> Step:
        name = self.names.connector
        try:
            self._connect.config(name)
        except NoSuchConnector:
            return Step(f"connector {name}", "there")
        if forget:
            self._connect.stop(name)
            self._once_stopped(lambda: self._connect.forget_offsets(name))
        self._connect.delete(name)
        return Step(f"connector {name}", "removed")

    def _once_stopped(self, change: Callable[[], None]) -> None:
        """Change a stored position; Connect refuses that while a task still ends."""
        deadline = time.monotonic() + 30
        while True:
            try:
                change()
            except CaptureFailed:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_POLL_S)
            else:
                return

    def _topics(self) -> list[str]:
        return [
            *table_topics(self.names, self.capture).values(),
            self.names.transactions,
            self.names.messages,
            self.names.notifications,
            self.names.heartbeats,
        ]

    def _known(self, action: Any) -> None:
        try:
            action(self.names.connector)
        except NoSuchConnector as cause:
            raise CaptureFailed(
                f"capture {self.capture.name} was not added.",
                advice=f"`everstate cdc add {self.capture.name}` makes its connector.",
            ) from cause

    def _absent(self) -> CaptureStatus:
        advice = f"`everstate cdc add {self.capture.name}` makes its connector"
        return CaptureStatus(self.capture.name, "absent", None, None, None, None, None, advice)

    def _safe(self, text: str | None) -> str | None:
        """``text`` without the password, whatever wrote it there."""
        if text is None or self.capture.dsn is None:
            return text
        address = postgres_address if self.capture.kind == "postgresql" else mariadb_address
        password = address(self._dsn())[1]
        return without_secret(text.replace(password, "***") if password else text)


def _states(told: Mapping[str, Any]) -> tuple[str, str | None, str | None]:
    """State of the connector, of its task, and the first line of what failed."""
    tasks = told.get("tasks") or []
    trace, task = _trace(told), tasks[0]["state"] if tasks else None
    return str(told["connector"]["state"]), task, None if trace is None else _cause(trace)


def _trace(told: Mapping[str, Any]) -> str | None:
    """Java's trace of what failed."""
    parts = [told["connector"], *(told.get("tasks") or [])]
    return next((str(part["trace"]) for part in parts if part.get("trace")), None)


def _cause(trace: str) -> str:
    """The innermost reason of a Java trace, in one line."""
    lines = [line.strip() for line in trace.splitlines()]
    causes = [line for line in lines if line.startswith("Caused by: ")] or lines[:1]
    return causes[-1].removeprefix("Caused by: ")


def _age_s(offset: Mapping[str, Any], now_s: float) -> float | None:
    """Seconds since the source wrote what is stored as done."""
    written_s = source_time_s(offset)
    return None if written_s is None else max(0.0, now_s - written_s)
