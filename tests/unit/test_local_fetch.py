"""Downloads: only what the lock says, in parallel, resumable, offline when cached."""

from __future__ import annotations

import hashlib
import io
import os
import threading
import traceback
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from rich.console import Console

from everstate.config import Config, load
from everstate.errors import InvalidConfig, LocalStackError
from everstate.local import SILENT, ConsoleProgress
from everstate.local import fetch as fetch_module
from everstate.local.artifacts import Artifact, cached, obtain
from everstate.local.fetch import fetch


class Repository:
    """An HTTP server on loopback with files, which can misbehave as told."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.asked: list[tuple[str, str | None]] = []
        self.ranges = True
        self.logins: list[str | None] = []
        self.moved_to: str | None = None
        """The address of another server to which each request is redirected."""
        self.cut_after: list[int] = []
        """For each of the next answers: close the connection after so many bytes."""
        self.refuse: list[int] = []
        """For each of the next requests: answer with this status."""
        repository = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                repository.answer(self)

            def log_message(self, *_arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        self.logins.append(request.headers.get("Authorization"))
        if self.moved_to is not None:
            request.send_response(302)
            request.send_header("Location", f"{self.moved_to}{request.path}")
            request.end_headers()
            return
        asked = request.headers.get("Range")
        self.asked.append((request.path, asked))
        if self.refuse:
            request.send_error(self.refuse.pop(0))
            return
        body = self.files.get(request.path.lstrip("/"))
        if body is None:
            request.send_error(404)
            return
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and self.ranges else 0
        request.send_response(206 if start else 200)
        request.send_header("Content-Length", str(len(body) - start))
        request.end_headers()
        cut = self.cut_after.pop(0) if self.cut_after else None
        request.wfile.write(body[start:] if cut is None else body[start : start + cut])

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def repository() -> Iterator[Repository]:
    repository = Repository()
    yield repository
    repository.close()


@pytest.fixture
def other_repository() -> Iterator[Repository]:
    repository = Repository()
    yield repository
    repository.close()


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tenacity.nap.time.sleep", lambda _seconds: None)


def wanted(repository: Repository, folder: Path, name: str) -> tuple[str, Path, str, int]:
    body = repository.files[name]
    return f"{repository.url}/{name}", folder / name, hashlib.sha256(body).hexdigest(), len(body)


def project(folder: Path, url: str) -> Config:
    return load(folder, local={"cache_dir": folder / "cache", "jars_url": url})


def test_files_are_fetched_and_verified(repository: Repository, tmp_path: Path) -> None:
    repository.files = {f"a/b/{n}.jar": bytes([n]) * 300_000 for n in range(20)}
    fetch([wanted(repository, tmp_path, name) for name in repository.files], SILENT)
    for name, body in repository.files.items():
        assert (tmp_path / name).read_bytes() == body
    assert not list(tmp_path.rglob("*.part"))


def test_another_sha256_is_an_error_and_the_file_is_removed(
    repository: Repository, tmp_path: Path
) -> None:
    repository.files = {"a.jar": b"what the lock says"}
    file = wanted(repository, tmp_path, "a.jar")
    repository.files = {"a.jar": b"what somebody else"}
    with pytest.raises(LocalStackError, match=r"a\.jar is not the file in the lock file"):
        fetch([file], SILENT)
    assert not list(tmp_path.iterdir())


def test_a_larger_file_than_locked_is_refused(repository: Repository, tmp_path: Path) -> None:
    repository.files = {"a.jar": b"12345"}
    file = wanted(repository, tmp_path, "a.jar")
    repository.files = {"a.jar": b"12345 and more"}
    with pytest.raises(LocalStackError, match="not the file in the lock file"):
        fetch([file], SILENT)


def test_a_partial_download_goes_on_where_it_stopped(
    repository: Repository, tmp_path: Path
) -> None:
    repository.files = {"a.jar": bytes(range(256)) * 1000}
    (tmp_path / "a.jar.part").write_bytes(repository.files["a.jar"][:100_000])
    fetch([wanted(repository, tmp_path, "a.jar")], SILENT)
    assert (tmp_path / "a.jar").read_bytes() == repository.files["a.jar"]
    assert repository.asked == [("/a.jar", "bytes=100000-")]


def test_a_connection_that_breaks_is_resumed(repository: Repository, tmp_path: Path) -> None:
    repository.files = {"a.jar": bytes(range(256)) * 1000}
    repository.cut_after = [70_000, 50_000]
    fetch([wanted(repository, tmp_path, "a.jar")], SILENT)
    assert (tmp_path / "a.jar").read_bytes() == repository.files["a.jar"]
    assert [asked for _path, asked in repository.asked] == [None, "bytes=70000-", "bytes=120000-"]


def test_a_server_without_ranges_is_read_from_the_start(
    repository: Repository, tmp_path: Path
) -> None:
    repository.ranges = False
    repository.files = {"a.jar": b"x" * 1000}
    (tmp_path / "a.jar.part").write_bytes(b"x" * 600)
    fetch([wanted(repository, tmp_path, "a.jar")], SILENT)
    assert (tmp_path / "a.jar").read_bytes() == b"x" * 1000


@pytest.mark.parametrize("left", [b"damaged", b"damaged and as long as the file itself", b"d" * 99])
def test_a_damaged_part_is_fetched_again(
    repository: Repository, tmp_path: Path, left: bytes
) -> None:
    repository.files = {"a.jar": b"the file that the lock knows, whole...."}
    (tmp_path / "a.jar.part").write_bytes(left)
    fetch([wanted(repository, tmp_path, "a.jar")], SILENT)
    assert (tmp_path / "a.jar").read_bytes() == repository.files["a.jar"]


def test_a_server_that_is_busy_is_asked_again(repository: Repository, tmp_path: Path) -> None:
    repository.files = {"a.jar": b"abc"}
    repository.refuse = [503, 502]
    fetch([wanted(repository, tmp_path, "a.jar")], SILENT)
    assert (tmp_path / "a.jar").read_bytes() == b"abc"


def test_a_file_that_is_not_there_is_a_clear_error_at_once(
    repository: Repository, tmp_path: Path
) -> None:
    with pytest.raises(LocalStackError, match=r"missing\.jar cannot be downloaded.*404"):
        fetch([(f"{repository.url}/missing.jar", tmp_path / "m", "00", 3)], SILENT)
    assert len(repository.asked) == 1


def test_a_login_in_the_address_is_sent_to_that_server_and_no_other(
    repository: Repository, other_repository: Repository, tmp_path: Path
) -> None:
    other_repository.files = {"g/a.jar": b"abc"}
    repository.moved_to = other_repository.url
    artifact = Artifact("g/a.jar", hashlib.sha256(b"abc").hexdigest(), 3)
    address = repository.url.replace("//", "//jars:s3%2Fcret@")
    assert obtain(project(tmp_path, address), [artifact])[0].read_bytes() == b"abc"
    assert repository.logins == ["Basic amFyczpzMy9jcmV0"]
    assert other_repository.logins == [None]


@pytest.mark.parametrize("body", [None, b"another file", b"abd"])
def test_no_error_shows_the_login_of_an_address(
    repository: Repository, tmp_path: Path, body: bytes | None
) -> None:
    repository.files = {} if body is None else {"g/a.jar": body}
    artifact = Artifact("g/a.jar", hashlib.sha256(b"abc").hexdigest(), 3)
    address = repository.url.replace("//", "//jars:s3cret@")
    with pytest.raises(LocalStackError, match=r"g/a\.jar") as caught:
        obtain(project(tmp_path, address), [artifact])
    told = "".join(traceback.format_exception(caught.value)) + str(caught.value.advice)
    assert f"{repository.url}/g/a.jar" in told
    assert "s3cret" not in told


@pytest.mark.parametrize("password", ["s3/cret", "s3?cret", "s3#cret", "s3[cret"])
def test_an_address_whose_login_cannot_be_told_apart_is_refused_and_not_shown(
    tmp_path: Path, password: str
) -> None:
    config = project(tmp_path, f"https://jars:{password}@host/maven")
    with pytest.raises(InvalidConfig, match=r"local\.jars_url") as caught:
        obtain(config, [Artifact("g/a.jar", "00", 3)])
    assert "cret" not in "".join(traceback.format_exception(caught.value))


def test_what_is_cached_needs_no_network(repository: Repository, tmp_path: Path) -> None:
    repository.files = {"g/a.jar": b"abc"}
    artifact = Artifact("g/a.jar", hashlib.sha256(b"abc").hexdigest(), 3)
    online = project(tmp_path, repository.url)
    assert obtain(online, [artifact]) == [cached(online, artifact)]
    offline = project(tmp_path, "http://127.0.0.1:1")
    assert obtain(offline, [artifact])[0].read_bytes() == b"abc"
    assert len(repository.asked) == 1


def test_without_network_and_cache_the_error_names_the_setting(tmp_path: Path) -> None:
    artifact = Artifact("g/a.jar", "00", 3)
    with pytest.raises(LocalStackError, match=r"g/a\.jar cannot be downloaded") as caught:
        obtain(project(tmp_path, "http://127.0.0.1:1"), [artifact])
    assert "local.jars_url" in str(caught.value.advice)


def test_a_truncated_file_of_the_cache_is_fetched_again(
    repository: Repository, tmp_path: Path
) -> None:
    repository.files = {"g/a.jar": b"abcdef"}
    artifact = Artifact("g/a.jar", hashlib.sha256(b"abcdef").hexdigest(), 6)
    config = project(tmp_path, repository.url)
    cached(config, artifact).parent.mkdir(parents=True)
    cached(config, artifact).write_bytes(b"abc")
    assert obtain(config, [artifact])[0].read_bytes() == b"abcdef"


def test_a_file_of_the_cache_that_is_another_one_of_the_same_size_is_fetched_again(
    repository: Repository, tmp_path: Path
) -> None:
    repository.files = {"g/a.jar": b"abcdef"}
    artifact = Artifact("g/a.jar", hashlib.sha256(b"abcdef").hexdigest(), 6)
    config = project(tmp_path, repository.url)
    (jar,) = obtain(config, [artifact])
    looked = jar.stat()
    jar.write_bytes(b"abcDEF")
    # Whoever puts another file in its place can set its time, too.
    os.utime(jar, ns=(looked.st_atime_ns, looked.st_mtime_ns))
    assert obtain(config, [artifact])[0].read_bytes() == b"abcdef"


def test_a_file_of_the_cache_is_read_once(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = Artifact("g/a.jar", hashlib.sha256(b"abcdef").hexdigest(), 6)
    config = project(tmp_path, repository.url)
    cached(config, artifact).parent.mkdir(parents=True)
    cached(config, artifact).write_bytes(b"abcdef")
    read: list[Path] = []

    def digest_of(path: Path) -> str:
        read.append(path)
        return fetch_module.digest_of(path)

    monkeypatch.setattr("everstate.local.artifacts.digest_of", digest_of)
    for _ in range(3):
        obtain(config, [artifact])
    assert read == [cached(config, artifact)]
    (tmp_path / "cache" / "jars" / "checked.json").write_text("[no list")
    obtain(config, [artifact])
    assert (len(read), repository.asked) == (2, [])


def test_several_who_fetch_the_same_file_do_not_disturb_each_other(
    repository: Repository, tmp_path: Path
) -> None:
    repository.files = {"a.jar": bytes(range(256)) * 2000}
    same = wanted(repository, tmp_path, "a.jar")
    fetch([same] * 8, SILENT)
    assert (tmp_path / "a.jar").read_bytes() == repository.files["a.jar"]
    assert len(repository.asked) == 1


def test_a_pipe_gets_plain_lines_with_bytes_and_rate(
    repository: Repository, tmp_path: Path
) -> None:
    repository.files = {"a.jar": b"x" * 2_000_000}
    text = io.StringIO()
    fetch(
        [wanted(repository, tmp_path, "a.jar")],
        ConsoleProgress(Console(file=text, force_terminal=False)),
    )
    assert "fetching 1 files, 2.0 MB" in text.getvalue()
    assert "2.0 of 2.0 MB" in text.getvalue()
    assert "\x1b" not in text.getvalue()


def test_a_terminal_gets_a_bar(repository: Repository, tmp_path: Path) -> None:
    repository.files = {"a.jar": b"x" * 2_000_000}
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=100)
    fetch([wanted(repository, tmp_path, "a.jar")], ConsoleProgress(console))
    assert "━" in text.getvalue()
    assert "MB" in text.getvalue()
