"""`everstate views search`: rows of a view by words in their texts."""

from __future__ import annotations

from typing import Annotated

import typer

from everstate.cli.console import READING, AppSession
from everstate.cli.results import Result, ResultTable
from everstate.serving import Reader


def search(
    session: AppSession,
    name: Annotated[str, typer.Argument(help="A view with search=(…), or in OpenSearch.")],
    words: Annotated[list[str], typer.Argument(help='Words to search; "a phrase", -excluded, or.')],
    where: Annotated[
        list[str] | None,
        typer.Option("-w", "--where", help="column=value, also with != < <= > >=."),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Largest number of rows.")] = 20,
) -> Result:
    """Search a view: rows whose texts have the words, best first."""
    config, project = session.connected(needs=READING)
    with Reader(config, project) as reader:
        found = reader.search(name, " ".join(words), where=where or (), limit=limit)
    rows = ((each.key, round(each.rank, 3), each.headline) for each in found)
    return Result(found, ResultTable(("key", "rank", "found"), rows))
