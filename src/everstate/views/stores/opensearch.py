"""Views in OpenSearch: an index for each version, and an alias under which readers find one.

A document is written with its row's version as its external version, so that OpenSearch itself
refuses an older write. Such versions last as long as a document; that of a deleted document is
forgotten, after a minute or with a restart. So a deletion is a document, which is marked and which
no reader of the alias finds, and it stays until its version of the view is dropped.
"""

from __future__ import annotations

import atexit
import json
import ssl
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import sha256
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Final

import pyarrow as pa

from everstate.config import Config
from everstate.errors import InvalidView, ViewRowsMissing
from everstate.sections import ViewServerConfig
from everstate.views.stores.documents import batch, finite, text
from everstate.views.stores.store import HEADLINE, RANK
from everstate.views.tables import KeptTable, Merge

if TYPE_CHECKING:
    import httpx

_KEY, _VERSION, _GONE = "_key", "_version", "_gone"
_ALIVE: Final = {"bool": {"must_not": {"term": {_GONE: True}}}}
_HASHED: Final = "sha256:"
_ID_BYTES_MAX: Final = 512
_KEYWORD: Final = {"type": "keyword", "ignore_above": 8191}
"""Lucene's terms have 32,766 bytes at most; a longer text is kept, and found by its words."""
_MARKS: Final = {"pre_tags": ["**"], "post_tags": ["**"], "number_of_fragments": 2}
_BULK_CHARACTERS: Final = 4_000_000
_PAGE_ROWS: Final = 2_000
_SCROLL: Final = "5m"
_CONFLICT: Final = "version_conflict_engine_exception"
_PRESENT: Final = ("resource_already_exists_exception",)
_NO_INDEX: Final = "index_not_found_exception"
_ABSENT: Final = (_NO_INDEX, "aliases_not_found_exception")
_FULL: Final = "validation_exception"
"""The cluster has as many shards as it may have."""


class OpenSearchRows:
    """The store `opensearch`, at the address in `[stores.opensearch]`."""

    merges: ClassVar[frozenset[Merge]] = frozenset({"row", "append"})
    call_s_max: ClassVar[float] = 60.0

    def __init__(self, config: Config) -> None:
        self._server = config.stores.server("opensearch")
        self._prefix = f"{config.views.schema_name}."

    def install(self, table: KeptTable, schema: pa.Schema) -> None:
        """Create an index for the columns; raises InvalidView for types it cannot hold exactly."""
        columns = [field for field in schema if field.name not in (_KEY, _VERSION)]
        for field in columns:
            if field.name.startswith("_"):
                reason = (
                    f"OpenSearch has names of its own that begin with _, as {field.name!r} does"
                )
                raise InvalidView(table.view, f"{reason}.", advice="Give the column another name.")
        fields = {field.name: _mapping(table.view, field) for field in columns}
        properties = {_KEY: _KEYWORD, _GONE: {"type": "boolean"}, **fields}
        mappings = {"dynamic": "strict", "properties": properties}
        index = self._index(table.name)
        body = {"mappings": mappings, "aliases": {_writes(index): {}}}
        try:
            self._ask("PUT", f"/{index}", body, allowed=_PRESENT)
        except RequestRefused as refused:
            if refused.status != 400 or refused.error["type"] == _FULL:
                raise
            reason = f"OpenSearch does not take its columns: {refused}."
            raise InvalidView(table.view, reason) from None

    def write(self, table: KeptTable, rows: pa.Table, gone: pa.Table) -> None:
        """Write documents of rows, and those that mark the keys of ``gone`` as deleted."""
        index = self._index(table.name)
        place = f"/{_writes(index)}/_bulk?require_alias=true"
        for body in _bodies(_lines(table.merge, rows, gone)):
            with _must_be_there(table.view, index):
                self._write(place, body)

    def _write(self, place: str, lines: str) -> None:
        answer = self._ask("POST", place, lines)
        for item in answer["items"] if answer["errors"] else ():
            refused = item["index"].get("error")
            # An older write than the present one: it must not win.
            if refused is not None and refused["type"] != _CONFLICT:
                raise RequestRefused(item["index"]["status"], refused)

    def rows(self, table: KeptTable, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """All rows of an index at one moment, in the columns of ``schema``."""
        index = self._index(table.name)
        with _must_be_there(table.view, index):
            self._ask("POST", f"/{index}/_refresh")
        query = {"size": _PAGE_ROWS, "version": True, "query": _ALIVE, "sort": ["_doc"]}
        page = self._ask("POST", f"/{index}/_search?scroll={_SCROLL}", query)
        try:
            while hits := page["hits"]["hits"]:
                yield _batch(hits, schema)
                again = {"scroll": _SCROLL, "scroll_id": page["_scroll_id"]}
                page = self._ask("POST", "/_search/scroll", again)
        finally:
            with suppress(Exception):  # OpenSearch forgets it by itself, five minutes later
                self._ask("DELETE", "/_search/scroll", {"scroll_id": [page["_scroll_id"]]})

    def search(
        self, table: KeptTable, schema: pa.Schema, words: str, limit: int, *, fresh: bool
    ) -> pa.Table:
        """The best rows in whose texts all words are, with `_rank` and `_headline` behind.

        ``words``: OpenSearch's simple query string. Without ``fresh``, rows that were written after
        the last refresh of the index are not found.
        """
        index = self._index(table.name)
        texts = [f.name for f in schema if pa.types.is_string(f.type) and f.name != _KEY]
        has = {"query": words, "fields": texts, "default_operator": "and"}
        query = {
            "size": limit,
            "version": True,
            "query": {"bool": {**_ALIVE["bool"], "must": {"simple_query_string": has}}},
            "sort": ["_score", _KEY],
            "highlight": _MARKS | {"fields": {name: {} for name in texts}},
        }
        with _must_be_there(table.view, index):
            if fresh:
                self._ask("POST", f"/{index}/_refresh")
            place = f"/{index}/_search?allow_partial_search_results=false"
            hits = self._ask("POST", place, query)["hits"]["hits"]
        found = pa.Table.from_batches([_batch(hits, schema)])
        ranks = pa.array([hit["_score"] for hit in hits], pa.float64())
        shown = [" … ".join(chain(*hit.get("highlight", {}).values())) for hit in hits]
        return found.append_column(RANK, ranks).append_column(
            HEADLINE, pa.array(shown, pa.string())
        )

    def drop(self, name: str) -> None:
        """Delete an index; nothing if there is none."""
        self._ask("DELETE", f"/{self._index(name)}", allowed=_ABSENT)

    def publish(self, view: str, name: str) -> None:
        """Let the alias of a view lead to another index, in one step."""
        alias, index = self._index(view), self._index(name)
        before = {"index": f"{alias}__v*", "alias": alias, "must_exist": False}
        after = {"index": index, "alias": alias, "filter": _ALIVE}
        with _must_be_there(view, index):
            self._ask("POST", "/_aliases", {"actions": [{"remove": before}, {"add": after}]})

    def unpublish(self, view: str) -> None:
        """Remove the alias of a view."""
        alias = self._index(view)
        place = f"/{alias}__v*/_alias/{alias}"
        self._ask("DELETE", place, allowed=_ABSENT)

    def _index(self, name: str) -> str:
        return self._prefix + name

    def _ask(self, method: str, place: str, body: Any = None, allowed: Sequence[str] = ()) -> Any:
        """The answer to a request, or None for an error that is ``allowed``; raises RequestRefused.

        A body of text is one of lines. A part of an index that does not answer is an error, too.
        """
        is_lines = isinstance(body, str)
        kind = "application/x-ndjson" if is_lines else "application/json"
        content = body if is_lines or body is None else json.dumps(body)
        headers = {"Content-Type": kind} if content else {}
        found = _client(self._server).request(method, place, content=content, headers=headers)
        try:
            answer = found.json()
        except ValueError:  # of something else between here and OpenSearch
            raise OSError(f"{found.status_code} {found.reason_phrase}") from None
        if found.is_success:
            if answer.get("_shards", {}).get("failed"):
                raise OSError(f"some shards of {place} do not answer")
            return answer
        error = answer.get("error")
        if not isinstance(error, dict):
            raise OSError(f"{found.status_code} {found.reason_phrase}")
        if error["type"] in allowed:
            return None
        raise RequestRefused(found.status_code, error)


class RequestRefused(OSError):
    """OpenSearch answered with an error."""

    def __init__(self, status: int, error: Any) -> None:
        """``error`` as in the answer, whose causes may have values of the document."""
        self.status, self.error = status, error
        reason = str(error["reason"]).partition(" in document with id")[0]
        super().__init__(f"{status} {error['type']}: {reason}")


@contextmanager
def _must_be_there(view: str, index: str) -> Iterator[None]:
    """Raise ViewRowsMissing when OpenSearch refuses a request because it has no such index."""
    try:
        yield
    except RequestRefused as refused:
        if refused.error["type"] != _NO_INDEX:
            raise
        raise ViewRowsMissing(view, index) from None


@cache
def _client(server: ViewServerConfig) -> httpx.Client:
    """The connections of this process to a server; no message has its login."""
    import httpx

    if not server.url:
        raise ConnectionError("stores.opensearch.url is not set, and no OpenSearch is started here")
    secret = server.password.get_secret_value() if server.password else ""
    client = httpx.Client(
        base_url=server.url,
        auth=(server.user, secret) if server.user else None,
        verify=ssl.create_default_context(cafile=server.ssl_cafile),
        timeout=OpenSearchRows.call_s_max,
    )
    atexit.register(client.close)
    return client


def _writes(index: str) -> str:
    """The alias to which documents are written: OpenSearch makes no index for a missing alias."""
    return f"{index}.writes"


def _lines(merge: Merge, rows: pa.Table, gone: pa.Table) -> Iterator[str]:
    """The lines of a bulk request: one that says where, and a document."""
    marked = ({**row, _GONE: True} for row in gone.to_pylist())
    for row in (*rows.to_pylist(maps_as_pydicts="strict"), *marked):
        version = row.pop(_VERSION)
        found = row[_KEY] if merge == "row" else f"{version}:{row[_KEY]}"
        place = {"_id": document_id(found), "version": version, "version_type": "external"}
        yield f"{json.dumps({'index': place})}\n{_document(row)}\n"


def _bodies(lines: Iterable[str]) -> Iterator[str]:
    """Lines in parts that are below the limit of a request."""
    part, characters = list[str](), 0
    for line in lines:
        if part and characters + len(line) > _BULK_CHARACTERS:
            yield "".join(part)
            part, characters = [], 0
        part.append(line)
        characters += len(line)
    if part:
        yield "".join(part)


def _batch(hits: Sequence[Any], schema: pa.Schema) -> pa.RecordBatch:
    """Documents as rows in the columns of a schema."""
    return batch([{**hit["_source"], _VERSION: hit["_version"]} for hit in hits], schema)


def document_id(key: str) -> str:
    """The `_id` of the document of a key: the key itself, or a digest of one that cannot be it."""
    if key and not key.startswith(_HASHED) and len(key.encode()) <= _ID_BYTES_MAX:
        return key
    return _HASHED + sha256(key.encode()).hexdigest()


def _document(row: dict[str, Any]) -> str:
    try:
        return json.dumps(row, default=text, allow_nan=False)
    except ValueError:
        return json.dumps(finite(row), default=text)


def _mapping(view: str, field: pa.Field[Any]) -> dict[str, Any]:
    """How a column is searched; its document has each value exactly, whatever this is.

    Decimals are texts in documents: a number would be read as a double by most clients. They are
    searched as doubles, so that ranges are those of numbers. Moments are searched by milliseconds.
    """
    kind, types = field.type, pa.types
    if not field.name.strip() or "." in field.name:
        raise InvalidView(view, f"OpenSearch has no field with the name {field.name!r}.")
    if types.is_list(kind) or types.is_large_list(kind):
        return _mapping(view, kind.value_field.with_name(field.name))
    if types.is_struct(kind):
        return {"properties": {each.name: _mapping(view, each) for each in kind}}
    if types.is_map(kind):
        _mapping(view, kind.item_field.with_name(field.name))
        return {"type": "object", "enabled": False}
    if types.is_string(kind) or types.is_large_string(kind):
        return {"type": "text", "fields": {"keyword": _KEYWORD}}
    if types.is_boolean(kind):
        return {"type": "boolean"}
    if types.is_signed_integer(kind):
        return {"type": "long"}
    if types.is_floating(kind) or types.is_decimal(kind):
        return {"type": "double", "ignore_malformed": True}  # NaN is kept, and not found
    if types.is_date(kind) or (types.is_timestamp(kind) and kind.unit != "ns"):
        return {"type": "date"}
    raise InvalidView(
        view,
        f"the column {field.name!r} is {kind}, which OpenSearch cannot keep exactly.",
        advice="CAST it to text.",
    )
