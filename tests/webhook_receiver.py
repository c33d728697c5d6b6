"""A receiver of webhooks on this machine, whose answers a test chooses."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class WebhookReceiver:
    """Records what it acknowledged; ``status`` is its answer from now on."""

    def __init__(self) -> None:
        self.posted: list[tuple[Message, bytes]] = []
        """Headers and bodies."""
        self.bodies: list[dict[str, Any]] = []
        self.refused = 0
        self.status = 204
        self.fails_for: bytes | None = None
        """A body with this is answered with 500."""
        self.answers = threading.Event()
        """While it is not set, a request gets no answer."""
        self.answers.set()
        self.url = ""

    def told(self, *names: str) -> list[tuple[Any, ...]]:
        """Fields of the bodies, in order."""
        return [tuple(body[name] for name in names) for body in self.bodies]


@contextmanager
def receiving(port: int = 0) -> Iterator[WebhookReceiver]:
    """A receiver on a port of the loopback during the block."""
    receiver = WebhookReceiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            receiver.answers.wait(60)
            status = receiver.status
            if receiver.fails_for is not None and receiver.fails_for in body:
                status = 500
            if status < 300:
                receiver.posted.append((self.headers, body))
                receiver.bodies.append(json.loads(body))
            else:
                receiver.refused += 1
            self.send_response(status)
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        do_GET = do_POST

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        receiver.url = f"http://127.0.0.1:{server.server_port}/hook?token=s3cret"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield receiver
        finally:
            receiver.answers.set()
            server.shutdown()
            thread.join()
