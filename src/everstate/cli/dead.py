"""`everstate dead`: records that were rejected, by reason, and each of them as it was."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, Any, Final

import typer

from everstate.cli.console import Session
from everstate.cli.results import Aside, Piece, Result, ResultTable, Verbs
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

dead = Verbs(
    no_args_is_help=True, help="List records that were rejected, by reason; show one of them."
)

_SHOWN_MAX: Final = 20
_LETTER: Final = re.compile(r"(?P<entity>[^@]*)@(?P<partition>\d+):(?P<offset>\d+)")


@dead.command("list")
def list_(
    session: Session,
    entity: Annotated[str | None, typer.Argument(help="Entity type; none: all.")] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit", min=1, help=f"Most reasons. Default: {_SHOWN_MAX}; with --json all."
        ),
    ] = None,
) -> Result:
    """List the reasons of dead letters, the most frequent first, and the newest letter of each."""
    config = resolve(session.config, needs=("kafka",))
    found = by_reason(read_dead_letters(config, entity))
    value = [asdict(each) | {"newest": _name(each)} for each in found[:limit]]
    limit = limit or _SHOWN_MAX
    rows = (
        (
            *(each.entity or "unknown", each.reason, each.letters),
            f"{each.first_at:%Y-%m-%d %H:%M:%SZ}",
            f"{each.last_at:%Y-%m-%d %H:%M:%SZ}",
            _name(each),
        )
        for each in found[:limit]
    )
    columns = ("entity", "reason", "letters", "first", "last", "newest")
    told = [ResultTable(columns, rows, none="no record was rejected")]
    if len(found) > limit:
        more = f"{len(found) - limit:,} more reasons; `--limit {len(found)}` shows them all"
        return Result(value, *told, Aside(more))
    return Result(value, *told)


@dead.command("show")
def show(
    session: Session,
    letter: Annotated[str, typer.Argument(help="A dead letter, as `list` names it: guest@0:17.")],
) -> Result:
    """Show one dead letter: why it was rejected, where it came from, and its record.

    Key and value are shown as they were, and with --json also in base64, byte for byte.
    """
    named = _LETTER.fullmatch(letter)
    if named is None:
        raise InvalidQuery(
            f"{letter!r} is no name of a dead letter.",
            advice="Take it from the column `newest` of `everstate dead list`, such as guest@0:17.",
        )
    config = resolve(session.config, needs=("kafka",))
    place = int(named["partition"]), int(named["offset"])
    found = read_dead_letter(config, named["entity"] or None, *place)
    if found is None:
        raise NotFound(
            f"There is no dead letter {letter}.",
            advice="Its record may have expired. `everstate dead list` shows those that exist.",
        )
    return Result(letter_record(found), *letter_pieces(found))


def letter_record(letter: DeadLetter) -> dict[str, Any]:
    """One dead letter for JSON: key and value as JSON, if they are, and their bytes in base64."""
    contents = {"key": letter.key, "value": letter.value}
    told = {name: bytes_value(content) for name, content in contents.items()}
    encoded = {
        f"{name}_base64": None if content is None else base64.b64encode(content).decode()
        for name, content in contents.items()
    }
    return asdict(letter) | told | encoded


def letter_pieces(letter: DeadLetter) -> Iterator[Piece]:
    """One dead letter for people."""
    rows = (
        ("entity", letter.entity or "unknown"),
        ("reason", letter.reason),
        ("written", f"{letter.at:%Y-%m-%d %H:%M:%S.%fZ}"),
        ("record", f"{letter.topic}[{letter.from_partition}] offset {letter.from_offset}"),
        ("key", bytes_text(letter.key)),
        ("value", "none" if letter.value is None else f"{len(letter.value):,} bytes"),
    )
    yield ResultTable(
        ("dead letter", f"{letter.entity or ''}@{letter.partition}:{letter.offset}"), rows
    )
    if letter.value is not None:
        yield bytes_text(letter.value)


def _name(each: DeadReason) -> str:
    return f"{each.entity or ''}@{each.partition}:{each.offset}"
