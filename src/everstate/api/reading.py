"""What the views answer over HTTP: an entity at a time, its history, who wrote it, and lists.

No web framework here. Records have the names of the command line's `--json`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec
import orjson

from everstate.app import App
from everstate.changes import EntityType, Kind
from everstate.changes.json_patch import json_patch
from everstate.changes.quoting import conditions_in, order_in
from everstate.changes.row_json import row_json
from everstate.changes.triggers import when
from everstate.config import Config
from everstate.errors import (
    ContradictoryQuery,
    InvalidBody,
    InvalidChange,
    InvalidQuery,
    InvalidTrigger,
    NotFound,
)
from everstate.http.answers import HttpAnswer, HttpRequest, Parameters, tagged, whole_number
from everstate.http.etags import etag
from everstate.serving import Entity, Reader, Version, differences, parse_moment
from everstate.serving.connection import WAIT_S
from everstate.serving.listing import (
    KEYS_MAX,
    WRITERS,
    ChangesCursor,
    WrittenBy,
    chosen_versions,
    deleted,
    many,
    written,
)
from everstate.serving.masking import Masks, no_masks
from everstate.serving.waiting import wait_until
from everstate.serving.words import difference_record, version_record
from everstate.serving.writers import last_writer, who_wrote
from everstate.sources.crud.resource import CHANGE_ID

AS_OF: Final = "Everstate-As-Of"
RECORDED_AT: Final = "Everstate-Recorded-At"
PAST: Final = ("at", "recorded_at", "version")
"""Parameters of `GET /v1/{entity}/{key}` by which a state of the past is asked for."""
WRITTEN_BY: Final = (*WRITERS, "kind", "since", "until")
"""Parameters by which changes are chosen: who wrote them, and when."""
CHANGES_CURSOR: Final = r"^([0-9]{1,16}) ([1-9][0-9]{0,17}) ([^\u0000]+)$"
"""Where a page of changes ended: microseconds since 1970, version, key."""
_CURSOR: Final = re.compile(CHANGES_CURSOR)
_EPOCH: Final = datetime.fromtimestamp(0, UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_LIMIT: Final = 50
_TRAILING: Final = "The views apply new changes shortly after, while `everstate run` is running."


class _Keys(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[str]
    at: str | None = None


class Reading:
    """Reads the views; as many connections as there are questions at once. Threads share it.

    Every method raises NotFound, saying what is known; InvalidQuery, naming the parameter;
    InvalidToken, NotCaughtUp and Unavailable.
    """

    def __init__(self, config: Config, app: App) -> None:
        self._config, self._app = config, app
        self.page_max: Final = config.api.page_max
        self.views = Reader(config, app)

    def close(self) -> None:
        """Close the connections; no question may be open."""
        self.views.close()

    def find(self, entity: str, key: str, wait_for: str | None = None) -> bytes:
        """Present state of an entity as JSON, with nothing hidden.

        As its model writes it; as it is in the log, where the model would refuse or change it.
        """
        entity_type = self._app.entity_type(entity)
        reader = self._reader(no_masks, entity, key)
        try:
            found = reader.get(entity, key, wait_for=wait_for)
        except NotFound as error:
            raise NotFound(error.message, advice=_TRAILING) from error
        try:
            return entity_type.encode(entity_type.validate_exactly(found.state))
        except InvalidChange:
            return row_json(found.state)

    def entity(self, incoming: HttpRequest, given: Parameters, entity: str, key: str) -> HttpAnswer:
        """One entity: now, `at` a world time, as `recorded_at` a time, or at a `version`."""
        found = self._reader(incoming.caller.mask, entity, key).get(
            entity,
            key,
            at=moment_of(given, "at"),
            recorded_at=moment_of(given, "recorded_at"),
            version=_version(given, "version"),
            wait_for=incoming.wait_for,
        )
        headers = {
            "ETag": etag(found.version, incoming.mask.tag),
            AS_OF: found.as_of.isoformat(),
            RECORDED_AT: found.recorded_at.isoformat(),
            CHANGE_ID: str(found.change_id),
        }
        if incoming.conditions.not_modified(found.version):
            return HttpAnswer(304, headers)
        return HttpAnswer(200, headers, _json(found.state))

    def history(
        self, incoming: HttpRequest, given: Parameters, entity: str, key: str
    ) -> HttpAnswer:
        """A page of versions: the newest, or those `before` or `after` a version.

        Of all, or of those by a writer, of a time, or that changed a field; oldest first unless the
        newest are asked for first.
        """
        choice = (*WRITTEN_BY, "changed")
        limit, before = (_version(given, each) for each in ("limit", "before"))
        after = _version(given, "after", least=0)
        if limit is not None and limit > self.page_max:
            raise InvalidQuery(f"limit is {limit}; expected 1 to {self.page_max}.")
        size = limit or min(_LIMIT, self.page_max)
        order = _one_of(given, "order", ("oldest", "newest"))
        diff = _one_of(given, "diff", ("fields", "patch"))
        wanted = written_by(given, self._app.entity_type(entity))
        reader = self._seen(incoming, entity, key)
        if any(name in given for name in choice):
            scan = self._config.api.scan_rows_max
            found, first, last = chosen_versions(
                reader, entity, key, wanted, limit=size, scan=scan, before=before, after=after
            )
        else:
            found = reader.history(entity, key, limit=size, before=before, after=after)
            first, last = (found[0].version, found[-1].version) if found else (0, 0)
        newest = reader.newest_version(entity, key)
        items = list(map(version_record, found))
        if diff == "patch":
            for item, patch in zip(items, _patches(reader, found), strict=True):
                del item["differences"]
                item["patch"] = orjson.Fragment(patch)
        page = {
            "items": items[::-1] if order == "newest" else items,
            "before": first if first > 1 else None,
            "after": last if last and newest is not None and last < newest else None,
        }
        return _answer(incoming, page)

    def diff(self, incoming: HttpRequest, given: Parameters, entity: str, key: str) -> HttpAnswer:
        """What changed from one version or time to another one: fields, and a JSON Patch."""
        if "from" not in given:
            raise InvalidQuery("from is missing; expected a version or a time.")
        reader = self._seen(incoming, entity, key)
        old, new = (_state_at(reader, entity, key, given.get(name)) for name in ("from", "to"))
        before, after = old.state, new.state
        found = {
            "from": _named(old),
            "to": _named(new),
            "differences": [difference_record(each) for each in differences(before, after)],
            "patch": orjson.Fragment(json_patch(row_json(before), row_json(after))),
        }
        return _answer(incoming, found)

    def explain(
        self,
        incoming: HttpRequest,
        given: Parameters,
        entity: str,
        key: str,
        field: str | None = None,
    ) -> HttpAnswer:
        """Where a version comes from and where it went; ``field``: the one that last wrote it."""
        version = _version(given, "version")
        reader = self._seen(incoming, entity, key)
        if field is not None:
            version = last_writer(reader.newest_first(entity, key), field).version
        found = reader.explain(entity, key, version)
        return _answer(incoming, asdict(found) | {"version": version_record(found.version)})

    def provenance(
        self, incoming: HttpRequest, _given: Parameters, entity: str, key: str
    ) -> HttpAnswer:
        """Who last wrote each field of the newest state, and what each service last wrote."""
        found = who_wrote(self._seen(incoming, entity, key).newest_first(entity, key))
        facts = ("version", "occurred_at", "recorded_at", "change_id", "provenance")
        fields = {
            path: {name: getattr(each, name) for name in facts}
            for path, each in found.fields.items()
        }
        answer = {"version": found.newest.version, "fields": fields, "sources": found.sources}
        return _answer(incoming, answer)

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
        found = many(self._seen(incoming, entity), entity, sound, at=at)
        items = {key: _entity(found[key]) if key in found else None for key in asked.keys}
        return HttpAnswer(200, {}, _json({"items": items}))

    def entities(self, incoming: HttpRequest, given: Parameters, entity: str) -> HttpAnswer:
        """Entities that meet conditions on their fields, now or at a world time, by pages."""
        order, limit = order_in(given.get("order", "")), limit_of(given, self.page_max)
        if order and "after" in given:
            raise ContradictoryQuery(
                "give one of after and order.", advice="/views/v1 has pages in any order."
            )
        found = self._seen(incoming, entity).list(
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
        reader = self._seen(incoming, entity)
        found = deleted(reader, entity, after=given.get("after"), limit=limit)
        more = found[-1].key if len(found) == limit else None
        return _answer(incoming, {"items": list(map(version_record, found)), "after": more})

    def written(self, incoming: HttpRequest, given: Parameters, entity: str) -> HttpAnswer:
        """A page of changes by who wrote them and when, in the order of their recording."""
        wanted = written_by(given)
        limit, after = limit_of(given, self.page_max), _cursor(given.get("after"))
        reader = self._seen(incoming, entity)
        found = written(reader, entity, wanted, after=after, limit=limit)
        more = None
        if len(found) == limit:
            last = found[-1]
            more = f"{(last.recorded_at - _EPOCH) // _MICROSECOND} {last.version} {last.key}"
        return _answer(incoming, {"items": list(map(version_record, found)), "after": more})

    def _seen(self, incoming: HttpRequest, entity: str, key: str = "") -> Reader:
        """A reader for several questions, once the views have what the request's token covers."""
        token = incoming.wait_for
        if token is not None:
            kept = "history" if self._app.keeps_history(entity) else "latest"
            wait_until(self._config, self._app, f"{entity}_{kept}", token, WAIT_S)
        return self._reader(incoming.caller.mask, entity, key)

    def _reader(self, masks: Masks, entity: str, key: str) -> Reader:
        if "\x00" in key:
            raise NotFound(f"there can be no {entity} {key!r}: no key has a NUL character.")
        return self.views.seen_by(masks)


def _version(given: Parameters, name: str, *, least: int = 1) -> int | None:
    if name not in given:
        return None
    return whole_number(given, name, f"a whole number from {least} on", least=least)


def _one_of(given: Parameters, name: str, values: tuple[str, ...]) -> str:
    """A parameter that has one of some values, the first by default; raises InvalidQuery."""
    value = given.get(name, values[0])
    if value not in values:
        raise InvalidQuery(f"{name} is {value!r}; expected {' or '.join(values)}.")
    return value


def written_by(given: Parameters, entity_type: EntityType | None = None) -> WrittenBy:
    """Which changes are wanted; ``entity_type``: its fields may be named by `changed`.

    Raises InvalidQuery.
    """
    kind, changed = given.get("kind"), None
    if kind not in (None, *Kind):
        raise InvalidQuery(f"kind is {kind!r}; expected one of {', '.join(Kind)}.")
    if entity_type is not None and "changed" in given:
        changed = given["changed"]
        try:
            when(changed).changes().check(entity_type)
        except InvalidTrigger as error:
            raise InvalidQuery(f"changed: {error.message}") from error
    return WrittenBy(
        provenance={name: given[name] for name in WRITERS if name in given},
        kind=kind,
        since=moment_of(given, "since"),
        until=moment_of(given, "until"),
        changed=changed,
    )


def moment_of(given: Parameters, name: str) -> datetime | None:
    """A parameter that is a time; raises InvalidQuery for another one."""
    return parse_moment(given[name]) if name in given else None


def limit_of(given: Parameters, page_max: int) -> int:
    """How much a page has; raises InvalidQuery for a `limit` that is no number up to the most."""
    limit = {"limit": given.get("limit", str(min(_LIMIT, page_max)))}
    return whole_number(limit, "limit", f"1 to {page_max}", least=1, most=page_max)


def _state_at(reader: Reader, entity: str, key: str, at: str | None) -> Version | Entity:
    """The version, the one of a time, or the newest; a deleting version has the state null."""
    if at is None or (at.isascii() and at.isdigit()):
        return reader.version(entity, key, None if at is None else _version({"at": at}, "at"))
    return reader.get(entity, key, at=parse_moment(at))


def _patches(reader: Reader, found: Sequence[Version]) -> Iterator[bytes]:
    """A JSON Patch for each version, from the state before it."""
    states = {0: None, **{each.version: each.state for each in found}}
    for each in found:
        earlier = each.version - 1
        if earlier not in states:
            with suppress(NotFound):  # it is kept nowhere: the patch makes the whole state
                states[earlier] = reader.version(each.entity, each.key, earlier).state
        yield json_patch(row_json(states.get(earlier)), row_json(each.state))


def _named(found: Version | Entity) -> dict[str, Any]:
    return {"version": found.version, "as_of": found.as_of, "kind": found.kind}


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
    return tagged(incoming, {}, _json(value))


def _json(value: Any) -> str:
    return row_json(value).decode()
