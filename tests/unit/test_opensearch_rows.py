"""How rows become documents of OpenSearch and come back, and what its answers mean."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any, Final

import httpx
import pyarrow as pa
import pytest
from pydantic import SecretStr

from everstate.config import Config
from everstate.errors import InvalidView
from everstate.sections import StoresConfig, ViewServerConfig
from everstate.views.stores import opensearch
from everstate.views.stores.documents import reader
from everstate.views.stores.opensearch import OpenSearchRows, document_id
from everstate.views.tables import KeptTable
from kit.row_values import KINDS

URL: Final = "http://reader:secret@search:9200"
TABLE: Final = KeptTable(view="found", version=2, fingerprint="f", merge="row")
INDEX: Final = "everstate_views.found__v2"


class Server:
    """Answers requests as OpenSearch would, and keeps them."""

    def __init__(self) -> None:
        self.requests: list[httpx.Request] = []
        self.answer: Callable[[httpx.Request], Any] = lambda _request: {"errors": False}
        self.status = 200

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        given = self.answer(request)
        if isinstance(given, str):
            return httpx.Response(self.status, text=given)
        return httpx.Response(self.status, json=given)

    def refuse(self, status: int, kind: str, reason: str = "no") -> None:
        self.status = status
        self.answer = lambda _request: {"error": {"type": kind, "reason": reason}}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    found = Server()
    with httpx.Client(base_url=URL, transport=httpx.MockTransport(found)) as client:
        monkeypatch.setattr(opensearch, "_client", lambda server: {URL: client}[server.url])
        yield found


@pytest.fixture
def store() -> OpenSearchRows:
    return OpenSearchRows(with_url(URL))


def with_url(url: str) -> Config:
    return Config(stores=StoresConfig().with_url("opensearch", url))


def schema_of(kind: pa.DataType) -> pa.Schema:
    return pa.schema([("_key", pa.string()), ("_version", pa.int64()), ("value", kind)])


def written(kind: pa.DataType, values: list[Any]) -> pa.Table:
    rows = [{"_key": str(n), "_version": n + 1, "value": each} for n, each in enumerate(values)]
    return pa.Table.from_pylist(rows, schema_of(kind))


GONE: Final = pa.table({"_key": ["x"], "_version": pa.array([9], pa.int64())})
NONE: Final = GONE.slice(0, 0)


def documents(request: httpx.Request) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    lines = [json.loads(line) for line in request.content.splitlines()]
    return [(at["index"], row) for at, row in zip(lines[::2], lines[1::2], strict=True)]


def test_what_is_not_a_number_is_kept(server: Server, store: OpenSearchRows) -> None:
    """JSON has no NaN: a document has its text."""
    store.write(TABLE, written(pa.list_(pa.float64()), [[math.nan, 1.0]]), NONE)
    ((_, row),) = documents(server.requests[0])
    assert row["value"] == ["nan", 1.0]
    (value,) = reader(pa.list_(pa.float64()))(row["value"])[:1]
    assert math.isnan(value)


def test_a_document_has_its_rows_version_and_a_deletion_is_a_document(
    server: Server, store: OpenSearchRows
) -> None:
    store.write(TABLE, written(pa.string(), ["a"]), GONE)
    (request,) = server.requests
    assert request.url.path == f"/{INDEX}.writes/_bulk"
    assert request.url.params["require_alias"] == "true"
    assert request.headers["authorization"].startswith("Basic ")
    assert documents(request) == [
        (
            {"_id": "0", "version": 1, "version_type": "external"},
            {"_key": "0", "value": "a"},
        ),
        (
            {"_id": "x", "version": 9, "version_type": "external"},
            {"_key": "x", "_gone": True},
        ),
    ]


def test_rows_of_changes_have_a_document_each(server: Server, store: OpenSearchRows) -> None:
    table = KeptTable(view="found", version=2, fingerprint="f", merge="append")
    rows = pa.table({"_key": ["a", "a"], "_version": pa.array([1, 2], pa.int64())})
    store.write(table, rows, NONE)
    assert [at["_id"] for at, _ in documents(server.requests[0])] == ["1:a", "2:a"]


def test_ids_of_documents_are_keys_where_they_can_be() -> None:
    assert document_id("o-1") == "o-1"
    long, digest = "é" * 257, document_id("é" * 257)
    odd = [long, "", digest, "é" * 256, "x" * 600]
    assert len({document_id(each) for each in odd}) == len(odd)
    assert document_id("é" * 256) == "é" * 256
    assert all(0 < len(document_id(each).encode()) <= 512 for each in odd)


def test_many_rows_are_several_requests(server: Server, store: OpenSearchRows) -> None:
    store.write(TABLE, written(pa.string(), ["x" * 1_500_000] * 5), NONE)
    sizes = [len(request.content) for request in server.requests]
    assert len(sizes) == 3
    assert max(sizes) < 4_000_000


def item(status: int, kind: str, reason: str) -> dict[str, Any]:
    cause = {"type": "number_format_exception", "reason": "For input string: 'Ann'"}
    error = {"type": kind, "reason": reason, "caused_by": cause}
    return {"index": {"status": status, "error": error}}


OLDER: Final = item(409, "version_conflict_engine_exception", "[0]: version conflict")
REFUSALS: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "busy": (
        item(429, "rejected_execution_exception", "queue is full"),
        "429 rejected_execution_exception: queue is full",
    ),
    "a field": (
        item(
            400,
            "mapper_parsing_exception",
            "failed to parse field [age] of type [long] in document with id '0'. Preview: 'Ann'",
        ),
        r"400 mapper_parsing_exception: failed to parse field \[age\] of type \[long\]$",
    ),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_every_item_of_a_bulk_request_is_looked_at(
    what: str, server: Server, store: OpenSearchRows
) -> None:
    refused, said = REFUSALS[what]
    server.answer = lambda _request: {"errors": True, "items": [OLDER, {"index": {}}, refused]}
    with pytest.raises(OSError, match=said):
        store.write(TABLE, written(pa.string(), ["a"]), NONE)


def test_an_index_has_a_field_for_each_column(server: Server, store: OpenSearchRows) -> None:
    fields = [(name, kind) for name, (kind, _) in KINDS.items()]
    schema = pa.schema([("_key", pa.string()), ("_version", pa.int64()), *fields])
    store.install(TABLE, schema)
    (request,) = server.requests
    assert (request.method, request.url.path) == ("PUT", f"/{INDEX}")
    body = json.loads(request.content)
    assert body["aliases"] == {f"{INDEX}.writes": {}}
    assert body["mappings"]["dynamic"] == "strict"
    found = body["mappings"]["properties"]
    assert {name: each.get("type") for name, each in found.items()} == {
        "_key": "keyword",
        "_gone": "boolean",
        "text": "text",
        "whole": "long",
        "double": "double",
        "exact": "double",
        "small": "double",
        "yes": "boolean",
        "day": "date",
        "zoned": "date",
        "local": "date",
        "list": "double",
        "struct": None,
        "map": "object",
    }
    assert {name: each["type"] for name, each in found["struct"]["properties"].items()} == {
        "a": "long",
        "b": "date",
    }


UNFIT: Final[dict[str, tuple[pa.Field[Any], str]]] = {
    "nanoseconds": (pa.field("c", pa.timestamp("ns")), r"'c' is timestamp\[ns\], which .* exactly"),
    "bytes": (pa.field("c", pa.list_(pa.binary())), "'c' is binary, which .* exactly"),
    "a map of bytes": (pa.field("c", pa.map_(pa.string(), pa.binary())), "'c' is binary"),
    "its own name": (pa.field("_source", pa.string()), "names of its own .* '_source'"),
    "a path": (pa.field("a.b", pa.string()), r"no field with the name 'a\.b'"),
    "a path inside": (pa.field("c", pa.struct([("a.b", pa.int64())])), r"the name 'a\.b'"),
    "blank": (pa.field(" ", pa.string()), "no field with the name ' '"),
}


@pytest.mark.parametrize("what", UNFIT)
def test_a_column_that_cannot_be_kept_is_refused(
    what: str, server: Server, store: OpenSearchRows
) -> None:
    field, reason = UNFIT[what]
    with pytest.raises(InvalidView, match=reason):
        store.install(TABLE, pa.schema([field]))
    assert server.requests == []


def test_what_opensearch_refuses_of_an_index_is_the_views_error(
    server: Server, store: OpenSearchRows
) -> None:
    server.refuse(400, "resource_already_exists_exception")
    store.install(TABLE, schema_of(pa.string()))
    server.refuse(400, "illegal_argument_exception", "Limit of total fields [1000]")
    with pytest.raises(InvalidView, match=r"does not take its columns: 400 .*total fields"):
        store.install(TABLE, schema_of(pa.string()))
    for status, kind in ((400, "validation_exception"), (503, "cluster_block_exception")):
        server.refuse(status, kind)
        with pytest.raises(OSError, match=f"{status} {kind}: no"):
            store.install(TABLE, schema_of(pa.string()))


def test_what_is_not_there_is_dropped_and_withdrawn(server: Server, store: OpenSearchRows) -> None:
    server.refuse(404, "index_not_found_exception")
    store.drop(TABLE.name)
    server.refuse(404, "aliases_not_found_exception")
    store.unpublish("found")
    server.refuse(404, "something_else")
    with pytest.raises(OSError, match="404 something_else"):
        store.drop(TABLE.name)


def test_answers_that_are_not_of_opensearch_and_parts_that_fail_are_errors(
    server: Server, store: OpenSearchRows
) -> None:
    server.status, server.answer = 502, lambda _request: "<html>Bad gateway: reader:secret</html>"
    with pytest.raises(OSError, match=r"^502 Bad Gateway$"):
        store.drop(TABLE.name)
    server.status, server.answer = 405, lambda _request: {"error": "Incorrect HTTP method"}
    with pytest.raises(OSError, match=r"^405 Method Not Allowed$"):
        store.drop(TABLE.name)
    server.status, server.answer = 200, lambda _request: {"_shards": {"failed": 1}}
    with pytest.raises(OSError, match=f"some shards of /{INDEX}/_refresh do not answer"):
        list(store.rows(TABLE, schema_of(pa.string())))


def test_the_login_of_the_settings_is_sent() -> None:
    login = ViewServerConfig(url="https://search:9200", user="ann", password=SecretStr("secret"))
    with opensearch._client(login) as client:
        assert isinstance(client.auth, httpx.BasicAuth)
        request = next(client.auth.auth_flow(client.build_request("GET", "/x")))
    assert request.headers["authorization"] == "Basic YW5uOnNlY3JldA=="
    assert str(request.url) == "https://search:9200/x"
