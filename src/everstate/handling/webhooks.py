"""Webhooks: handlers that post each change as https://www.standardwebhooks.com says."""

from __future__ import annotations

import asyncio
import hmac
import re
import ssl
import time
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from socket import SOCK_STREAM
from typing import Any, Final, TypeAlias
from urllib.parse import SplitResult, urlsplit

import msgspec

from everstate.changes import Change
from everstate.config import Config, expanded
from everstate.declarations.handlers import LANES, Context, Function, Handler, Prepared
from everstate.errors import ChangeParked, InvalidConfig, InvalidHandler, Unavailable
from everstate.errors.declarations import HIDDEN
from everstate.http.masks import Mask

RETRIES: Final = {"concurrency": LANES, "retries": 83, "pause_max_s": 3600.0}
"""Options of the handler, if it is declared without: retries for three days."""
Network: TypeAlias = IPv4Network | IPv6Network
_URL: Final = re.compile(r"https?://(\[[\da-f:.]+]|[\w.-]+)(:[1-9]\d*)?([/?][!-\"$-~]*)?", re.A)
_PREFIX: Final = "whsec_"
_PUBLIC6: Final = ip_network("2000::/3")


@dataclass(frozen=True, slots=True)
class Webhook(Prepared):
    """A receiver as it is declared; see :meth:`everstate.App.webhook`."""

    url: str = field(repr=False)
    secret: str = field(repr=False)
    allow: tuple[Network, ...]
    unmasked: bool
    timeout_s: float

    def __call__(self, config: Config, handler: Handler) -> Function:
        """Read the variables of the environment, and check what they have."""
        import httpcore  # noqa: F401  # A process that cannot post must not begin.

        title, name = handler.title, handler.entity_type.name
        mask = Mask(name, () if self.unmasked else config.api.masked(name))
        for each in _fields(handler.when.definition if handler.when else {}):
            if mask.covers(tuple(each.split("."))):
                raise InvalidHandler(title, f"a condition on {each} needs unmasked=True.")
        url = expanded(self.url, where := f"url of {title}")
        if not _URL.fullmatch(url):
            expected = "an absolute URL in ASCII, such as https://example.com/hook, without a login"
            raise InvalidConfig(where, HIDDEN, expected)
        keys = signing_keys(self.secret, f"secret of {title}")
        return _Sender(self, urlsplit(url), keys, mask, ssl.create_default_context()).send


@dataclass(frozen=True, slots=True)
class _Sender:
    """Posts changes to one receiver."""

    webhook: Webhook
    url: SplitResult
    keys: Sequence[bytes]
    mask: Mask
    tls: ssl.SSLContext

    async def send(self, change: Change[dict[str, Any]], context: Context) -> None:
        """Post a change; raises an error that says why it is not delivered, without the URL."""
        data, when = self.mask.change(context.json), msgspec.json.encode(change.occurred_at)
        kind = f"{change.entity}.{change.kind}".encode()
        body = b'{"type":"%b","timestamp":%b,"data":%b}' % (kind, when, data)
        try:
            async with asyncio.timeout(self.webhook.timeout_s):
                status = await self._post(str(context.id), body)
        except TimeoutError:
            raise Unavailable(f"no answer within {self.webhook.timeout_s:g} s.") from None
        if status == 410:
            raise ChangeParked("the receiver answered HTTP 410: it wants no more of them.")
        if not 200 <= status < 300:
            raise Unavailable(f"the receiver answered HTTP {status}; only 2xx is success.")

    async def _post(self, message_id: str, body: bytes) -> int:
        """Post to the host's first address that takes the connection; returns the status."""
        import httpcore

        to, moment = self.url, str(int(time.time()))
        headers = [
            *(("Host", to.netloc), ("Content-Length", str(len(body)))),
            *(("Content-Type", "application/json"), ("User-Agent", "everstate")),
            *(("webhook-id", message_id), ("webhook-timestamp", moment)),
            ("webhook-signature", signature(self.keys, message_id, moment, body)),
        ]
        port = to.port or (443 if to.scheme == "https" else 80)
        addresses = await self._addresses(port)
        limits = {"connect": self.webhook.timeout_s / len(addresses)}
        more = {"sni_hostname": to.hostname, "timeout": limits}
        target = (to.path or "/") + (f"?{to.query}" if to.query else "")
        async with httpcore.AsyncConnectionPool(ssl_context=self.tls) as pool:
            for each in addresses:
                url = httpcore.URL(scheme=to.scheme, host=each, port=port, target=target)
                post = httpcore.Request("POST", url, headers=headers, content=body, extensions=more)
                try:
                    answer = await pool.handle_async_request(post)
                    await answer.aclose()
                    return int(answer.status)
                except (httpcore.ConnectError, httpcore.ConnectTimeout):
                    if each == addresses[-1]:
                        raise
        raise AssertionError("a host has an address")

    async def _addresses(self, port: int) -> list[str]:
        """The addresses of the host; raises Unavailable when one of them is not permitted.

        The request goes to these, so that a later answer of the DNS does not count.
        """
        host, is_secure = self.url.hostname, self.url.scheme == "https"
        known = await asyncio.get_running_loop().getaddrinfo(host, port, type=SOCK_STREAM)
        found = list(dict.fromkeys(str(place[0]) for *_, place in known))
        for each in found:
            if reason := refusal(each, self.webhook.allow, is_secure=is_secure):
                raise Unavailable(f"the address {each} of the receiver {reason}.")
        return found


def signature(keys: Iterable[bytes], message_id: str, moment: str, body: bytes) -> str:
    """The header ``webhook-signature``: one signature for each key."""
    signed = f"{message_id}.{moment}.".encode() + body
    digests = (hmac.digest(key, signed, "sha256") for key in keys)
    return " ".join(f"v1,{b64encode(each).decode()}" for each in digests)


def signing_keys(text: str, where: str) -> list[bytes]:
    """The keys of secrets; raises InvalidConfig, which does not show them."""
    found = [each.partition(_PREFIX)[2] for each in expanded(text, where).split()]
    with suppress(ValueError):
        keys = [b64decode(each, validate=True) for each in found]
        if keys and all(24 <= len(each) <= 64 for each in keys):
            return keys
    expected = f"one or several of {_PREFIX} and 24 to 64 bytes in Base64, separated by spaces"
    raise InvalidConfig(where, HIDDEN, expected)


def refusal(address: str, allowed: Iterable[Network], *, is_secure: bool) -> str | None:
    """Why nothing is sent to an address, which may be one of our own; ``None``: it is permitted."""
    ip = ip_address(address)
    ip = getattr(ip, "ipv4_mapped", None) or ip
    if any(ip in network for network in allowed):
        return None
    is_public = ip.is_global and not ip.is_multicast
    if isinstance(ip, IPv6Address):
        is_public = is_public and ip in _PUBLIC6 and ip.sixtofour is None
    if not is_public:
        return "is not public, and not in allow="
    return None if is_secure else "is not in allow=, as it must be without TLS"


def _fields(definition: Mapping[str, Any]) -> list[str]:
    """The fields that a trigger's definition names."""
    if "field" in definition:
        return [definition["field"]]
    return [name for parts in definition.values() for each in parts for name in _fields(each)]
