"""Walks the feeds of an entity type, page by page: what to ask next, and what was new. Pure."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass
from typing import Any, Final

from everstate.client.requests import ClientRequest, segment
from everstate.errors import InvalidToken

BEGINNING: Final = "beginning"
NOW: Final = "now"


@dataclass(frozen=True, slots=True)
class FeedPage:
    """What was new on one page of a feed."""

    feed: str
    number: int
    is_closed: bool
    """Whether the page never changes again."""
    changes: list[dict[str, Any]]
    """As they are in the log, in the order in which they take effect."""
    bookmark: str
    """Continue after this page with it, in all feeds of the entity type."""


class FeedWalk:
    """One walk through all feeds of an entity type, from a bookmark to their heads."""

    def __init__(self, entity: str, since: str) -> None:
        """Raises InvalidToken when ``since`` is no bookmark, ``beginning`` or ``now``."""
        self._place = f"/feed/v1/{segment(entity)}"
        self._is_from_now = since == NOW
        self._at: dict[str, tuple[int, int | None]] = {}
        """Of each feed: the page to read, and how many of its changes were read (none: all)."""
        self._unfinished: deque[str] = deque()
        if since not in (BEGINNING, NOW):
            self._at = _parsed(since)

    def listing(self) -> ClientRequest:
        """The request for the list of feeds; :meth:`begin` takes its answer."""
        return _asking(self._place)

    def begin(self, listed: dict[str, Any]) -> None:
        """Take the list of feeds."""
        for each in listed["feeds"]:
            first = (each["pages"], None) if self._is_from_now else (0, 0)
            self._at.setdefault(each["feed"], first)
        self._unfinished.extend(self._at)

    def following(self) -> ClientRequest | None:
        """The request for the next page; ``None``: the walk has come to all heads."""
        if not self._unfinished:
            return None
        feed = self._unfinished[0]
        return _asking(f"{self._place}/{feed}/{self._at[feed][0]}")

    def took(self, page: dict[str, Any]) -> FeedPage | None:
        """Take the answer to :meth:`following`; the feeds take turns.

        ``None``: the walk begins now, and where that is is not known of all feeds yet.
        """
        feed = self._unfinished.popleft()
        number, read = self._at[feed]
        listed, is_closed = page["changes"], page["closed"]
        if is_closed:
            self._at[feed] = (number + 1, None if read is None else 0)
            self._unfinished.append(feed)
        else:
            self._at[feed] = (number, len(listed))
        if any(each is None for _, each in self._at.values()):
            return None
        new = listed[len(listed) if read is None else read :]
        return FeedPage(feed, number, is_closed, new, json.dumps(self._at))


def _asking(path: str) -> ClientRequest:
    return ClientRequest("GET", path, {}, {"Accept": "application/json"})


def _parsed(bookmark: str) -> dict[str, tuple[int, int | None]]:
    try:
        return {str(feed): (int(page), read) for feed, (page, read) in json.loads(bookmark).items()}
    except (ValueError, TypeError, AttributeError) as cause:
        raise InvalidToken("it is no bookmark of a feed") from cause
