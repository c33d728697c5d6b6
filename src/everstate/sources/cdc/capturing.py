"""What `everstate cdc` does: add, check, pause, resume and remove the capture of a database."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from uuid_utils.compat import uuid7

from everstate.changes import EntityType
from everstate.config import Config, expanded
from everstate.declarations.captures import Capture
from everstate.errors import (
    CaptureFailed,
    EverstateError,
    InvalidCapture,
    InvalidConfig,
    SourceReplaced,
    Unavailable,
)
from everstate.log.client import raw_bytes_max
from everstate.log.topics import Topics
from everstate.retrying import within
from everstate.sources.cdc.connectors import (
    CLASSES,
    SAFE_VERSIONS,
    connector_settings,
    not_left_out,
    writes_one_log,
)
from everstate.sources.cdc.database import CapturedDatabase, ConnectorStanding, Finding, SetupStep
from everstate.sources.cdc.halted import has_failed_reading, tables_to_read, without_first_table
from everstate.sources.cdc.mariadb import MariaDatabase, mariadb_address
from everstate.sources.cdc.names import CaptureNames, former_topics, names_of
from everstate.sources.cdc.notifications import (
    first_of,
    first_snapshot,
    notifications,
    tell_given_up,
    unread_of,
)
from everstate.sources.cdc.postgres import PostgresDatabase, postgres_address
from everstate.sources.cdc.raw_log import ensure_raw_log
from everstate.sources.cdc.refusing import generated_findings, refuse_failed
from everstate.sources.cdc.replaced import check_source, known_standing, write_source
from everstate.sources.cdc.rest import Connect, NoSuchConnector
from everstate.sources.cdc.secrets import forget_password, password_reference
from everstate.sources.cdc.status import CaptureStatus, age_s, states_of, trace_of
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
    steps: tuple[SetupStep, ...]
    topic: str
    """The raw log that the connector writes to."""
    warnings: tuple[Finding, ...] = ()
    """The doctor's warnings about the tables, which do not prevent their capture."""

    @property
    def changed(self) -> bool:
        """False when everything was as it should be already."""
        return any(step.done != "there" for step in self.steps)


class Capturing:
    """One declared capture, its connector, and its database.

    ``config`` has the addresses of the running servers. A capture without ``dsn`` is run by
    somebody else: every method that needs the database raises InvalidCapture.
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

        ``entities``: the registered entity types; without them it is not checked whether a model
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
        """Make topics, publication, our tables and the connector; wait until the connector reads.

        Idempotent; a changed declaration changes the connector. Raises CaptureFailed with the
        connector's reason when its task fails, and Unavailable when it is not connected after
        ``wait_s`` seconds. Raises CaptureFailed before anything is made when a table cannot be
        captured correctly, or would reject writes once it is published.
        """
        with self.database() as database:
            findings = self._table_findings(database)
            refuse_failed(self.capture, findings)
            known = known_standing(self._config, self.capture)
            identity = check_source(self.capture, database, known)
            steps = database.prepare()
            steps += self._make_topics()
            epoch = max(known.epoch, self.capture.epoch)
            steps.append(self._put_connector(database, snapshot, identity, epoch))
            if wait_s > 0:
                self._wait_until_connected(database, wait_s)
        # Warnings with SQL that repairs them are shown by the doctor only.
        warned = tuple(each for each in findings if each.outcome == "warn" and not each.sql)
        names = self.names
        return Added(self.capture.name, names.connector, tuple(steps), names.raw_log, warned)

    def begin_epoch(self, *, wait_s: float = 60.0) -> Added:
        """Start over with a database that was restored, or that replaced another one.

        The connector's stored position is deleted; its first snapshot reads all rows, in a new
        epoch whose positions are newer than all before. Raises as :meth:`add` does.
        """
        connector = self.names.connector
        with self.database() as database:
            findings = self._table_findings(database)
            refuse_failed(self.capture, findings)
            steps = [self._delete_connector(forget=True), *database.remove()]
            if self.capture.kind == "mariadb":
                with Topics(self._config) as topics:
                    topics.delete({self.names.schema_history} & topics.existing())
            steps += database.prepare()
            steps += self._make_topics()
            known = known_standing(self._config, self.capture)
            epoch = max(known.epoch, self.capture.epoch) + 1
            steps.append(self._put_connector(database, True, database.identity(), epoch))
            if wait_s > 0:
                self._wait_until_connected(database, wait_s)
        return Added(self.capture.name, connector, tuple(steps), self.names.raw_log)

    def move_to_one_log(self) -> bool:
        """Make a connector of an earlier version write to the one raw log.

        The connector is stopped first: what it wrote until then is in the former topics, what it
        writes afterwards in the one raw log. Out: whether it was moved. Raises Unavailable.
        """
        try:
            if writes_one_log(self._connect.config(self.names.connector), self.names):
                return False
        except NoSuchConnector:
            return False
        self.add(wait_s=0.0)
        return True

    def check_source(self) -> None:
        """Raise SourceReplaced when the database is not the one that was read before."""
        known = known_standing(self._config, self.capture)
        with self.database() as database:
            check_source(self.capture, database, known)

    def refuse_unfit(self) -> None:
        """Raise CaptureFailed, as `add` does, when a table cannot be captured correctly."""
        with self.database() as database:
            refuse_failed(self.capture, self._table_findings(database))

    def status(self) -> CaptureStatus:
        """Query Kafka Connect and the database; what does not answer is reported as unknown."""
        offset: dict[str, Any] = {}
        try:
            state, task, reason = states_of(self._connect.status(self.names.connector))
            offset = self._connect.offset(self.names.connector)
        except NoSuchConnector:
            return self._absent()
        except (Unavailable, InvalidConfig) as error:
            state, task, reason = "unreachable", None, f"{error.message} {error.advice or ''}"
        standing: ConnectorStanding | None = None
        problems: tuple[str, ...] = ()
        try:
            with self.database() as database:
                standing = database.standing(offset)
                problems = self._problems(database, is_reachable=state != "unreachable")
        except EverstateError as error:
            reason = reason or error.message
        reported = notifications(self._config, self.names)
        first = first_of(reported, len(self.capture.captured_tables))
        if first.interrupted and reason is None:
            reason = f"{_INTERRUPTED} `everstate cdc snapshot {self.capture.name}`"
        for table, why in unread_of(reported).items():
            again = f"`everstate cdc snapshot {self.capture.name} --table {table}` asks again"
            reason = reason or f"the last snapshot of {table} failed ({why}): {again}"
        return CaptureStatus(
            capture=self.capture.name,
            state=state,
            task=task,
            connected=standing.connected if standing else None,
            behind_s=0.0 if standing and standing.idle else age_s(offset, time.time()),
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
        """Problems with the database and its tables since the capture was added."""
        failed = [each for each in self._table_findings(database) if each.outcome == "fail"]
        known = known_standing(self._config, self.capture)
        replaced = []
        try:
            check_source(self.capture, database, known)
        except SourceReplaced as error:
            replaced = [str(error)]
        problems = replaced + [f"{each.name}: {each.found}" for each in failed]
        if is_reachable:
            settings = self._connect.config(self.names.connector)
            for column in not_left_out(settings, database.peculiarities()):
                add = f"`everstate cdc add {self.capture.name}` leaves it out"
                problems.append(f"{column} is generated, and its table cannot be read again: {add}")
        return tuple(problems)

    def check(self) -> list[Finding]:
        """Check everything that the connector needs of the database."""
        try:
            with self.database() as database:
                return [*database.check(), *self._generated(database), *self._plugin()]
        except (Unavailable, CaptureFailed) as error:
            return [Finding("connection", "fail", error.message, advice=error.advice)]

    def _plugin(self) -> list[Finding]:
        """Whether the cluster's Debezium loses no rows when it is stopped."""
        wanted = SAFE_VERSIONS.get(self.capture.kind)
        if wanted is None or self._url is None:
            return []
        name = "Debezium's plugin"
        try:
            found = self._connect.plugin_version(CLASSES[self.capture.kind])
        except EverstateError as error:
            return [Finding(name, "warn", error.message, advice=error.advice)]
        if found is None:
            return [Finding(name, "fail", f"{self._url} has none for {self.capture.kind}")]
        if tuple(int(part) for part in re.findall(r"[0-9]+", found)[:2]) >= wanted:
            return [Finding(name, "ok", found)]
        version = ".".join(map(str, wanted))
        return [
            Finding(
                name,
                "fail",
                f"{found} loses rows when it is stopped within a COPY (debezium/dbz#1554)",
                advice=f"Install {version} or later on the Connect cluster.",
            )
        ]

    def pause(self, wait_s: float = 30.0) -> None:
        """Stop reading; PostgreSQL keeps its log for the slot until :meth:`resume`."""
        self._known(self._connect.pause)
        self._wait_for("PAUSED", wait_s)

    def resume(self, wait_s: float = 60.0) -> None:
        """Resume reading at the stored position; failed parts are restarted too."""
        self.check_source()
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
            state, task, reason = states_of(self._connect.status(self.names.connector))
        except NoSuchConnector:
            return None
        has_failed = state == "FAILED" or (state == "RUNNING" and task == "FAILED")
        return (self._safe(reason) or "the connector gave no reason") if has_failed else None

    def restart_failed(self) -> str | None:
        """Restart the parts that failed; the connector resumes at its stored position.

        Out: the table that was removed from an incremental snapshot, if the connector failed
        because it cannot read that table: it would fail again after each restart. Raises
        Unavailable while the database does not answer, and CaptureFailed when the database no
        longer has the log after the position: a connector would skip the lost part silently.
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
        status = self._connect.status(connector)
        if tables_to_read(position) and has_failed_reading(trace_of(status)):
            return self._give_up(tables_to_read(position)[0], self._safe(states_of(status)[2]))
        self._connect.restart(connector)
        return None

    def running_position(self) -> dict[str, Any]:
        """The stored source position; empty while connector or task does not run.

        Two requests to Connect; raises Unavailable.
        """
        if self._connector_states()[:2] != ("RUNNING", "RUNNING"):
            return {}
        return self._connect.offset(self.names.connector)

    def nudge(self) -> None:
        """Write a signal that moves the connector's position and does nothing else."""
        with self.database() as database:
            database.signal(f"everstate-{uuid7()}", "log", '{"message": "still there?"}')

    def restart_reading(self) -> None:
        """Restart all tasks of the connector; it resumes at its stored position, snapshots too."""
        self._connect.restart_all(self.names.connector)

    def _give_up(self, table: str, reason: str | None) -> str | None:
        """Remove the unreadable table from the stored snapshot; report it as a notification."""
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
        why = reason or "the connector gave no reason"
        tell_given_up(self._config, self.names, table, why)
        return f"{table}: {why}"

    def remove(self, *, drop: bool = False, topics: bool = False) -> list[SetupStep]:
        """Delete the connector; with ``drop`` its position, slot, publication and our tables too.

        Without ``drop`` the slot still keeps the database's log, and a later `add` resumes where
        this connector ended. ``topics`` deletes the raw topics and the notifications.
        """
        steps = [self._delete_connector(forget=drop)]
        forget_password(self._config, self.capture.name)
        with self.database() as database:
            if drop:
                steps += database.remove()
            else:
                steps += database.release()
                if self.capture.kind == "postgresql":
                    steps.append(SetupStep(f"slot {self.names.identifier}", "kept"))
        doomed = [self.names.schema_history] if drop else []
        if topics:
            doomed += self._topics()
        with Topics(self._config) as admin:
            doomed = sorted(set(doomed) & admin.existing())
            admin.delete(doomed)
        return [*steps, *(SetupStep(f"topic {name}", "removed") for name in doomed)]

    @contextmanager
    def database(self) -> Iterator[CapturedDatabase]:
        """A connection to the captured database, as the connector's user."""
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

        A connector that was started a moment ago gets ``wait_s`` seconds to connect.
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

    def _make_topics(self) -> list[SetupStep]:
        config = self._config
        size = {"max.message.bytes": str(raw_bytes_max(config))}
        kept = {"retention.ms": str(int(config.capture.retention_hours * _HOUR_MS)), **size}
        with Topics(config) as topics:
            made = ensure_raw_log(config, self.capture, topics)
            made += topics.ensure_raw([self.names.notifications], partitions=1, settings=kept)
            if self.capture.kind == "mariadb":
                # The connector cannot read the binlog without the whole history of the tables.
                for_ever = {"retention.ms": "-1", **size}
                made += topics.ensure_raw(
                    [self.names.schema_history], partitions=1, settings=for_ever
                )
        return [SetupStep(f"topic {name}", "made") for name in made]

    def _put_connector(
        self, database: CapturedDatabase, snapshot: bool, identity: str, epoch: int
    ) -> SetupStep:
        """Make or change the connector; before a new one, the raw log gets its database's id."""
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
        connector = self.names.connector
        try:
            found: dict[str, str] | None = self._connect.config(connector)
        except NoSuchConnector:
            found = None
        if found == settings:
            return SetupStep(what, "there")
        is_moving = found is not None and not writes_one_log(found, self.names)
        if is_moving:
            # All that it has read so far must be written before the one raw log begins.
            self._connect.stop(connector)
            self._wait_for("STOPPED", 60.0)
        if found is None or is_moving:
            write_source(self._config, self.names, identity, epoch)
        try:
            self._connect.put(connector, settings)
        except CaptureFailed as error:
            raise CaptureFailed(str(self._safe(error.message))) from error
        if is_moving:
            self._connect.resume(connector)
        return SetupStep(what, "made" if found is None else "changed")

    def _wait_until_connected(self, database: CapturedDatabase, wait_s: float) -> None:
        deadline = time.monotonic() + wait_s
        while True:
            state, task, reason = self._connector_states()
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
        tables = len(self.capture.captured_tables)
        return first_snapshot(self._config, self.names, tables).under_way

    def _connector_states(self) -> tuple[str, str | None, str | None]:
        try:
            return states_of(self._connect.status(self.names.connector))
        except NoSuchConnector:
            # A new connector has no status for a moment.
            return "UNASSIGNED", None, None

    def _wait_for(self, state: str, wait_s: float) -> None:
        deadline = time.monotonic() + wait_s
        while True:
            found, task, reason = self._connector_states()
            if found == state and task in (state, None, "FAILED"):
                return
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"capture {self.capture.name} is {found} (task {task}), not {state}, "
                    f"after {wait_s:g} s.",
                    advice=self._safe(reason),
                )
            time.sleep(_POLL_S)

    def _delete_connector(self, *, forget: bool) -> SetupStep:
        name = self.names.connector
        try:
            self._connect.config(name)
        except NoSuchConnector:
            return SetupStep(f"connector {name}", "there")
        if forget:
            self._connect.stop(name)
            self._once_stopped(lambda: self._connect.forget_offsets(name))
        self._connect.delete(name)
        return SetupStep(f"connector {name}", "removed")

    def _once_stopped(self, change: Callable[[], None]) -> None:
        """Change a stored position; retried while Connect refuses it because a task still runs."""
        within(30.0, CaptureFailed, pause_s=_POLL_S)(change)

    def _topics(self) -> list[str]:
        former = former_topics(self.names, self.capture)
        return [self.names.raw_log, self.names.notifications, *former]

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
