"""`everstate commands`: send a command, and manage parked ones."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import typer

from everstate.changes import Provenance
from everstate.cli.console import (
    AppOption,
    JsonOption,
    err,
    out,
    print_json,
    print_result,
    project_of,
    user_name,
)
from everstate.errors import InvalidCommand

if TYPE_CHECKING:
    from everstate.sources.commands import Answer, Parked

commands = typer.Typer(
    no_args_is_help=True, help="Send commands; list, replay and discard parked ones."
)

EntityArgument = Annotated[str, typer.Argument(help="Entity type.")]
IdsArgument = Annotated[
    list[str] | None, typer.Argument(help="Ids that `commands parked` lists, or use --all.")
]
AllOption = Annotated[bool, typer.Option("--all", help="All parked commands of the entity type.")]


@commands.command("send")
def send(
    context: typer.Context,
    entity: EntityArgument,
    key: Annotated[str, typer.Argument(help="Key of the entity.")],
    name: Annotated[str, typer.Argument(help="Name of the command.")],
    data: Annotated[str, typer.Argument(help="The command's data as JSON.")] = "{}",
    expected_version: Annotated[
        int | None, typer.Option("--expected-version", min=0, help="Reject at another version.")
    ] = None,
    command_id: Annotated[
        str | None, typer.Option("--id", help="Id of the command; each id is decided once.")
    ] = None,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds to wait.")] = 10.0,
    app: AppOption = None,
    json: JsonOption = False,
) -> None:
    """Send a command and show its answer; exit code 5 when it is rejected."""
    from everstate.declarations.commands import group_of
    from everstate.sources.commands.client import CommandClient

    config, project = project_of(context, app)
    group = group_of(project.command_groups, entity)
    if name not in group.by_name:
        raise InvalidCommand(
            f"{entity} takes no command {name!r} (it takes {', '.join(group.by_name)})."
        )
    command = group.read(name, data)
    with CommandClient(config, project) as client:
        answer = client.send(
            entity,
            key,
            command,
            provenance=_provenance(),
            expected_version=expected_version,
            command_id=_uuid(command_id),
            timeout_s=timeout_s,
        )
    if json:
        print_json(answer_record(answer))
    answer.or_raise()
    if not json:
        facts = ", ".join(each.type for each in answer.changes) or "no change"
        out.print(f"accepted: {facts}; {entity} {key} is at version {answer.version}")


@commands.command("parked")
def parked(
    context: typer.Context, entity: EntityArgument, app: AppOption = None, json: JsonOption = False
) -> None:
    """List commands that could not be decided, the oldest first, and why."""
    from everstate.sources.commands import read_parked

    config, project = project_of(context, app)
    project.entity_type(entity)
    found = read_parked(config, entity)
    rows = [
        (each.parked_id, each.key, each.command, each.reason, _moment(each.parked_at_ms))
        for each in found
    ]
    records = list(map(parked_record, found))
    columns = ("id", "key", "command", "reason", "since")
    print_result(json, records, columns, rows, none="no commands are parked")


@commands.command("replay")
def replay(
    context: typer.Context,
    entity: EntityArgument,
    ids: IdsArgument = None,
    all_: AllOption = False,
    app: AppOption = None,
) -> None:
    """Send parked commands again; each is decided with the current state of its entity."""
    _send_again(context, entity, ids, all_, app, give_up=False)


@commands.command("discard")
def discard(
    context: typer.Context,
    entity: EntityArgument,
    ids: IdsArgument = None,
    all_: AllOption = False,
    app: AppOption = None,
) -> None:
    """Discard parked commands; their senders get a rejection."""
    _send_again(context, entity, ids, all_, app, give_up=True)


def _send_again(
    context: typer.Context,
    entity: str,
    ids: list[str] | None,
    all_: bool,
    app: str | None,
    *,
    give_up: bool,
) -> None:
    from everstate.sources.commands import replay as send_again

    if bool(ids) == all_:
        raise typer.BadParameter("give either ids or --all")
    config, project = project_of(context, app)
    project.entity_type(entity)
    sent = send_again(config, entity, None if all_ else ids, give_up=give_up)
    err.print(f"{len(sent)} commands {'discarded' if give_up else 'sent again'}")


def answer_record(answer: Answer) -> dict[str, Any]:
    """An answer for JSON."""
    return {
        "outcome": answer.outcome,
        "command_id": answer.command_id,
        "entity": answer.entity,
        "key": answer.key,
        "version": answer.version,
        "changes": [
            {"id": each.id, "version": each.version, "kind": each.kind, "type": each.type}
            | ({"data": each.data} if each.data is not None else {})
            for each in answer.changes
        ],
        "reason": answer.reason,
        "code": answer.code,
        "data": dict(answer.data),
        "expected_version": answer.expected_version,
    }


def parked_record(each: Parked) -> dict[str, Any]:
    """A parked command for JSON."""
    return {
        "id": each.parked_id,
        "key": each.key,
        "command": each.command,
        "reason": each.reason,
        "place": each.place,
        "parked_at": datetime.fromtimestamp(each.parked_at_ms / 1000, UTC),
        "data": each.data,
    }


def _provenance() -> Provenance:
    return Provenance(api_version="cli", service_name="everstate", identifier=user_name())


def _uuid(text: str | None) -> UUID | None:
    try:
        return None if text is None else UUID(text)
    except ValueError as cause:
        raise InvalidCommand(f"--id is {text!r}; expected a UUID.") from cause


def _moment(moment_ms: int) -> str:
    return datetime.fromtimestamp(moment_ms / 1000, UTC).isoformat(" ", "seconds")
