"""Detects a captured database that was replaced, or restored to an earlier copy.

The position record that cleaning commits also stores which server was read, the place in its log
that was reached, and a *mark*: a random text that the clean role writes into the capture's own
table every few seconds. An earlier copy of the database has an earlier mark, however far its log
gets. (The end of its log alone shows nothing once it has passed the place that was read.)

Records in the raw log say which database the rows behind them are from: `everstate cdc` and the
clean role write one with the server's identity, the epoch of its positions, and the mark.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple
from uuid import uuid4

import msgspec

from everstate.config import Config
from everstate.declarations.captures import Capture
from everstate.errors import SourceReplaced
from everstate.log.producer import Producer
from everstate.log.record import OutRecord
from everstate.sources.cdc.balance import note_of
from everstate.sources.cdc.database import CapturedDatabase
from everstate.sources.cdc.names import CaptureNames
from everstate.sources.cdc.reading import BinlogLook, SourceIdentity, encode_source
from everstate.sources.cdc.rows import KIND, SOURCE
from everstate.sources.cdc.stream import StreamStanding

EPOCH: Final = "everstate.epoch"
"""Setting of a connector that Debezium ignores: the epoch of the positions that it writes."""
_EARLIER: Final = "it is an earlier copy, without the mark that was written into its table"


class Mark(msgspec.Struct, frozen=True):
    """The text in the table of signals."""

    mark: str
    before: str | None = None
    """The mark before it, which may be the one that cleaning knows yet."""
    message: str = "By this row everstate notices that the database was restored"
    """The connector writes it into its log when the row is inserted."""
    looked_at: str | None = None
    """Up to where its log was looked at for what the connector does not see (decision 88)."""
    xa: dict[str, str] = {}
    """XA transaction that has not ended → its GTID if it has captured rows, else ""."""
    rolled_back: list[str] = []
    """GTIDs of those that the last look found rolled back."""
    looked: dict[str, int] = {}
    """Domain of GTIDs → number of the last transaction that was looked at."""
    unseen: dict[str, str] = {}
    """Table whose rows in the raw log are not those that were committed → the problem."""

    @property
    def look(self) -> BinlogLook | None:
        """What the look at a binlog means for rows that were held; ``None``: there was none."""
        prepared = [gtid for gtid in self.xa.values() if gtid]
        return BinlogLook(self.looked, prepared, self.rolled_back) if self.looked else None


def known_standing(config: Config, capture: Capture) -> StreamStanding:
    """The standing of a capture's raw log in its last position record; reads Kafka only."""
    note = note_of(config, capture)
    found = None if note is None else note.stream
    return found or StreamStanding(epoch=capture.epoch)


class CheckedSource(NamedTuple):
    """A database that is the one that was read before, or the first one."""

    identity: str
    known: StreamStanding
    """The standing of the capture's raw log that it was compared with."""


def check_source(
    config: Config,
    capture: Capture,
    database: CapturedDatabase,
    offset: Mapping[str, Any],
    *,
    epoch: int = 0,
    resumes: bool = True,
) -> CheckedSource:
    """Compare the database that a capture has now with what was read before.

    Raises SourceReplaced when it is another database. If the connector ``resumes`` at a position
    (``offset``: as Kafka Connect stores it), also when the database was restored to an earlier
    copy. ``epoch``: of the connector; until cleaning has come to it nothing can be compared. Of a
    capture of an earlier version no identity and no mark is known: it has them from now on.
    """
    identity = database.identity()

    def differs(known: StreamStanding) -> str | None:
        """Why the database is not the one that was read before; ``None``: it is."""
        if known.identity not in (None, identity):
            return f"it is {identity}, and was {known.identity}"
        if not resumes:
            return None
        if reason := database.went_back(known.place, offset):
            return reason
        is_it = is_marked(known.mark, mark_of(database.read_mark()))
        return None if is_it else f"{_EARLIER} {database.own.signals}"

    # A newer mark may be written while one is compared: a database that differs still does so when
    # it is compared again.
    for _ in range(2):
        known = known_standing(config, capture)
        reason = None if epoch > known.epoch else differs(known)
        if reason is None:
            return CheckedSource(identity, known)
    raise SourceReplaced(capture.name, str(reason))


def is_marked(known: str | None, found: Mark | None) -> bool:
    """Whether a database has the mark that was written into it, or the one after that."""
    return known is None or (found is not None and known in (found.mark, found.before))


def mark_of(text: str | None) -> Mark | None:
    """The mark in a text of the table of signals; ``None``: it has none."""
    try:
        return None if text is None else msgspec.json.decode(text, type=Mark)
    except msgspec.MsgspecError:
        return None


def new_mark(database: CapturedDatabase) -> Mark:
    """Write the first mark into a database that is read from its beginning; out: the mark."""
    mark = Mark(uuid4().hex, looked_at=database.log_end())
    database.write_mark(msgspec.json.encode(mark).decode(), None)
    return mark


def renew_mark(
    database: CapturedDatabase, known: str | None, look: Callable[[Mark], Mark] = lambda mark: mark
) -> Mark | None:
    """Write the next mark; out: the newest, for the raw log; ``None``: another process wrote one.

    ``look``: adds to a mark what the connector does not see. While cleaning does not know the last
    one yet, that one stays: the text has two marks, and one of them must be the mark that cleaning
    knows.
    """
    text = database.read_mark()
    found = mark_of(text)
    if found is None:
        return new_mark(database)
    if known != found.mark:
        return found
    mark = look(msgspec.structs.replace(found, mark=uuid4().hex, before=found.mark))
    return mark if database.write_mark(msgspec.json.encode(mark).decode(), text) else None


def write_source(config: Config, names: CaptureNames, source: SourceIdentity) -> None:
    """Write a record into the raw log that names the database that is read from here on."""
    record = OutRecord(names.raw_log, None, encode_source(source), [(KIND, SOURCE)])
    with Producer(config, client_id="everstate-cdc") as producer:
        producer.send(record)
        producer.flush()
