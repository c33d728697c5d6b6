"""ETags, and the conditions that requests put on them. Pure. Source: RFC 9110, section 13."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from everstate.errors import InvalidRequest, PreconditionFailed

_LIST: Final = re.compile(r'\s*(?:(?:W/)?"[\x21\x23-\x7e]*"\s*(?:,\s*|$))+')
_TAG: Final = re.compile(r'(W/)?"([\x21\x23-\x7e]*)"')
_VERSION: Final = re.compile(r"[1-9][0-9]{0,18}")
_ANY: Final = "*"
_NONE_MATCH: Final = "if-none-match"


def etag(version: int, variant: str = "") -> str:
    """The strong ETag of a version; ``variant``: of what a mask has made of it."""
    return f'"{version}.{variant}"' if variant else f'"{version}"'


@dataclass(frozen=True, slots=True)
class HeaderCondition:
    """Versions that a header names; ``any`` for `*`, which matches every existing version.

    ``strong`` has only the tags that are not weak: If-Match uses strong comparison.
    """

    header: str
    any: bool
    strong: frozenset[int]
    weak: frozenset[int]

    def __str__(self) -> str:
        return self.header


def parse_condition(name: str, value: str | None, variant: str = "") -> HeaderCondition | None:
    """HeaderCondition of an If-Match or If-None-Match header; ``None``: the header is missing.

    A tag that is not an everstate version matches nothing. ``variant``: the caller gets what a mask
    has made of a version; the tag of the version itself then names something that the caller does
    not have, and counts in If-Match only. Raises InvalidRequest when the header is not a list of
    tags.
    """
    if value is None:
        return None
    shown = f"{name}: {value}"
    if value.strip() == _ANY:
        return HeaderCondition(shown, True, frozenset(), frozenset())
    if not _LIST.fullmatch(value):
        raise InvalidRequest(f'{name} is {value!r}; expected * or versions such as "3".')
    tags = [(weak, _version_in(tag, variant, name)) for weak, tag in _TAG.findall(value)]
    tags = [(weak, tag) for weak, tag in tags if _VERSION.fullmatch(tag)]
    strong = frozenset(int(tag) for weak, tag in tags if not weak)
    return HeaderCondition(shown, False, strong, frozenset(int(tag) for _, tag in tags))


def _version_in(tag: str, variant: str, name: str) -> str:
    """The version that a tag names; empty: none that the caller can have."""
    own = f".{variant}"
    if variant and tag.endswith(own):
        return tag.removesuffix(own)
    return "" if variant and name.lower() == _NONE_MATCH else tag


@dataclass(frozen=True, slots=True)
class Conditions:
    """Conditions of a request on the present version."""

    match: HeaderCondition | None = None
    none_match: HeaderCondition | None = None

    @property
    def given(self) -> bool:
        """Whether the request has any condition."""
        return self.match is not None or self.none_match is not None

    def check(self, entity: str, key: str, version: int | None) -> None:
        """Raise PreconditionFailed when a condition does not hold; ``None``: no such entity."""
        match, none_match = self.match, self.none_match
        if match is not None and (version is None or not (match.any or version in match.strong)):
            raise PreconditionFailed(entity, key, str(match), version or 0)
        if none_match is not None and version is not None and self._same(none_match, version):
            raise PreconditionFailed(entity, key, str(none_match), version)

    def not_modified(self, version: int) -> bool:
        """Whether a reader has this version already: 304."""
        return self.none_match is not None and self._same(self.none_match, version)

    @staticmethod
    def _same(condition: HeaderCondition, version: int) -> bool:
        return condition.any or version in condition.weak
