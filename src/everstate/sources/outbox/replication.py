"""One session of PostgreSQL's replication protocol, over libpq as psycopg gives it.

psycopg 3 has no replication of its own; its wrapper of libpq has all that is needed: a connection
with ``replication=database``, and copying in both directions.
"""

from __future__ import annotations

import select
import struct
import time
from typing import Final

import psycopg
from psycopg import pq, sql

from everstate.errors import ReplicationFailed, Unavailable

_CONNECT_S: Final = 10
_DATA: Final = struct.Struct("!cQQq")
_KEEPALIVE: Final = struct.Struct("!cQqB")
_STATUS: Final = struct.Struct("!cQQQqB")
_EPOCH_S: Final = 946_684_800
"""The year 2000, from which PostgreSQL counts microseconds."""
_PULSE_S: Final = 1.0
_BYTES_MAX: Final = 32 * 1_048_576
_OPTIONS: Final = "-c timezone=UTC -c datestyle=ISO -c client_encoding=UTF8"


class ReplicationStream:
    """Payloads of a logical slot, as they come; the server keeps the WAL until ``confirm``.

    Once a second it asks the server where the WAL is: on an idle database nothing comes to be
    confirmed, while other databases of the server write WAL that the slot would hold.
    """

    def __init__(self, dsn: str, name: str) -> None:
        self._connection = psycopg.connect(
            dsn,
            autocommit=True,
            replication="database",
            application_name=name,
            connect_timeout=_CONNECT_S,
            options=_OPTIONS,
        )
        self._pg = self._connection.pgconn
        # A status is 34 bytes: it never waits, and needs no loop to be sent.
        self._pg.nonblocking = 0
        self._confirmed = 0
        self._pulse_at = 0.0
        self.keepalive_lsn = 0
        """All that was committed before has been sent; as of the last ``take``."""

    @property
    def pid(self) -> int:
        """Process of the server that sends."""
        return self._pg.backend_pid

    def close(self) -> None:
        """Give up the connection; what is not confirmed is sent again to the next one."""
        self._connection.close()

    def system(self) -> tuple[str, int]:
        """The server's own id, and the end of its WAL."""
        result = self._pg.exec_(b"IDENTIFY_SYSTEM")
        if result.status != pq.ExecStatus.TUPLES_OK:
            raise self._failed(result)
        high, _, low = (result.get_value(0, 2) or b"0/0").decode().partition("/")
        return (result.get_value(0, 0) or b"").decode(), int(high, 16) << 32 | int(low, 16)

    def start(self, slot: str, publication: str) -> bool:
        """Begin where the slot is confirmed; ``False``: another session reads it now."""
        command = sql.SQL(
            "START_REPLICATION SLOT {slot} LOGICAL 0/0 (proto_version '1',"
            " publication_names {publication}, messages 'true')"
        ).format(slot=sql.Identifier(slot), publication=sql.Literal(publication))
        result = self._pg.exec_(command.as_bytes(self._connection))
        if result.status == pq.ExecStatus.COPY_BOTH:
            return True
        if result.error_field(pq.DiagnosticField.SQLSTATE) == b"55006":
            return False
        raise self._failed(result)

    def take(self, wait_s: float, payloads_max: int) -> list[bytes]:
        """Payloads that are there, or the first that come within ``wait_s``; 32 MiB at most.

        Raises psycopg.OperationalError when the connection is lost, ReplicationFailed when the
        server ended the stream.
        """
        found = self._drain(payloads_max)
        if found:
            return found
        self._pulse()
        deadline = time.monotonic() + wait_s
        while True:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([self._pg.socket], [], [], left_s)[0]:
                return []
            self._pg.consume_input()
            found = self._drain(payloads_max)
            if found:
                return found

    def confirm(self, lsn: int) -> None:
        """Tell the server that everything before this position is safe with us."""
        if lsn > self._confirmed:
            self._confirmed = lsn
            self._send(asks=False)

    def _pulse(self) -> None:
        if time.monotonic() >= self._pulse_at:
            self._send(asks=True)

    def _send(self, *, asks: bool) -> None:
        clock = int((time.time() - _EPOCH_S) * 1_000_000)
        at = self._confirmed
        self._pg.put_copy_data(_STATUS.pack(b"r", at, at, at, clock, asks))
        self._pg.flush()
        if asks:
            self._pulse_at = time.monotonic() + _PULSE_S

    def _drain(self, payloads_max: int) -> list[bytes]:
        found: list[bytes] = []
        bytes_left = _BYTES_MAX
        while len(found) < payloads_max and bytes_left > 0:
            size, view = self._pg.get_copy_data(1)
            if size == 0:
                self._pg.consume_input()
                size, view = self._pg.get_copy_data(1)
                if size == 0:
                    return found
            if size == -1:
                raise self._failed(self._pg.get_result())
            data = bytes(view)
            if data[:1] == b"w":
                found.append(data[_DATA.size :])
                bytes_left -= size
                self.keepalive_lsn = 0
            elif data[:1] == b"k":
                _, self.keepalive_lsn, _, asks = _KEEPALIVE.unpack_from(data)
                if asks:
                    self._send(asks=False)
        return found

    def _failed(self, result: pq.abc.PGresult | None) -> Exception:
        said = b"" if result is None else result.error_field(pq.DiagnosticField.MESSAGE_PRIMARY)
        state = None if result is None else result.error_field(pq.DiagnosticField.SQLSTATE)
        reason = (said or self._pg.error_message or b"the server ended it").decode(errors="replace")
        if state is None or state[:2] in (b"57", b"08", b"53"):
            return Unavailable(f"reading the WAL: {reason.strip()}")
        return ReplicationFailed(f"reading the WAL: {reason.strip()} ({state.decode()})")
