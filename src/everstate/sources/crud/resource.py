"""The REST verbs of one entity type on its source of truth; independent of web frameworks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeAlias
from urllib.parse import quote

import msgspec
from pydantic import BaseModel
from tenacity import (
    RetryError,
    Retrying,
    retry_if_exception_type,
    stop_after_attempt,
    wait_random_exponential,
)

from everstate.changes import Kind
from everstate.changes.fields import tree_of
from everstate.changes.json_numbers import encode
from everstate.changes.tokens import written_token
from everstate.errors import (
    AlreadyExists,
    Deleted,
    EverstateError,
    IdempotencyKeyReused,
    InvalidBody,
    InvalidQuery,
    NotFound,
    PreconditionFailed,
    Unavailable,
    VersionConflict,
)
from everstate.http.answers import (
    JSON,
    HttpAnswer,
    HttpRequest,
    content_type_of,
    masked,
    read_kept,
)
from everstate.http.callers import TOKEN, occurred_at_of, provenance_of
from everstate.http.etags import Conditions, etag
from everstate.http.masks import Mask
from everstate.sources.crud.bodies import check_key, read_entity, read_json
from everstate.sources.crud.filters import RESERVED, Filters
from everstate.sources.crud.hidden import with_hidden
from everstate.sources.crud.patches import (
    JSON_PATCH,
    MERGE_PATCH,
    apply_json_patch,
    check_patch,
    merge,
)
from everstate.sources.stores.store import (
    AnsweredBefore,
    Once,
    Store,
    Versioned,
    Write,
    Written,
)

CHANGE_ID: Final = "Everstate-Change-Id"
VERSION: Final = "Everstate-Version"
"""The version that deleted an entity; there is no state whose ETag could name it."""
PAGE_DEFAULT: Final = 50
_TRIES_MAX: Final = 32
_REPEATED: Final = Retrying(
    retry=retry_if_exception_type(VersionConflict),
    stop=stop_after_attempt(_TRIES_MAX),
    wait=wait_random_exponential(multiplier=0.001, max=0.05),
)

Answering: TypeAlias = Callable[[Written], HttpAnswer]
Remember: TypeAlias = Callable[[Answering], Once | None]
"""Makes the :class:`Once` with which the store keeps the answer; ``None``: no Idempotency-Key."""

_LOST: Final = (AlreadyExists, InvalidBody, NotFound, PreconditionFailed, VersionConflict)
"""Refusals by the present state, which an equal request may have made."""


class Resource:
    """Handles the requests to one entity type; threads share it.

    Every write has its provenance, is one write of the store, and with an Idempotency-Key is done
    once. Every method raises everstate errors, which carry their HTTP status.
    """

    def __init__(
        self,
        store: Store,
        *,
        project: str,
        page_max: int = 500,
        message_bytes_max: int = 1_048_576,
    ) -> None:
        """``project``: name of the app, which is in the tokens of writes.

        ``message_bytes_max``: bytes that one JSON Patch may copy; no larger state can be stored.
        """
        self._project = project
        self.store, self.entity_type = store, store.entity_type
        self.name = self.entity_type.name
        self.path = f"/v1/{self.name}"
        self.page_max = page_max
        self.filters = Filters(self.entity_type)
        self._message_bytes_max = message_bytes_max

    def create(self, incoming: HttpRequest) -> HttpAnswer:
        """`POST`: a new entity, 201; raises AlreadyExists (409) with the present version."""
        content_type_of(incoming.headers, (JSON,))
        model = read_entity(self.entity_type, self._body_in(incoming))
        key = self.entity_type.key_of(model)
        said = self._said(incoming, key)

        def attempt(remember: Remember) -> HttpAnswer:
            try:
                return self._put(said, model, 0, remember)
            except VersionConflict as conflict:
                raise AlreadyExists(self.name, key, conflict.actual) from conflict

        return self._once(incoming, key, attempt)

    def read(self, incoming: HttpRequest, key: str) -> HttpAnswer:
        """`GET`: the entity with its ETag, or 304 when the reader has that version."""
        found, conditions = self.store.get(key), incoming.conditions
        if found is None:
            raise self._missing(key, self.store.deleted_version(key))
        # In a read If-None-Match means "I have this version": 304, not 412.
        Conditions(match=conditions.match).check(self.name, key, found.version)
        headers = {"ETag": etag(found.version)}
        if conditions.not_modified(found.version):
            return masked(HttpAnswer(304, headers), incoming.mask)
        return masked(HttpAnswer(200, headers, self._text(found.entity)), incoming.mask)

    def replace(self, incoming: HttpRequest, key: str) -> HttpAnswer:
        """`PUT`: the whole entity, 200, or 201 when there was none.

        Fields that the caller does not see keep their values where the body lacks them.
        """
        content_type_of(incoming.headers, (JSON,))
        given = self._body_in(incoming)
        is_partly_seen = any(incoming.mask.paths)  # who may only write sees nothing, not a part
        model = None if is_partly_seen else self._model_of(key, given)
        conditions, said = incoming.conditions, self._said(incoming, key)

        def attempt(remember: Remember) -> HttpAnswer:
            if model is not None and not conditions.given:
                return self._put(said, model, None, remember)
            present = self.store.get(key)
            version = None if present is None else present.version
            conditions.check(self.name, key, version)
            whole = self._model_of(key, self._whole(incoming, present)) if model is None else model
            return self._put(said, whole, version or 0, remember)

        return self._once(incoming, key, partial(self._retried, key, attempt))

    def patch(self, incoming: HttpRequest, key: str) -> HttpAnswer:
        """`PATCH`: a merge patch or a JSON Patch of the present state, by content type."""
        kind = content_type_of(incoming.headers, (MERGE_PATCH, JSON_PATCH))
        patch = read_json(incoming.body)
        check_patch(self.name, kind, patch)
        if kind == MERGE_PATCH:
            incoming.mask.check_written(patch)
        else:
            incoming.mask.check_operations(patch)
        said = self._said(incoming, key)

        def attempt(remember: Remember) -> HttpAnswer:
            found = self.store.get(key)
            version = None if found is None else found.version
            incoming.conditions.check(self.name, key, version)
            if found is None:
                raise self._missing(key)
            document = read_json(self.entity_type.encode(found.entity, "stored"))
            model = read_entity(
                self.entity_type, self._patched(kind, document, patch, incoming.mask)
            )
            check_key(self.entity_type, key, model)
            return self._put(said, model, found.version, remember)

        return self._once(incoming, key, partial(self._retried, key, attempt))

    def delete(self, incoming: HttpRequest, key: str) -> HttpAnswer:
        """`DELETE`: 204; its version is kept, and continues if it is created again."""
        conditions, said = incoming.conditions, self._said(incoming, key)

        def attempt(remember: Remember) -> HttpAnswer:
            expected = None
            if conditions.given:
                present = self.store.get(key)
                expected = None if present is None else present.version
                conditions.check(self.name, key, expected)
            once = remember(self._deleted)
            write = replace(said, expected_version=expected, once=once)
            return self._deleted(self.store.write(write))

        return self._once(incoming, key, partial(self._retried, key, attempt))

    def list(self, incoming: HttpRequest, parameters: Sequence[tuple[str, str]]) -> HttpAnswer:
        """`GET` of all: a page of entities by filters, with the cursor of the next one."""
        own: dict[str, str] = {}
        for name, value in parameters:
            if name in RESERVED:
                if name in own:
                    raise InvalidQuery(f"{name} is given twice.")
                own[name] = value
        limit = self._limit(own.get("limit"))
        equal = self.filters.parse(parameters)
        for field in equal:
            incoming.mask.refuse((field,), "a filter on")
        page = self.store.page(limit=limit, cursor=own.get("cursor"), equal=equal)
        items = [
            {
                "key": self.entity_type.key_of(found.entity),
                "version": found.version,
                "state": msgspec.Raw(
                    incoming.mask.json(self.entity_type.encode(found.entity, "stored"))
                ),
            }
            for found in page.entities
        ]
        body = msgspec.json.encode({"items": items, "next": page.cursor}).decode()
        return HttpAnswer(200, {}, body)

    def _patched(self, kind: str, document: Any, patch: Any, mask: Mask) -> bytes:
        try:
            if kind == MERGE_PATCH:
                return encode(merge(document, patch, tree_of(self.entity_type.model)))
            limit = self._message_bytes_max
            patched = apply_json_patch(self.name, document, patch, copied_bytes_max=limit)
            return encode(patched)
        except InvalidBody as cause:
            if not mask:
                raise
            # The reasons of the library quote the document.
            where = [(place, "the operation cannot be applied") for place, _ in cause.problems]
            raise InvalidBody(self.name, tuple(where)) from None
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
        self, said: Write, model: BaseModel, expected: int | None, remember: Remember
    ) -> HttpAnswer:
        def answer(written: Written) -> HttpAnswer:
            return self._stored(written, written.entity or model)

        once = remember(answer)
        write = replace(said, entity=model, expected_version=expected, once=once)
        return answer(self.store.write(write))

    def _model_of(self, key: str, body: bytes) -> BaseModel:
        """The entity of a key in a body; raises InvalidRequest and InvalidBody."""
        model = read_entity(self.entity_type, body)
        check_key(self.entity_type, key, model)
        return model

    def _body_in(self, incoming: HttpRequest) -> bytes:
        if incoming.mask:
            incoming.mask.check_written(read_json(incoming.body))
        return incoming.body

    def _whole(self, incoming: HttpRequest, present: Versioned | None) -> bytes:
        """The body with what its caller does not see of the present entity."""
        given = read_json(incoming.body)
        if present is None or not isinstance(given, dict):
            return incoming.body
        stored = read_json(self.entity_type.encode(present.entity, "stored"))
        return encode(with_hidden(incoming.mask, self.entity_type.model, given, stored))

    def _once(
        self, incoming: HttpRequest, key: str, attempt: Callable[[Remember], HttpAnswer]
    ) -> HttpAnswer:
        """Do a write; with an Idempotency-Key only once, repeating the first answer."""
        return masked(self._answer_once(incoming, key, attempt), incoming.mask)

    def _answer_once(
        self, incoming: HttpRequest, key: str, attempt: Callable[[Remember], HttpAnswer]
    ) -> HttpAnswer:
        if incoming.idempotency_key is None:
            return attempt(lambda _: None)
        once_id, fingerprint = incoming.once_id, incoming.fingerprint

        def remember(answering: Answering) -> Once:
            return Once(
                id=once_id,
                fingerprint=fingerprint,
                answer=lambda written: answering(written).kept(),
            )

        # Asked before the request is judged: its own write may be what it would be refused for.
        asked = remember(self._done)
        before = self._answered(incoming, key, asked)
        if before is not None:
            return before
        try:
            return attempt(remember)
        except AnsweredBefore:
            said = "the same request is being processed; send it again."
            refusal: EverstateError = Unavailable(said, public=said)
        except _LOST as lost:
            # An equal concurrent request may have come first, and this one saw its effect.
            refusal = lost
        before = self._answered(incoming, key, asked)
        if before is None:
            raise refusal
        return before

    def _answered(self, incoming: HttpRequest, key: str, once: Once) -> HttpAnswer | None:
        kept = self.store.answer_of(once, key)
        if kept is None:
            return None
        if kept.fingerprint != incoming.fingerprint:
            raise IdempotencyKeyReused(str(incoming.idempotency_key))
        return read_kept(kept.answer)

    def _retried(
        self, key: str, attempt: Callable[[Remember], HttpAnswer], remember: Remember
    ) -> HttpAnswer:
        """Read and write again when another writer wrote in between.

        Raises PreconditionFailed when a condition of the request no longer holds.
        """
        try:
            return _REPEATED(attempt, remember)
        except RetryError as lost:
            said = f"{self.name} {key!r}: {_TRIES_MAX} attempts conflicted with other writers"
            said = f"{said}; nothing was written."
            raise Unavailable(said, public=said) from lost.last_attempt.exception()

    def _said(self, incoming: HttpRequest, key: str) -> Write:
        """Provenance and time of a write of this key; checked before anything is read."""
        given = incoming.headers, incoming.caller
        provenance = provenance_of(*given, api_version="v1", entity=self.name, key=key)
        return Write(key=key, provenance=provenance, occurred_at=occurred_at_of(incoming.headers))

    def _missing(self, key: str, version: int | None = None) -> NotFound:
        """The error for no entity; ``version``: the one that deleted it."""
        if version is None:
            return NotFound(f"{self.name} {key!r} does not exist.")
        return Deleted(f"{self.name} {key!r} was deleted at version {version}.", version)

    def _text(self, entity: BaseModel) -> str:
        return self.entity_type.encode(entity, "stored").decode()

    def _done(self, written: Written) -> HttpAnswer:
        """The answer to a write that was done before."""
        if written.entity is None:
            return self._deleted(written)
        return self._stored(written, written.entity)

    def _stored(self, written: Written, entity: BaseModel) -> HttpAnswer:
        headers = {"ETag": etag(written.version), TOKEN: self._token(written)}
        if written.change_id is not None:
            headers[CHANGE_ID] = str(written.change_id)
        if written.kind is Kind.CREATED:
            headers["Location"] = f"{self.path}/{quote(written.key, safe='')}"
        status = 201 if written.kind is Kind.CREATED else 200
        return HttpAnswer(status, headers, self._text(entity))

    def _deleted(self, written: Written) -> HttpAnswer:
        headers = {VERSION: str(written.version), CHANGE_ID: str(written.change_id)}
        return HttpAnswer(204, {**headers, TOKEN: self._token(written)})

    def _token(self, written: Written) -> str:
        return str(written_token(self._project, self.name, written.key, written.version))
