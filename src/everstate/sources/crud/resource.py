"""The REST verbs of one entity type over its source of truth; no web framework here."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple, TypeAlias
from urllib.parse import quote

import msgspec
from pydantic import BaseModel

from everstate.changes import Kind, Provenance
from everstate.errors import (
    AlreadyExists,
    EverstateError,
    IdempotencyKeyReused,
    InvalidBody,
    InvalidQuery,
    NotFound,
    PreconditionFailed,
    Unavailable,
    VersionConflict,
)
from everstate.sources.crud.answers import JSON, Answer, Incoming, content_type_of, read_kept
from everstate.sources.crud.bodies import check_key, read_entity, read_json
from everstate.sources.crud.conditions import Conditions, etag
from everstate.sources.crud.filters import RESERVED, Filters
from everstate.sources.crud.patches import (
    JSON_PATCH,
    MERGE_PATCH,
    apply_json_patch,
    check_patch,
    merge,
)
from everstate.sources.crud.provenance import occurred_at_of, provenance_of
from everstate.sources.crud.store import AnsweredBefore, Once, Store, Written

CHANGE_ID: Final = "Everstate-Change-Id"
PAGE_DEFAULT: Final = 50
_TRIES_MAX: Final = 32
_PAUSE_S_MAX: Final = 0.05

Answering: TypeAlias = Callable[[Written], Answer]
Remember: TypeAlias = Callable[[Answering], Once | None]
"""Makes what the store keeps of an answer; ``None`` without an Idempotency-Key."""

_LOST: Final = (AlreadyExists, NotFound, PreconditionFailed, VersionConflict)


class Said(NamedTuple):
    """What a write says of itself; ``occurred_at`` ``None``: now."""

    provenance: Provenance
    occurred_at: datetime | None


class Resource:
    """What the requests to one entity type do; threads share it.

    Every write has its provenance, is one write of the store, and with an Idempotency-Key is done
    once. Every method raises errors of ours, which carry their HTTP status.
    """

    def __init__(
        self,
        store: Store,
        *,
        api_version: str = "v1",
        page_max: int = 500,
        message_bytes_max: int = 1_048_576,
    ) -> None:
        """``message_bytes_max``: what one JSON Patch may copy; no larger state could be stored."""
        self.store, self.entity_type = store, store.entity_type
        self.name = self.entity_type.name
        self.path = f"/{api_version}/{self.name}"
        self.page_max = page_max
        self.filters = Filters(self.entity_type)
        self._api_version, self._message_bytes_max = api_version, message_bytes_max

    def create(self, incoming: Incoming) -> Answer:
        """`POST`: a new entity, 201; raises AlreadyExists (409) with the present version."""
        content_type_of(incoming.headers, (JSON,))
        model = read_entity(self.entity_type, incoming.body)
        key = self.entity_type.key_of(model)
        said = self._said(incoming, key)

        def attempt(remember: Remember) -> Answer:
            try:
                return self._put(said, key, model, 0, remember)
            except VersionConflict as conflict:
                raise AlreadyExists(self.name, key, conflict.actual) from conflict

        return self._once(incoming, attempt)

    def read(self, incoming: Incoming, key: str) -> Answer:
        """`GET`: the entity with its ETag, or 304 when the reader has that version."""
        found, conditions = self.store.get(key), incoming.conditions
        if found is None:
            raise self._missing(key)
        # To a reader If-None-Match says "I have it": 304, not 412.
        Conditions(match=conditions.match).check(self.name, key, found.version)
        headers = {"ETag": etag(found.version)}
        if conditions.not_modified(found.version):
            return Answer(304, headers)
        return Answer(200, headers, self._text(found.entity))

    def replace(self, incoming: Incoming, key: str) -> Answer:
        """`PUT`: the whole entity, 200, or 201 when there was none."""
        content_type_of(incoming.headers, (JSON,))
        model = read_entity(self.entity_type, incoming.body)
        check_key(self.entity_type, key, model)
        conditions, said = incoming.conditions, self._said(incoming, key)

        def attempt(remember: Remember) -> Answer:
            if not conditions.given:
                return self._put(said, key, model, None, remember)
            present = self.store.get(key)
            version = None if present is None else present.version
            conditions.check(self.name, key, version)
            return self._put(said, key, model, version or 0, remember)

        return self._once(incoming, lambda remember: self._retried(key, lambda: attempt(remember)))

    def patch(self, incoming: Incoming, key: str) -> Answer:
        """`PATCH`: a merge patch or a JSON Patch of the present state, by content type."""
        kind = content_type_of(incoming.headers, (MERGE_PATCH, JSON_PATCH))
        patch = read_json(incoming.body)
        check_patch(self.name, kind, patch)
        said = self._said(incoming, key)

        def attempt(remember: Remember) -> Answer:
            found = self.store.get(key)
            version = None if found is None else found.version
            incoming.conditions.check(self.name, key, version)
            if found is None:
                raise self._missing(key)
            document = read_json(self.entity_type.encode(found.entity))
            model = read_entity(self.entity_type, self._patched(kind, document, patch))
            check_key(self.entity_type, key, model)
            return self._put(said, key, model, found.version, remember)

        return self._once(incoming, lambda remember: self._retried(key, lambda: attempt(remember)))

    def delete(self, incoming: Incoming, key: str) -> Answer:
        """`DELETE`: 204; its version is kept, and goes on if it is created again."""
        conditions, said = incoming.conditions, self._said(incoming, key)

        def attempt(remember: Remember) -> Answer:
            expected = None
            if conditions.given:
                present = self.store.get(key)
                expected = None if present is None else present.version
                conditions.check(self.name, key, expected)
            written = self.store.delete(
                key,
                provenance=said.provenance,
                expected_version=expected,
                occurred_at=said.occurred_at,
                once=remember(_deleted),
            )
            return _deleted(written)

        return self._once(incoming, lambda remember: self._retried(key, lambda: attempt(remember)))

    def list(self, parameters: Sequence[tuple[str, str]]) -> Answer:
        """`GET` of all: a page of entities by filters, with the cursor of the next one."""
        own: dict[str, str] = {}
        for name, value in parameters:
            if name in RESERVED:
                if name in own:
                    raise InvalidQuery(f"{name} is given twice.")
                own[name] = value
        limit = self._limit(own.get("limit"))
        equal = self.filters.parse(parameters)
        page = self.store.page(limit=limit, cursor=own.get("cursor"), equal=equal)
        items = [
            {
                "key": self.entity_type.key_of(found.entity),
                "version": found.version,
                "state": msgspec.Raw(self.entity_type.encode(found.entity)),
            }
            for found in page.entities
        ]
        body = msgspec.json.encode({"items": items, "next": page.cursor}).decode()
        return Answer(200, {}, body)

    def _patched(self, kind: str, document: Any, patch: Any) -> bytes:
        try:
            if kind == MERGE_PATCH:
                return msgspec.json.encode(merge(document, patch))
            limit = self._message_bytes_max
            patched = apply_json_patch(self.name, document, patch, copied_bytes_max=limit)
            return msgspec.json.encode(patched)
        except RecursionError as cause:
            raise InvalidBody(self.name, (("patch", "is nested too deeply"),)) from cause

    def _limit(self, given: str | None) -> int:
        if given is None:
            return min(PAGE_DEFAULT, self.page_max)
        number = int(given) if given.isascii() and given.isdigit() and len(given) < 10 else 0
        if not 1 <= number <= self.page_max:
            raise InvalidQuery(f"limit is {given!r}; expected 1 to {self.page_max}.")
        return number

    def _put(
        self, said: Said, key: str, model: BaseModel, expected: int | None, remember: Remember
    ) -> Answer:
        def answer(written: Written) -> Answer:
            headers = {"ETag": etag(written.version)}
            if written.change_id is not None:
                headers[CHANGE_ID] = str(written.change_id)
            if written.kind is Kind.CREATED:
                headers["Location"] = f"{self.path}/{quote(written.key, safe='')}"
            status = 201 if written.kind is Kind.CREATED else 200
            return Answer(status, headers, self._text(model))

        written = self.store.put(
            model,
            provenance=said.provenance,
            expected_version=expected,
            occurred_at=said.occurred_at,
            once=remember(answer),
        )
        return answer(written)

    def _once(self, incoming: Incoming, attempt: Callable[[Remember], Answer]) -> Answer:
        """Do a write; with an Idempotency-Key once, and answer a repeated request as before."""
        if incoming.idempotency_key is None:
            return attempt(lambda _: None)
        once_id, fingerprint = incoming.once_id, incoming.fingerprint
        before = self._answered(incoming, once_id)
        if before is not None:
            return before

        def remember(answering: Answering) -> Once:
            return Once(
                id=once_id,
                fingerprint=fingerprint,
                answer=lambda written: answering(written).kept(),
            )

        try:
            return attempt(remember)
        except AnsweredBefore:
            said = "the same request is being worked on; send it again."
            refusal: EverstateError = Unavailable(said, public=said)
        except _LOST as lost:
            # The same request at the same time may have won, and this one saw what it did.
            refusal = lost
        before = self._answered(incoming, once_id)
        if before is None:
            raise refusal
        return before

    def _answered(self, incoming: Incoming, once_id: str) -> Answer | None:
        kept = self.store.answered(once_id)
        if kept is None:
            return None
        if kept.fingerprint != incoming.fingerprint:
            raise IdempotencyKeyReused(str(incoming.idempotency_key))
        return read_kept(kept.answer)

    def _retried(self, key: str, attempt: Callable[[], Answer]) -> Answer:
        """Read and write again when somebody else wrote in between.

        A condition of the request that no longer holds ends it with PreconditionFailed.
        """
        for tried in range(_TRIES_MAX):
            try:
                return attempt()
            except VersionConflict:
                time.sleep(random.uniform(0, min(_PAUSE_S_MAX, 0.001 * 2**tried)))
        said = f"{self.name} {key!r}: lost {_TRIES_MAX} times against other writers"
        raise Unavailable(f"{said}; nothing was written.", public=f"{said}; nothing was written.")

    def _said(self, incoming: Incoming, key: str) -> Said:
        """What a write says of itself; asked before anything is read."""
        provenance = provenance_of(
            incoming.headers,
            incoming.caller,
            api_version=self._api_version,
            entity=self.name,
            key=key,
        )
        return Said(provenance, occurred_at_of(incoming.headers))

    def _missing(self, key: str) -> NotFound:
        return NotFound(f"{self.name} {key!r} does not exist.")

    def _text(self, entity: BaseModel) -> str:
        return self.entity_type.encode(entity).decode()


def _deleted(written: Written) -> Answer:
    return Answer(204, {CHANGE_ID: str(written.change_id)})
