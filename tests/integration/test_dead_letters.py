"""Dead letters on the command line: counted by reason, and each of them shown as it was."""

from __future__ import annotations

from datetime import UTC, datetime

import orjson
import pytest

from everstate.config import Config
from everstate.log.dead_letters import DeadLetter, by_reason, place_headers
from everstate.log.producer import Producer
from everstate.log.record import OutRecord
from everstate.log.topics import TopicNames
from kit.verbs import Run, verbs

pytestmark = pytest.mark.settings(topics=["guest", "room"], database=False)


@pytest.fixture
def everstate(config: Config, topic_prefix: str, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the command line against a log with five dead letters."""
    names = TopicNames(topic_prefix)
    with Producer(config) as producer:
        for number in range(3):
            where = place_headers(b"name: Field required", f"{topic_prefix}.raw.shop", 0, number)
            value = b'{"guest_id": "g1"}' if number else b"\xff\xfe"
            producer.send(OutRecord(names.dead("guest"), b"g1", value, where, partition=0))
        where = place_headers(b"conflict: version 2 is known", names.changes("guest"), 1, 9)
        producer.send(OutRecord(names.dead("guest"), b"g2", None, where, partition=0))
        where = place_headers(b"no JSON", f"{topic_prefix}.raw.shop", 0, 7)
        producer.send(OutRecord(names.dead_unknown, None, b"no", where, partition=0))
        producer.flush()
    return verbs(config, monkeypatch, "dead")


def test_dead_letters_are_counted_by_reason_and_shown_as_they_were(everstate: Run) -> None:
    code, out, _ = everstate("list", "--json")
    assert code == 0
    found = orjson.loads(out)
    assert [(each["entity"], each["letters"], each["newest"]) for each in found] == [
        ("guest", 3, "guest@0:2"),
        (None, 1, "@0:0"),
        ("guest", 1, "guest@0:3"),
    ]
    assert [each["reason"] for each in orjson.loads(everstate("list", "room", "--json")[1])] == []
    code, out, err = everstate("list", "guest", "--limit", "1")
    assert (code, "name: Field required" in out, "conflict" in out) == (0, True, False)
    assert "1 more reasons" in err
    assert "no record was rejected" in everstate("list", "room")[2]

    code, out, _ = everstate("show", "guest@0:2")
    assert code == 0
    assert "raw.shop[0] offset 2" in out
    assert '"guest_id": "g1"' in out
    shown = orjson.loads(everstate("show", "guest@0:0", "--json")[1])
    assert shown["value"] == {"base64": "//4="}
    assert (shown["key"], shown["from_offset"]) == ("g1", 0)
    assert orjson.loads(everstate("show", "@0:0", "--json")[1])["value"] == "no"


def test_a_dead_letter_that_is_not_there_is_named_with_advice(everstate: Run) -> None:
    assert everstate("show", "guest@0:9")[0] == 4
    assert everstate("show", "nothing@0:0")[0] == 4
    code, _, err = everstate("show", "guest")
    assert code == 2
    assert "everstate dead list" in err


def test_the_newest_letter_stands_for_its_reason_in_any_order() -> None:
    def letter(offset: int, hour: int) -> DeadLetter:
        at = datetime(2026, 1, 1, hour, tzinfo=UTC)
        return DeadLetter("guest", 0, offset, at, "why", "t", 0, 0, None, None)

    for letters in ([letter(1, 5), letter(2, 7)], [letter(2, 7), letter(1, 5)]):
        (found,) = by_reason(letters)
        assert (found.letters, found.offset) == (2, 2)
        assert (found.first_at.hour, found.last_at.hour) == (5, 7)
