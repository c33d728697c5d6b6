"""`everstate serve`: the HTTP API."""

from __future__ import annotations

import threading
from typing import Annotated

import typer

from everstate.cli.console import AppOption, config_of, err, load_app
from everstate.cli.metrics import serving_figures
from everstate.cli.supervisor import stop_on_signals
from everstate.local import connect
from everstate.parts import Journal, states_folder
from everstate.telemetry import configure_logging


def register(cli: typer.Typer) -> None:
    """Add the verb."""
    cli.command("serve")(serve)


def serve(
    context: typer.Context,
    host: Annotated[
        str | None, typer.Option("--host", help="Address to listen on; default: api.host.")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            "--port", min=0, max=65535, help="Port; 0 takes a free one; default: api.port."
        ),
    ] = None,
    app: AppOption = None,
) -> None:
    """Serve the entity types over REST, until stopped; OpenAPI is at /openapi.json."""
    # Imported here: the web framework takes a moment that no other verb should pay.
    from everstate.api import server

    configure_logging()
    config = config_of(context)
    given = {"host": host, "port": port}
    chosen = {name: value for name, value in given.items() if value is not None}
    config = config.model_copy(update={"api": config.api.model_copy(update=chosen)})
    server.check_reach(config)
    project_app = load_app(app, config)
    config = connect(config)
    stop = threading.Event()
    stop_on_signals(stop)
    with serving_figures(config, "serve"):
        journal = Journal("serve", states_folder(config.project.data_dir))

        def ready(url: str) -> None:
            journal.serves(url)
            err.print(f"serving {url}", highlight=False)

        with journal.beating():
            server.serve(config, project_app, stop, on_ready=ready)
    err.print("stopped")
