"""Webhooks without Kafka and PostgreSQL: what is posted, where it may go, and what it is not."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cache
from ipaddress import ip_network
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

import pytest

from everstate.app import App
from everstate.changes import Change, ChangeCodec
from everstate.changes.triggers import when
from everstate.config import Config
from everstate.declarations.handlers import Context, Handler, Prepared
from everstate.errors import ChangeParked, InvalidConfig, InvalidHandler, Unavailable
from everstate.handling.webhooks import refusal, signature, signing_keys
from everstate.http.masks import MASKED
from kit.changes import change_of
from kit.tls_door import TRUSTED, tls_before
from kit.view_orders import ORDER, START, TELLER, ViewedOrder
from reading_cases import orders_app
from webhook_receiver import receiving

CONFIG = Config(store={"dsn": "postgresql://localhost/none"}, log={"prefix": "shop"})
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
OTHER = "whsec_" + base64.b64encode(bytes(range(32))).decode()
LOOPBACK = ("127.0.0.0/8", "::1")


def webhook(url: str, *, secret: str = SECRET, allow: Any = LOOPBACK, **options: Any) -> Handler:
    app = orders_app()
    app.webhook("order", url=url, secret=secret, allow=allow, **options)
    return app.handlers["webhooks.order"]


@cache
def made() -> tuple[Change[dict[str, Any]], bytes]:
    before, now = (ViewedOrder(order_id="o1", status=each) for each in ("new", "paid"))
    times = {"occurred_at": START, "recorded_at": START}
    change = change_of("order", "o1", 2, now, before, who=TELLER, **times)
    value = ChangeCodec(ORDER).encode(change)[1]
    return ChangeCodec(ORDER).decode(value), value


def post(handler: Handler, config: Config = CONFIG) -> None:
    """Post a change as the process of handlers does."""
    assert isinstance(handler.function, Prepared)
    change, value = made()
    context = Context(None, threading.Event(), lambda: UUID(int=7), 1, value)
    asyncio.run(handler.function(config, handler)(change, context))


def test_the_signature_is_that_of_the_published_example() -> None:
    made = signature(
        signing_keys(SECRET, "secret"),
        "msg_p5jXN8AQM9LWM0D4loKWxJek",
        "1614265330",
        b'{"test": 2432232314}',
    )
    assert made == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_a_change_is_posted_as_subscribers_see_it_and_signed_with_each_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NEW_SECRET", OTHER)
    with receiving() as receiver:
        began = int(time.time())
        post(webhook(receiver.url, secret=f"$NEW_SECRET {SECRET}"))
        ((headers, body),) = receiver.posted
    value = made()[1]
    assert json.loads(body) == {
        "type": "order.updated",
        "timestamp": "2026-01-01T00:00:00Z",
        "data": json.loads(value),
    }
    assert value in body
    assert headers["Content-Type"] == "application/json"
    assert headers["Host"] in receiver.url
    assert headers["webhook-id"] == str(UUID(int=7))
    assert began <= int(headers["webhook-timestamp"]) <= time.time()
    signed = b".".join(
        [headers["webhook-id"].encode(), headers["webhook-timestamp"].encode(), body]
    )
    expected = []
    for each in (OTHER, SECRET):
        key = base64.b64decode(each.removeprefix("whsec_"))
        digest = hmac.new(key, signed, hashlib.sha256).digest()
        expected.append("v1," + base64.b64encode(digest).decode())
    assert headers["webhook-signature"].split(" ") == expected


def test_masked_fields_are_hidden_unless_the_webhook_is_declared_unmasked() -> None:
    config = CONFIG.model_copy(
        update={"api": CONFIG.api.model_copy(update={"masks": {"order": ("status",)}})}
    )
    with receiving() as receiver:
        post(webhook(receiver.url), config)
        post(webhook(receiver.url, unmasked=True), config)
        fires = when("quantity").changes() | ~when("status").changes(to="paid")
        with pytest.raises(
            InvalidHandler, match=r"webhooks.order: a condition on status needs unm"
        ):
            post(webhook(receiver.url, when=fires), config)
        post(webhook(receiver.url, when=fires, unmasked=True), config)
        states = [json.loads(body)["data"] for _, body in receiver.posted]
    found = [
        (each["currentEntityState"]["status"], each["originalEntityState"]["status"])
        for each in states
    ]
    assert found == [(MASKED, MASKED), ("paid", "new"), ("paid", "new")]


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (500, "the receiver answered HTTP 500; only 2xx is success."),
        (404, "the receiver answered HTTP 404; only 2xx is success."),
        (302, "the receiver answered HTTP 302; only 2xx is success."),
        (307, "the receiver answered HTTP 307; only 2xx is success."),
    ],
)
def test_another_answer_than_2xx_is_a_failure(status: int, reason: str) -> None:
    with receiving() as receiver:
        receiver.status = status
        with pytest.raises(Unavailable) as failure:
            post(webhook(receiver.url))
        assert (receiver.refused, receiver.posted) == (1, [])
    assert str(failure.value) == reason


@pytest.mark.parametrize("status", [200, 201, 299])
def test_any_2xx_is_a_success(status: int) -> None:
    with receiving() as receiver:
        receiver.status = status
        post(webhook(receiver.url))
        assert len(receiver.posted) == 1


def test_410_parks_the_change_at_once() -> None:
    with receiving() as receiver:
        receiver.status = 410
        with pytest.raises(ChangeParked, match="answered HTTP 410: it wants no more"):
            post(webhook(receiver.url))


def test_retries_are_spread_over_three_days() -> None:
    handler = webhook("https://example.com/hook")
    pauses = [handler.pause_s(calls) for calls in range(1, handler.retries + 2)]
    assert pauses[:4] == [1, 2, 4, 8]
    assert pauses[-2:] == [3600, None]
    day_s = 86_400
    assert 3 * day_s <= sum(pause or 0 for pause in pauses) < 3 * day_s + 3600
    assert webhook("https://example.com", retries=2).pause_s(3) is None


@contextmanager
def slow_server(answer: bytes) -> Iterator[str]:
    """A receiver that sends a byte of its answer in each 50 ms, and never more."""
    stop = threading.Event()

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            for byte in answer * 1000:
                if stop.wait(0.05):
                    return
                try:
                    connection.sendall(bytes([byte]))
                except OSError:
                    return

    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        thread = threading.Thread(target=serve, args=[listener])
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/hook"
        stop.set()
        thread.join()


def test_a_request_has_a_limit_also_when_the_answer_comes_byte_by_byte() -> None:
    with slow_server(b"HTTP/1.1 200 OK\r\nX: ") as url:
        began = time.monotonic()
        with pytest.raises(Unavailable, match=r"no answer within 0.5 s."):
            post(webhook(url, timeout_s=0.5))
        assert time.monotonic() - began < 5


def test_who_does_not_listen_is_a_failure_that_does_not_show_the_url() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(Exception, match="onnect") as failure:
        post(webhook(f"http://127.0.0.1:{port}/hook?token=s3cret"))
    assert "s3cret" not in str(failure.value)


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "127.9.9.9", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1"),
        *("169.254.169.254", "100.64.0.1", "192.0.2.1", "224.0.0.1", "240.0.0.1"),
        *("255.255.255.255", "::", "::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::7f00:1"),
        *("fc00::1", "fd12::1", "fe80::1", "fe80::1%1", "fec0::1", "ff02::1", "2001:db8::1"),
        *("2002:7f00:1::1", "2001:0:7f00:1::1", "64:ff9b::7f00:1", "64:ff9b:1::1"),
    ],
)
def test_an_address_that_is_not_public_is_refused(address: str) -> None:
    assert refusal(address, (), is_secure=True) == "is not public, and not in allow="
    version = "::/0" if ":" in address and "ffff" not in address else "0.0.0.0/0"
    assert refusal(address, [ip_network(version)], is_secure=False) is None


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8"])
def test_a_public_address_is_permitted_with_tls_only(address: str) -> None:
    assert refusal(address, (), is_secure=True) is None
    assert "without TLS" in (refusal(address, (), is_secure=False) or "")


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "localhost",
        "2130706433",
        "0x7f000001",
        "0x7f.1",
        "127.1",
        "0177.0.0.1",
        "[::1]",
    ],
)
def test_it_is_the_resolved_address_that_counts(host: str) -> None:
    with receiving() as receiver:
        port = urlsplit(receiver.url).port
        for scheme in ("http", "https"):
            with pytest.raises(Unavailable, match=r"the address .* of the receiver is not public"):
                post(webhook(f"{scheme}://{host}:{port}/hook", allow=["10.0.0.0/8"]))
        assert (receiver.posted, receiver.refused) == ([], 0)
        if host != "[::1]":
            post(webhook(f"http://{host}:{port}/hook"))
            assert len(receiver.posted) == 1


def test_the_request_goes_to_the_address_that_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that has another address a moment later does not lead elsewhere."""
    asked = list[str]()

    def resolved(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        asked.append(host)
        address = "127.0.0.1" if len(asked) == 1 else "127.0.0.2"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    with receiving() as receiver:
        url = receiver.url.replace("127.0.0.1", "hooks.example")
        monkeypatch.setattr(socket, "getaddrinfo", resolved)
        post(webhook(url, allow=["127.0.0.1"]))
        ((headers, _),) = receiver.posted
        assert headers["Host"].startswith("hooks.example:")
        with pytest.raises(Unavailable, match=r"the address 127.0.0.2 of the receiver is not"):
            post(webhook(url, allow=["127.0.0.1"]))
    assert asked == ["hooks.example"] * 2


def test_one_private_address_among_public_ones_is_enough_to_refuse(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def resolved(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        return [(2, 1, 6, "", (each, port)) for each in ("8.8.8.8", "10.0.0.1")]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    with pytest.raises(Unavailable, match=r"the address 10.0.0.1 of the receiver is not public"):
        post(webhook("https://hooks.example/", allow=()))


def test_the_next_address_is_tried_when_one_takes_no_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def resolved(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        return [(2, 1, 6, "", (each, port)) for each in ("127.0.0.9", "127.0.0.1")]

    with receiving() as receiver:
        url = receiver.url.replace("127.0.0.1", "hooks.example")
        monkeypatch.setattr(socket, "getaddrinfo", resolved)
        post(webhook(url))
        assert len(receiver.posted) == 1


def test_the_certificate_is_checked_for_the_name_and_not_for_the_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That of the door is for `localhost` and 127.0.0.1."""
    known = socket.getaddrinfo

    def resolved(host: str, *given: Any, **options: Any) -> list[Any]:
        return known("127.0.0.1" if host == "hooks.example" else host, *given, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    with receiving() as receiver, tls_before(urlsplit(receiver.url).port or 0) as port:
        with pytest.raises(Exception, match="CERTIFICATE_VERIFY_FAILED"):
            post(webhook(f"https://localhost:{port}/hook"))
        monkeypatch.setenv("SSL_CERT_FILE", str(TRUSTED))
        with pytest.raises(Exception, match="Hostname mismatch"):
            post(webhook(f"https://hooks.example:{port}/hook"))
        assert receiver.posted == []
        post(webhook(f"https://localhost:{port}/hook"))
        assert len(receiver.posted) == 1


@pytest.mark.parametrize(
    "url",
    [
        *("example.com/hook", "ftp://example.com", "https://", "https:///hook", "//example.com"),
        *("https://user:s3cret@example.com", "https://example.com/#s3cret", "https://e x.com"),
        *("https://example.com:0/", "https://example.com:x/", "https://[::1", "https://é.com"),
        *("https://example.com/\r\nX: s3cret", ""),
    ],
)
def test_a_wrong_url_ends_the_start_and_is_not_shown(url: str) -> None:
    with pytest.raises(InvalidConfig, match=r"url of webhooks.order has an invalid value") as found:
        post(webhook(url))
    assert "s3cret" not in str(found.value)


@pytest.mark.parametrize(
    "secret",
    [
        "",
        " ",
        "s3cret",
        SECRET.removeprefix("whsec_"),
        "whsec_s3cret",
        "whsec_!",
        f"{SECRET} s3cret",
    ],
)
def test_a_wrong_secret_ends_the_start_and_is_not_shown(secret: str) -> None:
    with pytest.raises(InvalidConfig, match=r"secret of webhooks.order has an invalid") as found:
        post(webhook("https://example.com", secret=secret))
    assert "s3cret" not in str(found.value)


def test_a_variable_that_is_not_set_ends_the_start() -> None:
    with pytest.raises(InvalidConfig, match=r"secret of webhooks.order is '\$\{NO_SUCH_SECRET\}'"):
        post(webhook("https://example.com", secret="${NO_SUCH_SECRET}"))


def test_what_a_declaration_has_and_what_it_does_not_show() -> None:
    app = App("orders")
    app.entity("order", key="order_id")(ViewedOrder)
    with pytest.raises(InvalidHandler, match=r"webhooks.order: allow: 10.0.0.1/8 has host bits"):
        app.webhook("order", url="https://e.com", secret=SECRET, allow=["10.0.0.1/8"])
    app.webhook("order", url="https://e.com/?t=s3cret", secret=SECRET)
    app.webhook("order", url="https://e.com", secret=SECRET, group="partners", name="acme")
    first, second = app.handlers.values()
    assert (first.title, second.title) == ("webhooks.order", "partners.acme")
    assert (first.concurrency, first.timeout_s) == (16, 30)
    shown = f"{first!r} {first.function!r} {replace(first, group='g')!r}"
    assert SECRET not in shown
    assert "s3cret" not in shown
