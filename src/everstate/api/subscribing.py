"""What a subscriber asks for, and the events that it gets: no web framework here.

It asks for one entity type, or for several: then one stream has the changes of all of them. An
event is a change, a present row, or a notice. Its id is a token: a subscriber that comes back with
it continues after that event, without a gap and without a double.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from tempfile import SpooledTemporaryFile
from typing import IO, Any, Final, Literal, TypeAlias, get_args
from urllib.parse import quote

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
from everstate.changes.codec import decode_wire
from everstate.changes.json_numbers import decode
from everstate.changes.quoting import unquoted
from everstate.changes.row_json import row_json
from everstate.changes.tokens import LogPosition, Partition, Spot, Token, parse_since, parse_token
from everstate.changes.triggers import Trigger, when
from everstate.config import Config
from everstate.errors import InvalidQuery, InvalidTrigger, NotFound
from everstate.http.masks import Mask
from everstate.serving import Reader
from everstate.serving.changes import NOW, Changes, Delivery
from everstate.serving.hub import ChangeHub, Subscription, key_of
from everstate.serving.merged import MergedChanges
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
    """What a subscriber asks for of one entity type."""

    entity_type: EntityType
    key: str | None
    kinds: frozenset[str]
    """Empty: all."""
    provenance: Mapping[str, str]
    trigger: Trigger | None
    since: str
    """A token, a time, ``beginning`` or ``now``."""
    is_current_wanted: bool
    """Whether the present rows come first."""
    when_slow: WhenSlow
    mask: Mask
    """What the subscriber does not see."""
    is_thin: bool
    """Whether it gets links in place of states."""

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
        current, thin = given.get("current", "false"), given.get("thin", "false")
        for name, value in (("current", current), ("thin", thin)):
            if value not in ("true", "false"):
                raise InvalidQuery(f"{name} is {value!r}; expected true or false.")
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
            thin == "true",
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

    def link(self, key: str, version: int) -> str:
        """The path at which a version of an entity is read."""
        return f"/v1/{self.entity_type.name}/{quote(key, safe='')}?version={version}"


Wishes: TypeAlias = Mapping[str, Wish]
"""By entity type: each has its mask; what else is asked for is the same of all."""
Spots: TypeAlias = Mapping[Partition, Spot]


class Subscriptions(SharedReaders[ChangeHub]):
    """The subscriptions to all entity types, and their hubs. Used by one event loop."""

    def __init__(self, config: Config, app: App) -> None:
        super().__init__(partial(ChangeHub, config, app))
        self.config, self.app = config, app
        self.turns = asyncio.Semaphore(_CATCHING_UP_MAX)
        """For subscribers that read the past."""

    async def open(self, wishes: Wishes, work: InThread[Any]) -> EventBatches:
        """Begin a subscription; out: its events, which end when it is closed or fails.

        ``work`` runs a blocking call in a thread. Raises InvalidToken, DataLoss, Unavailable.
        """
        return await ChangeSubscriber(self, wishes, work).opened()

    def past(self, wishes: Wishes, since: str, until: str) -> Changes | MergedChanges:
        """The changes between two positions; close them. Errors as of :class:`Changes`."""
        names = [*wishes] if len(wishes) > 1 else next(iter(wishes))
        return self.app.changes(names, since=since, until=until, config=self.config)

    def page(self, wishes: Wishes) -> tuple[Sequence[StreamEvent], str]:
        """The next wanted changes of those that there are now, and the token after them.

        Without an event there are no more. Cost: some 50 ms for each entity type.
        """
        with self.past(wishes, next(iter(wishes.values())).since, NOW) as past:
            with closing(iter(past)) as deliveries:  # type: ignore[type-var]
                chunk = _chunk(deliveries, wishes)
            return chunk, (chunk[-1].token if chunk else None) or past.token


class ChangeSubscriber(Subscriber[Subscriptions, Wishes]):
    """A subscription to the changes of one entity type or of several."""

    _past: Changes | MergedChanges | None = None
    """The changes before the subscription that the subscriber has not had."""

    def __init__(self, home: Subscriptions, wish: Wishes, work: InThread[Any]) -> None:
        super().__init__(home, wish, work)
        self._common = next(iter(wish.values()))
        self._hubs, self._subscriptions = dict[str, ChangeHub](), dict[str, Subscription]()

    async def begin(self, since: str | None = None) -> None:
        """Subscribe behind a position, or from now on and read the changes before."""
        since = since or self._common.since
        token = parse_since(since)
        try:
            goes_on = await self._joined(token.positions if isinstance(token, Token) else {})
            if len(goes_on) > 1:
                # All go on or none: else the past of some would come before what others remember.
                self.leave()
                goes_on = await self._joined({})
            if since != NOW and goes_on == {False}:
                until = self._token(self._begins())
                self._past = await self.work(partial(self.home.past, self.wish, since, until))
        except BaseException:
            self.leave()
            raise

    async def _joined(self, since: Mapping[str, LogPosition]) -> set[bool]:
        """Subscribe to each entity type; whether the subscriptions go on behind a position."""
        for name, wish in self.wish.items():
            hub = self._hubs[name] = await self.home.joined(name, self.wake, self.work)
            subscribe = partial(hub.subscribe, self.wake, key=wish.key, wants=wish.wants)
            self._subscriptions[name] = await self.work(
                partial(subscribe, since=since.get(name), limit=_WAITING_MAX)
            )
        return {each.goes_on for each in self._subscriptions.values()}

    def leave(self) -> None:
        """End the subscription, and the reading of its past."""
        for hub in self._hubs.values():
            hub.leave(self.wake)
        if self._past is not None:
            self._past.close()
            self._past = None

    def _begins(self) -> dict[str, Spots]:
        """Where the subscriptions begin."""
        return {name: each.spots for name, each in self._subscriptions.items()}

    def _token(self, spots: Mapping[str, Spots]) -> str:
        found = {name: self._hubs[name].position_of(each) for name, each in spots.items()}
        return str(Token(found))

    async def events(self) -> EventBatches:
        """The present rows or the past, as it is wanted, and then changes as they come."""
        spots, versions = self._begins(), dict[str, int]()
        for name, wish in self.wish.items() if self._common.is_current_wanted else ():
            present = await self.work(partial(self._present, wish, spots[name]))
            lines, spots[name], versions[name] = present
            with lines:
                rows = (StreamEvent("current", line.decode().rstrip("\n")) for line in lines)
                for batch in _batches(rows):
                    yield batch
        while self._past is not None:
            async for batch in self.past(self._past):
                yield batch
            # A time may be later than what the core has judged.
            for name, position in parse_token(self._past.token).positions.items():
                spots[name] = reached = dict(spots[name])
                _advance(reached, position.spots)
            if not any(each.is_overrun for each in self._subscriptions.values()):
                break
            # More changes came meanwhile than may wait. It begins again where the past ended.
            self.leave()
            await self.begin(self._token(spots))
            spots = self._begins()
        yield [StreamEvent("live", "{}", self._token(spots))]
        async for batch in self.live(spots, versions):
            yield batch

    async def past(self, past: Changes | MergedChanges) -> EventBatches:
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

    async def live(self, begins: Mapping[str, Spots], versions: Mapping[str, int]) -> EventBatches:
        """The changes behind ``begins`` as they come; of one key, those after its version."""
        spots = {name: dict(each) for name, each in begins.items()}

        def events(taken: Iterable[Delivery]) -> Iterator[StreamEvent]:
            for delivery in taken:
                own, version = spots[delivery.entity], versions.get(delivery.entity, 0)
                if delivery.spot <= own[delivery.partition]:
                    continue
                # What came before it in the other partitions was taken before it, or is not wanted.
                _advance(own, delivery.spots)
                if version and delivery.change.version <= version:
                    continue
                yield _change(self.wish[delivery.entity], delivery, self._token(spots))

        while True:
            self.awake.clear()
            found = [each.take() for each in self._subscriptions.values()]
            if dropped := sum(count for _, count in found):
                if self._common.when_slow == "disconnect":
                    yield [StreamEvent("slow", _SLOW)]
                    return
                yield [StreamEvent("dropped", orjson.dumps({"changes": dropped}).decode())]
            # Each entity type's own order stays; a token says how far each of them was read.
            lists = (each for each, _ in found)
            taken = [*heapq.merge(*lists, key=lambda each: each.record.timestamp_ms)]
            for batch in _batches(events(taken)):
                yield batch
            for name, hub in self._hubs.items():
                if (failure := self._subscriptions[name].failure or hub.failure) is not None:
                    raise failure.with_traceback(None)
            if taken:
                continue
            if await self.is_awake():
                await asyncio.sleep(_GATHER_S)
            else:
                for name, own in spots.items():
                    _advance(own, self._hubs[name].reached(self._subscriptions[name]))
                yield [StreamEvent("", token=self._token(spots))]

    def _present(self, wish: Wish, spots: Spots) -> tuple[IO[bytes], Spots, int]:
        """The present rows as lines of JSON, and the changes in them: up to spots and a version.

        They are read after the subscription began, so that no change is missing.
        """
        config, app = self.home.config, self.home.app
        entity, lines = wish.entity_type.name, SpooledTemporaryFile(_PRESENT_BYTES)

        def add(key: str, version: int, state: Any) -> None:
            row = {"entity": entity, "key": key, "version": version}
            shown = wish.mask.state(wish.entity_type.today(state))
            row |= {"link": wish.link(key, version)} if wish.is_thin else {"state": shown}
            lines.write(row_json(row) + b"\n")

        if wish.key is not None:
            with Reader(config, app) as reader:
                try:
                    found = reader.get(entity, wish.key)
                except NotFound:
                    return lines, spots, 0
            add(found.key, found.version, found.state)
            lines.seek(0)
            return lines, spots, found.version

        def take(rows: Iterator[tuple[str, int, Any]]) -> None:
            lines.seek(0)
            lines.truncate()
            for row in rows:
                add(*row)

        position = read_live(config, app, entity, take)
        lines.seek(0)
        return lines, position.spots, 0


def _advance(spots: dict[Partition, Spot], reached: Spots) -> None:
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


def _chunk(deliveries: Iterator[Delivery], wishes: Wishes) -> list[StreamEvent]:
    """The next events of the past; empty at its end. A chunk without wanted changes has one."""
    events, last, held = list[StreamEvent](), None, 0
    for last in islice(deliveries, _CHUNK):
        held += len(last.record.value or b"")
        wish = wishes[last.entity]
        if wish.wants(last):
            events.append(_change(wish, last, last.token))
        if held >= _CHUNK_BYTES:
            break
    return [StreamEvent("", token=last.token)] if last is not None and not events else events


def _change(wish: Wish, delivery: Delivery, token: str) -> StreamEvent:
    shown = wish.mask.change(delivery.record.value or b"")
    if wish.is_thin:
        head = decode_wire(shown)
        thin = {name: getattr(head, name) for name in ("entity", "key", "version", "kind")}
        shown = row_json({**thin, "link": wish.link(head.key, head.version)})
    return StreamEvent("change", shown.decode(), token)


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
