"""How a model is made of what people, clients, services and files give: one rule for all of them.

A value that the model can hold arrives exactly. Python's and pydantic's readers would change some
without an error: JSON numbers with many digits are rounded, parts of a microsecond are cut off,
digits are taken for the seconds since 1970, and `1_000` is taken for a number. Such values are kept
exactly, or refused with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date, datetime
from decimal import Context, Decimal, InvalidOperation
from typing import Any, Final

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from everstate.changes.computed import forget_computed, without_computed
from everstate.changes.json_numbers import (
    JsonNumber,
    WrittenNumber,
    decode,
    decode_as_written,
    encode,
    may_be_changed,
)
from everstate.changes.moments import is_finer
from everstate.changes.names import by_name
from everstate.changes.places import ValuePath, ValuePlace, apply, makes_texts, places_of
from everstate.changes.unknown import takes_unknown

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
_EXAMPLES: Final = {"date": "2026-01-02", "time": "2026-01-02T03:04:05Z"}


class NotAccepted(ValueError):
    """What was given is no valid entity; ``errors`` name each field, as pydantic's do.

    At most the first 1,000 are kept. Their texts are cut, so that they can be shown and logged.
    """

    def __init__(self, errors: Sequence[ErrorDetails]) -> None:
        self.errors = tuple(_cut(error) for error in errors[:_ERRORS_KEPT])
        super().__init__(self.errors[0]["msg"])


def accept(
    model: type[BaseModel], given: bytes | str | Mapping[str, Any], *, strict: bool | None = None
) -> BaseModel:
    """The model made of JSON text, or of Python values by field; raises NotAccepted.

    ``strict``: a value must have the JSON type of its field. Fields that the model does not have
    are treated as :mod:`everstate.changes.unknown` says. Cost: about 2 µs more than pydantic's own.
    """
    place, unknown = places_of(model), takes_unknown(model)
    problems: list[ErrorDetails] = []
    unread = None
    if place is not None and isinstance(given, Mapping):
        apply(place, given, _Checking(problems, is_json=False))
    elif place is not None and not isinstance(given, Mapping):
        try:
            if makes_texts(model) and not strict:
                given = _with_texts(place, given)
            tree = decode(given)
        except ValueError as cause:
            unread = cause
        else:
            exact = apply(place, tree, _Checking(problems, is_json=True))
            given = given if exact is tree else encode(exact)
    try:
        made = _made(model, given, strict, unknown.rule)
    except ValidationError as cause:
        if cause.error_count() > _ERRORS_MAX:
            # Each would be made into a dictionary before one can be chosen.
            many = f"{cause.error_count():,} values are wrong"
            raise NotAccepted(
                [{"type": "value_error", "loc": (), "msg": many, "input": None}]
            ) from None
        told = {error["loc"] for error in problems}
        others = cause.errors(include_url=False, include_context=False, include_input=False)
        problems += [
            error for error in others if error["loc"] not in told and not unknown.is_computed(error)
        ]
        if not problems:
            # Clients and exported rows may have the fields that the model computes.
            try:
                made = _made(model, without_computed(model, given, cause), strict, None)
                return forget_computed(model, made)
            except ValidationError as other:
                problems += other.errors(
                    include_url=False, include_context=False, include_input=False
                )
            except ValueError as other:
                unread = other
    if not problems and unread is not None:
        problems.append({"type": "json_invalid", "loc": (), "msg": str(unread), "input": None})
    if problems:
        raise NotAccepted(problems)
    return forget_computed(model, made)


def inexact(model: type[BaseModel], given: Mapping[str, Any]) -> ErrorDetails | None:
    """The first value of a row that the model's reader would change without an error.

    A table may have a boolean where the model has a number, and midnight where it has a day.
    Cost: about 1 µs for a model with three numbers.
    """
    place = places_of(model)
    if place is None:
        return None
    for name, part in place.members.items():
        value = given.get(name)
        if value is None or value.__class__ is part.plain:
            continue
        problems: list[ErrorDetails] = []
        rule = _Checking(problems, is_json=False, is_row=True)
        if value.__class__ is str:
            rule(part, value, (name,))
        else:
            apply(part, value, rule, (name,))
        if problems:
            return problems[0]
    return None


def read_exactly(model: type[BaseModel], text: bytes | str) -> BaseModel:
    """The model made of a stored state's JSON, with all digits; raises ValidationError."""
    written = text.encode() if isinstance(text, str) else text
    place = places_of(model)
    if place is not None and may_be_changed(written):
        tree = decode(written)
        exact = apply(place, tree, _kept_exactly)
        if exact is not tree:
            written = encode(exact)
    return _read(model, model.__pydantic_validator__.validate_json, written)


def read_values(model: type[BaseModel], state: Any) -> BaseModel:
    """The model made of a state's values by field; raises ValidationError."""
    return _read(model, model.__pydantic_validator__.validate_python, state)


def _read(model: type[BaseModel], validate: Callable[..., Any], state: Any) -> BaseModel:
    """The model made of what :meth:`EntityType.encode` or :func:`model_json` wrote."""
    names = by_name(model)
    try:
        made: BaseModel = validate(state, by_name=names)
    except ValidationError as cause:
        known = without_computed(model, state, cause)
        if known is state:
            raise
        made = validate(known, by_name=names)
    return forget_computed(model, made)


def _made(model: type[BaseModel], given: Any, strict: bool | None, extra: Any) -> BaseModel:
    # model_validate calls these, after checking options that are not used here.
    validator = model.__pydantic_validator__
    validate = validator.validate_python if isinstance(given, Mapping) else validator.validate_json
    made: BaseModel = validate(given, strict=strict, extra=extra)
    return made


def _with_texts(place: ValuePlace, given: bytes | str) -> bytes | str:
    """JSON in which a number that becomes a text is one, with the digits that it has."""
    tree = decode_as_written(given)
    made = apply(place, tree, _as_text)
    return given if made is tree else encode(made)


def _as_text(place: ValuePlace, value: Any, _: ValuePath) -> Any:
    return value.text if place.kind == "text" and isinstance(value, WrittenNumber) else value


def _kept_exactly(place: ValuePlace, value: Any, _: ValuePath) -> Any:
    """A number of a decimal or an integer field as text, in which pydantic keeps every digit."""
    if place.kind == "decimal" and isinstance(value, JsonNumber):
        return str(value)
    if place.kind != "integer":
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

    def __call__(self, place: ValuePlace, value: Any, at: ValuePath) -> Any:
        if isinstance(value, Iterator) and place.element is not None:
            self._refuse("what is given can be read only once; give a list", at)
        elif place.kind is None:
            self._check_unknown(value, at)
        elif reason := self._reason(place, value):
            self._refuse(reason, at)
        return _kept_exactly(place, value, at) if self._is_json else value

    def _reason(self, place: ValuePlace, value: Any) -> str | None:
        if place.has_own_rules:
            is_number = isinstance(value, (int, Decimal))
            return _not_a_float(value) if place.kind == "float" and is_number else None
        return _of_another_kind(place, value, is_row=self._is_row) or _refused(place, value)

    def _refuse(self, reason: str, at: ValuePath) -> None:
        self._problems.append({"type": "value_error", "loc": at, "msg": reason, "input": None})

    def _check_unknown(self, value: Any, at: ValuePath) -> None:
        if isinstance(value, JsonNumber):
            self._refuse(f"{value} has more digits than a field without a type can keep", at)
        elif isinstance(value, Mapping):
            for name, part in value.items():
                self._check_unknown(part, (*at, name))
        elif isinstance(value, list):
            for n, part in enumerate(value):
                self._check_unknown(part, (*at, n))


def _of_another_kind(place: ValuePlace, value: Any, *, is_row: bool) -> str | None:
    """Why a value is of another kind than its field, though pydantic converts it."""
    if isinstance(value, bool):
        is_number = place.kind in ("integer", "float") and not (place.takes_others or is_row)
        return f"{str(value).lower()} is no number" if is_number else None
    if place.kind != "date":
        return None
    if isinstance(value, datetime) and value.tzinfo is not None and not is_row:
        return f"{value} has a UTC offset, and the field is a day"
    if (
        isinstance(value, str)
        and (found := _DAY_AND_TIME.match(value))
        and (found["offset"] or not is_row)
    ):
        return f"{value!r} has a time, and the field is a day; write it as {_EXAMPLES['date']}"
    return None


def _refused(place: ValuePlace, value: Any) -> str | None:
    """Why a value is not what its field means; ``None``: pydantic decides."""
    kind = place.kind
    if kind in ("date", "time"):
        if isinstance(value, (date, datetime, bool)):
            return None
        is_number = isinstance(value, (int, float, Decimal))
        if is_number or (isinstance(value, str) and _DIGITS.fullmatch(value)):
            return f"{value!r} is a number and no {kind}; write it as {_EXAMPLES[kind]}"
        if isinstance(value, str) and is_finer(value):
            return f"{value!r} has parts of a microsecond, which no time here can hold"
        return None
    if kind == "text":
        return None
    if isinstance(value, str) and ("_" in value or not value.isascii()):
        return f"{value!r} is no number"
    return (
        _not_a_float(value) if kind == "float" and isinstance(value, (int, str, Decimal)) else None
    )


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
