"""PostgreSQL as a server of the stack: one user, one database, a password, loopback only."""

from __future__ import annotations

import io
import os
import signal
import tarfile
import zipfile
from pathlib import Path

import psutil
import psycopg
from psycopg import sql

from everstate.config import Config
from everstate.local import processes, unprivileged
from everstate.local.artifacts import cache_dir, cached, postgres_artifact
from everstate.local.files import created, fill, make_password, unpacked
from everstate.local.server import Launch, Ports, Server
from everstate.private import private_folder

_USER = "everstate"
_DATABASE = "everstate"
_PROBE_S = 3
_SETTINGS_FILE = "everstate.conf"

_SETTINGS = """\
listen_addresses = '127.0.0.1'
port = {port}
unix_socket_directories = ''
password_encryption = 'scram-sha-256'
timezone = 'UTC'
log_timezone = 'UTC'
wal_level = logical
max_prepared_transactions = 20
max_connections = 200
shared_buffers = 256MB
max_wal_size = 2GB
fsync = {fsync}
log_line_prefix = '%m [%p] '
"""


class PostgresServer(Server):
    """A server on 127.0.0.1 with the database ``everstate`` and a superuser of that name."""

    name = "postgres"
    program = "postgres"
    stop_signal = signal.SIGINT
    """Fast shutdown: open transactions are rolled back."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._data = self._folder / "data"
        self._password = self._folder / "password"
        self.artifacts = (postgres_artifact(),)
        self.marker = str(self._data)

    def prepare(self, ports: Ports) -> Launch:
        """Unpack the binaries once per user, make the data folder once, write the settings."""
        home = self._unpack()
        private_folder(self._folder)
        env = {**os.environ, "LC_ALL": "C.UTF-8", "TZ": "UTC"}
        if not (self._data / "PG_VERSION").exists():
            with created(self._data) as new:
                self._initdb(home, env, new)
        settings = _SETTINGS.format(
            port=ports["client"], fsync="on" if self._config.local.fsync else "off"
        )
        (self._data / _SETTINGS_FILE).write_text(settings, "utf-8")
        self._drop_stale_lock()
        argv = (str(home / "bin" / "postgres"), "-D", self.marker)
        return Launch((*unprivileged.prefix(self._data), *argv), env, self._folder)

    def probe(self, ports: Ports) -> None:
        """Log in to the maintenance database; raises OSError while that fails."""
        try:
            with psycopg.connect(self._dsn(ports, "postgres"), connect_timeout=_PROBE_S):
                return
        except psycopg.OperationalError as cause:
            raise ConnectionError(str(cause)) from cause

    def settle(self, ports: Ports) -> None:
        """Create the database ``everstate`` if it does not exist."""
        with psycopg.connect(self._dsn(ports, "postgres"), autocommit=True) as connection:
            query = "SELECT FROM pg_database WHERE datname = %s"
            if connection.execute(query, (_DATABASE,)).fetchone() is None:
                name = sql.Identifier(_DATABASE)
                connection.execute(sql.SQL("CREATE DATABASE {}").format(name))

    def reached(self, config: Config, ports: Ports) -> Config:
        """The settings with its connection string, which has the password in it."""
        return config.replaced("store", dsn=self._dsn(ports, _DATABASE))

    def _dsn(self, ports: Ports, database: str) -> str:
        password = self._password.read_text("utf-8").strip()
        return f"postgresql://{_USER}:{password}@127.0.0.1:{ports['client']}/{database}"

    def _drop_stale_lock(self) -> None:
        """Remove a lock file whose process is not a server of this data folder.

        PostgreSQL takes any process with the recorded pid for a running server: a zombie (a
        container whose first process does not reap children leaves zombies), the server of the
        project of which this folder is a copy, and a program that got the pid later. The lock
        stays while any process works in the data folder.
        """
        lock = self._data / "postmaster.pid"
        try:
            owner = psutil.Process(int(lock.read_text("utf-8").split()[0]))
            is_stale = owner.status() == psutil.STATUS_ZOMBIE or processes.works_elsewhere(
                owner, self._data, self.marker
            )
        except (OSError, ValueError, IndexError, psutil.Error):
            return
        if is_stale and not processes.in_folder(self._data):
            lock.unlink(missing_ok=True)

    def _unpack(self) -> Path:
        """The folder of the binaries in the cache."""
        artifact = self.artifacts[0]

        def unpack(folder: Path) -> None:
            with zipfile.ZipFile(cached(self._config, artifact)) as jar:
                packed = next(name for name in jar.namelist() if name.endswith(".txz"))
                archive = jar.read(packed)
            with tarfile.open(fileobj=io.BytesIO(archive), mode="r:xz") as tar:
                # The archive matches the lock; the filter exists from Python 3.11.4 on.
                tar.extraction_filter = getattr(tarfile, "tar_filter", None)
                tar.extractall(folder)

        return unpacked(cache_dir(self._config) / "postgres" / artifact.sha256[:16], unpack)

    def _initdb(self, home: Path, env: dict[str, str], new: Path) -> None:
        make_password(self._password)
        command = (
            *unprivileged.prefix(new),
            str(home / "bin" / "initdb"),
            *("-D", str(new), "-U", _USER, "-E", "UTF8", "--locale=C.UTF-8", "--data-checksums"),
            *("--auth=scram-sha-256", f"--pwfile={self._password}"),
        )
        fill(command, env, "PostgreSQL", self._folder)
        with open(new / "postgresql.conf", "a", encoding="utf-8") as file:
            file.write(f"include '{_SETTINGS_FILE}'\n")
