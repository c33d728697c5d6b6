"""A proxy before an object store that fails, loses answers or lets another writer go first."""

from __future__ import annotations

import http.client
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_HOP = {"connection", "transfer-encoding", "keep-alive", "expect"}
COMMIT = r"/_delta_log/\d{20}\.json$"
"""The path of a commit of a table."""


@dataclass
class Fault:
    """What happens to requests of a method and a path: they are answered so, or act first."""

    method: str
    path: str
    times: int
    refusal: tuple[int, str] | None = None
    """Status and code of S3 with which they are refused."""
    before: Callable[[str], object] = lambda path: None
    """Called with the path before a request is passed on."""
    loses_answer: bool = False
    """Whether the request is passed on, and the connection then ends without an answer."""
    seen: int = 0


@dataclass
class FaultyS3:
    """The proxy; give it :class:`Fault` objects."""

    port: int
    target: int
    faults: list[Fault] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def add(self, method: str, path: str, times: int = 1, **what: Any) -> Fault:
        """A fault of the next ``times`` requests whose path matches."""
        fault = Fault(method, path, times, **what)
        self.faults.append(fault)
        return fault

    def take(self, method: str, path: str) -> Fault | None:
        """The fault of a request, counted."""
        with self.lock:
            for fault in self.faults:
                if fault.method in (method, "*") and fault.seen < fault.times:
                    if re.search(fault.path, path.partition("?")[0]):
                        fault.seen += 1
                        return fault
        return None


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, proxy: FaultyS3) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.proxy = proxy


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_GET(self) -> None:
        fault = self.server.proxy.take(self.command, self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if fault is not None:
            fault.before(self.path)
            if fault.refusal is not None:
                status, code = fault.refusal
                error = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>"
                self._answer(status, {"Content-Type": "application/xml"}, error.encode())
                return
        answered = self._forward(body)
        if answered is None or (fault is not None and fault.loses_answer):
            self.close_connection = True
            with suppress(OSError):
                self.connection.shutdown(2)
            return
        self._answer(*answered)

    do_PUT = do_POST = do_DELETE = do_HEAD = do_GET

    def _answer(self, status: int, headers: Mapping[str, str], content: bytes) -> None:
        self.send_response_only(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _forward(self, body: bytes) -> tuple[int, dict[str, str], bytes] | None:
        """The answer of the object store; ``None``: it has none."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.server.proxy.target)) as to:
            try:
                to.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                for name, value in self.headers.items():
                    if name.lower() not in _HOP:
                        to.putheader(name, value)
                to.endheaders(body or None)
                found = to.getresponse()
                content = found.read()
            except (OSError, http.client.HTTPException):
                return None
            headers = {n: v for n, v in found.getheaders() if n.lower() not in _HOP}
            return found.status, headers, content

    def log_message(self, *_: object) -> None:
        return


@contextmanager
def faulty_s3(target: int) -> Iterator[FaultyS3]:
    """A proxy on a port of its own, before the object store on port ``target``."""
    made = FaultyS3(0, target)
    with _Server(made) as server:
        made.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield made
        finally:
            server.shutdown()
            thread.join()
