"""A receiver of webhooks on this machine, whose answers a test chooses."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class WebhookReceiver:
    """Records the bodies that it acknowledged; ``status`` is its answer from now on."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.refused = 0
        self.status = 204
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
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            receiver.answers.wait(60)
            if receiver.status < 300:
                receiver.bodies.append(body)
            else:
                receiver.refused += 1
            self.send_response(receiver.status)
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
