"""`everstate schema`: the forms of states and messages, for programs in any language."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from everstate.cli.console import AppSession, out
from everstate.cli.results import Verbs

schema = Verbs(
    help="Export the forms of states and messages for programs in any language.",
    no_args_is_help=True,
)


@schema.command("export")
def export(
    session: AppSession,
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="Folder of the files.")] = Path(
        "schemas"
    ),
) -> None:
    """Write JSON Schemas of each entity type and its messages, and an AsyncAPI file of the topics.

    The schemas are of draft 7; `asyncapi.json` is of AsyncAPI 3.0 and refers to them. Files with
    their names are written over. No server is needed.
    """
    # Imported here: it loads the client of Kafka.
    from everstate.cli.asyncapi import schema_files
    from everstate.log.topics import TopicNames

    config = session.config
    made = schema_files(session.app(views=False), TopicNames(config.log.prefix))
    folder.mkdir(parents=True, exist_ok=True)
    for name, form in made.items():
        text = json.dumps(form, indent=2, ensure_ascii=False)
        (folder / name).write_text(text + "\n", "utf-8")
    out.print(f"wrote {len(made)} files to {folder}", highlight=False)
