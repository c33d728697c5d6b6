"""A dead letter is shown as its bytes were."""

from __future__ import annotations

import base64
from datetime import UTC, datetime

import orjson
import pytest

from everstate.cli import dead
from everstate.cli.console import print_json
from everstate.cli.results import show_pieces
from everstate.log.dead_letters import DeadLetter

CONTENTS = [None, b"null", b'{"a":1,"a":2}', b"1.50", b'"abc"', b"abc", b"\xff\x00", b""]


def letter(value: bytes | None) -> DeadLetter:
    at = datetime(2026, 1, 1, tzinfo=UTC)
    return DeadLetter("guest", 0, 17, at, "a reason", "topic", 0, 1, b"k", value)


@pytest.mark.parametrize("content", [b"null", b'{"a":1,"a":2}', b"1.50", b'"abc"', b"abc"])
def test_text_is_shown_unchanged(capsys: pytest.CaptureFixture[str], content: bytes) -> None:
    show_pieces(*dead.letter_pieces(letter(content)))
    assert capsys.readouterr().out.splitlines()[-1] == content.decode()


def test_no_two_values_are_shown_alike(capsys: pytest.CaptureFixture[str]) -> None:
    shown = set()
    for content in CONTENTS:
        show_pieces(*dead.letter_pieces(letter(content)))
        shown.add(capsys.readouterr().out)
    assert len(shown) == len(CONTENTS)


@pytest.mark.parametrize("content", CONTENTS)
def test_json_has_each_byte(capsys: pytest.CaptureFixture[str], content: bytes | None) -> None:
    print_json(dead.letter_record(letter(content)))
    told = orjson.loads(capsys.readouterr().out)["value_base64"]
    assert (None if told is None else base64.b64decode(told)) == content
