"""The stack of a project: start missing servers, report their status, stop them."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import psutil

from everstate.config import Config, load
from everstate.errors import LocalStackError
from everstate.local.artifacts import obtain
from everstate.local.cassandra import CassandraServer
from everstate.local.connect import ConnectServer
from everstate.local.files import writing
from everstate.local.kafka import KafkaServer
from everstate.local.mariadb import MariaDbServer
from everstate.local.memory import Memory, Remembered
from everstate.local.postgres import PostgresServer
from everstate.local.processes import (
    ProcessId,
    end,
    free_port,
    is_alive,
    is_free,
    resident_bytes,
    send,
    spawn,
    strays,
    wait_gone,
    works_elsewhere,
)
from everstate.local.progress import SILENT, StackProgress
from everstate.local.redis import RedisServer
from everstate.local.s3 import S3Server
from everstate.local.server import Ports, Server
from everstate.private import private_folder

ServerState = Literal["running", "not answering", "crashed", "stopped"]

_READY_S_MAX = 180.0
_ADOPT_S_MAX = 20.0
_STOP_S_MAX = 30.0
_ATTEMPTS = 3
_POLL_S = 0.1
_TAIL_LINES = 12
_OPTIONAL = ("connect", "mariadb")
"""Started when the configuration names them or a command needs them; then part of the stack."""
_LAST = ("connect",)
"""Started when the others answer, and stopped before them, because it needs other servers."""
_SERVERS: dict[str, Callable[[Config], Server]] = {
    "kafka": KafkaServer,
    "postgres": PostgresServer,
    "cassandra": CassandraServer,
    "mariadb": MariaDbServer,
    "redis": RedisServer,
    "s3": S3Server,
}
_STORES = ("redis",)
"""Servers of stores of views: started when the configuration has a section of the store."""
_TRY_AGAIN = ("Address already in use", "pre-existing shared memory block", "lock file")
"""Messages of a failed start that may succeed with another port or after a moment."""


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """Present status of one server of the stack."""

    name: str
    state: ServerState
    address: str | None
    """``host:port``; None when it was never started."""
    pid: int | None
    memory_bytes: int | None
    since: float | None
    """Start of its process, seconds since the epoch."""
    log: Path


class Stack:
    """The local servers of one project: those whose addresses are not configured.

    As a context manager it stops on exit the servers that it started; a server that already ran is
    used and left running.
    """

    def __init__(self, config: Config, *, also: Iterable[str] = ()) -> None:
        """``also``: optional servers that are needed now (``connect``, ``mariadb``)."""
        self._config = config
        self._memory = Memory(config.project.data_dir)
        self._writing = threading.Lock()
        self._started: list[str] = []
        names = []
        if config.log.bootstrap_servers is None:
            names.append("kafka")
        if config.store.dsn is None:
            names.append("postgres")
        if config.cassandra.local and not config.cassandra.contact_points:
            names.append("cassandra")
        if config.archive.s3.local:
            names.append("s3")
        remembered = self._memory.read()
        wanted = {*config.capture.local, *also, *remembered}
        if "mariadb" in wanted:
            names.append("mariadb")
        if "connect" in wanted and config.capture.connect_url is None:
            names.append("connect")
        sections = config.stores.servers.items()
        names += [name for name, given in sections if name in _STORES and not given.url]
        self._servers = {name: self._make(name) for name in names}

    @property
    def names(self) -> tuple[str, ...]:
        """The servers that this stack starts; empty when all addresses are configured."""
        return tuple(self._servers)

    def start(self, progress: StackProgress | None = None) -> Config:
        """Start the missing servers, wait until each answers, and fill in the addresses.

        A server that runs already (also one that a killed run left) is taken over; ports stay the
        same unless another process uses them. Takes about 4 s the first time. Raises
        LocalStackError with the end of the log of the server that did not start.
        """
        steps = progress or SILENT
        if not self._servers:
            return self._config
        with self._memory.lock():
            wanted = [a for server in self._servers.values() for a in server.artifacts]
            obtain(self._config, wanted, steps)
            for server in self._servers.values():
                server.obtain(steps)
            logs = self._config.project.data_dir / "logs"
            with writing(logs):
                private_folder(logs)
            for wave in _waves(self._servers):
                with ThreadPoolExecutor(len(wave)) as pool:
                    list(pool.map(lambda name: self._bring_up(name, steps), wave))
        return self.resolve()

    def resolve(self, needs: Collection[str] | None = None) -> Config:
        """The configuration with the running servers' addresses filled in.

        Raises LocalStackError when one of them does not run, unless it is optional or not in
        ``needs`` (``None``: all are needed); its address then stays empty.
        """
        remembered, config = self._remembered(), self._config
        for name, server in self._servers.items():
            known = remembered.get(name)
            # A store of views that does not answer is an error of its views, and of nothing else.
            is_optional = name in _STORES or name in _OPTIONAL
            if known is not None and (_runs(known) or name in _STORES):
                config = server.reached(config, known.ports)
            elif not is_optional and (needs is None or name in needs):
                crashed = known is not None and known.process is not None
                raise LocalStackError(
                    f"the local {name} {'crashed' if crashed else 'is not running'}.",
                    advice=f"Start it with `everstate up`; its log is {self._log(name)}."
                    if crashed
                    else "Start it with `everstate up`, or give its address in everstate.toml.",
                )
        return config

    def status(self) -> list[ServerStatus]:
        """Present status of each server; probes each running one by its protocol (at most 3 s)."""
        remembered = self._remembered()
        return [self._status(name, remembered.get(name)) for name in self._servers]

    def gone(self) -> list[str]:
        """The servers whose process does not exist; cheap, for a supervisor's loop."""
        remembered = self._remembered()
        return [name for name in self._servers if not _runs(remembered.get(name))]

    def crashed(self) -> list[str]:
        """The servers whose process ended although they were not stopped."""
        remembered = self._remembered()
        known = {name: remembered.get(name) for name in self._servers}
        return [n for n, k in known.items() if k is not None and k.process is not None
                and not _runs(k)]  # fmt: skip

    def has_crashed(self, name: str) -> bool | None:
        """Whether a server ended although it was not stopped; ``None``: it was never started."""
        return None if name not in self._remembered() else name in self.crashed()

    def revive(self, names: Iterable[str], progress: StackProgress | None = None) -> list[str]:
        """Restart the crashed servers of ``names``, and return them.

        Does nothing while another server is down that they may need. Raises LocalStackError.
        """
        wanted = set(names)
        if not wanted.intersection(self.crashed()) or set(self.gone()) - wanted:
            return []
        with self._memory.lock():
            crashed = [name for name in self.crashed() if name in wanted]
            for name in crashed:
                self._bring_up(name, progress or SILENT)
        return crashed

    def settled_crashes(self) -> list[str]:
        """Those of :meth:`crashed`, while no other process starts or stops servers.

        `everstate down` ends a server first, and records then that it was stopped.
        """
        if not self.crashed():
            return []
        with self._memory.lock():
            return self.crashed()

    def check(self) -> None:
        """Raise LocalStackError, with the end of its log, when a server is gone."""
        for name in self.gone():
            raise self.failure(name, "is gone")

    def stop(self, names: tuple[str, ...] | None = None) -> list[str]:
        """Stop the servers (or those of ``names``) cleanly and return those that ran.

        They are killed after at most 30 s each. Ports are kept for the next start.
        """
        return self._stop([name for name in self._servers if names is None or name in names])

    def stop_all(self) -> list[str]:
        """Stop all servers that were started in this folder, and return those that ran.

        Also those that the settings do not name any more, because they give the address of
        another server now.
        """
        unnamed = [
            name
            for name, known in self._remembered().items()
            if name not in self._servers and known.process is not None
        ]
        return self._stop([*self._servers, *unnamed])

    def _stop(self, wanted: list[str]) -> list[str]:
        if not wanted or not self._config.project.data_dir.exists():
            return []
        with self._memory.lock():
            ran: list[str] = []
            for wave in reversed(_waves(wanted)):
                with ThreadPoolExecutor(len(wave)) as pool:
                    did_run = pool.map(self._take_down, wave)
                    ran += [name for name, ran_it in zip(wave, did_run, strict=True) if ran_it]
        return [name for name in wanted if name in ran]

    def kill(self, name: str) -> None:
        """SIGKILL one server, as a crash would; for fault tests."""
        process = self._process(name)
        send(process, signal.SIGKILL)
        wait_gone(process, _STOP_S_MAX)

    def restart(self, name: str, progress: StackProgress | None = None) -> None:
        """Stop one server when it runs, and start it on the same ports."""
        with self._memory.lock():
            self._take_down(name)
            self._bring_up(name, progress or SILENT)

    def restart_crashed(self, name: str, progress: StackProgress) -> None:
        """Start one server again, unless it was stopped or started meanwhile."""
        with self._memory.lock():
            if name in self.crashed():
                self._bring_up(name, progress)

    def pid(self, name: str) -> int:
        """The process id of a server; LocalStackError when it was not started."""
        return self._process(name).pid

    def failure(self, name: str, what: str) -> LocalStackError:
        """The error that says ``what`` of a server, with the end of its log."""
        return LocalStackError(
            f"the local {name} {what}. The end of its log:\n{self._tail(name)}\n",
            advice=f"The whole log is {self._log(name)}; `everstate doctor` looks for the cause.",
        )

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            # Without this, nothing would end the servers that did start: __exit__ is not called.
            self.stop(tuple(self._started))
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop(tuple(self._started))

    def _make(self, name: str) -> Server:
        """The server of that name."""
        if name == "connect":
            return ConnectServer(self._config, self._brokers)
        return _SERVERS[name](self._config)

    def _server(self, name: str) -> Server:
        """The server of that name, also when the settings do not name it any more."""
        return self._servers.get(name) or self._make(name)

    def _remembered(self) -> dict[str, Remembered]:
        """The record of each server of this folder, by name.

        A copied folder has the record of the original: there, a server that works outside of this
        folder was never started.
        """
        return {
            name: Remembered(known.ports, None) if self._is_foreign(name, known) else known
            for name, known in self._memory.read().items()
        }

    def _is_foreign(self, name: str, known: Remembered) -> bool:
        """Whether a recorded process runs, and is a server of another folder."""
        if known.process is None or not is_alive(known.process):
            return False
        try:
            process = psutil.Process(known.process.pid)
            return works_elsewhere(process, self._folder(name), self._server(name).marker)
        except psutil.Error:
            return False

    def _folder(self, name: str) -> Path:
        """The folder of a server, in which it works."""
        return self._config.project.data_dir / name

    def _process(self, name: str) -> ProcessId:
        known = self._remembered().get(name)
        if known is None or known.process is None:
            raise LocalStackError(f"the local {name} is not running.", advice="Run `everstate up`.")
        return known.process

    def _brokers(self) -> str:
        """The log's addresses; the local broker was started before the server that needs them."""
        kafka, config = self._servers.get("kafka"), self._config
        if kafka is not None:
            config = kafka.reached(config, self._remembered()["kafka"].ports)
        return config.bootstrap_servers

    def _log(self, name: str) -> Path:
        return self._config.project.data_dir / "logs" / f"{name}.log"

    def _remember(self, name: str, server: Remembered) -> None:
        with self._writing:
            # The records of the other servers as they are: what `_remembered` makes of them holds
            # for one moment.
            self._memory.write({**self._memory.read(), name: server})

    def _status(self, name: str, known: Remembered | None) -> ServerStatus:
        server, log = self._servers[name], self._log(name)
        if known is None:
            return ServerStatus(name, "stopped", None, None, None, None, log)
        address = f"127.0.0.1:{known.ports['client']}"
        process = known.process
        if process is None:
            return ServerStatus(name, "stopped", address, None, None, None, log)
        if not is_alive(process):
            return ServerStatus(name, "crashed", address, None, None, None, log)
        state: ServerState = "running" if _answers(server, known.ports) else "not answering"
        memory = resident_bytes(process)
        return ServerStatus(name, state, address, process.pid, memory, process.started, log)

    def _bring_up(self, name: str, steps: StackProgress) -> None:
        """Make sure that one server runs and answers, started now or before."""
        server = self._servers[name]
        known = self._remembered().get(name)
        if known is not None and known.process is not None and _runs(known):
            if self._await(name, known.process, known.ports, _ADOPT_S_MAX):
                server.settle(known.ports)
                steps.step(f"{name} is already running on 127.0.0.1:{known.ports['client']}")
                return
            end(known.process, server.stop_signal, patience_s=_STOP_S_MAX)
        for stray in strays(server.marker, server.program, self._folder(name)):
            steps.step(
                f"{name}: stopped process {stray.pid}, which an earlier killed run had left running"
            )
            end(stray, server.stop_signal, patience_s=_STOP_S_MAX)
        ports = dict(known.ports) if known is not None else {}
        for attempt in range(1, _ATTEMPTS + 1):
            began = time.monotonic()
            if self._launch(name, self._choose_ports(server, ports)):
                now = self._remembered()[name].ports
                server.settle(now)
                took = time.monotonic() - began
                steps.step(f"{name} answers on 127.0.0.1:{now['client']} after {took:.1f} s")
                return
            tail = self._tail(name)
            if attempt == _ATTEMPTS or not any(reason in tail for reason in _TRY_AGAIN):
                raise self.failure(name, "did not start")
            time.sleep(attempt)

    def _choose_ports(self, server: Server, before: dict[str, int]) -> dict[str, int]:
        """The recorded ports that are still free, and new ports for the rest."""
        taken = {port for known in self._remembered().values() for port in known.ports.values()}
        chosen = {}
        for port_name in server.port_names:
            port = before.get(port_name)
            chosen[port_name] = port if port and is_free(port) else free_port(taken)
        return chosen

    def _launch(self, name: str, ports: dict[str, int]) -> bool:
        """Start the process and wait for its answer; False (process ended) when it fails."""
        log = self._log(name)
        with writing(self._folder(name)):
            launch = self._servers[name].prepare(ports)
            with open(log, "a", encoding="utf-8") as file:
                file.write(f"--- everstate starts {name} on {ports} ---\n")
        process = spawn(launch.argv, env=launch.env, cwd=launch.cwd, log=log)
        if name not in self._started:
            self._started.append(name)
        try:
            self._remember(name, Remembered(ports, process))
            if self._await(name, process, ports, _READY_S_MAX):
                return True
        except BaseException:
            end(process, signal.SIGKILL, patience_s=_STOP_S_MAX)
            self._remember(name, Remembered(ports, None))
            raise
        end(process, signal.SIGKILL, patience_s=_STOP_S_MAX)
        self._remember(name, Remembered(ports, None))
        return False

    def _await(self, name: str, process: ProcessId, ports: Ports, patience_s: float) -> bool:
        """Wait until the server answers; False when it ended or took too long."""
        deadline = time.monotonic() + patience_s
        while is_alive(process) and time.monotonic() < deadline:
            if _answers(self._servers[name], ports):
                return True
            time.sleep(_POLL_S)
        return False

    def _take_down(self, name: str) -> bool:
        server = self._server(name)
        known = self._remembered().get(name)
        ran = _runs(known)
        if known is not None and known.process is not None:
            end(known.process, server.stop_signal, patience_s=_STOP_S_MAX)
            self._remember(name, Remembered(known.ports, None))
        for stray in strays(server.marker, server.program, self._folder(name)):
            ran = end(stray, server.stop_signal, patience_s=_STOP_S_MAX) or True
        return ran

    def _tail(self, name: str) -> str:
        """The last lines of the log since the last start."""
        try:
            lines = self._log(name).read_text("utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return ""
        starts = [at for at, line in enumerate(lines) if line.startswith("--- everstate starts")]
        return "\n".join(lines[starts[-1] if starts else 0 :][-_TAIL_LINES:])


def resolve(config: Config, *, needs: Collection[str] | None = None) -> Config:
    """The settings, with the addresses of the local servers where the project uses them.

    Returns ``config`` itself when all addresses are set. Raises LocalStackError with the advice
    `everstate up` when a server of ``needs`` does not run (``None``: any server of the local
    stack); the address of another one that does not run stays empty.
    """
    return Stack(config).resolve(needs)


def project_config(folder: Path | str = ".") -> Config:
    """The settings of the project in ``folder``, complete for its own and for local servers.

    Reads everstate.toml and the environment, and adds the address of each local server. Raises
    what :func:`everstate.load` raises, and LocalStackError when a local server does not run.
    """
    return resolve(load(folder))


def _waves(names: Iterable[str]) -> list[list[str]]:
    """Groups of servers that are started together, in order."""
    listed = list(names)
    early = [name for name in listed if name not in _LAST]
    late = [name for name in listed if name in _LAST]
    return [wave for wave in (early, late) if wave]


def _runs(known: Remembered | None) -> bool:
    return known is not None and known.process is not None and is_alive(known.process)


def _answers(server: Server, ports: Ports) -> bool:
    try:
        server.probe(ports)
    except OSError:
        return False
    return True
