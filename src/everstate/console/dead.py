"""Dead letters on pages: by reason, and each of them with its bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from heapq import nlargest
from typing import Final

from everstate.config import Config
from everstate.console.servers import check_log_answers
from everstate.errors import NotFound
from everstate.http.answers import whole_number
from everstate.log.dead_letters import (
    DeadLetter,
    DeadReason,
    by_reason,
    read_dead_letter,
    read_dead_letters,
)

LETTERS_MAX: Final = 50
REASONS_MAX: Final = 100
BYTES_MAX: Final = 8_192
"""Bytes of a record that a page shows in hexadecimal."""
_WIDTH: Final = 16


@dataclass(frozen=True, slots=True)
class Content:
    """A key or a value of a record, as it was."""

    text: str | None
    """``None``: it is no text."""
    size: int | None
    """Bytes; ``None``: there is none."""
    hexadecimal: str
    is_cut: bool


def reasons(config: Config) -> list[DeadReason]:
    """The reasons of all dead letters, the most frequent first.

    Raises Unavailable. Cost: a pass over the dead-letter topics.
    """
    check_log_answers(config)
    return by_reason(read_dead_letters(config))


def letters(config: Config, given: Mapping[str, str]) -> tuple[str | None, str, list[DeadLetter]]:
    """The newest letters of an `entity` type that have a `reason`, newest first.

    Raises Unavailable. Cost: a pass over the dead-letter topic.
    """
    check_log_answers(config)
    entity, reason = given.get("entity") or None, given.get("reason", "")
    found = (
        each
        for each in read_dead_letters(config, entity)
        if each.entity == entity and each.reason == reason
    )
    return entity, reason, nlargest(LETTERS_MAX, found, key=lambda each: each.at)


def letter(config: Config, given: Mapping[str, str]) -> DeadLetter:
    """One letter by its place; raises NotFound, InvalidQuery and Unavailable."""
    check_log_answers(config)
    place = (whole_number(given, name, "a number") for name in ("partition", "offset"))
    found = read_dead_letter(config, given.get("entity") or None, *place)
    if found is None:
        raise NotFound("there is no such dead letter.", advice="Its record may have expired.")
    return found


def content_of(content: bytes | None) -> Content:
    """Bytes as text, if they are text, and in hexadecimal."""
    if content is None:
        return Content("none", None, "", False)
    shown = content[:BYTES_MAX]
    lines = []
    for at in range(0, len(shown), _WIDTH):
        part = shown[at : at + _WIDTH]
        letters = "".join(chr(byte) if 32 <= byte < 127 else "·" for byte in part)
        lines.append(f"{at:06x}  {part.hex(' '):<{3 * _WIDTH - 1}}  {letters}")
    try:
        text = content.decode()
    except UnicodeDecodeError:
        text = None
    return Content(text, len(content), "\n".join(lines), len(content) > BYTES_MAX)
