"""Serves board.html, and passes requests for views on to `everstate serve`.

A browser lets a page read what comes from the page's own server only. In production the proxy with
TLS does what this file does.
"""

import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

BOARD = Path(__file__).with_name("board.html").read_text()


class Pages(BaseHTTPRequestHandler):
    """Answers the requests of browsers."""

    everstate = "http://127.0.0.1:8080"
    board = BOARD

    def do_GET(self) -> None:
        """The board, or what `everstate serve` answers."""
        if self.path == "/":
            self.start(200, "text/html; charset=utf-8")
            self.wfile.write(self.board.encode())
        elif self.path.startswith("/views/v1/"):
            self.pass_on()
        else:
            self.send_error(404)

    def pass_on(self) -> None:
        """Send a request on, and its answer back as it comes."""
        named = {name: self.headers.get(name) for name in ("Accept", "Last-Event-ID")}
        headers = {name: value for name, value in named.items() if value is not None}
        try:
            answer = urlopen(Request(self.everstate + self.path, headers=headers))
        except HTTPError as error:
            answer = error
        except URLError:
            self.send_error(502)
            return
        with answer:
            self.start(answer.status, answer.headers["Content-Type"])
            try:
                while part := answer.read1(65_536):
                    self.wfile.write(part)
            except OSError:
                pass  # the browser has left, or the server has ended

    def start(self, status: int, kind: str) -> None:
        """Begin an answer; nothing keeps it."""
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Cache-Control", "no-store")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Print nothing for each request."""


if __name__ == "__main__":
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 8000
    print(f"http://127.0.0.1:{port}")
    ThreadingHTTPServer(("127.0.0.1", port), Pages).serve_forever()
