"""What somebody outside may send to a running project, by PostgreSQL, Kafka and HTTP; seeded.

Each door sends one thing at a time, valid or with something wrong in it, and returns what is wrong
with the answer: a refusal without a reason, or a server's error.
"""

from __future__ import annotations

import json
import random
import socket
from abc import ABC, abstractmethod
from collections import Counter
from http.client import HTTPException, HTTPResponse
from uuid import uuid4

import psycopg

from everstate.config import Config
from everstate.errors import EverstateError
from everstate.log.producer import Producer
from everstate.log.topics import TopicNames

_PATIENCE_S = 60.0
_DEEP = ("[" * 150 + "]" * 150, "[" * 20_000 + "]" * 20_000, '{"a":' * 2_000 + "1" + "}" * 2_000)
_VALUES = (
    *("null", "1", "-1", "1e400", "1e-400", "123456789012345678901234567890", "NaN", "Infinity"),
    *('""', "[]", "{}", "true", '"', "{", "[1,", '[["a"]]', '{"a":"b"}', '[{"a":"b"}]'),
    *('"\\u0000"', '"\\ud800"', '"🙂"', '"\\u202e"', '"."', '".."', '"a/b?c#d"', '"%00"'),
    *('"2026-01-01T24:00:00Z"', '"9999-12-31T23:59:59-12:00"', '"0001-01-01T00:00:00+14:00"'),
    *('"2099-01-01T00:00:00Z"', '"2026-01-01T00:00:60Z"', '"2026-01-01"', '"created"'),
    *(json.dumps("x" * 3_000), json.dumps("x" * 20_000), json.dumps("x" * 1_500_000)),
    *_DEEP,
)
_BYTES = (
    b"",
    b"\x00",
    b"\xff\xfe",
    b"\xed\xa0\x80",
    b"\xef\xbb\xbf{}",
    b"{}",
    b"null",
    b"x" * 70_000,
)
"""Also a surrogate in UTF-8, and a byte order mark."""
_HEADER_TEXTS = (
    b"",
    b"x",
    b"\xff",
    b"7",
    None,
    b"transaction",
    b"source",
    b"message",
    b"c" * 9_000,
)
KEYS = ("fuzz-1", "fuzz-2", "fuzz-3", "fuzz ü/%?#", "fuzz-" + "k" * 2_040, "fuzz-" + "k" * 3_000)


def wrong_json(fields: dict[str, str], source: random.Random) -> bytes:
    """A JSON object of these members' texts, with something wrong in it, or nothing."""
    changed = dict(fields)
    for _ in range(source.choice((0, 1, 1, 2))):
        changed[source.choice((*fields, "more"))] = source.choice(_VALUES)
    if source.random() < 0.1:
        changed.pop(source.choice(tuple(fields)), None)
    text = "{" + ",".join(f"{json.dumps(name)}:{value}" for name, value in changed.items()) + "}"
    value = text.encode(errors="surrogatepass")
    if source.random() < 0.15:
        at = source.randrange(len(value))
        value = source.choice(
            (value[:at], value[:at] + b"\xff" + value[at:], source.choice(_BYTES))
        )
    return value


class Door(ABC):
    """One way in for strangers; what it finds wrong is in :attr:`found`."""

    def __init__(self, config: Config, seed: int) -> None:
        self.config, self.source = config, random.Random(seed)
        self.outcomes: Counter[str] = Counter()
        self.found: list[str] = []

    @abstractmethod
    def step(self) -> None:
        """Send one thing."""

    def close(self) -> None:  # noqa: B027 (one door has no connection to close)
        """Close the connections."""

    def _refused(self, what: str, reason: str) -> None:
        self.outcomes[f"{what} refused"] += 1
        if len(reason.strip()) < 5:
            self.found.append(f"{what} was refused without a reason")

    def key(self) -> str:
        """A key that is no key of the load."""
        return self.source.choice((*KEYS, f"fuzz-{self.source.randrange(10_000)}"))


class PostgresDoor(Door):
    """`emit`, `emit_event`, and messages with our prefix in the write-ahead log."""

    def __init__(self, config: Config, seed: int) -> None:
        super().__init__(config, seed)
        self._connection = psycopg.connect(config.store_dsn, autocommit=True)

    def close(self) -> None:
        self._connection.close()

    def step(self) -> None:
        what = self.source.choice((self._message, self._emit, self._emit, self._event))
        name = what.__name__.strip("_")
        try:
            what()
        except (psycopg.Error, UnicodeEncodeError) as cause:
            state = getattr(cause, "sqlstate", "") or ""
            self._refused(f"postgres {name}", str(cause))
            if state.startswith(("XX", "57", "58", "08")):
                self.found.append(f"postgres {name}: {state} {cause}")
        else:
            self.outcomes[f"postgres {name} taken"] += 1

    def _text(self, **fields: str) -> str:
        return wrong_json(fields, self.source).decode(errors="replace")

    def _message(self) -> None:
        prefix = self.source.choice(("everstate", "everstate_store", "everstate_outbox", "shop"))
        content = self._text(xid='"x"', entity='"order"', key='"load-1"')[:200_000]
        run = "SELECT pg_logical_emit_message(true, %s, %s)"
        self._connection.execute(run, [prefix, content.replace("\0", "")])

    def _more(self) -> tuple[str, str, str | None]:
        """Provenance, event and time."""
        who = self._text(apiVersion='"v1"', serviceName='"fuzz"', identifier='"f"', actor='"a"')
        event = self._text(type='"Fuzzed"', data='{"a":1}')
        times = (None, "2026-01-01T00:00:00Z", "2026-01-01T24:00:00Z", "2099-01-01T00:00:00Z", "x")
        return who, event, self.source.choice(times)

    def _emit(self) -> None:
        key = self.key()
        after = self._text(
            order_id=json.dumps(key), note='"n"', amount="1", price="1.5", lines="[]"
        )
        run = "SELECT everstate_store.emit(%s, %s, %s, %s, %s, %s, %s, chain => %s)"
        chain = self.source.choice(("strict", "mend", "x"))
        entity = self.source.choice((*["order"] * 9, "visit", "nothing"))
        self._connection.execute(run, [entity, key, None, after, *self._more(), chain])

    def _event(self) -> None:
        key = f"fuzz-{uuid4()}" if self.source.random() < 0.8 else self.key()
        fact = self._text(visit_id=json.dumps(key), page='"p"')
        run = "SELECT everstate_store.emit_event(%s, %s, %s, %s, %s, %s)"
        self._connection.execute(run, ["visit", key, fact, *self._more()])


class KafkaDoor(Door):
    """Records in the topics of the project, also in those that only its roles write."""

    def __init__(self, config: Config, seed: int) -> None:
        super().__init__(config, seed)
        self._producer: Producer | None = None
        self._names = TopicNames(config.log.prefix)
        self._many = (
            *[self._command] * 4,
            *(self._change, self._change, self._reply, self._row, self._row, self._other),
        )

    def close(self) -> None:
        if self._producer is not None:
            self._producer.close()

    def step(self) -> None:
        topic, key, value, headers = self.record()
        if self._producer is None:
            self._producer = Producer(self.config)
        try:
            self._producer.send_raw(topic, key, value, headers)
            self._producer.flush()
        except EverstateError as cause:
            self._refused("kafka record", cause.message)
        else:
            self.outcomes[f"kafka {topic.split('.', 1)[1]}"] += 1

    def record(self) -> tuple[str, bytes | None, bytes | None, list[tuple[str, bytes | None]]]:
        """Topic, key, value and headers of the next record."""
        topic, key, value = self.source.choice(self._many)()
        if self.source.random() < 0.1:
            value = self.source.choice((None, *_BYTES))
        names = ("replay", "discard", "client", "offset", "batch", "tails", "ce_id", "kind", "kind")
        headers = [
            (self.source.choice((*names, "everstate_offset")), self.source.choice(_HEADER_TEXTS))
            for _ in range(self.source.choice((0, 0, 1, 3)))
        ]
        return topic, key, value, headers

    def _command(self) -> tuple[str, bytes | None, bytes | None]:
        key = self.key()
        kind, data = self.source.choice(
            (
                ("Open", f'{{"account_id":{json.dumps(key)},"owner":"Eva"}}'),
                ("Deposit", '{"amount":1}'),
                ("Withdraw", '{"amount":1000000}'),
                ("Split", json.dumps({"amounts": [1] * self.source.choice((*[1, 3] * 20, 6_000))})),
                ("Audit", "{}"),
            )
        )
        value = wrong_json(
            {
                "id": json.dumps(str(uuid4())),
                "entity": '"account"',
                "key": json.dumps(key),
                "command": f'"{kind}"',
                "data": data,
                "occurredAt": '"2026-01-01T00:00:00Z"',
                "provenance": '{"api_version":"v1","service_name":"s","identifier":"i"}',
                "expectedVersion": "null",
                "ifMatch": "null",
            },
            self.source,
        )
        return self._names.commands("account"), key.encode(), value

    def _change(self) -> tuple[str, bytes | None, bytes | None]:
        entity = self.source.choice(("order", "visit", "account", "item"))
        key = f"fuzz-{uuid4()}" if self.source.random() < 0.5 else self.key()
        id_of = {"order": "order_id", "visit": "visit_id", "account": "account_id", "item": "id"}
        kind = "event" if entity == "visit" else self.source.choice(("created", "updated"))
        value = wrong_json(
            {
                "id": json.dumps(str(uuid4())),
                "entity": json.dumps(entity),
                "schemaVersion": "1",
                "key": json.dumps(key),
                "version": "1",
                "kind": json.dumps(kind),
                "occurredAt": '"2026-01-01T00:00:00Z"',
                "recordedAt": '"2026-01-01T00:00:00Z"',
                "event": "null",
                "provenance": '{"apiVersion":"v1","serviceName":"fuzz","identifier":"f"}',
                "currentEntityState": json.dumps({id_of[entity]: key, "owner": "", "name": ""}),
                "originalEntityState": "null",
            },
            self.source,
        )
        topics = (
            self._names.changes(entity),
            self._names.changes(entity),
            self._names.state(entity),
        )
        return self.source.choice(topics), key.encode(), value

    def _reply(self) -> tuple[str, bytes | None, bytes | None]:
        fields = {"id": json.dumps(str(uuid4())), "entity": '"account"', "key": '"fuzz-1"'}
        fields |= {"outcome": '"accepted"', "version": "1", "changes": "[]"}
        return self._names.replies("account"), b"fuzz-1", wrong_json(fields, self.source)

    def _row(self) -> tuple[str, bytes | None, bytes | None]:
        key = json.dumps(self.key())
        after = wrong_json({"id": key, "name": '"n"'}, self.source).decode(errors="replace")
        fields = {"op": '"c"', "before": "null", "after": after, "ts_ms": "1700000000000"}
        place = {
            "connector": "postgresql",
            "schema": "public",
            "table": "item",
            "snapshot": "false",
        }
        fields["source"] = json.dumps({**place, "lsn": self.source.randrange(10**9), "ts_ms": 1})
        named = wrong_json({"id": key}, self.source)
        return self._names.raw("shop", "item"), named, wrong_json(fields, self.source)

    def _other(self) -> tuple[str, bytes | None, bytes | None]:
        names = self._names
        topic = self.source.choice(
            (
                *(names.progress, names.timers("counter"), names.seen("counter")),
                *(names.parked("account"), names.dead("order")),
            )
        )
        key = self.source.choice((b"fuzz", b"\xff", None, b"visit\0fuzz-1"))
        if topic not in (names.progress, names.dead("order")):
            key = key or b"fuzz"  # a compacted topic has keys
        elif topic == names.progress:
            key = b"fuzz"
        return topic, key, wrong_json({"due_us": "1", "key": '"fuzz"'}, self.source)


class HttpDoor(Door):
    """Requests as bytes, with parts that no client library would send."""

    _READ = (
        *("/v1/order", "/v1/order/{key}", "/v1/order/{key}/history", "/v1/order/{key}/diff"),
        *("/v1/order/{key}/explain", "/v1/order/{key}/explain/note", "/v1/visit/{key}"),
        *("/v1/account/{key}", "/v1/account/{key}/history", "/query/v1/order", "/views/v1"),
        *("/views/v1/orders_by_amount", "/views/v1/orders_by_amount/rows/{key}", "/ready"),
        *("/feed/v1/order", "/feed/v1/order/0", "/stream/v1/order", "/console/order/{key}"),
        *("/console", "/console/order", "/openapi.json", "/metrics", "/nowhere", "/"),
    )
    _WRITTEN = (
        *(("POST", "/v1/order"), ("PUT", "/v1/order/{key}"), ("PUT", "/v1/order/{key}")),
        *(("PATCH", "/v1/order/{key}"), ("DELETE", "/v1/order/{key}"), ("POST", "/v1/visit")),
        *(
            ("POST", f"/v1/account/{{key}}/commands/{name}")
            for name in ("Open", "Deposit", "Split")
        ),
    )
    _NAMES = (
        *(
            "limit",
            "cursor",
            "at",
            "version",
            "recorded_at",
            "before",
            "from",
            "q",
            "where",
            "after",
        ),
        *("order", "key", "keys", "note", "amount", "start", "snapshot", "filter", "to", "field"),
    )
    _TEXTS = (
        *(
            "",
            "1",
            "-1",
            "0",
            "99999999999999999999",
            "x",
            "%00",
            "%ff",
            "é".encode().decode("latin1"),
        ),
        *("e1.AAAA", "0.999999", "2026-01-01T00:00:00Z", "9999-12-31T23:59:59-12:00", "a%20b%27--"),
        *("[" * 500, "x" * 4_000, "%F0%9F%99%82", "NaN", "..", "amount>1", "null"),
    )
    _HEADERS = (
        *(
            "Everstate-Service",
            "Everstate-Identifier",
            "Everstate-Occurred-At",
            "If-Match",
            "Prefer",
        ),
        *(
            "If-None-Match",
            "Idempotency-Key",
            "Content-Type",
            "Everstate-Wait-For",
            "Last-Event-ID",
        ),
        *(
            "traceparent",
            "Accept",
            "Everstate-Causation-Id",
            "Range",
            "Expect",
            "Upgrade",
            "Origin",
        ),
        *("Content-Encoding", "Authorization", "Everstate-Api-Version", "X-Forwarded-For"),
    )
    _HEADER_TEXTS = (
        *(b"", b"x", b"*", b'"1"', b'W/"1"', b'"' * 300, b"wait=0", b"wait=-1", b"wait=1e9"),
        *(b"application/json", b"application/json; charset=utf-16", b"text/plain", b"\xff\xfe"),
        *(b"application/merge-patch+json", b"application/json-patch+json", b"gzip", b"Bearer x"),
        *(b"2099-01-01T00:00:00Z", b"e1.AAAA", b"x" * 9_000, b"0-0", b"100-continue", b"websocket"),
    )

    def __init__(self, config: Config, seed: int, port: int) -> None:
        super().__init__(config, seed)
        self._port = port

    def step(self) -> None:
        method, request = self._request()
        try:
            with socket.create_connection(("127.0.0.1", self._port), _PATIENCE_S) as client:
                client.sendall(request)
                with HTTPResponse(client, method=method) as answer:
                    answer.begin()
                    is_stream = "event-stream" in (answer.getheader("Content-Type") or "")
                    body = b"" if is_stream else answer.read()
        except TimeoutError:
            self.found.append(f"http: no answer within {_PATIENCE_S:g} s to {request[:300]!r}")
            return
        except (OSError, HTTPException):
            # What is no HTTP has a connection closed, and no answer that it could read.
            self.outcomes["http closed"] += 1
            if b"\r\n\r\n" in request and request.isascii() and len(request) < 4_000:
                self.found.append(f"http: a connection was closed: {request[:300]!r}")
            return
        self.outcomes[f"http {answer.status}"] += 1
        if answer.status >= 500 and answer.status not in (503, 504):
            self.found.append(f"http: {answer.status} {body[:300]!r} to {request[:300]!r}")
        elif answer.status >= 400 and method != "HEAD":
            self._refused("http request", body.decode(errors="replace"))

    def _request(self) -> tuple[str, bytes]:
        source = self.source
        method, path = "GET", source.choice(self._READ)
        if source.random() < 0.5:
            method, path = source.choice(self._WRITTEN)
        if source.random() < 0.1:
            method = source.choice(("HEAD", "PUT", "POST", "DELETE", "OPTIONS", "TRACE", "FOO"))
        texts = ("fuzz-1", "fuzz-2", "fuzz%20%C3%BC", "%00", "%ff", "%2e%2e", "%2F", "k" * 3_000)
        path = path.replace("{key}", source.choice(texts))
        if source.random() < 0.5:
            many = range(source.choice((1, 2, 60)))
            path += "?" + "&".join(
                f"{source.choice(self._NAMES)}={source.choice(self._TEXTS)}" for _ in many
            )
        headers = {b"Host": b"127.0.0.1:%d" % self._port, b"Connection": b"close"}
        headers |= {b"Everstate-Service": b"fuzz", b"Everstate-Identifier": b"f"}
        headers[b"Content-Type"] = b"application/json"
        for _ in range(source.choice((0, 0, 1, 2))):
            name = source.choice(self._HEADERS).encode()
            headers[name] = source.choice(self._HEADER_TEXTS)
        body = b""
        if method in ("PUT", "POST", "PATCH") or source.random() < 0.05:
            fields = {"order_id": '"fuzz-1"', "note": '"n"', "amount": "1", "lines": "[]"}
            if "visit" in path:
                fields = {"visit_id": f'"fuzz-{source.randrange(10**9)}"', "page": '"p"'}
            elif "commands" in path:
                fields = {"account_id": '"fuzz-1"', "owner": '"o"', "amount": "1"}
            body = wrong_json(fields, source)
            if method == "PATCH" and source.random() < 0.5:
                headers[b"Content-Type"] = b"application/json-patch+json"
                body = b'[{"op":"replace","path":"/note","value":' + body + b"}]"
        headers[b"Content-Length"] = str(len(body)).encode()
        lines = b"".join(b"%b: %b\r\n" % pair for pair in headers.items())
        head = f"{method} {path} HTTP/1.1\r\n".encode("latin1", errors="replace")
        request = head + lines + b"\r\n" + body
        if source.random() < 0.03:
            request = source.choice(
                (request[:20] + b"\r\n\r\n", b"\x16\x03\x01" + request, b"\r\n\r\n\r\n")
            )
        return method, request


def doors(config: Config, seed: int, port: int) -> tuple[Door, ...]:
    """The doors of a running project; the caller closes them."""
    return PostgresDoor(config, seed), KafkaDoor(config, seed + 1), HttpDoor(config, seed + 2, port)
