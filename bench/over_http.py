"""What the benches over HTTP share: servers as child processes, and a client that only counts."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from everstate.config import Config

CONNECTIONS = 16
_START_S = 60


async def seconds_of(
    port: int, requests: Sequence[bytes], connections: int = CONNECTIONS
) -> list[float]:
    """Seconds of each request over some connections; any answer but 2xx ends the bench."""
    waiting, times = iter(requests), []

    async def connection() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for request in waiting:
            began = time.perf_counter()
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head)
            body = await reader.readexactly(int(length[1])) if length else b""
            times.append(time.perf_counter() - began)
            if not head.startswith(b"HTTP/1.1 2"):
                raise RuntimeError(f"{head!r} {body!r}")
        writer.close()

    await asyncio.gather(*(connection() for _ in range(connections)))
    return times


def get(path: str) -> bytes:
    """A GET request."""
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


def post(path: str, body: str) -> bytes:
    """A POST request with JSON."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


def everstate_serve(app: str) -> list[str]:
    """The command of `everstate serve` on a free port."""
    return [sys.executable, "-m", "everstate.cli", "serve", "--port", "0", "--app", app]


@contextmanager
def served(argv: list[str], config: Config, path: Path) -> Iterator[tuple[int, int]]:
    """A server as a child process; gives its port, once it listens, and its process id.

    ``path``: the folder of the app's module.
    """
    env = {
        **os.environ,
        "EVERSTATE_LOG_BOOTSTRAP_SERVERS": config.bootstrap_servers,
        "EVERSTATE_STORE_DSN": config.store_dsn,
        "EVERSTATE_VIEWS_DSN": config.views_dsn,
        "EVERSTATE_LOG_PREFIX": config.log.prefix,
        "EVERSTATE_ARCHIVE_PATH": str(config.archive_path),
        "EVERSTATE_API_CONNECTIONS_MAX": "2000",
        "PYTHONPATH": str(path),
    }
    process = subprocess.Popen(argv, stderr=subprocess.PIPE, env=env, text=True)
    try:
        assert process.stderr is not None
        found, deadline = None, time.monotonic() + _START_S
        for line in process.stderr:
            found = re.search(r"serving http://127.0.0.1:(\d+)", line)
            if found or time.monotonic() > deadline:
                break
        if not found:
            raise RuntimeError(f"{argv[-1]} did not start")
        port = int(found[1])
        # A pipe that nobody reads would stop the server when it is full.
        threading.Thread(target=sys.stderr.writelines, args=(process.stderr,), daemon=True).start()
        while True:
            try:
                asyncio.run(seconds_of(port, [get("/health")]))
                break
            except OSError:
                time.sleep(0.1)
        yield port, process.pid
    finally:
        process.terminate()
        process.wait(60)
