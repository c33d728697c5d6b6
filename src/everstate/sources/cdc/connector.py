"""A capture's connector on its Connect cluster, without the captured database."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from everstate.changes import EntityType
from everstate.config import Config, expanded
from everstate.declarations.captures import Capture
from everstate.errors import CaptureFailed, InvalidCapture, InvalidConfig, Unavailable
from everstate.log.client import raw_bytes_max
from everstate.log.topics import Topics
from everstate.retrying import within
from everstate.sources.cdc.connectors import left_out_tables, without_tables
from everstate.sources.cdc.database import CapturedDatabase, ConnectorStanding, SetupStep
from everstate.sources.cdc.halted import (
    has_failed_parsing,
    tables_to_read,
    with_quoted_names,
    without_first_table,
)
from everstate.sources.cdc.mariadb import MariaDatabase
from everstate.sources.cdc.misread import ColumnCheck
from everstate.sources.cdc.mysql import MySqlDatabase
from everstate.sources.cdc.names import CaptureNames
from everstate.sources.cdc.notifications import tell_given_up
from everstate.sources.cdc.postgres import PostgresDatabase
from everstate.sources.cdc.raw_log import ensure_raw_log, newest_lsn
from everstate.sources.cdc.replaced import EPOCH
from everstate.sources.cdc.rest import Connect, NoSuchConnector
from everstate.sources.cdc.status import DISCARDED, reads_anew, states_of
from everstate.telemetry import without_secret

logger = logging.getLogger("everstate.sources.cdc")

_Databases = type[PostgresDatabase | MariaDatabase]
_DATABASES: Final[Mapping[str, _Databases]] = {
    "postgresql": PostgresDatabase,
    "mariadb": MariaDatabase,
    "mysql": MySqlDatabase,
}
POLL_S: Final = 0.2
_HOUR_MS: Final = 3_600_000
_OWN_CLUSTER: Final = "no connect_url is set, and no local worker runs"

T = TypeVar("T")


class CaptureConnector:
    """The connector of one declared capture."""

    def __init__(
        self,
        config: Config,
        capture: Capture,
        *,
        local: bool,
        entities: Mapping[str, EntityType] | None = None,
        columns: ColumnCheck | None = None,
    ) -> None:
        """``local``: Connect is the local stack's worker, whose files we can write.

        ``entities``: the registered entity types; without them it is not checked whether a model
        needs a column that the database's log does not have. ``columns``: of a capture that is
        checked again and again, what was compared before.
        """
        self._config, self.capture, self._local = config, capture, local
        self.entities, self._columns = entities or {}, columns or ColumnCheck()
        self.names = CaptureNames(config.log.prefix, capture.name)

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

    def pause(self, wait_s: float = 30.0) -> None:
        """Stop reading; PostgreSQL keeps its log for the slot until :meth:`resume`."""
        self._known(self._connect.pause)
        self._wait_for("PAUSED", wait_s)

    def failure(self) -> str | None:
        """Why the connector or its task has failed; one request to Connect.

        ``None``: neither has, or it is paused, or nobody has added it yet. Raises Unavailable.
        """
        if self._url is None:
            return None
        state, task, reason = self._connector_states()
        has_failed = state == "FAILED" or (state == "RUNNING" and task == "FAILED")
        return (self._safe(reason) or "the connector gave no reason") if has_failed else None

    def runs(self) -> bool:
        """Whether connector and task run; one request to Connect, raises Unavailable."""
        return self.has_connect and self._connector_states()[:2] == ("RUNNING", "RUNNING")

    def running_position(self) -> dict[str, Any]:
        """The stored source position; empty while connector or task does not run.

        Two requests to Connect; raises Unavailable.
        """
        return self._connect.offset(self.names.connector) if self.runs() else {}

    def restart_reading(self) -> None:
        """Restart all tasks of the connector; it resumes at its stored position, snapshots too."""
        self._connect.restart(self.names.connector, only_failed=False)

    def leave_out(self, table: str, why: str) -> bool:
        """Have the connector go on without a table, until a new epoch; out: whether others are."""
        found = self._connect.config(self.names.connector)
        left_out = {**left_out_tables(found), table: why}
        settings = without_tables(found, self.capture, left_out)
        if settings is None:
            return False
        logger.error("capture %s: %s is left out: %s", self.capture.name, table, left_out[table])
        self._put(self._connect.put, settings)
        return True

    def refuse_left_out(self, tables: Sequence[str]) -> None:
        """Raise CaptureFailed when the connector goes on without one of these tables."""
        for table, why in left_out_tables(self._found()).items():
            if table in tables:
                raise CaptureFailed(f"capture {self.capture.name}: {table} is left out: {why}")

    def _go_on(self, table: str, why: str, trace: str | None) -> str | None:
        """Let a connector go on that failed in its stored snapshot, at ``table``, with a trace.

        Where it could not parse the names of the tables, these are quoted. Otherwise the table is
        removed, and reported as a notification. Out: the removed table and the reason.
        """
        connector, is_unparsed = self.names.connector, has_failed_parsing(trace)
        self._connect.stop(connector)
        try:
            self._wait_for("STOPPED", 30.0)
            position = self._connect.offset(connector)
            if tables_to_read(position)[:1] != (table,):
                return None
            alter = with_quoted_names if is_unparsed else without_first_table
            altered = alter(position)
            self._once_stopped(lambda: self._connect.alter_offset(connector, altered))
        finally:
            self._connect.resume(connector)
        if is_unparsed:
            return None
        tell_given_up(self._config, self.names, table, why)
        return f"{table}: {why}"

    def _dsn(self) -> str:
        if self.capture.dsn is None:
            reason = "it is declared without dsn: its connector is somebody else's"
            raise InvalidCapture(self.capture.name, reason)
        return expanded(self.capture.dsn, f"dsn of capture {self.capture.name}")

    @property
    def _database(self) -> _Databases:
        """The class of its database; raises InvalidCapture for a kind that has none."""
        if self.capture.kind not in _DATABASES:
            reason = f"no connector for {self.capture.kind} is at hand"
            advice = "Run one of your own and declare the capture without dsn."
            raise InvalidCapture(self.capture.name, reason, advice=advice)
        return _DATABASES[self.capture.kind]

    def _password(self) -> str:
        return self._database.address_of(self._dsn())[1]

    def _found(self) -> dict[str, str] | None:
        """Settings of the connector; ``None``: there is none."""
        try:
            return self._connect.config(self.names.connector)
        except NoSuchConnector:
            return None

    def _put(
        self, put: Callable[[str, Mapping[str, str]], None], settings: Mapping[str, str]
    ) -> None:
        try:
            put(self.names.connector, settings)
        except CaptureFailed as error:
            raise CaptureFailed(str(self._safe(error.message))) from error

    def _connector_states(self) -> tuple[str, str | None, str | None]:
        """State of connector and task, and why one failed."""
        try:
            return states_of(self._connect.status(self.names.connector), self.capture.name)
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
            time.sleep(POLL_S)

    def _delete_connector(self, *, forget: bool) -> SetupStep:
        name = self.names.connector
        if self._found() is None:
            return SetupStep(f"connector {name}", "there")
        if forget:
            self._connect.stop(name)
            self._once_stopped(lambda: self._connect.forget_offsets(name))
        self._connect.delete(name)
        return SetupStep(f"connector {name}", "removed")

    def _make_topics(self) -> list[SetupStep]:
        kept_ms = {self.names.notifications: int(self._config.capture.retention_hours * _HOUR_MS)}
        if self.capture.kind != "postgresql":
            # The connector cannot read the binlog without the whole history of the tables.
            kept_ms[self.names.schema_history] = -1
        size = {"max.message.bytes": str(raw_bytes_max(self._config))}
        with Topics(self._config) as topics:
            made = ensure_raw_log(self._config, self.capture, topics)
            for name, ms in kept_ms.items():
                settings = {"retention.ms": str(ms), **size}
                made += topics.ensure_raw([name], partitions=1, settings=settings)
        return [SetupStep(f"topic {name}", "made") for name in made]

    def _refuse_lost(self, database: CapturedDatabase, position: Mapping[str, Any]) -> None:
        """Raise CaptureFailed when a connector would skip a part of the database's log."""
        standing = self._standing(database, position)
        lost = standing.note if standing.is_lost else None
        if not position and self._connector_states()[0] == "STOPPED":
            lost = DISCARDED
        if lost is not None:
            advice = f"{reads_anew(self.capture.name)}."
            raise CaptureFailed(f"capture {self.capture.name}: {lost}.", advice=advice)

    def _standing(
        self, database: CapturedDatabase, position: Mapping[str, Any]
    ) -> ConnectorStanding:
        found = database.standing(position)
        if found.is_lost and self.capture.kind == "postgresql":
            # Connect stores a position after its records, which are there if it was killed between.
            lsn = max(int(position.get("lsn") or 0), newest_lsn(self._config, self.capture))
            found = database.standing({**position, "lsn": lsn})
        return found

    def _once_stopped(self, change: Callable[[], None]) -> None:
        """Change a stored position; retried while Connect refuses it because a task still runs."""
        within(30.0, CaptureFailed, pause_s=POLL_S)(change)

    def _known(self, action: Callable[[str], T]) -> T:
        try:
            return action(self.names.connector)
        except NoSuchConnector as cause:
            raise CaptureFailed(
                f"capture {self.capture.name} was not added.",
                advice=f"`everstate cdc add {self.capture.name}` makes its connector.",
            ) from cause

    def _safe(self, text: str | None) -> str | None:
        """``text`` without the password, whatever wrote it there."""
        if text is None or self.capture.dsn is None:
            return text
        password = self._password()
        return without_secret(text.replace(password, "***") if password else text)


def epoch_of(settings: Mapping[str, str] | None) -> int:
    """Epoch that a connector was made for; 0: one of an earlier version does not say."""
    return int((settings or {}).get(EPOCH, 0))
