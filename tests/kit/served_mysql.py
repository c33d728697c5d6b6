"""MySQL for tests: the newest server in Debian's unstable packages, on loopback.

No registry of the project has a server of MySQL, and users have one of their own (decision 108).
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, Final, Self

from everstate.config import Config, load
from everstate.errors import LocalStackError
from everstate.local.artifacts import cache_dir
from everstate.local.files import unpacked
from everstate.local.processes import free_port
from everstate.private import private_folder, write_private

_PACKAGE: Final = "mysql-server-core"
_START_S_MAX: Final = 120.0
_PASSWORD: Final = "only-on-loopback"
_USERS: Final = f"""\
CREATE DATABASE IF NOT EXISTS everstate;
CREATE USER IF NOT EXISTS 'everstate'@'127.0.0.1' IDENTIFIED BY '{_PASSWORD}';
GRANT ALL PRIVILEGES ON *.* TO 'everstate'@'127.0.0.1' WITH GRANT OPTION;
"""
_OPTIONS: Final = (
    "--bind-address=127.0.0.1", "--skip-name-resolve", "--mysqlx=OFF", "--server-id=1",
    "--log-bin=binlog", "--binlog-row-metadata=FULL", "--enforce-gtid-consistency=ON",
    "--gtid-mode=ON", "--default-time-zone=+00:00", "--character-set-server=utf8mb4",
    "--collation-server=utf8mb4_bin", "--innodb-buffer-pool-size=64M",
    "--max-connect-errors=4294967295", "--secure-file-priv=",
)  # fmt: skip


def _run(*words: str) -> str:
    """Run a program; raises LocalStackError with what it says."""
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as cause:
        told = getattr(cause, "stderr", None) or cause
        raise LocalStackError(
            f"tests of MySQL need Debian's package {_PACKAGE}, and {words[0]} fails: {told}"
        ) from cause


def _mirror() -> str:
    """The mirror of Debian from which this machine gets its packages; raises LocalStackError."""
    listed = _run("apt-get", "indextargets", "--format", "$(LABEL) $(REPO_URI)")
    found = [line.split(" ", 1)[1] for line in listed.splitlines() if line.startswith("Debian ")]
    if not found:
        raise LocalStackError(
            f"tests of MySQL need Debian's package {_PACKAGE}, and apt has no mirror of Debian.",
            advice="Run `apt-get update` on a machine with Debian.",
        )
    return found[0]


def _fetch(folder: Path) -> None:
    """Unpack the server and all that it needs into a folder; apt verifies the signatures.

    Its files are in the folder only, so that no right of root is needed.
    """
    apt = folder / "apt"
    for each in ("state/lists/partial", "cache/archives/partial"):
        (apt / each).mkdir(parents=True)
    (apt / "status").touch()
    (apt / "sources.list").write_text(f"deb {_mirror()} unstable main\n", "utf-8")
    places = {
        "Dir::State": apt / "state", "Dir::State::status": apt / "status",
        "Dir::Cache": apt / "cache", "Dir::Etc::SourceList": apt / "sources.list",
        "Dir::Etc::SourceParts": "-", "APT::Sandbox::User": "", "APT::Install-Recommends": "false",
    }  # fmt: skip
    own = [word for name, value in places.items() for word in ("-o", f"{name}={value}")]
    _run("apt-get", *own, "update")
    _run("apt-get", *own, "--download-only", "--yes", "install", _PACKAGE)
    for package in sorted(apt.rglob("*.deb")):
        _run("dpkg-deb", "--extract", str(package), str(folder))
        package.unlink()


class MySqlServer:
    """A server with the database ``everstate`` and a user of that name; it can be killed."""

    name: ClassVar[str] = "mysql"

    def __init__(self, config: Config, folder: Path) -> None:
        home = unpacked(cache_dir(config) / "mysql" / "unstable", _fetch)
        self._folder, self._fsync = folder, config.local.fsync
        private_folder(folder)
        self.port = free_port(set())
        libraries = next(home.glob("usr/lib/*-linux-gnu"))
        loader = next(home.glob("usr/lib*/ld-linux-*.so.*"))
        share = home / "usr" / "share" / "mysql"
        self._words = (
            *(str(loader), "--library-path", str(libraries), str(home / "usr" / "sbin" / "mysqld")),
            "--no-defaults",
            *(("--user=root",) if os.geteuid() == 0 else ()),
            *(f"--basedir={home / 'usr'}", f"--lc-messages-dir={share}"),
            *(f"--character-sets-dir={share / 'charsets'}", f"--datadir={folder / 'data'}"),
            f"--plugin-dir={home / 'usr' / 'lib' / 'mysql' / 'plugin'}",
        )
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    @contextmanager
    def alone(cls, folder: Path, *, fsync: bool = False) -> Iterator[Self]:
        """A server; with ``fsync`` it writes each transaction to its disk."""
        server = cls(load(folder, local={"fsync": fsync}), folder / "mysql")
        try:
            server.start()
            yield server
        finally:
            server.kill()

    @property
    def url(self) -> str:
        """The URL of its administrator."""
        return f"mysql://everstate:{_PASSWORD}@127.0.0.1:{self.port}/everstate"

    def start(self) -> None:
        """Start it, and wait until it answers; raises LocalStackError with the end of its log."""
        log, users = self._folder / "log.txt", self._folder / "users.sql"
        if not (self._folder / "data").exists():
            _run(*self._words, "--initialize-insecure")
            write_private(users, _USERS)
        with log.open("ab") as output:
            begin = output.tell()
            self._process = subprocess.Popen(
                [*self._words, *_OPTIONS, f"--port={self.port}", f"--init-file={users}",
                 # With 0 it would lose transactions that its binlog has, when it is killed.
                 f"--innodb-flush-log-at-trx-commit={1 if self._fsync else 2}",
                 f"--sync-binlog={int(self._fsync)}", "--socket=mysql.sock"],
                stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        until = time.monotonic() + _START_S_MAX
        while f"port: {self.port}".encode() not in log.read_bytes()[begin:]:
            if self._process.poll() is not None or time.monotonic() > until:
                self.kill()
                raise LocalStackError(f"MySQL does not start: {log.read_text()[-2000:]}")
            time.sleep(0.2)

    def kill(self) -> None:
        """SIGKILL it, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
