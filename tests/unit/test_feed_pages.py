"""The bytes of closed pages: caches keep them for ever, so a new release must write the same."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest

from everstate.api.atom import atom_page, service_document
from everstate.api.feeding import _json_page
from everstate.api.guards import is_own_origin
from everstate.changes.codec import decode_wire
from everstate.client.feeds import FeedWalk
from everstate.errors import InvalidToken
from everstate.serving.feeds import PAGE_OFFSETS, FeedPlace

CHANGE = (
    b'{"id":"0199c8a2-7c11-7d3e-9a55-0d8f2f6b1c77","entity":"guest","schemaVersion":1,'
    b'"key":"a<b","version":2,"kind":"updated","occurredAt":"2026-01-02T03:04:05Z",'
    b'"recordedAt":"2026-01-02T04:04:05.5+01:00","event":null,"provenance":{"apiVersion":"v1",'
    b'"serviceName":"desk","identifier":"clerk-7","actor":"Eva & Co","reason":null,'
    b'"correlationId":null,"causationId":null,"transaction":null},'
    b'"currentEntityState":{"name":"]]>\xef\xbf\xbf"},"originalEntityState":null}'
)
PLACE = FeedPlace("0123456789abcdef-0", 0, 1, 256)
LINKS = {
    "self": "/feed/v1/guest/0123456789abcdef-0/1?kind=updated",
    "current": "/feed/v1/guest/0123456789abcdef-0?kind=updated",
    "prev-archive": "/feed/v1/guest/0123456789abcdef-0/0?kind=updated",
    "next-archive": "/feed/v1/guest/0123456789abcdef-0/2?kind=updated",
}
ATOM = """<?xml version='1.0' encoding='utf-8'?>
<feed xmlns="http://www.w3.org/2005/Atom" xmlns:fh="http://purl.org/syndication/history/1.0">\
<id>urn:everstate:feed:0123456789abcdef-0</id><title>guest changes, partition 0</title>\
<updated>2026-01-02T03:04:05.500000Z</updated><fh:archive />\
<link rel="self" href="/feed/v1/guest/0123456789abcdef-0/1?kind=updated" \
type="application/atom+xml" />\
<link rel="current" href="/feed/v1/guest/0123456789abcdef-0?kind=updated" \
type="application/atom+xml" />\
<link rel="prev-archive" href="/feed/v1/guest/0123456789abcdef-0/0?kind=updated" \
type="application/atom+xml" />\
<link rel="next-archive" href="/feed/v1/guest/0123456789abcdef-0/2?kind=updated" \
type="application/atom+xml" />\
<entry><id>urn:uuid:0199c8a2-7c11-7d3e-9a55-0d8f2f6b1c77</id>\
<title>guest a&lt;b version 2 updated</title>\
<updated>2026-01-02T03:04:05.500000Z</updated><published>2026-01-02T03:04:05.500000Z</published>\
<author><name>desk clerk-7</name></author><author><name>Eva &amp; Co</name></author>\
<category term="updated" /><content type="text">\
{"id":"0199c8a2-7c11-7d3e-9a55-0d8f2f6b1c77","entity":"guest","schemaVersion":1,\
"key":"a&lt;b","version":2,"kind":"updated","occurredAt":"2026-01-02T03:04:05Z",\
"recordedAt":"2026-01-02T04:04:05.5+01:00","event":null,"provenance":{"apiVersion":"v1",\
"serviceName":"desk","identifier":"clerk-7","actor":"Eva &amp; Co","reason":null,\
"correlationId":null,"causationId":null,"transaction":null},\
"currentEntityState":{"name":"]]&gt;\\uffff"},"originalEntityState":null}\
</content></entry></feed>"""


def test_a_page_has_the_bytes_that_earlier_releases_gave_it() -> None:
    """If this fails, do not change the text: caches have it. Give the routes a new version."""
    assert PAGE_OFFSETS == 128
    changes = [(decode_wire(CHANGE), CHANGE)]
    page = atom_page(
        name=PLACE.feed,
        title="guest changes, partition 0",
        links=LINKS,
        is_closed=PLACE.is_closed,
        changes=changes,
    )
    assert page == ATOM
    assert _json_page(PLACE, LINKS, changes).encode() == (
        b'{"feed":"0123456789abcdef-0","page":1,"closed":true,'
        b'"self":"/feed/v1/guest/0123456789abcdef-0/1?kind=updated",'
        b'"current":"/feed/v1/guest/0123456789abcdef-0?kind=updated",'
        b'"previous":"/feed/v1/guest/0123456789abcdef-0/0?kind=updated",'
        b'"next":"/feed/v1/guest/0123456789abcdef-0/2?kind=updated",'
        b'"changes":[' + CHANGE + b"]}"
    )


def test_a_page_without_changes_never_changes_either() -> None:
    page = atom_page(name="f-0", title="t", links={}, is_closed=True, changes=[])
    assert "<updated>1970-01-01T00:00:00Z</updated>" in page
    ET.fromstring(page)


def test_the_list_of_feeds_takes_no_posts() -> None:
    found = ET.fromstring(
        service_document("guest changes", [("partition 0", "/feed/v1/guest/f-0")])
    )
    app = "{http://www.w3.org/2007/app}"
    (collection,) = found.iter(f"{app}collection")
    assert collection.attrib == {"href": "/feed/v1/guest/f-0"}
    accept = collection.find(f"{app}accept")
    assert accept is not None
    assert accept.text is None


@pytest.mark.parametrize(
    ("origin", "hosts", "is_own"),
    [
        ("http://shop.example", ["shop.example"], True),
        ("http://shop.example", ["shop.example:80"], True),
        ("https://shop.example", ["shop.example"], True),
        ("https://shop.example", ["shop.example:443"], True),
        ("https://Shop.Example", ["shop.EXAMPLE"], True),
        ("http://[::1]:8080", ["[::1]:8080"], True),
        ("https://shop.example", ["shop.example:80"], False),
        ("https://shop.example:8443", ["shop.example"], False),
        ("https://evil.example", ["shop.example"], False),
        ("https://shop.example.evil", ["shop.example"], False),
        ("https://shop.example@evil.example", ["shop.example"], False),
        ("http://shop.example:x", ["shop.example"], False),
        ("null", ["shop.example"], False),
        ("", ["shop.example"], False),
        ("", [""], False),
        ("file://", [""], False),
        ("http://", [""], False),
        ("http://shop.example", [], False),
        ("http://shop.example", ["shop.example", "evil.example"], False),
    ],
)
def test_only_a_page_of_this_server_opens_a_websocket(
    origin: str, hosts: list[str], is_own: bool
) -> None:
    assert is_own_origin(origin, hosts) is is_own


def test_a_walk_that_begins_now_gives_no_bookmark_before_it_knows_all_feeds() -> None:
    """A bookmark that leaves the place in a feed open would miss what comes to it meanwhile."""
    walk = FeedWalk("guest", "now")
    walk.begin({"feeds": [{"feed": "f-0", "pages": 3}, {"feed": "f-1", "pages": 0}]})
    assert walk.took({"changes": [1, 2], "closed": False}) is None
    assert walk.took({"changes": [3], "closed": True}) is None
    asked = walk.following()
    assert asked is not None
    assert asked.path == "/feed/v1/guest/f-1/1"
    page = walk.took({"changes": [4], "closed": False})
    assert page is not None
    assert page.changes == []
    assert page.bookmark == '{"f-0": [3, 2], "f-1": [1, 1]}'
    assert walk.following() is None
    for wrong in ("x", "[]", '{"f-0": 1}', "null"):
        with pytest.raises(InvalidToken, match="bookmark"):
            FeedWalk("guest", wrong)
