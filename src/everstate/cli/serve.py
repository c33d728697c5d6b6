"""`everstate serve`: the HTTP API and the web console."""

from __future__ import annotations

from typing import Annotated

import typer

from everstate.cli.console import AppSession, err
from everstate.local import resolve
from everstate.parts import Journal, states_folder
from everstate.runtime.figures import serving_figures
from everstate.runtime.supervisor import stop_on_signals
from everstate.telemetry import configure_logging


def serve(
    session: AppSession,
    host: Annotated[
        str | None, typer.Option("--host", help="Address to listen on. Default: api.host.")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            "--port", min=0, max=65535, help="Port to listen on; 0: a free port. Default: api.port."
        ),
    ] = None,
    with_parent: Annotated[int | None, typer.Option("--with-parent", hidden=True)] = None,
) -> None:
    """Serve REST (/openapi.json) and the web console (/) of the entity types, until stopped."""
    # Imported here: the web framework takes a moment that no other verb should pay.
    from everstate.api import server

    config = session.config
    configure_logging(config.logging, "serve")
    given = {"host": host, "port": port}
    chosen = {name: value for name, value in given.items() if value is not None}
    config = config.replaced("api", **chosen)
    server.check_reach(config)
    project_app = session.app()
    config = resolve(config)
    stop = stop_on_signals(with_parent)
    with serving_figures(config, "serve"):
        journal = Journal("serve", states_folder(config.project.data_dir))

        def ready(url: str) -> None:
            journal.serves(url)
            err.print(f"serving {url}", highlight=False)

        with journal.beating():
            server.serve(config, project_app, stop, on_ready=ready)
    err.print("stopped")
