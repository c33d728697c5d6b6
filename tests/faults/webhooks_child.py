"""A receiver of webhooks in a process of its own, to be killed; it notes each request in a file."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import random
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


def is_signed(headers: Any, body: bytes, secrets: list[str]) -> bool:
    """Whether there is a signature of each secret, in their order."""
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    wanted = []
    for each in secrets:
        key = base64.b64decode(each.removeprefix("whsec_"))
        digest = hmac.new(key, signed, hashlib.sha256).digest()
        wanted.append("v1," + base64.b64encode(digest).decode())
    is_now = abs(time.time() - int(headers["webhook-timestamp"])) < 60
    return is_now and headers["webhook-signature"].split() == wanted


def main() -> None:
    """Answer on a port until it is killed; at random with 500, or not at all."""
    port, file, share, *secrets = sys.argv[1:]
    busy, lock, rng = Counter[str](), threading.Lock(), random.Random()
    output = Path(file).open("ab", buffering=0)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            change = json.loads(body)["data"]
            key = change["key"]
            with lock:
                overlaps = busy[key] > 0
                busy[key] += 1
            time.sleep(rng.random() / 100)
            status = 500 if rng.random() < float(share) else 204
            row = {
                "key": key,
                "version": change["version"],
                "id": self.headers["webhook-id"],
                "status": status,
                "overlaps": overlaps,
                "signed": is_signed(self.headers, body, secrets),
            }
            with lock:
                busy[key] -= 1
                output.write(json.dumps(row).encode() + b"\n")
            if rng.random() < float(share):
                # It has the change, and the sender cannot know that.
                self.close_connection = True
                return
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    class Server(ThreadingHTTPServer):
        request_queue_size = 128

    with Server(("127.0.0.1", int(port)), Handler) as server:
        server.serve_forever()


if __name__ == "__main__":
    main()
