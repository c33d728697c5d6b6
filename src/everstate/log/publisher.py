"""Numbered batches, published exactly once from a table to the log (C2, C3)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from everstate.closing import Closing
from everstate.config import Config
from everstate.errors import (
    DeliveryFailed,
    Fenced,
    LogError,
    LogTruncated,
    RecordRefused,
    Unavailable,
)
from everstate.errors.log import BEGIN_NEW_LOG
from everstate.log.consumer import Consumer
from everstate.log.positions import Offsets
from everstate.log.producer import Producer
from everstate.log.record import OutRecord
from everstate.log.tails import Tail, check_tails, decode_tails, encode_tails, tails_with
from everstate.log.topics import TopicNames

_BATCH_HEADER: Final = "batch"
_TAILS_HEADER: Final = "tails"
_WINDOW_RECORDS: Final = 2_000
_ENDS_AGAIN_S: Final = 1.0
"""How long batches are counted from the same ends of their topics, which cost a round trip."""
_PAUSE_S: Final = 0.1
_ABORT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class PublishedProgress:
    """The newest batch whose records are in the log; ``note`` is the caller's, byte-exact."""

    batch: int
    note: bytes
    tails: bytes = field(default=b"", compare=False)
    """Of its watched topics (:mod:`everstate.log.tails`); empty: it watches none."""


def check_progress(
    who: str,
    progress: PublishedProgress | None,
    batch: int,
    begun: int,
    *,
    advice: str = BEGIN_NEW_LOG,
) -> None:
    """Raise LogTruncated when the log lacks batches that the store has marked as published (C8).

    ``batch`` is the newest batch that the store has marked, and ``begun`` the newest one that it
    had marked when it was bound to this log: an earlier log has the batches up to that one.
    """
    found = 0 if progress is None else progress.batch
    if max(found, begun) < batch:
        raise LogTruncated(
            f"{who}: the log has the batches up to {found:,}, and the store has marked those up to "
            f"{batch:,} as published: the log has lost its newest records. Nothing was published.",
            advice=advice,
        )


class OncePublisher(Closing):
    """Publishes numbered batches: each is in the log whole and once, or not at all.

    The records of a batch and a progress record are sent in one Kafka transaction under one fixed
    transactional id, so that the log itself records the progress of this publisher. After a kill,
    or when the outcome of a commit is unknown, that progress is read before anything is sent again.

    The caller manages batches in its own table: it assigns rows and a number to a batch *before*
    publishing, and flags the rows as published afterwards. Only one process of a name works at a
    time; a second one fences the first.
    """

    def __init__(self, config: Config, name: str, *, watched: Iterable[str] = ()) -> None:
        """``watched``: topics whose ends are recorded with each batch, for :meth:`check_tails`."""
        self._config = config
        self._name = name
        self._watched = frozenset(watched)
        self._offsets: Offsets | None = None
        self._tails: dict[str, Tail] = {}
        self._recent: dict[str, Tail] = {}
        """Those with ends that are not older than :data:`_ENDS_AGAIN_S`."""
        self._recent_until = 0.0
        self._begun = 0
        self._id = f"{config.log.prefix}.{name}"
        self._topic = TopicNames(config.log.prefix).progress
        self._producer: Producer | None = None
        self._progress: PublishedProgress | None = None
        self._fenced: Fenced | None = None

    def close(self) -> None:
        """Close the connection."""
        if self._producer is not None:
            self._producer.discard()
            self._producer = None
        if self._offsets is not None:
            self._offsets.close()
            self._offsets = None

    def open(self, timeout_s: float = 60.0) -> PublishedProgress | None:
        """Fence an older instance and return the progress in the log; ``None``: none published yet.

        Takes about 0.6 s. Raises Unavailable when the broker does not answer in time, or while
        another publisher's open transaction hides the end of the progress topic.
        """
        if self._fenced is not None:
            raise self._fenced
        self.close()
        deadline = time.monotonic() + timeout_s
        producer = Producer(self._config, transactional_id=self._id, client_id=self._id)
        try:
            # Fence first, then read: a commit in flight is completed before progress is read.
            producer.init(timeout_s)
            self._progress = self._read_progress(deadline)
        except BaseException:
            producer.discard()
            raise
        self._producer = producer
        if self._watched:
            self._offsets, self._recent = Offsets(self._config), {}
            known = self._progress
            is_known = known is not None and known.batch > self._begun
            self._tails = decode_tails(known.tails or b"{}") if known and is_known else {}
        return self._progress

    def check_tails(self, who: str, begun: int, *, advice: str = BEGIN_NEW_LOG) -> None:
        """Raise LogTruncated when a watched topic lacks records of batches after ``begun`` (C8).

        ``begun`` is the newest batch that the log need not have. Call it after :meth:`open`.
        """
        self._begun = begun
        if self._progress is None or self._progress.batch <= begun:
            self._tails = {}
        known = {name: tail for name, tail in self._tails.items() if name in self._watched}
        check_tails(self._config, who, known, advice=advice)

    def publish(
        self,
        batch: int,
        records: Iterable[OutRecord],
        note: bytes = b"",
        *,
        timeout_s: float = 120.0,
        meanwhile: Callable[[], object] | None = None,
    ) -> bool:
        """Publish a batch whole; ``False``: the log had it already and nothing was sent.

        ``meanwhile`` is run once, after all records were sent and before the commit waits for
        them, so that other work can overlap. If it raises, no record of the batch is visible.

        ``batch`` grows with each call; the newest one may be repeated with the same ``note``,
        which should therefore be unique for each batch (first and last row id, say). Waits while a
        broker is unreachable. Raises RecordRefused (with the key; no record of the batch is
        visible), Fenced, and Unavailable after the time-out: call again with the same batch.
        """
        deadline = time.monotonic() + timeout_s
        if self._producer is None:
            self.open(timeout_s)
        if self._is_published(batch, note):
            return False
        held = records if isinstance(records, Sequence) else list(records)
        known = self._progress
        try:
            while not self._attempt(batch, held, note, deadline, meanwhile):
                meanwhile = None
                time.sleep(_PAUSE_S)
                self.open(max(1.0, deadline - time.monotonic()))
                if self._is_published(batch, note):
                    return True
                if self._progress != known:
                    raise self._overtaken(batch)
        except Fenced as error:
            self._fenced = error
            self.close()
            raise
        self._progress = PublishedProgress(batch, note)
        return True

    def _attempt(
        self,
        batch: int,
        records: Sequence[OutRecord],
        note: bytes,
        deadline: float,
        meanwhile: Callable[[], object] | None,
    ) -> bool:
        """One transaction; ``False``: failed or unknown: read the progress, then try again."""
        producer = self._producer
        assert producer is not None
        header = [(_BATCH_HEADER, str(batch).encode())]
        tails: dict[str, Tail] = {}
        try:
            if self._offsets is not None:
                if time.monotonic() >= self._recent_until:
                    self._recent, self._recent_until = {}, time.monotonic() + _ENDS_AGAIN_S
                tails = tails_with(self._offsets, records, self._watched, self._recent)
                header.append((_TAILS_HEADER, encode_tails({**self._tails, **tails})))
            producer.begin()
            producer.send_many(records)
            producer.send_raw(self._topic, self._name.encode(), note, header)
            if meanwhile is not None:
                meanwhile()
            producer.commit(max(1.0, deadline - time.monotonic()))
        except (DeliveryFailed, Unavailable) as error:
            is_aborted = isinstance(error, DeliveryFailed) and self._withdraw(producer)
            if isinstance(error, RecordRefused) and is_aborted:
                # The outcome is certain, so the producer can be used again.
                raise
            self.close()
            if isinstance(error, RecordRefused):
                raise
            if time.monotonic() + _PAUSE_S > deadline:
                raise Unavailable(
                    f"publisher {self._name}: {error.message} Before batch {batch} is sent again, "
                    "the log is read to find out whether it was committed."
                ) from error
            return False
        except BaseException:
            self._withdraw(producer)
            self.close()
            raise
        self._tails |= tails
        self._recent |= tails
        return True

    def _withdraw(self, producer: Producer) -> bool:
        """Abort the open transaction, so that no reader waits for the broker's time-out."""
        with suppress(Unavailable, DeliveryFailed, LogError):
            producer.abort(_ABORT_S)
            return True
        return False

    def _is_published(self, batch: int, note: bytes) -> bool:
        newest = self._progress
        if newest is None or newest.batch < batch:
            return False
        if newest == PublishedProgress(batch, note):
            return True
        raise self._overtaken(batch)

    def _overtaken(self, batch: int) -> Fenced:
        newest = self._progress.batch if self._progress else None
        return Fenced(
            f"publisher {self._name}: batch {batch} was to be published, and the log already has "
            f"batch {newest}, which another process wrote.",
            advice="Stop the other process. If there is none, the table was restored from a "
            "backup.",
        )

    def _read_progress(self, deadline: float) -> PublishedProgress | None:
        with Offsets(self._config) as offsets:
            # Another publisher's open transaction may hide a committed record of this one.
            offsets.settle(self._topic, deadline - time.monotonic())
        return read_progress(self._config, self._name)


def read_progress(config: Config, name: str) -> PublishedProgress | None:
    """Committed progress of the publisher of this name; ``None``: it never published.

    Searches its newest record backwards from the end. Raises LogError when the log has no progress
    topic yet, and Unavailable.
    """
    topic, window = TopicNames(config.log.prefix).progress, _WINDOW_RECORDS
    with Offsets(config) as offsets:
        start = offsets.beginnings([topic])[topic, 0]
        end = offsets.stable_ends([topic])[topic, 0]
    with Consumer(config, client_id=f"{config.log.prefix}.{name}") as consumer:
        while start < end:
            low = max(start, end - window)
            found = None
            for record in consumer.read(topic, 0, low, end):
                if record.key == name.encode():
                    headers = dict(record.headers)
                    batch, tails = headers[_BATCH_HEADER], headers.get(_TAILS_HEADER)
                    assert batch is not None
                    found = PublishedProgress(int(batch), record.value or b"", tails or b"")
            if found is not None:
                return found
            end, window = low, window * 2
    return None
