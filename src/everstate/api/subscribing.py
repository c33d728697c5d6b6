"""What a subscriber asks for, and the events that it gets: no web framework here.

An event is a change, a present row, or a notice. Its id is a token: a subscriber that comes back
with it continues after that event, without a gap and without a double.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from tempfile import SpooledTemporaryFile
from typing import IO, Any, Final, Literal, get_args

import orjson

from everstate.api.events import (
    EventBatches,
    InThread,
    SharedReaders,
    StreamEvent,
    Subscriber,
    before_beat,
)
from everstate.app import App
from everstate.changes import EntityType, Kind
from everstate.changes.json_numbers import decode
from everstate.changes.quoting import unquoted
from everstate.changes.row_json import row_json
from everstate.changes.tokens import LogPosition, Partition, Spot, Token, parse_token
from everstate.changes.triggers import Trigger, when
from everstate.config import Config
from everstate.errors import InvalidQuery, InvalidTrigger, NotFound
from everstate.http.masks import Mask
from everstate.serving import Reader
from everstate.serving.changes import BEGINNING, NOW, Changes, Delivery
from everstate.serving.hub import ChangeHub, Subscription, key_of
from everstate.serving.snapshots import read_live

WhenSlow = Literal["disconnect", "drop"]
"""What happens to a subscriber that takes changes more slowly than they come."""

_PROVENANCE: Final = ("service", "identifier", "actor")
_CHUNK: Final = 200
_CHUNK_BYTES: Final = 2**21
"""A chunk of the past ends after so many bytes of changes, though it has fewer than `_CHUNK`."""
_BATCH_BYTES: Final = 65_536
_GATHER_S: Final = 0.02
"""What comes within this time is sent in one piece: to send costs more than what is sent."""
_PRESENT_BYTES: Final = 2**22
"""Present rows of a subscriber that are held in memory, in bytes; more of them are in a file."""
_WAITING_MAX: Final = 10_000
"""Changes that wait to be taken, of at most 32 MiB; they are the hub's, and no copies."""
_CATCHING_UP_MAX: Final = 8
"""Subscribers for which the past is read at once."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What a subscriber asks for."""

    entity_type: EntityType
    key: str | None
    kinds: frozenset[str]
    """Empty: all."""
    provenance: Mapping[str, str]
    trigger: Trigger | None
    since: str
    """A token, ``beginning`` or ``now``."""
    is_current_wanted: bool
    """Whether the present rows come first."""
    when_slow: WhenSlow
    mask: Mask
    """What the subscriber does not see."""

    @classmethod
    def of(
        cls,
        entity_type: EntityType,
        given: Mapping[str, str],
        last_id: str | None,
        mask: Mask,
    ) -> Wish:
        """Read the parameters of a request.

        Raises InvalidQuery, naming the parameter, and NotPermitted for a condition on a field that
        the subscriber does not see.
        """
        kinds = frozenset(filter(None, given.get("kind", "").split(",")))
        for kind in sorted(kinds.difference(Kind)):
            raise InvalidQuery(f"kind is {kind!r}; expected some of {', '.join(Kind)}.")
        slow = given.get("when_slow", "disconnect")
        if slow not in get_args(WhenSlow):
            raise InvalidQuery(f"when_slow is {slow!r}; expected disconnect or drop.")
        current = given.get("current", "false")
        if current not in ("true", "false"):
            raise InvalidQuery(f"current is {current!r}; expected true or false.")
        if current == "true" and "since" in given:
            raise InvalidQuery("give one of current and since: present rows, or changes since.")
        return cls(
            entity_type,
            given.get("key"),
            kinds,
            {name: given[name] for name in _PROVENANCE if name in given},
            _trigger(entity_type, given, mask),
            last_id or given.get("since", NOW),
            current == "true" and not last_id,
            "drop" if slow == "drop" else "disconnect",
            mask,
        )

    def wants(self, delivery: Delivery) -> bool:
        """Whether a change meets all conditions."""
        if self.key is not None and key_of(delivery) != self.key:
            return False
        if not (self.kinds or self.provenance or self.trigger):
            return True
        change = delivery.change
        if self.kinds and change.kind.value not in self.kinds:
            return False
        who = change.provenance
        told = {"service": who.service_name, "identifier": who.identifier, "actor": who.actor}
        if any(told[name] != value for name, value in self.provenance.items()):
            return False
        trigger = self.trigger
        return trigger is None or trigger.fires(self.entity_type, change.original, change.current)


@dataclass(frozen=True, slots=True)
class _Present:
    """Present rows, and the changes that they contain already."""

    rows: IO[bytes]
    """A row of JSON in each line; on the disk when there are many, for a slow reader as well."""
    spots: Mapping[Partition, Spot]
    """They contain the changes up to here."""
    version: int = 0
    """Of one key: they contain its changes up to this version."""


class Subscriptions(SharedReaders[ChangeHub]):
    """The subscriptions to all entity types, and their hubs. Used by one event loop."""

    def __init__(self, config: Config, app: App) -> None:
        super().__init__(partial(ChangeHub, config, app))
        self.config, self.app = config, app
        self.turns = asyncio.Semaphore(_CATCHING_UP_MAX)
        """For subscribers that read the past."""

    async def open(self, wish: Wish, work: InThread[Any]) -> EventBatches:
        """Begin a subscription; out: its events, which end when it is closed or fails.

        ``work`` runs a blocking call in a thread. Raises InvalidToken, DataLoss, Unavailable.
        """
        return await ChangeSubscriber(self, wish, work).opened()


class ChangeSubscriber(Subscriber[Subscriptions, Wish]):
    """A subscription to the changes of an entity type."""

    _hub: ChangeHub
    _subscription: Subscription
    _past: Changes | None = None
    """The changes before the subscription that the subscriber has not had."""

    async def begin(self, since: LogPosition | None = None) -> None:
        """Subscribe behind a position, or from now on and read the changes before."""
        wish, name = self.wish, self.wish.entity_type.name
        since = since or _position(wish)
        self._hub = hub = await self.home.joined(name, self.wake, self.work)
        try:
            subscribe = partial(hub.subscribe, self.wake, key=wish.key, wants=wish.wants)
            self._subscription = await self.work(
                partial(subscribe, since=since, limit=_WAITING_MAX)
            )
            if wish.since != NOW and not self._subscription.goes_on:
                make = partial(Changes, self.home.config, self.home.app, name)
                begin = wish.since if since is None else str(Token({name: since}))
                until = hub.token_of(self._subscription.spots)
                self._past = await self.work(partial(make, since=begin, until=until))
        except BaseException:
            hub.leave(self.wake)
            raise

    def leave(self) -> None:
        """End the subscription, and the reading of its past."""
        self._hub.leave(self.wake)
        if self._past is not None:
            self._past.close()
            self._past = None

    async def events(self) -> EventBatches:
        """The present rows or the past, as it is wanted, and then changes as they come."""
        spots: Mapping[Partition, Spot] = self._subscription.spots
        version = 0
        if self.wish.is_current_wanted:
            present = await self.work(partial(self._present, spots))
            spots, version = present.spots, present.version
            with present.rows as lines:
                rows = (StreamEvent("current", line.decode().rstrip("\n")) for line in lines)
                for batch in _batches(rows):
                    yield batch
        while self._past is not None:
            async for batch in self.past(self._past):
                yield batch
            if not self._subscription.is_overrun:
                break
            # More changes came meanwhile than may wait. It begins again where the past ended.
            self.leave()
            await self.begin(self._hub.position_of(spots))
            spots = self._subscription.spots
        yield [StreamEvent("live", "{}", self._hub.token_of(spots))]
        async for batch in self.live(spots, version):
            yield batch

    async def past(self, past: Changes) -> EventBatches:
        """The changes before the subscription began.

        A subscriber takes its turn for each chunk: one that takes its batches slowly holds up none.
        """
        turns, token = self.home.turns, past.token
        with closing(iter(past)) as deliveries:  # type: ignore[type-var]
            while True:
                while not await before_beat(turns.acquire()):
                    yield [StreamEvent("", token=token)]
                try:
                    chunk = await self.work(partial(_chunk, deliveries, self.wish))
                finally:
                    turns.release()
                if not chunk:
                    return
                token = chunk[-1].token or token
                for batch in _batches(chunk):
                    yield batch

    async def live(self, begin: Mapping[Partition, Spot], version: int) -> EventBatches:
        """The changes behind ``begin`` as they come; of one key, those after ``version``."""
        hub, subscription, spots = self._hub, self._subscription, dict(begin)

        def events(taken: Iterable[Delivery]) -> Iterator[StreamEvent]:
            for delivery in taken:
                if delivery.spot <= spots[delivery.partition]:
                    continue
                # What came before it in the other partitions was taken before it, or is not wanted.
                _advance(spots, delivery.spots)
                if version and delivery.change.version <= version:
                    continue
                yield _change(self.wish, delivery, hub.token_of(spots))

        while True:
            self.awake.clear()
            taken, dropped = subscription.take()
            if dropped:
                if self.wish.when_slow == "disconnect":
                    yield [StreamEvent("slow", _SLOW)]
                    return
                yield [StreamEvent("dropped", orjson.dumps({"changes": dropped}).decode())]
            for batch in _batches(events(taken)):
                yield batch
            if (failure := subscription.failure or hub.failure) is not None:
                raise failure.with_traceback(None)
            if taken:
                continue
            if await self.is_awake():
                await asyncio.sleep(_GATHER_S)
            else:
                _advance(spots, hub.reached(subscription))
                yield [StreamEvent("", token=hub.token_of(spots))]

    def _present(self, spots: Mapping[Partition, Spot]) -> _Present:
        """The present rows: read after the subscription began, so that no change is missing."""
        wish, config, app = self.wish, self.home.config, self.home.app
        entity, lines = wish.entity_type.name, SpooledTemporaryFile(_PRESENT_BYTES)

        def add(key: str, version: int, state: Any) -> None:
            row = {"key": key, "version": version, "state": wish.mask.state(state)}
            lines.write(row_json(row) + b"\n")

        if wish.key is not None:
            with Reader(config, app) as reader:
                try:
                    found = reader.get(entity, wish.key)
                except NotFound:
                    return _Present(lines, spots)
            add(found.key, found.version, found.state)
            lines.seek(0)
            return _Present(lines, spots, found.version)

        def take(rows: Iterator[tuple[str, int, Any]]) -> None:
            lines.seek(0)
            lines.truncate()
            for row in rows:
                add(*row)

        position = read_live(config, app, entity, take)
        lines.seek(0)
        return _Present(lines, position.spots)


def _advance(spots: dict[Partition, Spot], reached: Mapping[Partition, Spot]) -> None:
    for partition, spot in reached.items():
        spots[partition] = max(spots[partition], spot)


def _batches(events: Iterable[StreamEvent]) -> Iterator[Sequence[StreamEvent]]:
    """The same events in lists of at least 64 KiB, except the last one."""
    batch: list[StreamEvent] = []
    size = 0
    for event in events:
        batch.append(event)
        size += len(event.data)
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


_SLOW: Final = orjson.dumps(
    {"detail": "Changes came faster than they were taken. Connect again with the last event's id."}
).decode()


def _chunk(deliveries: Iterator[Delivery], wish: Wish) -> list[StreamEvent]:
    """The next events of the past; empty at its end. A chunk without wanted changes has one."""
    events, last, held = list[StreamEvent](), None, 0
    for last in islice(deliveries, _CHUNK):
        held += len(last.record.value or b"")
        if wish.wants(last):
            events.append(_change(wish, last, last.token))
        if held >= _CHUNK_BYTES:
            break
    return [StreamEvent("", token=last.token)] if last is not None and not events else events


def _change(wish: Wish, delivery: Delivery, token: str) -> StreamEvent:
    shown = wish.mask.change(delivery.record.value or b"")
    return StreamEvent("change", shown.decode(), token)


def _position(wish: Wish) -> LogPosition | None:
    """The position after which a subscription goes on; ``None``: it begins now or at the start."""
    if wish.since in (NOW, BEGINNING):
        return None
    return parse_token(wish.since).positions.get(wish.entity_type.name)


def _trigger(entity_type: EntityType, given: Mapping[str, str], mask: Mask) -> Trigger | None:
    """The condition on fields: `changed` names one, `becomes` one and its value after a change."""
    triggers = []
    for name in ("changed", "becomes"):
        if name in given:
            mask.refuse(given[name].partition(":")[0].split("."), "a condition on")
    if "changed" in given:
        triggers.append(_checked(entity_type, "changed", when(given["changed"]).changes()))
    if "becomes" in given:
        field, colon, text = given["becomes"].partition(":")
        if not colon:
            raise InvalidQuery(f"becomes is {given['becomes']!r}; expected field:value.")
        triggers.append(_becomes(entity_type, field, text))
    if len(triggers) == 2:
        return triggers[0] & triggers[1]
    return triggers[0] if triggers else None


def _becomes(entity_type: EntityType, field: str, text: str) -> Trigger:
    """A trigger for the text as a value; where the field cannot have that, for its value as JSON.

    As in all filters, `null` is no value, and `"null"` in double quotes is the text.
    """
    try:
        return _checked(entity_type, "becomes", when(field).changes(to=unquoted(text)))
    except InvalidQuery:
        try:
            value = decode(text)
        except ValueError:
            raise InvalidQuery(f"becomes: {field} cannot be {text!r}.") from None
        return _checked(entity_type, "becomes", when(field).changes(to=value))


def _checked(entity_type: EntityType, name: str, trigger: Trigger) -> Trigger:
    try:
        trigger.check(entity_type)
    except InvalidTrigger as error:
        raise InvalidQuery(f"{name}: {error.message}") from error
    return trigger
