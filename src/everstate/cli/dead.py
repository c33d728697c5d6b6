"""`everstate dead`: records that were rejected, by reason, and each of them as it was."""

from __future__ import annotations

import base64
import re
from dataclasses import asdict
from typing import Annotated, Any, Final

import typer

from everstate.cli.console import JsonOption, config_of, err, out, print_json, table
from everstate.errors import InvalidQuery, NotFound
from everstate.local import resolve
from everstate.log.dead_letters import (
    DeadLetter,
    DeadReason,
    by_reason,
    read_dead_letter,
    read_dead_letters,
)
from everstate.serving.words import bytes_text, bytes_value

dead = typer.Typer(
    no_args_is_help=True, help="List records that were rejected, by reason; show one of them."
)

_SHOWN_MAX: Final = 20
_LETTER: Final = re.compile(r"(?P<entity>[^@]*)@(?P<partition>\d+):(?P<offset>\d+)")


@dead.command("list")
def list_(
    context: typer.Context,
    entity: Annotated[str | None, typer.Argument(help="Entity type; none: all.")] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit", min=1, help=f"Most reasons. Default: {_SHOWN_MAX}; with --json all."
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """List the reasons of dead letters, the most frequent first, and the newest letter of each."""
    config = resolve(config_of(context), needs=("kafka",))
    found = by_reason(read_dead_letters(config, entity))
    if json:
        print_json([asdict(each) | {"newest": _name(each)} for each in found[:limit]])
        return
    limit = limit or _SHOWN_MAX
    if not found:
        err.print("no record was rejected")
        return
    table(
        ("entity", "reason", "letters", "first", "last", "newest"),
        [
            (
                each.entity or "unknown",
                each.reason,
                each.letters,
                f"{each.first_at:%Y-%m-%d %H:%M:%SZ}",
                f"{each.last_at:%Y-%m-%d %H:%M:%SZ}",
                _name(each),
            )
            for each in found[:limit]
        ],
    )
    if len(found) > limit:
        err.print(f"{len(found) - limit:,} more reasons; `--limit {len(found)}` shows them all")


@dead.command("show")
def show(
    context: typer.Context,
    letter: Annotated[str, typer.Argument(help="A dead letter, as `list` names it: guest@0:17.")],
    json: JsonOption = False,
) -> None:
    """Show one dead letter: why it was rejected, where it came from, and its record.

    Key and value are shown as they were, and with --json also in base64, byte for byte.
    """
    named = _LETTER.fullmatch(letter)
    if named is None:
        raise InvalidQuery(
            f"{letter!r} is no name of a dead letter.",
            advice="Take it from the column `newest` of `everstate dead list`, such as guest@0:17.",
        )
    config = resolve(config_of(context), needs=("kafka",))
    place = int(named["partition"]), int(named["offset"])
    found = read_dead_letter(config, named["entity"] or None, *place)
    if found is None:
        raise NotFound(
            f"There is no dead letter {letter}.",
            advice="Its record may have expired. `everstate dead list` shows those that exist.",
        )
    if json:
        print_json(letter_record(found))
        return
    print_letter(found)


def letter_record(letter: DeadLetter) -> dict[str, Any]:
    """One dead letter for JSON: key and value as JSON, if they are, and their bytes in base64."""
    contents = {"key": letter.key, "value": letter.value}
    told = {name: bytes_value(content) for name, content in contents.items()}
    encoded = {
        f"{name}_base64": None if content is None else base64.b64encode(content).decode()
        for name, content in contents.items()
    }
    return asdict(letter) | told | encoded


def print_letter(letter: DeadLetter) -> None:
    """Print one dead letter."""
    rows = (
        ("entity", letter.entity or "unknown"),
        ("reason", letter.reason),
        ("written", f"{letter.at:%Y-%m-%d %H:%M:%S.%fZ}"),
        ("record", f"{letter.topic}[{letter.from_partition}] offset {letter.from_offset}"),
        ("key", bytes_text(letter.key)),
        ("value", "none" if letter.value is None else f"{len(letter.value):,} bytes"),
    )
    table(("dead letter", f"{letter.entity or ''}@{letter.partition}:{letter.offset}"), rows)
    if letter.value is not None:
        out.print(bytes_text(letter.value), highlight=False)


def _name(each: DeadReason) -> str:
    return f"{each.entity or ''}@{each.partition}:{each.offset}"
