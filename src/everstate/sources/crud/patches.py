"""The two kinds of patches: JSON Merge Patch (RFC 7396) and JSON Patch (RFC 6902). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import jsonpatch

from everstate.changes.fields import FieldTree
from everstate.changes.json_numbers import encode
from everstate.errors import InvalidBody

MERGE_PATCH: Final = "application/merge-patch+json"
JSON_PATCH: Final = "application/json-patch+json"

_OPERATIONS: Final = ("add", "remove", "replace", "move", "copy", "test")
OPERATIONS_MAX: Final = 1_000
"""Maximum number of operations in one JSON Patch."""
_REASON_MAX: Final = 200
"""Maximum length of a reason: the library's reasons may quote the whole document."""


def merge(target: Any, patch: Any, tree: FieldTree | None = None) -> Any:
    """Apply a merge patch: null removes a member, an object is merged, other values replace.

    ``tree``: what the target is; ``None``: any JSON. A field of a model that takes null gets null,
    and a name that the model does not have stays in the result with null, so that the model
    refuses it.
    """
    if not isinstance(patch, dict):
        return patch
    merged = dict(target) if isinstance(target, dict) else {}
    for given, value in patch.items():
        name, inner, takes_null = member_of(tree, given)
        if value is not None:
            merged[name] = merge(merged.get(name), value, inner)
        elif takes_null:
            merged[name] = None
        else:
            merged.pop(name, None)
    return merged


class Member(NamedTuple):
    """A member of an object that a caller gives."""

    name: str
    """Its name in a state."""
    tree: FieldTree | None
    """``None``: any JSON."""
    takes_null: bool
    """Whether null is a value of it, or must be refused by the model."""


def member_of(tree: FieldTree | None, given: str) -> Member:
    """The member that a name means in an object of this type."""
    if tree is None or tree.model is None:
        is_map = tree is not None and tree.type == "map"
        return Member(given, tree.element if tree and is_map else None, False)
    field = next((each for each in tree.fields if given in each.read), None)
    if field is not None:
        return Member(field.written, field.tree, field.takes_null)
    is_computed = any(given in each.names for each in tree.computed)
    may_remove = is_computed or tree.keeps_unknown or tree.converts_input
    return Member(given, None, not may_remove)


def check_patch(entity: str, kind: str, patch: Any) -> None:
    """Raise InvalidBody when a patch is malformed, independent of its target document."""
    if kind == JSON_PATCH:
        _check_json_patch(entity, patch)
    elif not isinstance(patch, dict):
        raise InvalidBody(entity, (("patch", "a merge patch must be an object"),))


def apply_json_patch(
    entity: str, document: Any, operations: Sequence[Any], *, copied_bytes_max: int
) -> Any:
    """Apply a well-formed JSON Patch; returns the document, which is changed in place or replaced.

    The `copy` operations of a patch may together copy ``copied_bytes_max`` bytes of JSON: each of
    them could double the document. So the work is bounded by the sizes of document and patch.
    Raises InvalidBody naming the operation that cannot be applied, or the `test` that fails.
    """
    copied = 0
    for number, operation in enumerate(operations):
        where = f"patch.{number}"
        try:
            if operation["op"] == "copy":
                copied += _bytes(document, operation["from"])
                if copied > copied_bytes_max:
                    reason = f"the patch copies more than {copied_bytes_max:,} bytes"
                    raise InvalidBody(entity, ((where, reason),))
            document = jsonpatch.apply_patch(document, [operation], in_place=True)
        except (jsonpatch.JsonPatchException, jsonpatch.JsonPointerException) as cause:
            reason = str(cause)[:_REASON_MAX] or type(cause).__name__
            raise InvalidBody(entity, ((where, reason),)) from cause
        except (TypeError, ValueError, KeyError, IndexError) as cause:
            # The library raises these when a path leads through a value without members; `-`, the
            # element after the last one of a list, has no JSON to copy.
            raise InvalidBody(entity, ((where, "the path does not exist"),)) from cause
    return document


def _bytes(document: Any, pointer: str) -> int:
    """Size in bytes of the JSON value at a pointer."""
    return len(encode(jsonpatch.JsonPointer(pointer).resolve(document)))


def _check_json_patch(entity: str, operations: Any) -> None:
    if not isinstance(operations, list):
        raise InvalidBody(entity, (("patch", "a JSON Patch must be a list of operations"),))
    if len(operations) > OPERATIONS_MAX:
        raise InvalidBody(entity, (("patch", f"more than {OPERATIONS_MAX:,} operations"),))
    for number, operation in enumerate(operations):
        _check_shape(entity, f"patch.{number}", operation)


def _check_shape(entity: str, where: str, operation: Any) -> None:
    if not isinstance(operation, dict) or operation.get("op") not in _OPERATIONS:
        known = ", ".join(_OPERATIONS)
        raise InvalidBody(entity, ((where, f"expected an object whose op is one of {known}"),))
    pointers = ["path", "from"] if operation["op"] in ("move", "copy") else ["path"]
    for name in pointers:
        pointer = operation.get(name)
        if not isinstance(pointer, str) or (pointer and not pointer.startswith("/")):
            raise InvalidBody(entity, ((f"{where}.{name}", "expected a JSON pointer"),))
    if operation["op"] in ("add", "replace", "test") and "value" not in operation:
        raise InvalidBody(entity, ((f"{where}.value", "is missing"),))
