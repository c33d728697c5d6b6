"""`everstate commands`: send a command, and manage parked ones."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import typer

from everstate.changes import Provenance
from everstate.cli.console import AppSession, err, user_name
from everstate.cli.results import Result, ResultTable, Verbs
from everstate.errors import InvalidCommand

if TYPE_CHECKING:
    from everstate.sources.commands import Answer, Parked

commands = Verbs(no_args_is_help=True, help="Send commands; list, replay and discard parked ones.")

EntityArgument = Annotated[str, typer.Argument(help="Entity type.")]
IdsArgument = Annotated[
    list[str] | None, typer.Argument(help="Ids that `commands parked` lists, or use --all.")
]
AllOption = Annotated[bool, typer.Option("--all", help="All parked commands of the entity type.")]


@commands.command("send")
def send(
    session: AppSession,
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
) -> Result:
    """Send a command and show its answer; exit code 5 when it is rejected."""
    from everstate.declarations.commands import group_of
    from everstate.sources.commands.client import CommandClient

    config, project = session.connected()
    group = group_of(project.command_groups, entity)
    if name not in group.by_name:
        raise InvalidCommand(
            f"{entity} takes no command {name!r} (it takes {', '.join(group.by_name)})."
        )
    command = group.read(name, data)
    by = Provenance(api_version="cli", service_name="everstate", identifier=user_name())
    with CommandClient(config, project) as client:
        answer = client.send(
            entity,
            key,
            command,
            provenance=by,
            expected_version=expected_version,
            command_id=_uuid(command_id),
            timeout_s=timeout_s,
        )
    facts = ", ".join(each.type for each in answer.changes) or "no change"
    said = f"accepted: {facts}; {entity} {key} is at version {answer.version}"
    told = [said] if answer.accepted else []
    return Result(answer_record(answer), *told, then=answer.or_raise)


@commands.command("parked")
def parked(session: AppSession, entity: EntityArgument) -> Result:
    """List commands that could not be decided, the oldest first, and why."""
    from everstate.sources.commands import read_parked

    config, project = session.connected()
    project.entity_type(entity)
    found = read_parked(config, entity)
    rows = (
        (
            *(each.parked_id, each.key, each.command, each.reason),
            datetime.fromtimestamp(each.parked_at_ms / 1000, UTC).isoformat(" ", "seconds"),
        )
        for each in found
    )
    columns = ("id", "key", "command", "reason", "since")
    told = ResultTable(columns, rows, none="no commands are parked")
    return Result(list(map(parked_record, found)), told)


@commands.command("replay")
def replay(
    session: AppSession,
    entity: EntityArgument,
    ids: IdsArgument = None,
    all_: AllOption = False,
) -> None:
    """Send parked commands again; each is decided with the current state of its entity."""
    _send_again(session, entity, ids, all_, give_up=False)


@commands.command("discard")
def discard(
    session: AppSession,
    entity: EntityArgument,
    ids: IdsArgument = None,
    all_: AllOption = False,
) -> None:
    """Discard parked commands; their senders get a rejection."""
    _send_again(session, entity, ids, all_, give_up=True)


def _send_again(
    session: AppSession,
    entity: str,
    ids: list[str] | None,
    all_: bool,
    *,
    give_up: bool,
) -> None:
    from everstate.sources.commands import replay as send_again

    if bool(ids) == all_:
        raise typer.BadParameter("give either ids or --all")
    config, project = session.connected()
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


def _uuid(text: str | None) -> UUID | None:
    try:
        return None if text is None else UUID(text)
    except ValueError as cause:
        raise InvalidCommand(f"--id is {text!r}; expected a UUID.") from cause
