"""Fetches files over HTTP: in parallel, resumable, and verified against the lock."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import os
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import IO
from urllib.parse import unquote, urlsplit, urlunsplit

from everstate.errors import LocalStackError
from everstate.local.progress import Advance, StackProgress

_THREADS = 8
_ATTEMPTS = 4
_TIMEOUT_S = 30.0
_CHUNK_BYTES = 1 << 18
_GONE_FOR_GOOD = frozenset({400, 401, 403, 404, 410})

WantedFile = tuple[str, Path, str, int]
"""URL (it may have a login), target, sha256 in hex, size in bytes."""


@dataclass(frozen=True, slots=True)
class _Source:
    """A URL as it is requested and shown, and the login that was in it."""

    url: str
    login: str | None

    @classmethod
    def of(cls, url: str) -> _Source:
        parts = urlsplit(url)
        user, at, host = parts.netloc.rpartition("@")
        shown = urlunsplit(parts._replace(netloc=host))
        return cls(shown, unquote(user) if at else None)

    def request(self) -> urllib.request.Request:
        """A request with the login, which a server to which it is redirected does not get."""
        request = urllib.request.Request(self.url, headers={"User-Agent": "everstate"})
        if self.login is not None:
            encoded = base64.b64encode(self.login.encode()).decode()
            request.add_unredirected_header("Authorization", f"Basic {encoded}")
        return request


def fetch(files: Sequence[WantedFile], progress: StackProgress) -> None:
    """Fetch ``files``; all exist and are verified when this returns.

    An interrupted download leaves a `.part` file from which the next call resumes. Certificates
    are those of urllib: the system's, or SSL_CERT_FILE. Raises LocalStackError naming the URL; a
    file with another sha256 is removed.
    """
    total = sum(size for _url, _target, _sha256, size in files)
    with (
        progress.fetching(len(files), total) as advance,
        ThreadPoolExecutor(_THREADS, thread_name_prefix="fetch") as pool,
    ):
        futures = [pool.submit(_fetch_one, *wanted, advance) for wanted in files]
        try:
            for future in futures:
                future.result()
        finally:
            for future in futures:
                future.cancel()


def _fetch_one(url: str, target: Path, sha256: str, size: int, advance: Advance) -> None:
    source = _Source.of(url)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    with open(part, "ab") as file:
        # Another process may be fetching the same file into the same cache.
        fcntl.flock(file, fcntl.LOCK_EX)
        if target.exists() and target.stat().st_size == size and digest_of(target) == sha256:
            advance(size)
            return
        resumed = file.seek(0, os.SEEK_END) > 0
        whole = _download(source, file, size, advance, sha256)
        if not whole and resumed:
            # The part that an earlier run left may be damaged: start again from the first byte.
            advance(-file.tell())
            file.truncate(0)
            whole = _download(source, file, size, advance, sha256)
        if not whole:
            part.unlink(missing_ok=True)
            raise LocalStackError(
                f"{source.url} is not the file in the lock file: its SHA-256 or size differs. It "
                "was deleted.",
                advice="Check local.jars_url and any proxy on the way, then run the command again.",
            )
        os.replace(part, target)


def _download(source: _Source, file: IO[bytes], size: int, advance: Advance, sha256: str) -> bool:
    """Complete ``file`` from ``source``; True when its size and hash are right."""
    have = file.seek(0, os.SEEK_END)
    if have > size:
        file.truncate(0)
        have = 0
    advance(have)
    # Imported here: verbs that only look for running servers fetch nothing.
    import tenacity

    repeated = tenacity.Retrying(
        retry=tenacity.retry_if_exception(_may_pass),
        stop=tenacity.stop_after_attempt(_ATTEMPTS),
        wait=tenacity.wait_exponential(),
        reraise=True,
    )
    try:
        repeated(_append, source, file, size, advance)
    except (OSError, HTTPException) as cause:
        raise LocalStackError(
            f"{source.url} cannot be downloaded: {cause}.",
            advice="Check the network, or set local.jars_url to a Maven repository that you can "
            "reach. Files that were downloaded are kept.",
        ) from cause
    file.flush()
    return file.tell() == size and digest_of(Path(file.name)) == sha256


def _may_pass(error: BaseException) -> bool:
    if isinstance(error, urllib.error.HTTPError):
        error.close()
        return error.code not in _GONE_FOR_GOOD
    return isinstance(error, (OSError, HTTPException))


def _append(source: _Source, file: IO[bytes], size: int, advance: Advance) -> None:
    """Append the missing bytes; starts over when the server does not support ranges."""
    have = file.seek(0, os.SEEK_END)
    if have >= size:
        return
    request = source.request()
    if have:
        request.add_header("Range", f"bytes={have}-")
    response: HTTPResponse
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
        if have and response.status != 206:
            file.truncate(0)
            advance(-have)
        length = response.headers.get("Content-Length")
        came = 0
        while chunk := response.read(_CHUNK_BYTES):
            file.write(chunk)
            came += len(chunk)
            advance(len(chunk))
        if length is not None and came < int(length):
            raise HTTPException(
                f"the connection was closed after {came:,} of {int(length):,} bytes"
            )


def digest_of(path: Path) -> str:
    """Sha256 of a file, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
