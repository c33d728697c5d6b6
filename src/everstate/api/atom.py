r"""Feeds as XML: Atom (RFC 4287), archived feeds (RFC 5005) and the list of them (RFC 5023). Pure.

The library escapes; what XML 1.0 cannot have at all is replaced here. In the JSON of a change such
a character becomes its `\u` escape, so the content stays the same JSON.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Final
from xml.etree import ElementTree as ET

from everstate.changes.codec import WireChange

ATOM_TYPE: Final = "application/atom+xml"
SERVICE_TYPE: Final = "application/atomsvc+xml"

_ATOM: Final = "http://www.w3.org/2005/Atom"
_HISTORY: Final = "http://purl.org/syndication/history/1.0"
_APP: Final = "http://www.w3.org/2007/app"
for _prefix, _space in (("", _ATOM), ("fh", _HISTORY), ("app", _APP)):
    ET.register_namespace(_prefix, _space)

_UNWRITABLE: Final = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_NEVER: Final = datetime.fromtimestamp(0, UTC)
"""`updated` of a page without changes: Atom wants one, and it must not change."""


def atom_page(
    *,
    name: str,
    title: str,
    links: Mapping[str, str],
    is_closed: bool,
    changes: Sequence[tuple[WireChange, bytes]],
) -> str:
    """One page as an Atom feed document; ``changes``: each with its JSON, as it is in the log."""
    root = ET.Element(_in(_ATOM, "feed"))
    _text(root, "id", f"urn:everstate:feed:{name}")
    _text(root, "title", title)
    _text(root, "updated", _moment(max((c.recorded_at for c, _ in changes), default=_NEVER)))
    if is_closed:
        ET.SubElement(root, _in(_HISTORY, "archive"))
    for relation, place in links.items():
        ET.SubElement(root, _in(_ATOM, "link"), rel=relation, href=place, type=ATOM_TYPE)
    for change, content in changes:
        _entry(root, change, content)
    return _written(root)


def service_document(title: str, feeds: Sequence[tuple[str, str]]) -> str:
    """The list of feeds, each with its title and place, as an Atom service document."""
    root = ET.Element(_in(_APP, "service"))
    workspace = ET.SubElement(root, _in(_APP, "workspace"))
    _text(workspace, "title", title)
    for name, place in feeds:
        collection = ET.SubElement(workspace, _in(_APP, "collection"), href=place)
        _text(collection, "title", name)
        # An empty `accept`: entries are read here, and not posted.
        ET.SubElement(collection, _in(_APP, "accept"))
    return _written(root)


def _entry(root: ET.Element, change: WireChange, content: bytes) -> None:
    entry = ET.SubElement(root, _in(_ATOM, "entry"))
    _text(entry, "id", f"urn:uuid:{change.id}")
    what = f"{change.entity} {change.key} version {change.version} {change.kind.value}"
    _text(entry, "title", _writable(what))
    _text(entry, "updated", _moment(change.recorded_at))
    _text(entry, "published", _moment(change.recorded_at))
    who = change.provenance
    for name in filter(None, (f"{who.service_name} {who.identifier}", who.actor)):
        _text(ET.SubElement(entry, _in(_ATOM, "author")), "name", _writable(name))
    ET.SubElement(entry, _in(_ATOM, "category"), term=change.kind.value)
    escaped = _UNWRITABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", content.decode())
    _text(entry, "content", escaped).set("type", "text")


def _text(parent: ET.Element, name: str, text: str) -> ET.Element:
    made = ET.SubElement(parent, _in(_ATOM, name))
    made.text = text
    return made


def _in(space: str, name: str) -> str:
    return f"{{{space}}}{name}"


def _writable(text: str) -> str:
    return _UNWRITABLE.sub("\ufffd", text)


def _moment(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")


def _written(root: ET.Element) -> str:
    found: bytes = ET.tostring(root, encoding="utf-8", xml_declaration=True)
    return found.decode()
