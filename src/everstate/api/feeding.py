"""What feeds answer over HTTP: the list of them, their heads, and pages that never change.

No web framework here. A closed page may be kept by caches for ever: its bytes are made from its
address, from records of the log and from verdicts about them, and none of these ever changes.
"""

from __future__ import annotations

import hashlib
import queue
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import orjson
from werkzeug.datastructures import MIMEAccept
from werkzeug.http import parse_accept_header, parse_etags

from everstate.api.atom import ATOM_TYPE, SERVICE_TYPE, atom_page, service_document
from everstate.changes import Kind
from everstate.changes.codec import WireChange, decode_wire
from everstate.config import Config
from everstate.errors import InvalidQuery, NotFound
from everstate.http.answers import JSON, HttpAnswer, HttpRequest, Parameters
from everstate.serving.feeds import FeedPlace, FeedReader

_NUMBER: Final = re.compile(r"0|[1-9][0-9]{0,14}")
_FOR_EVER: Final = "max-age=31536000, immutable"
_ASK_AGAIN: Final = "no-cache"


class Feeding:
    """The feeds of one entity type; threads share it.

    Its methods raise NotFound, PageGone, InvalidQuery and Unavailable.
    """

    def __init__(self, config: Config, entity: str, *, is_open: bool) -> None:
        """``is_open``: callers need no token."""
        self._config, self._entity = config, entity
        self.place: Final = f"/feed/v1/{entity}"
        """Path of the list of feeds; feeds and pages are below it."""
        self._audience = "public" if is_open else "private"
        """Whose caches may keep answers: a shared one would give them to callers without token."""
        self._idle: queue.LifoQueue[FeedReader] = queue.LifoQueue()

    def close(self) -> None:
        """Close the connections; no question may be open."""
        while not self._idle.empty():
            self._idle.get_nowait().close()

    def listed(self, incoming: HttpRequest, _given: Parameters) -> HttpAnswer:
        """The feeds of the entity type: one of each partition of its changelog."""
        form = _form(incoming, SERVICE_TYPE)
        with self._reader() as reader:
            heads = reader.heads()
        known_by = " ".join(f"{head.feed}:{head.end}" for head in heads)
        tag = hashlib.blake2b(known_by.encode(), digest_size=16).hexdigest()
        headers = self._headers(tag, form, is_closed=False)
        if _is_known(incoming, headers):
            return HttpAnswer(304, headers)
        if form == SERVICE_TYPE:
            feeds = [(self._title(head), f"{self.place}/{head.feed}") for head in heads]
            return HttpAnswer(200, headers, service_document(f"{self._entity} changes", feeds))
        listed = [
            {
                "feed": head.feed,
                "current": f"{self.place}/{head.feed}",
                "first": f"{self.place}/{head.feed}/0",
                "pages": head.number,
                "position": head.end,
            }
            for head in heads
        ]
        return HttpAnswer(200, headers, orjson.dumps({"feeds": listed}).decode())

    def page(
        self, incoming: HttpRequest, given: Parameters, feed: str, page: str | None = None
    ) -> HttpAnswer:
        """One page of a feed; ``None``: its head, which is the page that is not closed yet."""
        kind = given.get("kind")
        if kind not in (None, *Kind):
            raise InvalidQuery(f"kind is {kind!r}; expected one of {', '.join(Kind)}.")
        if page is not None and not _NUMBER.fullmatch(page):
            raise NotFound(f"feed {feed} has no page {page!r}.", advice="Pages are 0, 1, 2, …")
        form = _form(incoming, ATOM_TYPE)
        with self._reader() as reader:
            place = reader.place(feed, None if page is None else int(page))
            parts = (feed, place.number, place.end, kind, incoming.mask.tag)
            tag = ".".join(str(part) for part in parts if part not in (None, ""))
            # A caller may see later what a mask hides now: only the page itself never changes.
            is_for_ever = place.is_closed and not incoming.mask
            headers = self._headers(tag, form, is_closed=is_for_ever)
            if _is_known(incoming, headers):
                return HttpAnswer(304, headers)
            values = [incoming.mask.change(each.value or b"") for each in reader.read(place)]
        changes = [(decode_wire(value), value) for value in values]
        changes = [each for each in changes if kind is None or each[0].kind == kind]
        links = self._links(place, "" if kind is None else f"?kind={kind}", is_head=page is None)
        if form == JSON:
            return HttpAnswer(200, headers, _json_page(place, links, changes))
        body = atom_page(
            name=feed,
            title=self._title(place),
            links=links,
            is_closed=place.is_closed,
            changes=changes,
        )
        return HttpAnswer(200, headers, body)

    def _title(self, place: FeedPlace) -> str:
        return f"{self._entity} changes, partition {place.partition}"

    def _links(self, place: FeedPlace, query: str, *, is_head: bool) -> dict[str, str]:
        """Links of a page by relation (RFC 5005), as paths: a page has no host in its bytes."""
        head = f"{self.place}/{place.feed}"
        found = {
            "self": f"{head}{query}" if is_head else f"{head}/{place.number}{query}",
            "current": f"{head}{query}",
        }
        if place.number:
            found["prev-archive"] = f"{head}/{place.number - 1}{query}"
        if place.is_closed:
            # The page after a closed page is there in any case: it may still be open, and then
            # has no changes yet or some. So the link is in a page from the beginning.
            found["next-archive"] = f"{head}/{place.number + 1}{query}"
        return found

    def _headers(self, tag: str, form: str, *, is_closed: bool) -> dict[str, str]:
        how = _FOR_EVER if is_closed else _ASK_AGAIN
        return {
            "Content-Type": form,
            "ETag": f'"{tag}.{form.rpartition("/")[2]}"',
            "Cache-Control": f"{self._audience}, {how}",
            "Vary": "Accept",
        }

    @contextmanager
    def _reader(self) -> Iterator[FeedReader]:
        try:
            reader = self._idle.get_nowait()
        except queue.Empty:
            reader = FeedReader(self._config, self._entity)
        try:
            yield reader
        finally:
            self._idle.put(reader)


def _json_page(
    place: FeedPlace, links: Mapping[str, str], changes: Sequence[tuple[WireChange, bytes]]
) -> str:
    found = {
        "feed": place.feed,
        "page": place.number,
        "closed": place.is_closed,
        "self": links["self"],
        "current": links["current"],
        "previous": links.get("prev-archive"),
        "next": links.get("next-archive"),
        "changes": [orjson.Fragment(value) for _, value in changes],
    }
    return orjson.dumps(found).decode()


def _form(incoming: HttpRequest, xml: str) -> str:
    """The media type that the client prefers; XML when it prefers none of both."""
    accepted = parse_accept_header(incoming.headers.get("accept"), MIMEAccept)
    return accepted.best_match([xml, JSON], default=xml) or xml


def _is_known(incoming: HttpRequest, headers: Mapping[str, str]) -> bool:
    """Whether the client has this already: 304."""
    asked = parse_etags(incoming.headers.get("if-none-match"))
    return asked.contains_weak(headers["ETag"].strip('"'))
