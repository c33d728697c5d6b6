"""The command line on a project of a test."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from typer.testing import CliRunner

from everstate.cli import cli
from everstate.config import Config

Run = Callable[..., tuple[int, str, str]]
"""Takes words, and gives the exit code and what was written to stdout and stderr."""


def verbs(
    config: Config, monkeypatch: pytest.MonkeyPatch, *before: str, app: str = "", code: str = ""
) -> Run:
    """Runs verbs in the test's folder, on its servers; ``before`` are their first words.

    ``app``: the project's app; its module is made of ``code``, where there is any.
    """
    settings = {
        "STORE_DSN": config.store_dsn,
        "LOG_BOOTSTRAP_SERVERS": config.bootstrap_servers,
        "LOG_PREFIX": config.log.prefix,
        "ARCHIVE_PATH": config.archive_path,
        "PROJECT_APP": app,
    }
    for name, value in settings.items():
        if value:
            monkeypatch.setenv(f"EVERSTATE_{name}", value)
    if code:
        (config.folder / f"{app.partition(':')[0]}.py").write_text(code, "utf-8")
        monkeypatch.syspath_prepend(config.folder)

    def run(*words: str, answer: str | None = None) -> tuple[int, str, str]:
        given = ["-C", str(config.folder), *before, *words]
        done = CliRunner().invoke(cli, given, input=answer)
        return done.exit_code, done.stdout, done.stderr

    return run
