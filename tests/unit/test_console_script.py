"""The console's script in Node.js, before a server whose answers go wrong."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

import pytest

from everstate.console.pages import MARK, static_files

NODE: Final = shutil.which("node")
SCRIPT: Final = static_files()["console.js"][0].decode()
BROWSER: Final = """
const [base, slides, late, script] = JSON.parse(require("fs").readFileSync(0, "utf8"));
const away = { textContent: "", hidden: true };
const timers = [], seen = [], nothing = () => {};
let reloads = 0, reloaded = nothing, move = nothing, expire = nothing;
const part = {
  dataset: { refresh: "/part", every: "5" }, innerHTML: "first",
  contains: () => false, querySelector: () => null, querySelectorAll: () => [],
  setAttribute: nothing, removeAttribute: nothing,
};
const slider = {
  dataset: { part: "part" }, form: { action: `${base}/entity` }, value: "2",
  addEventListener: (_, listener) => { move = listener; },
};
globalThis.document = {
  hidden: false, activeElement: null,
  getElementById: (id) => ({ away, part, chosen: {} })[id],
  querySelectorAll: (wanted) => wanted === "[data-refresh]" ? [part].slice(slides) : [slider],
};
globalThis.window = {
  setTimeout: (task) => timers.push(task), clearTimeout: nothing,
  location: { reload: () => { reloads += 1; reloaded(); } }, history: { replaceState: nothing },
};
const ask = fetch;
let isLate = false;
globalThis.fetch = async (address, options) => {
  const answer = await ask(new URL(address, base), options);
  if (isLate) expire();
  return answer;
};
AbortSignal.timeout = () => {
  const limit = new AbortController();
  expire = () => limit.abort(new DOMException("it took too long", "TimeoutError"));
  return limit.signal;
};
(0, eval)(script);
(async () => {
  for (isLate of late) {
    if (slides) move();
    const gone = new Promise((resolve) => { reloaded = resolve; });
    const patience = new Promise((resolve) => setTimeout(resolve, 20_000, "waits for ever"));
    const task = timers.shift() ?? (async () => "asks no more");
    const failed = await Promise.race([task().catch(String), gone, patience]);
    const warning = away.hidden ? "" : away.textContent.split(" (")[0];
    seen.push([warning, part.innerHTML, reloads, failed ?? ""]);
  }
  console.log(JSON.stringify(seen));
  process.exit(0);
})();
"""
AWAY: Final = "everstate serve does not answer"
Answer = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    """Gives the answers that a test has chosen, one after the other."""

    server: Server

    def do_GET(self) -> None:
        self.server.answers.pop(0)(self)

    def send(self, status: int, body: bytes, mark: str | None = None, length: int = 0) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(length or len(body)))
        if mark is not None:
            self.send_header(MARK, mark)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class Server(ThreadingHTTPServer):
    answers: list[Answer]
    ended: threading.Event


def well(handler: Handler) -> None:
    handler.send(200, b"fresh", "part")


def told(handler: Handler) -> None:
    handler.send(503, b"the log does not answer", "part")


def cut_off(handler: Handler) -> None:
    handler.send(200, b"cut off", "part", length=1_000)


def of_a_proxy(handler: Handler) -> None:
    handler.send(502, b"Bad gateway")


def of_a_sign_in(handler: Handler) -> None:
    handler.send(200, b"Sign in at the proxy")


def never(handler: Handler) -> None:
    """Begin the answer, and do not end it before the test ends."""
    handler.send(200, b"first part", "part", length=1_000)
    handler.server.ended.wait(60)


def another_page(handler: Handler) -> None:
    handler.send(401, b"Log in", "page")


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as made:
        made.daemon_threads, made.ended = True, threading.Event()
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.ended.set()
        made.shutdown()


def seen(server: Server, *answers: Answer, slides: bool = False) -> list[list[Any]]:
    """What the page shows after each answer: its warning, its part, its reloads, and a fault."""
    if NODE is None and not os.environ.get("CI"):
        pytest.skip("node is not installed: apt-get install nodejs")
    server.answers = [*answers]
    late = [each is never for each in answers]
    given = [f"http://127.0.0.1:{server.server_port}", int(slides), late, SCRIPT]
    done = subprocess.run(
        [NODE or "node", "-e", BROWSER],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[list[Any]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("wrong", [cut_off, of_a_proxy, of_a_sign_in, never])
def test_an_answer_that_is_not_the_consoles_is_told_and_the_page_asks_again(
    server: Server, wrong: Answer
) -> None:
    assert seen(server, wrong, wrong, well) == [
        [AWAY, "first", 0, ""],
        [AWAY, "first", 0, ""],
        ["", "fresh", 0, ""],
    ]


def test_an_error_that_the_console_tells_is_shown_in_place_of_the_part(server: Server) -> None:
    assert seen(server, told) == [["", "the log does not answer", 0, ""]]


def test_a_page_in_place_of_a_part_loads_the_page_again(server: Server) -> None:
    assert seen(server, another_page) == [["", "first", 1, ""]]


@pytest.mark.parametrize("wrong", [cut_off, of_a_proxy, never])
def test_the_slider_tells_that_a_version_does_not_come(server: Server, wrong: Answer) -> None:
    assert seen(server, wrong, well, slides=True) == [
        [f"{AWAY}. Move the slider again in a while.", "first", 0, ""],
        ["", "fresh", 0, ""],
    ]
