"""What `everstate cdc` does: add, check, pause, resume and remove the capture of a database."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from uuid_utils.compat import uuid7

from everstate.errors import (
    CaptureFailed,
    EverstateError,
    InvalidConfig,
    SourceReplaced,
    TableMisread,
    Unavailable,
)
from everstate.log.consumer import Consumer
from everstate.log.topics import Topics
from everstate.sources.cdc.connector import POLL_S, CaptureConnector, epoch_of
from everstate.sources.cdc.connectors import (
    Peculiarities,
    connector_settings,
    is_current,
    left_out_tables,
    not_left_out,
    without_tables,
)
from everstate.sources.cdc.database import (
    CapturedDatabase,
    ConnectorStanding,
    Finding,
    FindingOutcome,
    SetupStep,
    signal_snapshot,
)
from everstate.sources.cdc.fingerprint import fingerprints, gone_problems, watch_tables
from everstate.sources.cdc.halted import has_failed_reading, tables_to_read
from everstate.sources.cdc.inexact import check_values
from everstate.sources.cdc.mariadb import MariaDatabase
from everstate.sources.cdc.mariadb_unseen import look_at
from everstate.sources.cdc.notifications import first_of, notifications, unread_of
from everstate.sources.cdc.reading import SourceIdentity
from everstate.sources.cdc.refusing import (
    name_findings,
    peculiarities,
    plugin_findings,
    refuse_failed,
    shape_findings,
)
from everstate.sources.cdc.replaced import (
    EPOCH,
    CheckedSource,
    check_source,
    known_standing,
    mark_of,
    new_mark,
    write_source,
)
from everstate.sources.cdc.rest import NoSuchConnector
from everstate.sources.cdc.secrets import forget_password, password_reference
from everstate.sources.cdc.status import (
    DISCARDED,
    CaptureStatus,
    age_s,
    reads_anew,
    states_of,
    told_by,
    trace_of,
    unfit_table,
    why_not,
)

_STARTING: Final = ("RUNNING", "UNASSIGNED", "RESTARTING")
"""States of a connector that may read soon."""
_UNBEGUN: Final = "0"
"""Epoch of a connector that is made, but must not read yet."""
_INTERRUPTED: Final = (
    "the first snapshot was begun again while its slot was there already, so a transaction that "
    "was committing at that moment may be missing: read all rows once more with"
)


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
    left_out: tuple[str, ...] = ()
    """Columns that the connector does not read, each with the reason."""

    @property
    def changed(self) -> bool:
        """False when everything was as it should be already."""
        return any(step.done != "there" for step in self.steps)


class Capturing(CaptureConnector):
    """One declared capture, its connector, and its database.

    ``config`` has the addresses of the running servers. A capture without ``dsn`` is run by
    somebody else: every method that needs the database raises InvalidCapture.
    """

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
            peculiar = self._peculiarities(database)
            steps = self._make(database, snapshot, peculiar)
            if wait_s > 0:
                self._wait_until_connected(database, wait_s)
            late = [step.table for step in steps if step.table is not None]
            if snapshot and late:
                signal_snapshot(database, late)
                what = f"snapshot of {', '.join(late)}"
                steps.append(SetupStep(what, "made"))
        # Warnings with SQL that repairs them are shown by the doctor only.
        warned = tuple(each for each in findings if each.outcome == "warn" and not each.sql)
        left_out = tuple(not_left_out(self.capture.settings, peculiar))
        names = self.names
        return Added(
            capture=self.capture.name,
            connector=names.connector,
            steps=tuple(steps),
            topic=names.raw_log,
            warnings=warned,
            left_out=left_out,
        )

    def begin_epoch(self, *, wait_s: float = 60.0, may_delete: int = 0) -> Added:
        """Start over with a database that was restored, or that replaced another one.

        All rows are read, in an epoch whose positions are newer. ``may_delete``: so many entities
        of a table may be gone, also if they are more than `capture.deletes_max_percent`. Raises as
        :meth:`add` does, when a right is missing before anything is removed.
        """
        with self.database() as database:
            refuse_failed(self.capture, self._table_findings(database))
            steps = database.prepare()
            # That the publication is new does not matter: so will be the slot.
            new = {f"{what} {self.names.identifier}" for what in ("publication", "slot")}
            refuse_failed(self.capture, (f for f in database.check() if f.name not in new))
            found = self._found()
            if found is not None:
                # It keeps the number of its epoch, so that a killed attempt can be repeated.
                self._connect.stop(self.names.connector)
                self._wait_for("STOPPED", 60.0)
            steps += database.begin_anew()
            with Topics(self._config) as topics:
                topics.delete({self.names.schema_history} & topics.existing())
            peculiar, after = self._peculiarities(database), epoch_of(found)
            made = self._make(database, True, peculiar, after=after, may_delete=may_delete)
            steps += [step for step in made if step.done != "there"]
            if wait_s > 0:
                self._wait_until_connected(database, wait_s)
        return Added(self.capture.name, self.names.connector, tuple(steps), self.names.raw_log)

    def bring_up_to_date(self) -> bool:
        """Give a connector of an earlier version the settings of its sessions; out: whether it did.

        Raises Unavailable.
        """
        if (found := self._found()) is None or is_current(found, self.capture):
            return False
        self.add(wait_s=0.0)
        return True

    def check_source(self, *, renew: bool = False) -> bool:
        """Raise SourceReplaced when the database is not the one that was read before.

        ``renew``: write the next mark into a database that is read (:mod:`replaced`), and leave out
        a table that is misread. ``False``: nothing was compared, since there is no connector.
        """
        settings = self._found() if self.has_connect else None
        if settings is None:
            return False
        position = self._connect.offset(self.names.connector)
        with self.database() as database:
            try:
                found = self._checked(database, position, settings)
            except TableMisread as error:
                if not renew or not self.leave_out(error.table, str(error)):
                    raise
                return True
            if renew and position and found.known.epoch >= epoch_of(settings):
                passed = found.known.passed
                look = partial(look_at, self.capture, database, position, passed=passed)
                seen = self._columns.changed
                watch_tables(self._config, self.capture, self.entities, database, found, seen, look)
        return True

    def _checked(
        self, database: CapturedDatabase, position: Mapping[str, Any], settings: Mapping[str, str]
    ) -> CheckedSource:
        epoch = epoch_of(settings)
        found = check_source(self._config, self.capture, database, position, epoch=epoch)
        if isinstance(database, MariaDatabase):
            left_out = left_out_tables(settings)
            tables = [each for each in self.capture.captured_tables if each not in left_out]
            misread = self._columns.misread(database, tables, position, self._definitions())
            if misread is not None:
                table, differs = misread
                raise TableMisread(self.capture.name, differs, table)
        return found

    def _definitions(self) -> Iterator[bytes]:
        """Values of the topic in which a connector of a binlog stores the tables' definitions."""
        with Consumer(self._config, client_id="everstate-cdc") as consumer:
            for record in consumer.read_topic(self.names.schema_history):
                if record.value is not None:
                    yield record.value

    def refuse_unfit(self) -> None:
        """Raise CaptureFailed, as `add` does, when a table cannot be captured correctly."""
        with self.database() as database:
            refuse_failed(self.capture, self._table_findings(database))

    def status(self) -> CaptureStatus:
        """Query Kafka Connect and the database; what does not answer is reported as unknown."""
        offset: dict[str, Any] = {}
        try:
            status = self._connect.status(self.names.connector)
            state, task, reason = states_of(status, self.capture.name)
            offset = self._connect.offset(self.names.connector)
        except NoSuchConnector:
            advice = f"`everstate cdc add {self.capture.name}` makes its connector"
            return CaptureStatus(self.capture.name, "absent", None, None, None, None, None, advice)
        except (Unavailable, InvalidConfig) as error:
            state, task, reason = "unreachable", None, f"{error.message} {error.advice or ''}"
        standing: ConnectorStanding | None = None
        problems: tuple[str, ...] = ()
        try:
            with self.database() as database:
                problems = self._problems(database, offset, is_reachable=state != "unreachable")
                standing = self._standing(database, offset)
        except EverstateError as error:
            reason = f"{reason} {error.message}" if reason else error.message
        reported = notifications(self._config, self.names)
        first = first_of(reported, len(self.capture.captured_tables))
        if state == "STOPPED" and not offset:
            reason = f"{DISCARDED}; {reads_anew(self.capture.name)}"
        elif first.interrupted and self.capture.kind == "postgresql" and reason is None:
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
            reason=self._safe(why_not(self.capture.name, reason, standing)),
            snapshot=first.state,
            reads_snapshot=first.under_way and standing is not None,
            reads_again=tables_to_read(offset),
            position=offset,
            problems=problems,
        )

    def _problems(
        self, database: CapturedDatabase, position: Mapping[str, Any], *, is_reachable: bool
    ) -> tuple[str, ...]:
        """Problems with the database and its tables since the capture was added."""
        settings = self.capture.settings
        if is_reachable:
            settings = self._connect.config(self.names.connector)
        findings = [*self._names_and_shapes(database, settings), *database.check()]
        slot = f"slot {self.names.identifier}"  # `reason` says what is wrong with it.
        failed = [each for each in findings if each.outcome == "fail" and each.name != slot]
        replaced: list[str] = []
        try:
            known = self._checked(database, position, settings).known
            if known.epoch >= epoch_of(settings):
                replaced = gone_problems(self.capture, self.entities, database, known)
            if (mark := mark_of(database.read_mark())) is not None:
                replaced += [f"{table}: {why}" for table, why in mark.unseen.items()]
        except SourceReplaced as error:
            replaced = [str(error)]
        except CaptureFailed as error:
            # A question that was refused for want of a right, which the findings name.
            replaced = [] if failed else [str(error)]
        problems = replaced + [f"{each.name}: {each.found}" for each in failed]
        if is_reachable:
            add = f"`everstate cdc add {self.capture.name}` leaves it out"
            kept = not_left_out(settings, self._peculiarities(database))
            problems += [f"{column}: {add}" for column in kept]
            left_out = left_out_tables(settings).items()
            problems += [f"{t}: it is left out, and the others go on: {why}" for t, why in left_out]
        return tuple(problems)

    def check(self) -> list[Finding]:
        """Check everything that the connector needs of the database."""
        try:
            with self.database() as database:
                found = [*database.check(), *self._declared_findings(database)]
            found += self._source_findings()
        except (Unavailable, CaptureFailed) as error:
            found = [Finding("connection", "fail", error.message, advice=error.advice)]
        if self._url is not None:
            found += [
                *plugin_findings(self.capture.kind, self._url),
                *told_by(self.status(), found),
            ]
        return found

    def _source_findings(self) -> list[Finding]:
        """Whether the database is the one that was read before, if its connector is reachable."""
        try:
            if self.check_source():
                return [Finding("source", "ok", "the database that was read before")]
        except EverstateError as error:
            outcome: FindingOutcome = "fail" if isinstance(error, SourceReplaced) else "warn"
            return [Finding("source", outcome, error.message, advice=error.advice)]
        return []

    def resume(self, wait_s: float = 60.0) -> None:
        """Resume reading at the stored position; failed parts are restarted too.

        Raises CaptureFailed when the database no longer sends all that is behind the position.
        """
        self.check_source()
        position = self._known(self._connect.offset)
        with self.database() as database:
            self._refuse_lost(database, position)
        self._known(self._connect.resume)
        self._wait_for("RUNNING", wait_s)
        if self.failure() is not None:
            self.restart_failed()

    def restart_failed(self) -> str | None:
        """Restart the parts that failed; the connector resumes at its stored position.

        Out: the table that was removed from an incremental snapshot because the connector failed at
        it: it would fail again after each restart. A table whose rows in the log do not fit is left
        out. Raises Unavailable while the database does not answer, and CaptureFailed when it no
        longer has the log after the position: a connector would skip the lost part silently.
        """
        connector = self.names.connector
        position = self._connect.offset(connector)
        with self.database() as database:
            self._checked(database, position, self._connect.config(connector))
            self._refuse_lost(database, position)
        status = self._connect.status(connector)
        why = str(self._safe(states_of(status, self.capture.name)[2]))
        trace = trace_of(status)
        if tables_to_read(position) and has_failed_reading(trace):
            return self._go_on(tables_to_read(position)[0], why, trace)
        table = unfit_table(trace, self.capture.captured_tables)
        if table is None or not self.leave_out(table, why):
            self._connect.restart(connector)
        return None

    def nudge(self) -> None:
        """Write a signal that moves the connector's position and does nothing else."""
        with self.database() as database:
            database.signal(f"everstate-{uuid7()}", "log", '{"message": "still there?"}')

    def remove(self, *, drop: bool = False, topics: bool = False) -> list[SetupStep]:
        """Delete the connector; with ``drop`` its position, slot, publication and our tables too.

        Without ``drop`` the slot still keeps the database's log, and a later `add` resumes where
        this connector ended. ``topics`` deletes the raw topics and the notifications.
        """
        steps = [self._delete_connector(forget=drop)]
        forget_password(self._config, self.capture.name)
        with self.database() as database:
            steps += database.remove() if drop else database.release()
        doomed = [self.names.schema_history] if drop else []
        if topics:
            doomed += [self.names.raw_log, self.names.notifications]
        with Topics(self._config) as admin:
            doomed = sorted(set(doomed) & admin.existing())
            admin.delete(doomed)
        return [*steps, *(SetupStep(f"topic {name}", "removed") for name in doomed)]

    @contextmanager
    def database(self) -> Iterator[CapturedDatabase]:
        """A connection to the captured database, as the connector's user."""
        dsn = self._dsn()
        with closing(self._database(self.capture, self.names, dsn)) as opened:
            yield opened

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
                    or f"`everstate cdc status {self.capture.name}` shows more.",
                )
            time.sleep(POLL_S)

    def _table_findings(self, database: CapturedDatabase) -> list[Finding]:
        return [*self._declared_findings(database), *database.check_tables()]

    def _declared_findings(self, database: CapturedDatabase) -> list[Finding]:
        """What is wrong with what is declared; a pass over each table with dates."""
        return [
            *self._names_and_shapes(database, self.capture.settings),
            *check_values(self.capture, self.entities, database),
        ]

    def _names_and_shapes(
        self, database: CapturedDatabase, settings: Mapping[str, str]
    ) -> list[Finding]:
        """What is wrong with names, columns and keys, for a connector with these settings."""
        shaped = shape_findings(self.capture, self.entities, database.shapes(settings), settings)
        return [*name_findings(self.capture), *shaped]

    def _make(
        self,
        database: CapturedDatabase,
        snapshot: bool,
        peculiar: Peculiarities,
        *,
        after: int | None = None,
        may_delete: int = 0,
    ) -> list[SetupStep]:
        """Prepare database and topics, and make the connector, or change it.

        A new connector without a stored position reads all rows, in an epoch of its own: what was
        read before it may have had any position. ``after``: a new epoch after this one, whatever
        is stored. Before the connector reads, the raw log gets the identity of its database.
        """
        connector, settings = self.names.connector, self._settings(database, snapshot, peculiar)
        found, known = self._found(), known_standing(self._config, self.capture)
        is_new = found is None or found.get(EPOCH) == _UNBEGUN or after is not None
        was_read = bool(known.identity or known.place) or after is not None
        if found is None and was_read:
            # Only Connect knows whether a position is stored, and only of a connector that exists.
            self._put(self._connect.make_stopped, {**settings, EPOCH: _UNBEGUN})
        try:
            position = self._connect.offset(connector) if found or was_read else {}
            if after is not None:
                epoch, identity = max(known.epoch, after) + 1, database.identity()
                if position:
                    self._once_stopped(lambda: self._connect.forget_offsets(connector))
            else:
                resumes = bool(position) or not is_new
                identity = check_source(
                    *(self._config, self.capture, database, position),
                    epoch=epoch_of(found),
                    resumes=resumes,
                ).identity
                if resumes:
                    self._refuse_lost(database, position)
                epoch = known.epoch + (was_read and not resumes)
        except EverstateError:
            if found is None and was_read:
                self._connect.delete(connector)
            raise
        if is_new:
            settings[EPOCH] = str(epoch)
        elif found is not None and EPOCH in found:
            settings[EPOCH] = found[EPOCH]
        if after is None:
            settings = without_tables(settings, self.capture, left_out_tables(found)) or settings
        steps = [*database.prepare(), *self._make_topics()]
        what = f"connector {connector}"
        if found == settings:
            return [*steps, SetupStep(what, "there")]
        if is_new:
            mark = new_mark(database).mark if after is not None or not position else None
            # Tables of one that resumes are compared with what they were when they were read.
            read = fingerprints(self.capture, self.entities, None if mark is None else database)
            source = SourceIdentity(
                identity=identity, epoch=epoch, mark=mark, may_delete=may_delete
            )
            source.tables, source.seen = dict(read[0]), read[1]
            write_source(self._config, self.names, source)
        self._put(self._connect.put, settings)
        if is_new and (was_read or found is not None):
            self._connect.resume(connector)
            self._wait_for("RUNNING", 60.0)
        return [*steps, SetupStep(what, "made" if is_new else "changed")]

    def _settings(
        self, database: CapturedDatabase, snapshot: bool, peculiar: Peculiarities
    ) -> dict[str, str]:
        """Settings of the connector, without its epoch."""
        name, password = self.capture.name, self._password()
        reference = password_reference(self._config, name, password, local=self._local)
        return connector_settings(
            self._config,
            self.capture,
            self.names,
            database.address,
            database.own,
            password=reference,
            brokers=self._config.bootstrap_servers,
            snapshot=snapshot,
            peculiar=peculiar,
        )

    def _peculiarities(self, database: CapturedDatabase) -> Peculiarities:
        """Of the tables as they are now."""
        shapes = database.shapes(self.capture.settings)
        return peculiarities(self.capture, self.entities, shapes)

    def _wait_until_connected(self, database: CapturedDatabase, wait_s: float) -> None:
        deadline, was_restarted = time.monotonic() + wait_s, False
        while True:
            state, task, reason = self._connector_states()
            if "FAILED" in (state, task):
                if was_restarted:
                    raise CaptureFailed(
                        f"capture {self.capture.name}: the connector failed: {self._safe(reason)}",
                        advice=f"`everstate cdc doctor {self.capture.name}` looks for the cause.",
                    )
                # A task that begins while its former one ends fails by chance, and once.
                self._connect.restart(self.names.connector)
                was_restarted = True
            if state in ("PAUSED", "STOPPED"):
                return
            if task == "RUNNING":
                if database.standing({}).connected:
                    return
                # A first snapshot comes before a session that reads the log.
                steps = notifications(self._config, self.names)
                if first_of(steps, len(self.capture.captured_tables)).under_way:
                    return
            if time.monotonic() > deadline:
                note = database.standing({}).note
                raise Unavailable(
                    f"capture {self.capture.name} is not connected after {wait_s:g} s "
                    f"(connector {state}, task {task}{'' if note is None else f': {note}'}).",
                    advice=f"Look again with `everstate cdc status {self.capture.name}`.",
                )
            time.sleep(POLL_S)
