"""The log that every peer reads, in two parts, and what each must make of it.

The first million are those of `bench.data`: 435,000 keys that are created, 56 % of the changes are
updates. The second part changes the same keys again and again, each once before any comes again, so
that a keyed store has none of them in its newest part. Everything follows from the index alone.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from bench import data

FIRST = 1_000_000
EXISTING = int(os.environ.get("EVERSTATE_BENCH_PEERS_EXISTING", "1000000"))
_ID_BASE = 0x0199C8A3_0000_7000_8000_000000000000
_RISE_CENTS = 10


@dataclass(frozen=True, slots=True)
class Change:
    """One change, as a message of everstate and as one of Debezium's form."""

    key: bytes
    value: bytes
    headers: list[tuple[str, bytes]]
    debezium: bytes


Answer = dict[str, tuple[int, int]]
"""Group (`country|status`) → purchases, and their sum in cents."""


@cache
def _keys(first: int) -> tuple[tuple[int, int], ...]:
    """Number and newest step of each purchase of the first part, in the order of creation."""
    newest: dict[int, int] = {}
    for index in range(first):
        at = data.place(index)
        newest[at.number] = at.step
    return tuple(newest.items())


def changes(first: int, existing: int) -> Iterator[Change]:
    """Both parts; some 80,000 a second."""
    for index in range(first):
        at = data.place(index)
        key, value, headers = data.message(index)
        name = key.decode()
        original = data.state_text(name, at.number, at.step - 1) if at.step else None
        current = data.state_text(name, at.number, at.step)
        yield Change(key, value, headers, _debezium(current, original, index))
    keys = _keys(first)
    for index in range(existing):
        round_, nth = divmod(index, len(keys))
        number, step = keys[nth]
        name = data.key_of(number)
        current = _later(number, step, round_ + 1)
        original = _later(number, step, round_)
        version = step + 2 + round_
        value, headers = data.written(
            _ID_BASE + index, name, version, first + index, current, original
        )
        yield Change(name.encode(), value, headers, _debezium(current, original, first + index))


def _later(number: int, step: int, rounds: int) -> str:
    """State of a purchase after so many rounds of the second part."""
    key, cents = data.key_of(number), data.cents_of(number, step) + _RISE_CENTS * rounds
    return data.state_text(key, number, (step + rounds) % len(data.STEPS), cents)


def _debezium(current: str, original: str | None, index: int) -> bytes:
    kind = "c" if original is None else "u"
    text = f'{{"before":{original or "null"},"after":{current},"op":"{kind}","ts_ms":{index}}}'
    return text.encode()


def answer(first: int, existing: int) -> Answer:
    """What a right view holds in the end, folded without a view."""
    counts: Counter[str] = Counter()
    sums: Counter[str] = Counter()
    keys = _keys(first)
    for nth, (number, step) in enumerate(keys):
        rounds = existing // len(keys) + (nth < existing % len(keys))
        status = data.STEPS[(step + rounds) % len(data.STEPS)]
        group = f"{data.COUNTRIES[number % len(data.COUNTRIES)]}|{status}"
        counts[group] += 1
        sums[group] += data.cents_of(number, step) + _RISE_CENTS * rounds
    return {group: (counts[group], sums[group]) for group in counts}


def write_answer(path: Path, first: int, existing: int) -> None:
    """The answer, for peers that do not import this."""
    path.write_text(json.dumps(answer(first, existing)), "utf-8")
