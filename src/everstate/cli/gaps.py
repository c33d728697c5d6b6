"""`everstate gaps`: list keys whose changes wait for a missing version, and accept the gap."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from everstate.changes import Provenance
from everstate.cli.console import READING, AppSession, user_name
from everstate.cli.results import Result, ResultTable, Verbs
from everstate.errors import InvalidQuery, NoGap
from everstate.local import resolve
from everstate.telemetry import safe_text

gaps = Verbs(no_args_is_help=True, help="List keys with missing versions, and accept such gaps.")

_SHOWN_MAX = 5


@gaps.command("list")
def list_(
    session: AppSession,
    entity: Annotated[str | None, typer.Argument(help="Entity type. Default: all.")] = None,
) -> Result:
    """List keys with held changes, the missing version, and since when they wait."""
    from everstate.pipeline.gaps import list_gaps

    config = session.config
    if entity is not None:
        session.app().entity_type(entity)
    config = resolve(config, needs=READING)
    found = list_gaps(config, entity)
    rows = (
        (
            *(each.entity, each.key, each.expected_version, _versions(each.held_versions)),
            f"{each.since:%Y-%m-%d %H:%M:%SZ}",
            ", ".join(each.views),
        )
        for each in found
    )
    columns = ("entity", "key", "missing version", "held versions", "since", "views")
    return Result(found, ResultTable(columns, rows, none="no changes are held"))


@gaps.command("accept")
def accept(
    session: AppSession,
    entity: Annotated[str, typer.Argument(help="Entity type.")],
    key: Annotated[str, typer.Argument(help="Key of the entity.")],
    reason: Annotated[
        str | None, typer.Option("--reason", help="Reason; stored in the changes' provenance.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
) -> Result:
    """Accept the gap of a key: changes are published in place of the missing versions.

    They have the states on both sides of the gap, and your name, in log, archive and history. It
    asks for confirmation; without a terminal it needs --yes.
    If the missing change arrives later, it is a conflict and is dead-lettered.
    """
    from everstate.pipeline.gaps import accept_gap, list_gaps

    config, project = session.connected()
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
        question = (
            f"Versions {_versions(tuple(found[0].missing))} of {entity} {key} are missing. Publish "
            "changes in their place, for every reader of the log? (If the source still has them, "
            "`everstate drift repair` is better.)"
        )
        typer.confirm(safe_text(question), abort=True, err=True)
    by = Provenance(
        api_version="cli", service_name="everstate", identifier=user_name(), reason=reason
    )
    accepted = accept_gap(config, entity_type, key, provenance=by)
    return Result(
        accepted,
        f"published {entity} {key} version {_versions(accepted.published)} for the missing; "
        f"version {_versions(accepted.gap.held_versions)} is released after it",
    )


def _is_terminal() -> bool:
    return sys.stdin.isatty()


def _versions(versions: tuple[int, ...]) -> str:
    """Versions as text; if there are many, the first ones and the number of others."""
    shown = ", ".join(str(version) for version in versions[:_SHOWN_MAX])
    more = len(versions) - _SHOWN_MAX
    return shown if more <= 0 else f"{shown} and {more:,} more"
