"""How a model is made of what people, clients, services and files give: one rule for all of them.

A value that the model can hold arrives exactly. Python's and pydantic's readers would change some
without an error: JSON numbers with many digits are rounded, parts of a microsecond are cut off,
digits are taken for the seconds since 1970, and `1_000` is taken for a number. Such values are kept
exactly, or refused with the reason.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from decimal import Context, Decimal, InvalidOperation
from typing import Any, Final, Literal

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from everstate.changes.fields import FieldTree, ValuePath, has_rule, ruled_tree, tree_of
from everstate.changes.json_numbers import (
    JsonNumber,
    WrittenNumber,
    decode,
    decode_as_written,
    encode,
    may_be_changed,
    number_of,
)
from everstate.changes.moments import is_finer
from everstate.changes.names import by_name
from everstate.changes.unknown import EXTRA, keeps_computed, refuses_unknown, without_computed

_DIGITS: Final = re.compile(r"\s*[-+]?[\d_.]+\s*")
_DAY_AND_TIME: Final = re.compile(r"\s*\d{4}-\d\d-\d\d[Tt_ ]\s*\d[\d:.,]*\s*(?P<offset>[Zz+-].*)?")
_DIGITS_MAX: Final = 1_000
"""A float has at most 767 digits."""
_FLOAT_WHOLE: Final = 2**53
"""A float above does not have the digits with which JSON writes it."""
_ERRORS_MAX: Final = 100_000
_ERRORS_KEPT: Final = 1_000
_PLACE_MAX: Final = 200
_REASON_MAX: Final = 1_000
"""Most characters of what an error says; a name or a value may be as long as the input."""
_EXAMPLES: Final = {
    "date": ("date", "2026-01-02"),
    "timestamp": ("time", "2026-01-02T03:04:05Z"),
}
"""What a field means in words, and how it is written."""


class NotAccepted(ValueError):
    """What was given is no valid entity; ``errors`` name each field, as pydantic's do.

    At most the first 1,000 are kept. Their texts are cut, so that they can be shown and logged.
    """

    def __init__(self, model: type[BaseModel], errors: Sequence[ErrorDetails]) -> None:
        self._model = model
        self.errors = tuple(_cut(error) for error in errors[:_ERRORS_KEPT])
        super().__init__(self.errors[0]["msg"])

    def problems(self, whole: str, most: int = 1) -> tuple[tuple[str, str], ...]:
        """The first fields that are refused, and why; ``whole`` is the name of the value itself."""
        return tuple(
            (".".join(str(part) for part in error["loc"]) or whole, self._reason(error))
            for error in self.errors[:most]
        )

    def _reason(self, error: ErrorDetails) -> str:
        """Why a field is refused, with the most similar field name as a hint."""
        if error["type"] != EXTRA:
            return error["msg"]
        names = [each.written for each in tree_of(self._model).columns]
        alike = difflib.get_close_matches(str(error["loc"][-1]), names, 1)
        hint = f"; did you mean {alike[0]}?" if alike and len(error["loc"]) == 1 else ""
        return f"there is no field of this name{hint}"


def accept(
    model: type[BaseModel], given: bytes | str | Mapping[str, Any], *, strict: bool | None = None
) -> BaseModel:
    """The model made of JSON text, or of Python values by field; raises NotAccepted.

    ``strict``: a value must have the JSON type of its field. Fields that the model does not have
    are treated as :mod:`everstate.changes.unknown` says. Cost: about 2 µs more than pydantic's own.
    """
    place = ruled_tree(model)
    problems: list[ErrorDetails] = []
    unread = None
    if place is not None and isinstance(given, Mapping):
        place.apply(given, _Checking(problems, is_json=False))
    elif place is not None and not isinstance(given, Mapping):
        try:
            keeps_texts = has_rule(model, "text") and not strict
            tree = decode_as_written(given) if keeps_texts else decode(given)
        except ValueError as cause:
            unread = cause
        else:
            exact = place.apply(tree, _Checking(problems, is_json=True))
            given = given if exact is tree else encode(exact)
    try:
        extra = "forbid" if refuses_unknown(model) else None
        made = read_values(model, given, strict=strict, extra=extra, by_name=None)
    except ValidationError as cause:
        if cause.error_count() > _ERRORS_MAX:
            # Each would be made into a dictionary before one can be chosen.
            many = f"{cause.error_count():,} values are wrong"
            raise NotAccepted(
                model, [{"type": "value_error", "loc": (), "msg": many, "input": None}]
            ) from None
        told = {error["loc"] for error in problems}
        others = cause.errors(include_url=False, include_context=False, include_input=False)
        problems += [error for error in others if error["loc"] not in told]
    if not problems and unread is not None:
        problems.append({"type": "json_invalid", "loc": (), "msg": str(unread), "input": None})
    if problems:
        raise NotAccepted(model, problems)
    return made


def read_row(model: type[BaseModel], given: Mapping[str, Any]) -> BaseModel:
    """The model made of a row's values by field; raises ValidationError.

    Raises NotAccepted for a value that the model's reader would change without an error. A table
    may have a boolean where the model has a number, and midnight where it has a day. Cost: about
    1 µs more than the model's own for three numbers.
    """
    place, problems = ruled_tree(model), list[ErrorDetails]()
    if place is not None:
        place.apply(given, _Checking(problems, is_json=False, is_row=True))
    if problems:
        raise NotAccepted(model, problems)
    return read_values(model, given)


def read_exactly(model: type[BaseModel], text: bytes | str) -> BaseModel:
    """The model made of a stored state's JSON, with all digits; raises ValidationError."""
    written = text.encode() if isinstance(text, str) else text
    place = ruled_tree(model)
    if place is not None and may_be_changed(written):
        tree = decode(written)
        exact = place.apply(tree, _kept_exactly)
        if exact is not tree:
            written = encode(exact)
    return read_values(model, written)


def read_values(model: type[BaseModel], given: Any, **options: Any) -> BaseModel:
    """The model made of a state's values, or of JSON text; raises ValidationError.

    Computed fields that the model does not take are left out. The ``options`` are pydantic's;
    those of a state are the default.
    """
    own: Any = model.__pydantic_validator__
    # model_validate calls these, after checking options that are not used here.
    read = own.validate_json if isinstance(given, (bytes, str)) else own.validate_python
    options = {"by_name": by_name(model)} | options
    if keeps_computed(model):
        given = without_computed(model, given)
    try:
        return read(given, **options)  # type: ignore[no-any-return]
    except ValidationError:
        known = without_computed(model, given)
        if known is given:
            raise
    return read(known, **options)  # type: ignore[no-any-return]


def _kept_exactly(place: FieldTree, value: Any, _: ValuePath) -> Any:
    """A number of a decimal, integer or text field as text, in which pydantic keeps every digit."""
    exact = WrittenNumber if place.rule == "text" else JsonNumber
    if place.rule in ("decimal", "text") and isinstance(value, exact):
        return str(value)
    if place.rule != "integer":
        return value
    if isinstance(value, float) and abs(value) > _FLOAT_WHOLE:
        value = JsonNumber(repr(value))
    if isinstance(value, JsonNumber):
        # The model's reader takes no exponent in the text of an integer.
        return format(value, "f") if abs(value.adjusted()) < _DIGITS_MAX else str(value)
    return value


def _cut(error: ErrorDetails) -> ErrorDetails:
    """The error with short texts."""
    place, message = ".".join(str(part) for part in error["loc"]), error["msg"]
    if len(place) > _PLACE_MAX:
        error = {**error, "loc": (f"{place[:_PLACE_MAX]}…",)}
    if len(message) > _REASON_MAX:
        error = {**error, "msg": f"{message[:_REASON_MAX]}… ({len(message):,} characters)"}
    return error


class _Checking:
    """The rule of :func:`accept`; it collects what is refused."""

    def __init__(
        self, problems: list[ErrorDetails], *, is_json: bool, is_row: bool = False
    ) -> None:
        self._problems, self._is_json, self._is_row = problems, is_json, is_row

    def __call__(self, place: FieldTree, value: Any, at: ValuePath) -> Any:
        if isinstance(value, WrittenNumber) and place.rule not in (None, "text"):
            value = number_of(value.text)  # only a text shows how the number was written
        if isinstance(value, Iterator) and place.element is not None:
            self._refuse("what is given can be read only once; give a list", at)
        elif place.rule is None:
            self._check_unknown(value, at)
        elif reason := self._reason(place, value):
            self._refuse(reason, at)
        return _kept_exactly(place, value, at) if self._is_json else value

    def _reason(self, place: FieldTree, value: Any) -> str | None:
        """Why a value is not what its field means; ``None``: pydantic decides."""
        kind = place.rule
        if place.has_own_rules:
            is_number = isinstance(value, (int, Decimal))
            return _not_a_float(value) if kind == "float" and is_number else None
        if isinstance(value, bool):
            takes_it = kind not in ("integer", "float") or place.takes_others or self._is_row
            return None if takes_it else f"{str(value).lower()} is no number"
        if kind == "date" or kind == "timestamp":
            return _no_time(kind, value, is_row=self._is_row)
        if kind != "text" and isinstance(value, str) and ("_" in value or not value.isascii()):
            return f"{value!r} is no number"
        is_written = isinstance(value, (int, str, Decimal))
        return _not_a_float(value) if kind == "float" and is_written else None

    def _refuse(self, reason: str, at: ValuePath) -> None:
        self._problems.append({"type": "value_error", "loc": at, "msg": reason, "input": None})

    def _check_unknown(self, value: Any, at: ValuePath) -> None:
        if isinstance(value, JsonNumber) and Decimal(repr(float(value))) != value:
            self._refuse(f"{value} has more digits than a field without a type can keep", at)
        elif isinstance(value, Mapping):
            for name, part in value.items():
                self._check_unknown(part, (*at, name))
        elif isinstance(value, list):
            for n, part in enumerate(value):
                self._check_unknown(part, (*at, n))


def _no_time(kind: Literal["date", "timestamp"], value: Any, *, is_row: bool) -> str | None:
    """Why a value is no day or time, though pydantic would make one of it."""
    word, example = _EXAMPLES[kind]
    if isinstance(value, date):
        has_offset = getattr(value, "tzinfo", None) is not None and kind == "date" and not is_row
        return f"{value} has a UTC offset, and the field is a day" if has_offset else None
    found = _DAY_AND_TIME.match(value) if kind == "date" and isinstance(value, str) else None
    if found is not None and (found["offset"] or not is_row):
        return f"{value!r} has a time, and the field is a day; write it as {example}"
    is_number = isinstance(value, (int, float, Decimal))
    if is_number or (isinstance(value, str) and _DIGITS.fullmatch(value)):
        return f"{value!r} is a number and no {word}; write it as {example}"
    if isinstance(value, str) and is_finer(value):
        return f"{value!r} has parts of a microsecond, which no time here can hold"
    return None


def _not_a_float(value: int | str | Decimal) -> str | None:
    if _is_float(value):
        return None
    return f"{str(value)[:100]} is a number that a float cannot hold exactly"


def _is_float(given: int | str | Decimal) -> bool:
    """Whether a float shows this number when it is written with as many digits; true: no number.

    0.1 is shown by a float although no float is 0.1, and so is 1.000000000000000056e-01.
    """
    try:
        number = Decimal(given.strip() if isinstance(given, str) else given)
    except InvalidOperation:
        return True  # the model refuses it
    try:
        value = float(number)
    except OverflowError:
        return False
    if not number.is_finite() or value - value != 0 or Decimal(repr(value)) == number:
        return True  # the model refuses NaN and infinity
    digits = len(number.as_tuple().digits)
    return digits <= _DIGITS_MAX and Context(prec=digits).plus(Decimal(value)) == number
