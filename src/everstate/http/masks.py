"""Hides the values of fields from a caller, in JSON of an entity type. Pure.

That a hidden field exists and that it changed stays visible; what its value is or was does not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any, Final

import msgspec

from everstate.api_config import Right
from everstate.errors import InvalidBody, NotPermitted

MASKED: Final = "***"
"""Replaces a hidden value, null too."""
ALL_FIELDS: Final = ""
"""Means the whole state where fields are listed."""
_STATES: Final = ("currentEntityState", "originalEntityState")
Path = tuple[str, ...]


class Mask:
    """The fields of one entity type that one caller does not see; false: it sees all."""

    def __init__(
        self,
        entity: str,
        fields: Iterable[str] = (),
        caller: str | None = None,
        lacking: Right = "unmasked",
    ) -> None:
        """``fields``: with :data:`ALL_FIELDS`, all; ``lacking``: the right that would show it."""
        self.entity, self._caller, self._lacking = entity, caller, lacking
        self._paths = tuple(tuple(filter(None, field.split("."))) for field in sorted(fields))
        digest = hashlib.sha256("\0".join(".".join(path) for path in self._paths).encode())
        self.tag = f"m{digest.hexdigest()[:8]}" if self._paths else ""
        """Is in the ETag of what this mask has changed; empty: nothing is hidden."""

    def __bool__(self) -> bool:
        return bool(self._paths)

    @property
    def paths(self) -> tuple[Path, ...]:
        """The hidden fields; ``()`` is the whole state."""
        return self._paths

    def state(self, state: Any) -> Any:
        """A decoded state without the hidden values; ``None`` stays ``None``."""
        return self.within((), state)

    def within(self, path: Path, value: Any) -> Any:
        """The value of a field, or of the whole state for ``()``, without what is hidden in it."""
        for hidden in self._paths:
            shared = _shared(path, hidden)
            if shared == len(hidden) or _leads_elsewhere(path, hidden, shared):
                return MASKED
            if shared == len(path):
                hide = _hidden if path else _member_hidden
                value = hide(value, hidden[shared:])
            elif shared and _occurs(value, hidden[shared]):
                return MASKED
        return value

    def json(self, text: bytes) -> bytes:
        """A state as JSON without the hidden values."""
        for path in self._paths:
            text = _member_hidden_in(text, path) if path else _encoded(MASKED)
        return text

    def event(self, event: Any) -> Any:
        """An event of a change: of a type with hidden fields, only its type is shown.

        Its data may repeat any field under any name.
        """
        if not self or event is None:
            return event
        kind = event.get("type") if isinstance(event, Mapping) else None
        return {"type": kind, "data": MASKED} if isinstance(kind, str) else MASKED

    def change(self, wire: bytes) -> bytes:
        """A change as it is in the log, without the hidden values."""
        if not self or not wire:
            return wire
        members = msgspec.json.decode(wire, type=dict[str, msgspec.Raw])
        for name in _STATES:
            if name in members:
                members[name] = msgspec.Raw(self.json(bytes(members[name])))
        if "event" in members:
            event = self.event(_read(bytes(members["event"])))
            members["event"] = msgspec.Raw(_encoded(event))
        return msgspec.json.encode(members)

    def covers(self, path: Path) -> bool:
        """Whether a field is hidden, is within a hidden one, or has one within it."""
        return any(
            path[: len(hidden)] == hidden or hidden[: len(path)] == path for hidden in self._paths
        )

    def shown(self, path: Path) -> Path:
        """A field, or the hidden field that it is within."""
        for hidden in self._paths:
            shared = _shared(path, hidden)
            if shared == len(hidden) or _leads_elsewhere(path, hidden, shared):
                return path[:shared]
        return path

    def refuse(self, path: Iterable[str], what: str) -> None:
        """Raise NotPermitted for a field that is hidden: ``what`` would reveal its value."""
        named = tuple(path)
        if self.covers(named):
            raise NotPermitted(
                self._caller, f"`{self._lacking}` on {self.entity}, for {what} {'.'.join(named)!r}"
            )

    def check_written(self, value: Any, at: Path = ()) -> None:
        """Raise InvalidBody when a caller writes the mask where it saw it, and not a value.

        ``value`` is what is written into a field, or into the whole state.
        """
        for hidden in self._paths:
            if hidden[: len(at)] == at and _has_mask(value, hidden[len(at) :]):
                reason = f"is {MASKED!r}, which replaces a value that this caller does not see"
                raise InvalidBody(self.entity, ((".".join(hidden), reason),))

    def check_operations(self, operations: Sequence[Mapping[str, Any]]) -> None:
        """Check the operations of a JSON Patch (RFC 6902), which may read as well as write.

        Raises NotPermitted for one that would show or test a hidden value, and InvalidBody as
        :meth:`check_written`.
        """
        for each in operations if self else ():
            path = _fields_of(each["path"])
            if each["op"] in ("test", "move", "copy"):
                for pointer in ("path", "from"):
                    if pointer in each:
                        self.refuse(_fields_of(each[pointer]), f"the operation {each['op']} on")
            elif "value" in each:
                self.check_written(each["value"], path)

    def refuse_all(self, what: str) -> None:
        """Raise NotPermitted when any field is hidden: ``what`` may have any value."""
        if self:
            raise NotPermitted(self._caller, f"`{self._lacking}` on {self.entity}, for {what}")


NO_MASK: Final = Mask("")


def _hidden_in(text: bytes, path: Path) -> bytes:
    """As :func:`_hidden`, of JSON; the other values keep their text."""
    if not path or _is_misfit(_read(text), path[0]):
        return _encoded(MASKED)
    return _member_hidden_in(text, path)


def _member_hidden_in(text: bytes, path: Path) -> bytes:
    kind = text.lstrip()[:1]
    if kind == b"[":
        items = msgspec.json.decode(text, type=list[msgspec.Raw])
        shown = [msgspec.Raw(_member_hidden_in(bytes(each), path)) for each in items]
        return msgspec.json.encode(shown)
    members = msgspec.json.decode(text, type=dict[str, msgspec.Raw]) if kind == b"{" else {}
    if path[0] not in members:
        return text
    members[path[0]] = msgspec.Raw(_hidden_in(bytes(members[path[0]]), path[1:]))
    return msgspec.json.encode(members)


def _hidden(value: Any, path: Path) -> Any:
    """A field's value without what is hidden in it; one of another form is hidden as a whole."""
    if not path or _is_misfit(value, path[0]):
        return MASKED
    return _member_hidden(value, path)


def _member_hidden(value: Any, path: Path) -> Any:
    """A state, or an object, without a hidden member; of a list, each object."""
    if isinstance(value, list):
        return [_member_hidden(item, path) for item in value]
    if isinstance(value, Mapping) and path[0] in value:
        return {**value, path[0]: _hidden(value[path[0]], path[1:])}
    return value


def _is_misfit(value: Any, name: str) -> bool:
    """Whether a value may hold a hidden member where no path leads: a state need not fit its model.

    It does when it is a text or another value without members, and when it has the member only
    further within, as an object of objects in place of a list of them does.
    """
    if isinstance(value, list):
        return any(_is_misfit(item, name) for item in value)
    if isinstance(value, Mapping):
        return name not in value and any(_occurs(each, name) for each in value.values())
    return value is not None


def _shared(path: Path, hidden: Path) -> int:
    """How many of their first names two paths share."""
    pairs = zip(path, hidden, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _leads_elsewhere(path: Path, hidden: Path, shared: int) -> bool:
    """Whether a path leads to a hidden member of a misfit, see :func:`_is_misfit`."""
    return 0 < shared < len(hidden) and hidden[shared] in path[shared:]


def _occurs(value: Any, name: str) -> bool:
    """Whether an object has such a member, at any depth."""
    if isinstance(value, list):
        return any(_occurs(item, name) for item in value)
    if isinstance(value, Mapping):
        return name in value or any(_occurs(each, name) for each in value.values())
    return False


def _has_mask(value: Any, path: Path) -> bool:
    if isinstance(value, list):
        return any(_has_mask(item, path) for item in value)
    if not path or isinstance(value, str):
        # A value of another form than the path's is masked as a whole.
        return bool(value == MASKED)
    return isinstance(value, Mapping) and path[0] in value and _has_mask(value[path[0]], path[1:])


def _fields_of(pointer: str) -> Path:
    """The field that a JSON Pointer names; places in lists are left out, as in masks."""
    parts = (part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:])
    return tuple(part for part in parts if not (part.isdigit() or part == "-"))


def _read(text: bytes) -> Any:
    # Numbers stay texts: one may have more digits than Python reads.
    return json.loads(text, parse_int=str, parse_float=str)


def _encoded(value: Any) -> bytes:
    # Not orjson: a state may have numbers of more than 64 bits, and texts with lone surrogates.
    return json.dumps(value, separators=(",", ":")).encode()
