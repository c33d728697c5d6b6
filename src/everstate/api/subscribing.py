"""What a subscriber asks for, and the events that it gets: no web framework here.

An event is a change, a present row, or a notice. Its id is a token: a subscriber that comes back
with it continues after that event, without a gap and without a double.
"""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, closing
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from tempfile import SpooledTemporaryFile
from typing import IO, Any, Final, Literal, NamedTuple, TypeVar, get_args

import orjson

from everstate.app import App
from everstate.changes import EntityType, Kind
from everstate.changes.json_numbers import decode
from everstate.changes.quoting import unquoted
from everstate.changes.row_json import row_json
from everstate.changes.tokens import LogPosition, Partition, Spot, Token, parse_token
from everstate.changes.triggers import Trigger, when
from everstate.config import Config
from everstate.errors import (
    EverstateError,
    InvalidQuery,
    InvalidTrigger,
    NotFound,
    Unauthenticated,
    Unavailable,
)
from everstate.http.masks import Mask
from everstate.serving import Reader
from everstate.serving.changes import BEGINNING, NOW, Changes, Delivery
from everstate.serving.hub import ChangeHub, Subscription, key_of
from everstate.serving.snapshots import read_live

T = TypeVar("T")
InThread = Callable[[Callable[[], T]], Awaitable[T]]

WhenSlow = Literal["disconnect", "drop"]
"""What happens to a subscriber that takes changes more slowly than they come."""

_PROVENANCE: Final = ("service", "identifier", "actor")
_BEAT_S: Final = 15.0
"""A subscription without changes for so long gets its position, and proxies see that it lives."""
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
class StreamEvent:
    """One event of a subscription."""

    name: str
    """``change``, ``current``, ``live``, ``dropped``, ``error``; ``""``: only a new position."""
    data: str = ""
    """JSON."""
    token: str | None = None
    """Continue after this event with it; ``None``: after the event before."""
    failure: EverstateError | None = None
    """Of an `error`."""


EventBatches = AsyncGenerator[Sequence[StreamEvent], None]
"""Events in order, in lists of those that are ready together: a server sends a list at once.

Whoever has one closes it; see :func:`started`."""


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


class _Begun(NamedTuple):
    """A subscription, and the changes before it that its subscriber has not had."""

    subscription: Subscription
    past: Changes | None

    def leave(self, hub: ChangeHub) -> None:
        """End both."""
        hub.leave(self.subscription)
        if self.past is not None:
            self.past.close()


class Subscriptions:
    """The hubs of all entity types. Used by one event loop."""

    def __init__(self, config: Config, app: App) -> None:
        self._config, self._app = config, app
        self._hubs: dict[str, ChangeHub] = {}
        self._catching_up: asyncio.Semaphore | None = None
        self._is_closed = False

    def close(self) -> None:
        """End all subscriptions; their subscribers get an event that says so."""
        self._is_closed = True
        for hub in list(self._hubs.values()):
            hub.close()

    async def open(self, wish: Wish, work: InThread[Any]) -> EventBatches:
        """Begin a subscription; out: its events, which end when it is closed or fails.

        ``work`` runs a blocking call in a thread. Raises InvalidToken, DataLoss, Unavailable.
        """
        if self._is_closed:
            raise Unavailable("the server is being stopped.")
        entity = wish.entity_type.name
        if self._catching_up is None:
            self._catching_up = asyncio.Semaphore(_CATCHING_UP_MAX)
        hub = self._hubs.setdefault(entity, ChangeHub(self._config, self._app, entity))
        loop, awake = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(awake.set)

        begin = partial(self._begin, wish, hub, wake, work)
        begun = await begin(_position(wish))
        return await started(self._events(wish, hub, begun, begin, awake, work))

    async def _begin(
        self,
        wish: Wish,
        hub: ChangeHub,
        wake: Callable[[], None],
        work: InThread[Any],
        since: LogPosition | None,
    ) -> _Begun:
        """A subscription behind a position, or one from now on and the changes before it."""
        subscribe = partial(hub.subscribe, wake, key=wish.key, wants=wish.wants, since=since)
        subscription = await work(partial(subscribe, limit=_WAITING_MAX))
        try:
            if wish.since == NOW or subscription.goes_on:
                return _Begun(subscription, None)
            begin = wish.since if since is None else str(Token({wish.entity_type.name: since}))
            until = hub.token_of(subscription.spots)
            make = partial(Changes, self._config, self._app, wish.entity_type.name)
            return _Begun(subscription, await work(partial(make, since=begin, until=until)))
        except BaseException:
            hub.leave(subscription)
            raise

    async def _events(
        self,
        wish: Wish,
        hub: ChangeHub,
        begun: _Begun,
        begin: Callable[[LogPosition], Awaitable[_Begun]],
        awake: asyncio.Event,
        work: InThread[Any],
    ) -> EventBatches:
        spots: Mapping[Partition, Spot] = begun.subscription.spots
        version = 0
        try:
            yield []
            if wish.is_current_wanted:
                present = await work(partial(self._present, wish, spots))
                spots, version = present.spots, present.version
                with present.rows as lines:
                    rows = (StreamEvent("current", line.decode().rstrip("\n")) for line in lines)
                    for batch in _batches(rows):
                        yield batch
            while begun.past is not None:
                async for batch in self._past(wish, begun.past, work):
                    yield batch
                if not begun.subscription.is_overrun:
                    break
                # More changes came meanwhile than may wait. It begins again where the past ended.
                over, begun = begun, await begin(hub.position_of(spots))
                over.leave(hub)
                spots = begun.subscription.spots
            yield [StreamEvent("live", "{}", hub.token_of(spots))]
            async for batch in _live(wish, hub, begun.subscription, spots, version, awake):
                yield batch
        except EverstateError as error:
            yield [failed(error)]
        finally:
            begun.leave(hub)

    async def _past(self, wish: Wish, past: Changes, work: InThread[Any]) -> EventBatches:
        """The changes before the subscription began.

        A subscriber takes its turn for each chunk: one that takes its batches slowly holds up none.
        """
        turns, token = self._catching_up, past.token
        assert turns is not None
        with closing(iter(past)) as deliveries:  # type: ignore[type-var]
            while True:
                while not await _took_turn(turns):
                    yield [StreamEvent("", token=token)]
                try:
                    chunk = await work(partial(_chunk, deliveries, wish))
                finally:
                    turns.release()
                if not chunk:
                    return
                token = chunk[-1].token or token
                for batch in _batches(chunk):
                    yield batch

    def _present(self, wish: Wish, spots: Mapping[Partition, Spot]) -> _Present:
        """The present rows: read after the subscription began, so that no change is missing."""
        entity, lines = wish.entity_type.name, SpooledTemporaryFile(_PRESENT_BYTES)

        def add(key: str, version: int, state: Any) -> None:
            row = {"key": key, "version": version, "state": wish.mask.state(state)}
            lines.write(row_json(row) + b"\n")

        if wish.key is not None:
            with Reader(self._config, self._app) as reader:
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

        position = read_live(self._config, self._app, entity, take)
        lines.seek(0)
        return _Present(lines, position.spots)


async def _took_turn(turns: asyncio.Semaphore) -> bool:
    """Wait for a turn, which the caller releases; false: it is time for a sign of life."""
    try:
        async with asyncio.timeout(_BEAT_S):
            await turns.acquire()
    except TimeoutError:
        return False
    return True


async def _live(
    wish: Wish,
    hub: ChangeHub,
    subscription: Subscription,
    begin: Mapping[Partition, Spot],
    version: int,
    awake: asyncio.Event,
) -> EventBatches:
    """The changes behind ``begin`` as they come; of one key, those after ``version``."""
    spots = dict(begin)

    def events(taken: Iterable[Delivery]) -> Iterator[StreamEvent]:
        for delivery in taken:
            if delivery.spot <= spots[delivery.partition]:
                continue
            # What came before it in the other partitions was taken before it, or is not wanted.
            _advance(spots, delivery.spots)
            if version and delivery.change.version <= version:
                continue
            yield _change(wish, delivery, hub.token_of(spots))

    while True:
        awake.clear()
        taken, dropped = subscription.take()
        if dropped:
            if wish.when_slow == "disconnect":
                yield [StreamEvent("slow", _SLOW)]
                return
            yield [StreamEvent("dropped", orjson.dumps({"changes": dropped}).decode())]
        for batch in _batches(events(taken)):
            yield batch
        if subscription.failure is not None:
            yield [failed(subscription.failure)]
            return
        if taken:
            continue
        try:
            async with asyncio.timeout(_BEAT_S):
                await awake.wait()
            await asyncio.sleep(_GATHER_S)
        except TimeoutError:
            _advance(spots, hub.reached(subscription))
            yield [StreamEvent("", token=hub.token_of(spots))]


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


async def started(batches: EventBatches) -> EventBatches:
    """The same after its first batch, which is empty.

    A generator that has not begun does nothing when it is closed: the subscription of a client
    that leaves before its first event would stay.
    """
    await anext(batches)
    return batches


async def while_valid(batches: EventBatches, expires: datetime | None) -> EventBatches:
    """The events until the subscriber's token expires, and then an `error`; ``None``: never."""
    async with aclosing(batches):
        while True:
            left_s = None if expires is None else (expires - datetime.now(UTC)).total_seconds()
            try:
                async with asyncio.timeout(left_s):
                    batch = await anext(batches)
            except StopAsyncIteration:
                return
            except TimeoutError:
                yield [failed(Unauthenticated("the token has expired."))]
                return
            yield batch
            # A connection that takes a batch at once does not wait: without this, others of the
            # loop would have no turn until all batches are sent, nor would a lost connection.
            await asyncio.sleep(0)


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


def failed(error: EverstateError) -> StreamEvent:
    """The event that says why a subscription ends."""
    said = {"type": f"urn:everstate:error:{type(error).__name__}", "detail": error.public}
    return StreamEvent("error", orjson.dumps(said).decode(), failure=error)


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
