"""What the views answer about many entities: lists, many keys, who wrote what, what was deleted."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec

from everstate.api.reading import Reading, limit_of, moment_of, written_by
from everstate.app import App
from everstate.changes.quoting import conditions_in, order_in
from everstate.changes.row_json import row_json
from everstate.config import Config
from everstate.errors import ContradictoryQuery, InvalidBody, InvalidQuery
from everstate.http.answers import HttpAnswer, HttpRequest, Parameters, tagged
from everstate.serving import Entity, parse_moment
from everstate.serving.listing import KEYS_MAX, ChangesCursor, deleted, many, written
from everstate.serving.words import version_record

CHANGES_CURSOR: Final = r"^([0-9]{1,16}) ([1-9][0-9]{0,17}) ([^\u0000]+)$"
"""Where a page of changes ended: microseconds since 1970, version, key."""
_CURSOR: Final = re.compile(CHANGES_CURSOR)
_EPOCH: Final = datetime.fromtimestamp(0, UTC)
_MICROSECOND: Final = timedelta(microseconds=1)


class _Keys(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[str]
    at: str | None = None


class Listing:
    """Answers about many entities, with the readers of :class:`~everstate.api.reading.Reading`."""

    def __init__(self, config: Config, app: App, reading: Reading) -> None:
        self._app, self._reading = app, reading
        self.page_max: Final = config.api.page_max

    def keys(self, incoming: HttpRequest, _given: Parameters, entity: str) -> HttpAnswer:
        """Many entities by key, all at one moment; a key without an entity has null."""
        try:
            asked = msgspec.json.decode(incoming.body, type=_Keys)
        except msgspec.MsgspecError as error:
            raise InvalidBody("list of keys", (("body", str(error)),)) from error
        if len(asked.keys) > KEYS_MAX:
            too_many = f"at most {KEYS_MAX:,} are read at once"
            raise InvalidBody("list of keys", (("keys", too_many),))
        at = None if asked.at is None else parse_moment(asked.at)
        sound = [key for key in asked.keys if "\x00" not in key]
        found = many(self._reading.reader(incoming, entity), entity, sound, at=at)
        items = {key: _entity(found[key]) if key in found else None for key in asked.keys}
        return HttpAnswer(200, {}, row_json({"items": items}).decode())

    def entities(self, incoming: HttpRequest, given: Parameters, entity: str) -> HttpAnswer:
        """Entities that meet conditions on their fields, now or at a world time, by pages."""
        order, limit = order_in(given.get("order", "")), limit_of(given, self.page_max)
        if order and "after" in given:
            raise ContradictoryQuery(
                "give one of after and order.", advice="/views/v1 has pages in any order."
            )
        found = self._reading.reader(incoming, entity).list(
            entity,
            at=moment_of(given, "at"),
            where=conditions_in(given.get("where", "")),
            order=order,
            after=given.get("after"),
            limit=limit,
        )
        items = [{"key": each.key} | _entity(each) for each in found]
        more = found[-1].key if len(found) == limit and not order else None
        return _answer(incoming, {"items": items, "after": more})

    def deleted(self, incoming: HttpRequest, given: Parameters, entity: str) -> HttpAnswer:
        """A page of the entities that are deleted now, in the order of their keys."""
        limit = limit_of(given, self.page_max)
        reader = self._reading.reader(incoming, entity)
        found = deleted(reader, entity, after=given.get("after"), limit=limit)
        more = found[-1].key if len(found) == limit else None
        return _answer(incoming, {"items": [version_record(each) for each in found], "after": more})

    def written(self, incoming: HttpRequest, given: Parameters, entity: str) -> HttpAnswer:
        """A page of changes by who wrote them and when, in the order of their recording."""
        wanted = written_by(given)
        limit, after = limit_of(given, self.page_max), _cursor(given.get("after"))
        reader = self._reading.reader(incoming, entity)
        found = written(reader, entity, wanted, after=after, limit=limit)
        more = None
        if len(found) == limit:
            last = found[-1]
            more = f"{(last.recorded_at - _EPOCH) // _MICROSECOND} {last.version} {last.key}"
        return _answer(incoming, {"items": [version_record(each) for each in found], "after": more})


def _cursor(text: str | None) -> ChangesCursor | None:
    if text is None:
        return None
    found = _CURSOR.fullmatch(text)
    if found is None:
        raise InvalidQuery(f"after is {text!r}; expected that of an earlier page.")
    recorded_at, version, key = found.groups()
    return _EPOCH + int(recorded_at) * _MICROSECOND, key, int(version)


def _entity(found: Entity) -> dict[str, Any]:
    return {"version": found.version, "as_of": found.as_of, "state": found.state}


def _answer(incoming: HttpRequest, value: Any) -> HttpAnswer:
    return tagged(incoming, {}, row_json(value).decode())
