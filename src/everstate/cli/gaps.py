"""`everstate gaps`: list keys whose changes wait for a missing version, and accept the gap."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from everstate.changes import Provenance
from everstate.cli.console import (
    READING,
    AppOption,
    JsonOption,
    config_of,
    load_app,
    out,
    print_json,
    print_result,
    project_of,
    user_name,
)
from everstate.errors import InvalidQuery, NoGap
from everstate.local import resolve
from everstate.telemetry import safe_text
from everstate.views.gaps import Gap

gaps = typer.Typer(
    no_args_is_help=True, help="List keys with missing versions, and accept such gaps."
)

_SHOWN_MAX = 5


@gaps.command("list")
def list_(
    context: typer.Context,
    entity: Annotated[str | None, typer.Argument(help="Entity type. Default: all.")] = None,
    app: AppOption = None,
    json: JsonOption = False,
) -> None:
    """List keys with held changes, the missing version, and since when they wait."""
    from everstate.pipeline.gaps import list_gaps

    config = config_of(context)
    if entity is not None:
        load_app(app, config).entity_type(entity)
    config = resolve(config, needs=READING)
    found = list_gaps(config, entity)
    rows = [
        (
            each.entity,
            each.key,
            each.expected_version,
            _versions(each.held_versions),
            f"{each.since:%Y-%m-%d %H:%M:%SZ}",
            ", ".join(each.views),
        )
        for each in found
    ]
    columns = ("entity", "key", "missing version", "held versions", "since", "views")
    print_result(json, found, columns, rows, none="no changes are held")


@gaps.command("accept")
def accept(
    context: typer.Context,
    entity: Annotated[str, typer.Argument(help="Entity type.")],
    key: Annotated[str, typer.Argument(help="Key of the entity.")],
    reason: Annotated[
        str | None, typer.Option("--reason", help="Reason; stored in the changes' provenance.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    app: AppOption = None,
    json: JsonOption = False,
) -> None:
    """Accept the gap of a key: changes are published in place of the missing versions.

    They have the states on both sides of the gap, and your name, in log, archive and history. It
    asks for confirmation; without a terminal it needs --yes.
    If the missing change arrives later, it is a conflict and is dead-lettered.
    """
    from everstate.pipeline.gaps import accept_gap, list_gaps

    config, project = project_of(context, app)
    entity_type = project.entity_type(entity)
    if not yes:
        found = list_gaps(config, entity, key)
        if not found:
            raise NoGap(entity, key)
        if not _is_terminal():
            raise InvalidQuery(
                "gaps accept asks for confirmation, and there is no terminal to ask on.",
                advice="Add --yes if the missing versions are to be replaced.",
            )
        typer.confirm(safe_text(_question(found[0])), abort=True, err=True)
    by = Provenance(
        api_version="cli", service_name="everstate", identifier=user_name(), reason=reason
    )
    accepted = accept_gap(config, entity_type, key, provenance=by)
    if json:
        print_json(accepted)
        return
    out.print(
        f"published {entity} {key} version {_versions(accepted.published)} for the missing; "
        f"version {_versions(accepted.gap.held_versions)} is released after it",
        highlight=False,
    )


def _is_terminal() -> bool:
    return sys.stdin.isatty()


def _question(gap: Gap) -> str:
    return (
        f"Versions {_versions(tuple(gap.missing))} of {gap.entity} {gap.key} are missing. Publish "
        "changes in their place, for every reader of the log? (If the source still has them, "
        "`everstate drift repair` is better.)"
    )


def _versions(versions: tuple[int, ...]) -> str:
    """Versions as text; if there are many, the first ones and the number of others."""
    shown = ", ".join(str(version) for version in versions[:_SHOWN_MAX])
    more = len(versions) - _SHOWN_MAX
    return shown if more <= 0 else f"{shown} and {more:,} more"
