"""What a process manager has reacted to: the newest version of each entity, kept in the log.

A change may come to a process manager again long after the ids of its commands were forgotten:
`everstate drift repair` publishes changes again, and a log that lost its tail is filled again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec

from everstate.changes import Change, Kind
from everstate.config import Config
from everstate.log.consumer import Consumer
from everstate.log.positions import Offsets
from everstate.log.topics import Topics
from everstate.sources.commands.store import Batch, PartitionStore, open_store

_ROWS: Final = 2_000
_FORM: Final = "seen-1"
_NOTHING: Final = (0, ())

_Versions = tuple[int, tuple[tuple[int, int], ...]]
"""The newest version, and the spans of versions below it that never came."""

_encode = msgspec.json.Encoder().encode
_decode_versions = msgspec.json.Decoder(_Versions).decode
_decode_position = msgspec.json.Decoder(int).decode


class Seen:
    """The memory of one partition: a compacted topic, and a local copy in RocksDB.

    What :meth:`takes` and :meth:`move` change is in :attr:`changed` until :meth:`settle`. The
    caller writes it to the topic, in the transaction of the commands that follow.
    """

    def __init__(self, store: PartitionStore) -> None:
        self._store = store
        self.changed: dict[bytes, bytes] = {}
        """Keys and values of the records that the topic gets."""

    @classmethod
    def open(
        cls,
        config: Config,
        path: Path,
        topic: str,
        number: int,
        offsets: Offsets,
        alive: Callable[[], None],
    ) -> Seen:
        """Complete the local copy from the topic. Cost: the records since it was last opened."""
        end = offsets.settled_ends([topic], number, alive)[topic]
        with Topics(config) as topics:
            topic_id = topics.identity(topic).topic_id
        store = open_store(path, _FORM, [topic_id])
        try:
            start = max(store.meta.state_next, offsets.beginnings([topic])[topic, number])
            rows: dict[bytes, bytes] = {}
            with Consumer(config, client_id="everstate-process-seen") as consumer:
                for record in consumer.read(topic, number, start, end):
                    rows[record.key or b""] = record.value or b""
                    if len(rows) >= _ROWS:
                        store.write(Batch(states=rows), 0)
                        rows = {}
                        alive()
            store.write(Batch(states=rows), 0)
            store.save(replace(store.meta, topic_ids=[topic_id], state_next=end))
        except BaseException:
            store.close()
            raise
        return cls(store)

    def close(self) -> None:
        """Forget what was not settled, and give up the files."""
        self._store.close()

    def position(self, topic: str) -> int | None:
        """The next change of a changelog; ``None``: it was never read."""
        row = self._row(_position_name(topic))
        return None if row is None else _decode_position(row)

    def move(self, topic: str, position: int) -> None:
        """Note the next change of a changelog."""
        self.changed[_position_name(topic)] = _encode(position)

    def takes(self, change: Change[Any]) -> bool:
        """Whether a change came for the first time; notes that it did.

        A version that was passed over, because the log did not have it then, is taken when it
        comes. Events have no versions: each is taken.
        """
        if change.kind is Kind.EVENT:
            return True
        name = f"{change.entity}\0{change.key}".encode()
        row = self._row(name)
        newest, missing = _NOTHING if row is None else _decode_versions(row)
        taken = _with(newest, missing, change.version)
        if taken is not None:
            self.changed[name] = _encode(taken)
        return taken is not None

    def settle(self) -> None:
        """The transaction is committed: the local copy follows."""
        self._store.write(Batch(states=self.changed), 0)
        self.changed = {}

    def _row(self, name: bytes) -> bytes | None:
        return self.changed.get(name) or self._store.state(name)


def _position_name(topic: str) -> bytes:
    # No entity type has an empty name.
    return b"\0" + topic.encode()


def _with(newest: int, missing: tuple[tuple[int, int], ...], version: int) -> _Versions | None:
    """The versions with one more; ``None``: it was among them."""
    if version > newest:
        # Nothing is known of what was before the first change that was seen.
        passed = ((newest + 1, version - 1),) if 0 < newest < version - 1 else ()
        return version, (*missing, *passed)
    for at, (first, last) in enumerate(missing):
        if first <= version <= last:
            parts = [(first, version - 1), (version + 1, last)]
            left = tuple(part for part in parts if part[0] <= part[1])
            return newest, (*missing[:at], *left, *missing[at + 1 :])
    return None
