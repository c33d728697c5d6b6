"""An object store as a server of the stack: versitygw, which is built with Go once."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from everstate.config import Config
from everstate.errors import LocalStackError
from everstate.local.artifacts import cache_dir
from everstate.local.progress import StackProgress
from everstate.local.server import Launch, Ports, Server
from everstate.private import private_folder
from everstate.sections import LOCAL_S3_KEY

_PROBE_S: Final = 2.0
_MODULE: Final = "github.com/versity/versitygw@v1.8.0"
_SUM: Final = "h1:au+wI+aybno/STsQiSm35Uu6Q6iK5MWReQxgO6SEMFc="
"""Sum of the module, whose own `go.sum` has those of all that it needs."""
_ADVICE: Final = (
    "Install Go 1.25 or newer (https://go.dev/dl), with which everstate builds the server once, in "
    "about two minutes; or put a program versitygw on the PATH; or give archive.s3.endpoint."
)


class S3Server(Server):
    """A server on 127.0.0.1, whose buckets are folders. Go is needed at its first start alone."""

    name = "s3"
    program = "versitygw"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._data = self._folder / "data"
        self.marker = str(self._data)

    def obtain(self, progress: StackProgress) -> None:
        """Build the server with Go where there is none; raises LocalStackError."""
        if self._found() is None:
            progress.step("s3: building versitygw with Go, once; this takes about two minutes")
            _build(cached_program(self._config))

    def prepare(self, ports: Ports) -> Launch:
        """Create the bucket of `archive.path`."""
        program = self._found()
        if program is None:
            raise LocalStackError("there is no program versitygw.", advice="Run `everstate up`.")
        private_folder(self._folder)
        private_folder(self._data)
        parts = urlsplit(self._config.archive_path)
        if parts.scheme == "s3":
            private_folder(self._data / parts.netloc)
        address = f"127.0.0.1:{ports['client']}"
        keys = {"ROOT_ACCESS_KEY": LOCAL_S3_KEY, "ROOT_SECRET_KEY": LOCAL_S3_KEY}
        # With kept connections it reads the request after an upload from the wrong byte on.
        options = ("--port", address, "--health", "/health", "--quiet")
        argv = (str(program), *options, "posix", self.marker)
        return Launch(argv, {**os.environ, **keys}, self._folder)

    def _found(self) -> Path | None:
        """The program of the PATH, else the one in the cache."""
        program = Path(shutil.which(self.program) or cached_program(self._config))
        return program if program.exists() else None

    def probe(self, ports: Ports) -> None:
        """Ask for its health; raises OSError while it does not answer."""
        server = http.client.HTTPConnection("127.0.0.1", ports["client"], timeout=_PROBE_S)
        with closing(server):
            server.request("GET", "/health")
            if server.getresponse().status != http.client.OK:
                raise ConnectionError("the object store does not answer yet")

    def reached(self, config: Config, ports: Ports) -> Config:
        """The settings with its address."""
        endpoint = f"http://127.0.0.1:{ports['client']}"
        s3 = config.archive.s3.model_copy(update={"endpoint": endpoint, "path_style": True})
        return config.replaced("archive", s3=s3)


def cached_program(config: Config) -> Path:
    """Where the program is, or would be, in the cache."""
    return cache_dir(config) / "versitygw" / _MODULE.rpartition("@")[2] / S3Server.program


def _build(program: Path) -> None:
    program.parent.mkdir(parents=True, exist_ok=True)
    told = _go(["mod", "download", "-json", _MODULE], cwd=program.parent, GOFLAGS="")
    module = json.loads(told)
    if module["Sum"] != _SUM:
        raise LocalStackError(f"the source of {_MODULE} has another sum: {module['Sum']}.")
    part = program.with_name(f"{program.name}.{os.getpid()}")
    flags = {"GOFLAGS": "-mod=readonly -trimpath -buildvcs=false", "CGO_ENABLED": "0"}
    _go(["build", "-o", str(part), "./cmd/versitygw"], cwd=Path(module["Dir"]), **flags)
    part.replace(program)


def _go(arguments: list[str], *, cwd: Path, **env: Any) -> str:
    """What Go prints; raises LocalStackError when it is not there, or fails."""
    try:
        ran = subprocess.run(
            ["go", *arguments],
            cwd=cwd,
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            check=True,
        )
    except FileNotFoundError:
        raise LocalStackError(
            "there is no program versitygw, and no Go to build it with.", advice=_ADVICE
        ) from None
    except subprocess.CalledProcessError as cause:
        reason = (cause.stderr or cause.stdout).strip()[-500:]
        raise LocalStackError(f"Go cannot build {_MODULE}: {reason}", advice=_ADVICE) from None
    return ran.stdout
