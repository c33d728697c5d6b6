"""`everstate dev`: a project in one terminal, started again when its files change."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from everstate.cli.console import AppSession, err, print_json
from everstate.config import CONFIG_FILE
from everstate.errors import EverstateError, InvalidView
from everstate.local import ConsoleProgress, Stack, resolve
from everstate.runtime.reloading import NO_BYTECODE, ChildProcesses, run_reloading, watched
from everstate.runtime.supervisor import stop_on_signals


def dev(
    session: AppSession,
    port: Annotated[
        int | None,
        typer.Option(
            "--port", min=0, max=65535, help="Port of `serve`; 0: a free port. Default: api.port."
        ),
    ] = None,
    check: Annotated[bool, typer.Option("--check", hidden=True)] = False,
) -> None:
    """Do `up`, `run` and `serve` in one terminal, and restart them when the project changes.

    Watched are everstate.toml and those Python files in its folder that the app imports. An error
    in one of them is shown with its line, and nothing runs until it is corrected. Ctrl-C stops
    `run` and `serve`; the servers stay, and `everstate down` stops them.
    """
    config = session.config
    if check:
        # What the app prints at its import must not be between the JSON, which `dev` reads.
        with redirect_stdout(sys.stderr):
            files = checked_files(session)
        print_json([str(path) for path in files])
        return
    if not session.has_app:
        session.app()  # raises with the setting that is missing
    common = [sys.executable, "-m", "everstate.cli", "--project", str(config.folder)]
    own_app = [] if session.spec is None else ["--app", session.spec]
    own_port = [] if port is None else ["--port", str(port)]
    with_parent = ["--with-parent", str(os.getpid())]
    commands = ChildProcesses(
        {
            "run": [*common, "run", *with_parent, *own_app],
            "serve": [*common, "serve", *with_parent, *own_port, *own_app],
        }
    )
    checking = [*common, "dev", "--check", *own_app]

    def files_of_app() -> frozenset[Path] | None:
        done = subprocess.run(
            checking,
            stdout=subprocess.PIPE,
            env={**os.environ, **NO_BYTECODE},
            start_new_session=True,
        )
        return frozenset(map(Path, json.loads(done.stdout))) if done.returncode == 0 else None

    stack = Stack(config)
    if stack.names:
        stack.start(ConsoleProgress(err))
    tell = partial(err.print, style="bold", highlight=False)
    with watched(config.folder) as changes:
        run_reloading(commands, changes, stop_on_signals(), check=files_of_app, tell=tell)
    err.print("stopped; `everstate down` stops the servers", highlight=False)


def checked_files(session: AppSession) -> list[Path]:
    """Files on which the running app depends: those that it imports, and everstate.toml.

    Raises or prints the errors in them: of the import, the models, the views, changed models.
    """
    from everstate.cli.plan import planned, tell_refused
    from everstate.views.models import check_models

    config, project = session.config, session.app()
    tell_refused(project)
    if project.refused_views:
        raise typer.Exit(InvalidView.exit_code)
    try:
        changes, _ = planned(resolve(config), project)
    except EverstateError:
        pass  # a server does not answer; `everstate run` waits for it and reports it
    else:
        check_models(changes)
    loaded = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    found = {config.folder / CONFIG_FILE, *(Path(file) for file in loaded if file is not None)}
    folder = config.folder.resolve()
    return sorted(path for each in found if (path := each.resolve()).is_relative_to(folder))
