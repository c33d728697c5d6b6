"""Connections to Cassandra, execution of statements, and translation of its errors."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Final

from cassandra import (
    AuthenticationFailed,
    ConsistencyLevel,
    DriverException,
    RequestValidationException,
    Unauthorized,
    UnresolvableContactPoints,
)
from cassandra.auth import PlainTextAuthProvider
from cassandra.cluster import (
    EXEC_PROFILE_DEFAULT,
    Cluster,
    ExecutionProfile,
    NoHostAvailable,
    Session,
)
from cassandra.connection import ConnectionBusy, ConnectionException
from cassandra.policies import (
    DCAwareRoundRobinPolicy,
    ExponentialReconnectionPolicy,
    FallthroughRetryPolicy,
    TokenAwarePolicy,
)
from cassandra.protocol import ErrorMessage
from cassandra.query import (
    UNSET_VALUE,
    BatchStatement,
    BatchType,
    PreparedStatement,
    named_tuple_factory,
)

from everstate.closing import Closing
from everstate.config import CassandraConfig, Config
from everstate.errors import EverstateError, InvalidConfig, SourceError, Unavailable

_KEYSPACE: Final = (
    "CREATE KEYSPACE IF NOT EXISTS {keyspace} WITH replication = "
    "{{'class': 'NetworkTopologyStrategy', '{datacenter}': {replication}}}"
)
_PROTOCOL: Final = 5
_REQUEST_S: Final = 15.0
"""Longer than the server's time-out of a conditional write, so that it rarely expires first."""
_CONNECT_S: Final = 10.0
_RECONNECT_S_MAX: Final = 10.0
_AT_ONCE: Final = 64
_SERIAL: Final = "serial"

_AWAY: Final = (NoHostAvailable, DriverException, ConnectionException, ConnectionBusy, ErrorMessage)


class Database(Closing):
    """One connection pool for a process; threads share it. Statements are prepared once.

    Reads and writes use QUORUM, conditional writes and ``serial`` reads use SERIAL (Paxos over all
    replicas). No statement is retried automatically: a conditional write that timed out may have
    been done, and only the caller can find out.
    """

    def __init__(self, config: Config, *, is_local: bool = False) -> None:
        """``is_local``: reads and writes use LOCAL_QUORUM, of the datacenter in the settings."""
        self.settings = config.cassandra
        self._level = ConsistencyLevel.LOCAL_QUORUM if is_local else ConsistencyLevel.QUORUM
        self.keyspace = self.settings.keyspace
        self._lock = threading.Lock()
        self._cluster: Cluster | None = None
        self._session: Session | None = None
        self._prepared: dict[str, PreparedStatement] = {}

    def close(self) -> None:
        """Close the connections; the next statement opens new ones."""
        with self._lock:
            cluster, self._cluster, self._session = self._cluster, None, None
            self._prepared.clear()
        if cluster is not None:
            cluster.shutdown()

    def execute(
        self, statement: str, values: Sequence[Any] = (), *, serial: bool = False
    ) -> list[Any]:
        """Rows of a statement; ``serial`` reads settle a conditional write in progress."""
        with translated(self.settings):
            session = self._connected()
            bound = self._prepare(session, statement).bind(values)
            profile = _SERIAL if serial else EXEC_PROFILE_DEFAULT
            return list(session.execute(bound, execution_profile=profile))

    def execute_many(
        self, statement: str, each: Iterable[Sequence[Any]], *, serial: bool = False
    ) -> list[list[Any]]:
        """Rows of a statement for each of many values, in their order; 64 run at a time.

        Raises the first error; statements for other values may have been done.
        """
        listed = list(each)
        answers: list[list[Any]] = []
        with translated(self.settings):
            session = self._connected()
            prepared = self._prepare(session, statement)
            profile = _SERIAL if serial else EXEC_PROFILE_DEFAULT
            for at in range(0, len(listed), _AT_ONCE):
                futures = [
                    session.execute_async(prepared.bind(values), execution_profile=profile)
                    for values in listed[at : at + _AT_ONCE]
                ]
                answers.extend(list(future.result()) for future in futures)
        return answers

    def execute_if(self, statements: Sequence[tuple[str, Sequence[Any]]]) -> Any:
        """Run a conditional batch in one partition; returns its first row, which has ``applied``.

        Raises the driver's errors: then it is unknown whether the batch was done.
        """
        session = self._connected()
        batch = BatchStatement(BatchType.UNLOGGED)
        for statement, values in statements:
            batch.add(self._prepare(session, statement).bind(values))
        return session.execute(batch).one()

    def stream(self, statement: str, values: Sequence[Any], rows: int) -> Iterator[Any]:
        """Rows of a large result, fetched ``rows`` at a time."""
        with translated(self.settings):
            session = self._connected()
            bound = self._prepare(session, statement).bind(values)
            bound.fetch_size = rows
            yield from session.execute(bound)

    def clock_s(self) -> float:
        """The time of the server, in seconds since the epoch."""
        rows = self.execute("SELECT toUnixTimestamp(now()) AS now_ms FROM system.local")
        return float(rows[0].now_ms) / 1000

    def define_keyspace(self) -> None:
        """Create the keyspace of the settings if it is missing."""
        self.define(
            _KEYSPACE.format(
                keyspace=self.keyspace,
                datacenter=self.settings.datacenter.replace("'", "''"),
                replication=self.settings.replication,
            )
        )

    def define(self, statement: str) -> None:
        """Run a statement that changes the schema."""
        with translated(self.settings):
            self._connected().execute(statement, timeout=60.0)

    def _prepare(self, session: Session, statement: str) -> PreparedStatement:
        prepared = self._prepared.get(statement)
        if prepared is None:
            prepared = self._prepared[statement] = session.prepare(statement)
        return prepared

    def _connected(self) -> Session:
        session = self._session
        if session is not None:
            return session
        with self._lock:
            if self._session is None:
                self._cluster = self._make_cluster()
                try:
                    self._session = self._cluster.connect()
                    # Use the server's clock as write timestamp: a writer's own clock may be late,
                    # and an earlier deletion would hide its announcement.
                    self._session.use_client_timestamp = False
                except BaseException:
                    self._cluster.shutdown()
                    self._cluster = None
                    raise
            return self._session

    def _make_cluster(self) -> Cluster:
        settings = self.settings
        if not settings.contact_points:
            raise InvalidConfig(
                "cassandra.contact_points",
                (),
                "hosts, or cassandra.local = true and a running local stack (everstate up)",
            )
        policy = TokenAwarePolicy(DCAwareRoundRobinPolicy(local_dc=settings.datacenter))

        def profile(level: int) -> ExecutionProfile:
            return ExecutionProfile(
                load_balancing_policy=policy,
                retry_policy=FallthroughRetryPolicy(),
                consistency_level=level,
                serial_consistency_level=ConsistencyLevel.SERIAL,
                request_timeout=_REQUEST_S,
                row_factory=named_rows,
            )

        return Cluster(
            list(settings.contact_points),
            port=settings.port,
            protocol_version=_PROTOCOL,
            auth_provider=_login(settings),
            ssl_context=_tls(settings),
            connect_timeout=_CONNECT_S,
            # The driver's own waits become 10 minutes long while a node is away, and then end.
            reconnection_policy=ExponentialReconnectionPolicy(
                1.0, _RECONNECT_S_MAX, max_attempts=None
            ),
            execution_profiles={
                EXEC_PROFILE_DEFAULT: profile(self._level),
                _SERIAL: profile(ConsistencyLevel.SERIAL),
            },
        )


def named_rows(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[Any]:
    """Rows as the driver's named tuples, without a new class for each result (60 µs)."""
    make = _row_type(tuple(names))
    return [make(row) for row in rows]


@lru_cache(maxsize=256)
def _row_type(names: tuple[str, ...]) -> Callable[[Iterable[Any]], Any]:
    # The driver chooses the attributes: `[applied]` is `applied`.
    (row,) = named_tuple_factory(names, [(None,) * len(names)])
    make: Callable[[Iterable[Any]], Any] = type(row)._make
    return make


def _login(settings: CassandraConfig) -> PlainTextAuthProvider | None:
    if settings.user is None:
        return None
    password = settings.password.get_secret_value() if settings.password is not None else ""
    return PlainTextAuthProvider(settings.user, password)


def _tls(settings: CassandraConfig) -> ssl.SSLContext | None:
    """TLS that checks the server's certificate, but not the name in it."""
    if settings.ssl_cafile is None:
        return None
    try:
        context = ssl.create_default_context(cafile=settings.ssl_cafile)
    except OSError as cause:
        raise InvalidConfig(
            "cassandra.ssl_cafile", str(settings.ssl_cafile), f"certificates in PEM ({cause})"
        ) from None
    # Nodes are found by their addresses, which certificates seldom have.
    context.check_hostname = False
    return context


def unless_null(value: Any) -> Any:
    """The value to bind to a column of a new row; a bound null would write a tombstone."""
    return UNSET_VALUE if value is None else value


@contextmanager
def translated(settings: CassandraConfig) -> Iterator[None]:
    """Translate the driver's errors in the block into everstate errors."""
    try:
        yield
    except _AWAY as cause:
        raise translate(settings, cause) from cause


def translate(settings: CassandraConfig, cause: BaseException) -> EverstateError:
    """The everstate error for one of the driver's."""
    reason = str(cause).strip().partition("\n")[0]
    if isinstance(cause, AuthenticationFailed | Unauthorized) or _login_refused(cause):
        return SourceError(
            f"Cassandra refuses the user {settings.user!r}: {reason}",
            advice="Check cassandra.user and cassandra.password.",
        )
    if isinstance(cause, RequestValidationException) and not isinstance(
        cause, UnresolvableContactPoints
    ):
        return SourceError(f"Cassandra refuses: {reason}")
    where = ", ".join(settings.contact_points)
    return Unavailable(f"Cassandra at {where}:{settings.port} does not answer ({reason}).")


def _login_refused(cause: BaseException) -> bool:
    if not isinstance(cause, NoHostAvailable) or not isinstance(cause.errors, dict):
        return False
    return any(isinstance(error, AuthenticationFailed) for error in cause.errors.values())


UNKNOWN: Final = _AWAY
"""Errors of a conditional write after which it is unknown whether it was done."""
