"""`everstate list`: entities of one type, now or at any time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from everstate.changes.quoting import order_in
from everstate.cli.console import READING, AppSession, JsonOption, WaitOption
from everstate.cli.get import AtOption, moment_of
from everstate.cli.results import Aside, Result, ResultTable
from everstate.cli.standing import freshness, waiting
from everstate.errors import InvalidQuery
from everstate.serving import Reader
from everstate.serving.words import value_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from everstate.app import App

_FIELDS_SHOWN = 7


def list_(
    session: AppSession,
    entity: Annotated[str, typer.Argument(help="Entity type.")],
    at: AtOption = None,
    where: Annotated[
        list[str] | None,
        typer.Option(
            "--where",
            "-w",
            help="Condition field=value, also with != < <= > >=; repeatable. null: no value.",
        ),
    ] = None,
    order: Annotated[
        list[str] | None,
        typer.Option(
            "--order",
            "-o",
            help="Fields to sort by, with `;` between or repeated; -field for descending order.",
        ),
    ] = None,
    fields: Annotated[
        str | None, typer.Option("--fields", "-f", help="Fields to show: a,b,c or all.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Largest number of entities.")] = 50,
    wait_for: WaitOption = None,
    json: JsonOption = False,
) -> Result:
    """List entities that exist now, or existed at a time, and meet all conditions."""
    if json and fields is not None:
        raise InvalidQuery("--fields is for the table; --json has every field.")
    config, project = session.connected(needs=READING, views=False)
    names = names_of(project, entity, fields)
    with Reader(config, project) as reader:
        found = reader.list(
            entity,
            at=moment_of(at),
            where=where or (),
            order=order_in(*(order or ())),
            limit=limit + 1,
            wait_for=wait_for,
        )
        more = f"there are more than {limit}; see them with --limit"
        notes = [
            *([Aside(more)] if len(found) > limit else []),
            *waiting(config, project, entity),
            *freshness(reader, f"{entity}_{'latest' if at is None else 'history'}"),
        ]
    shown = found[:limit]
    rows = (
        (one.key, one.version, *(value_text(one.state.get(name)) for name in names))
        for one in shown
    )
    return Result(shown, ResultTable(header(names), rows), notes=notes)


def header(names: Sequence[str]) -> list[str]:
    """Columns with these fields: key and version first, `_key` beside a field called key."""
    return [*(f"_{own}" if own in names else own for own in ("key", "version")), *names]


def names_of(project: App, entity: str, fields: str | None) -> list[str]:
    """Fields to show: the requested ones, or the first ones; the key has a column already.

    Raises InvalidQuery for a field that the model does not have.
    """
    entity_type = project.entity_type(entity)
    given = entity_type.field_names
    if fields is not None and fields != "all":
        given = tuple(each.strip() for each in fields.split(","))
        for name in given:
            if name not in entity_type.field_names:
                raise InvalidQuery(
                    f"--fields: {entity} has no field {name!r}.",
                    advice=f"It has {', '.join(entity_type.field_names)}.",
                )
    names = [name for name in given if name != entity_type.key]
    return names if fields is not None else names[:_FIELDS_SHOWN]
