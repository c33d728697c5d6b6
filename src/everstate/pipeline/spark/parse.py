"""The one definition of how a record of a changelog is read, or why it cannot be read.

The archive, the keeper and the proofs all use :func:`parse`, so they cannot disagree on which
records are changes. It is a pure function of the record and the entity type.

Whether a record can be read depends on its envelope alone, never on the model: a state that does
not fit the model is accepted, and each value that does not fit is NULL in the typed columns (a
misfit, :mod:`everstate.views.misfits`).

Lenient in one place: a number, boolean or object where the model wants text is read as its JSON
text. Unknown fields are ignored here and kept in the raw value.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, reduce
from hashlib import sha256
from operator import and_
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from everstate.changes import PROVENANCE_FIELDS, EntityType, Kind
from everstate.changes.moments import FINER
from everstate.pipeline.spark.exact import is_doubtful, texts_schema
from everstate.pipeline.spark.former import has_clash, today
from everstate.pipeline.spark.states import (
    CORRUPT,
    HEADERS,
    JSON_OPTIONS,
    fields_present,
    fitted_state,
    holds,
    state_schema,
    stored_schema,
    struct,
)

_END: Final = "_everstate_end"
"""A field that is appended to a message before it is read, to find text after its end."""
_CURRENT, _ORIGINAL = "currentEntityState", "originalEntityState"
_UUID: Final = "^[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\\z"
_LOWER_UUID: Final = "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\\z"
# An escaped NUL that is not itself an escaped backslash followed by "u0000" (C19).
_NUL: Final = r"(?<!\\)(?:\\\\)*\\u0000"

_TEXT, _INT, _LONG, _TIME = StringType(), IntegerType(), LongType(), TimestampType()
_TRANSACTION: Final = struct(("id", _TEXT), ("index", _INT), ("count", _INT))
_PROVENANCE: Final = struct(*((name, _TEXT) for name in PROVENANCE_FIELDS.values()))
_IN_UTC_MAX: Final = len("2013-01-01T05:17:00.123456Z")
_WITH_OFFSET_MAX: Final = len("2013-01-01T05:17:00.123456+01:00")
"""A text of a time that is not longer has no parts of a microsecond."""
_REQUIRED_PROVENANCE: Final = ("apiVersion", "serviceName", "identifier")


def envelope_schema(entity_type: EntityType) -> StructType:
    """Spark's type of a message's value; times are still text, the event is JSON text."""
    state = stored_schema(entity_type)
    provenance = StructType([*_PROVENANCE, StructField("transaction", _TRANSACTION)])
    return struct(
        *(("id", _TEXT), ("entity", _TEXT), ("schemaVersion", _INT), ("key", _TEXT)),
        *(("version", _LONG), ("kind", _TEXT), ("event", _TEXT)),
        *(("occurredAt", _TEXT), ("recordedAt", _TEXT), ("provenance", provenance)),
        *((_CURRENT, state), (_ORIGINAL, state), (CORRUPT, _TEXT), (_END, _INT)),
    )


def parsed_schema(entity_type: EntityType) -> StructType:
    """The schema of :func:`parse` and of the archive's table: one column order for both."""
    state = state_schema(entity_type)
    return struct(
        *(("partition", _INT), ("offset", _LONG), ("key", _TEXT), ("recorded_at", _TIME)),
        *(("generation", _INT), ("version", _LONG), ("id", _TEXT), ("kind", _TEXT)),
        *(("occurred_at", _TIME), ("current", state), ("original", state)),
        *(("provenance", _PROVENANCE), ("transaction", _TRANSACTION), ("event", _TEXT)),
        *(("schema_version", _INT), ("reason", _TEXT)),
        *(("raw_key", BinaryType()), ("raw_value", BinaryType()), ("raw_headers", HEADERS)),
        *(("timestamp", _TIME), ("timestamp_type", _INT)),
        *(("model", _TEXT), ("misfits", ArrayType(_TEXT))),
    )


def model_of(entity_type: EntityType) -> str:
    """A hash of the model's typed columns: equal for models with the same names and types."""
    columns = state_schema(entity_type).simpleString()
    if texts_schema(pa.struct(list(entity_type.arrow_schema))) is not None:
        # Archives have columns with rounded values, of a time when nothing looked for them.
        columns = f"exact {columns}"
    if entity_type.former:
        columns = f"{entity_type.former} {columns}"
    return sha256(columns.encode()).hexdigest()[:16]


def parse(
    records: DataFrame,
    entity_type: EntityType,
    *,
    unjudged: str | None = None,
    kept: Sequence[str] = (),
) -> DataFrame:
    """Typed columns of each record of a changelog, or the reason why it has none.

    In: columns of :data:`~everstate.pipeline.spark.source.SOURCE_SCHEMA`, headers or none.
    Out: one row a record, columns of :func:`parsed_schema`. ``reason`` is null for a readable
    change; otherwise it is one of ``no_key``, ``tombstone``, ``malformed``, ``nul_character``,
    ``unknown_entity``, ``key_mismatch``, ``wrong_type:<field>``, ``missing:<field>``,
    ``unexpected:<field>``, ``invalid:<field>``, ``too_fine:<field>`` (a time with parts of a
    microsecond), and all typed columns are null. ``misfits`` has the
    fields of the current state whose value does not fit the model, or is missing. Never fails on a
    record. Cost: the JSON is parsed once, whatever is filtered or selected later; more often where
    a state does not fit.

    With ``unjudged`` a record that is not plainly readable gets that text as its reason, readable
    or not, and the caller parses it again without ``unjudged``. The rules are most of the plan, and
    Spark spends a fifth of a small batch on them, though nearly every batch has no record that
    needs them. The caller must then check the bytes itself
    (:func:`everstate.pipeline.spark.plain_bytes.plain_bytes`). ``kept`` are columns of ``records``
    that stand unchanged after those of the schema.
    """
    application = records.sparkSession.sparkContext.applicationId
    has_headers = "headers" in records.columns
    *steps, parsed = _selections(entity_type, application, unjudged, has_headers)
    for columns in steps:
        records = records.select(*columns)
    return records.select(*parsed, *kept)


@lru_cache(maxsize=64)
def _selections(
    entity_type: EntityType, _application: str, unjudged: str | None, has_headers: bool
) -> tuple[list[Column], ...]:
    """The selections that make up `parse`, one after the other.

    Built once for each Spark application: they need some hundred calls into the JVM, which would
    be most of the time of a small batch.
    """
    # A filter on a parsed column would be pushed below the parsing, which would then be done
    # twice; Spark never moves or repeats an expression that it considers nondeterministic.
    text = F.when(F.spark_partition_id() >= 0, _with_end())
    read = F.from_json(text, envelope_schema(entity_type), JSON_OPTIONS).alias("v")
    times = [_moment("occurredAt").alias("occurred"), _moment("recordedAt").alias("recorded")]
    every = F.col("*")
    # Nearly every record is readable, and one plain condition proves it. All others go through
    # the rules: the condition may be too strict, never too lenient.
    conditions = _plainly_readable(entity_type)
    if unjudged is None:
        conditions += _plain_bytes()
    plain = F.coalesce(reduce(and_, conditions), F.lit(False))
    current, original = _states(entity_type)
    misfits = F.lit(None).cast(ArrayType(StringType()))
    if unjudged is None:
        judged = [
            [every, plain.alias("plain")],
            [every, _reason(entity_type).alias("reason")],
            [every, _fits(entity_type).alias("fits")],
        ]
        current = F.when(F.col("plain"), current).otherwise(F.col("fits.current.state"))
        original = F.when(F.col("plain"), original).otherwise(F.col("fits.original.state"))
        misfits = F.filter("fits.current.misfits", lambda each: each.isNotNull())
        misfits = F.when(F.size(misfits) > 0, misfits)
        # The first lower() of a JVM builds ICU's case tables, which takes a core ten seconds.
        change_id = F.when(F.col("plain"), F.col("v.id")).otherwise(F.lower(F.col("v.id")))
    else:
        judged = [[every, F.when(~plain, unjudged).alias("reason")]]
        change_id = F.col("v.id")
    typed: dict[str, Column] = {
        "key": F.col("v.key"),
        "recorded_at": F.col("recorded"),
        "version": F.col("v.version"),
        "id": change_id,
        "kind": F.col("v.kind"),
        "occurred_at": F.col("occurred"),
        "current": current,
        "original": original,
        "misfits": misfits,
        "provenance": F.struct(*(F.col(f"v.provenance.{f.name}") for f in _PROVENANCE)),
        "transaction": F.col("v.provenance.transaction"),
        "event": F.col("v.event"),
        "schema_version": F.col("v.schemaVersion"),
    }
    given = {
        "generation": F.substring_index("topic", ".g", -1).cast("int"),
        "raw_key": F.col("key"),
        "raw_value": F.col("value"),
        "raw_headers": F.col("headers") if has_headers else F.lit(None).cast(HEADERS),
        "timestamp_type": F.col("timestampType"),
        "model": F.lit(model_of(entity_type)),
    }
    readable = F.col("reason").isNull()
    columns = []
    for column in parsed_schema(entity_type):
        name = column.name
        if name in typed:
            columns.append(F.when(readable, typed[name]).alias(name))
        else:
            columns.append(given.get(name, F.col(name)).alias(name))
    return ([every, read], [every, *times], *judged, columns)


def _with_end() -> Column:
    """The message with one more field before its last brace.

    Spark's parser stops after the first value and does not report whether anything follows. When
    the last brace is not the one that closes the message, the added field is not found in it.
    """
    whole = F.col("value").cast("string").endswith("}")
    trimmed = F.regexp_replace(F.col("value").cast("string"), "[ \\t\\r\\n]+$", "")
    value = F.when(whole, F.col("value")).otherwise(trimmed.cast("binary"))
    head = F.substring(value, F.lit(1), F.octet_length(value) - 1)
    return F.concat(head, F.lit(f',"{_END}":1}}'.encode())).cast("string")


def _moment(field: str) -> Column:
    """A time of the envelope; null unless it is a date, a time and an offset (RFC 3339).

    One with parts of a microsecond is null too: Spark would cut them off, and Python rounds them.
    """
    text = F.col(f"v.{field}")
    in_utc = text.endswith("Z") | text.endswith("z")
    zone = in_utc | F.substring(text, -6, 1).isin("+", "-")
    length = F.octet_length(text)
    exact = (length <= F.when(in_utc, _IN_UTC_MAX).otherwise(_WITH_OFFSET_MAX)) | ~text.rlike(FINER)
    shaped = (length >= 20) & (F.substring(text, 5, 1) == "-") & zone & exact
    moment = F.expr(f"try_cast(v.{field} AS timestamp)")
    held = holds(moment, pa.timestamp("us", "UTC"))
    assert held is not None
    return F.when(shaped & held, moment)


def _reason(entity_type: EntityType) -> Column:
    """Why a record cannot be read; null when it can.

    The rules are in a lambda, which Spark interprets: otherwise Spark would generate code for them
    for every task, which was a third of the time of a small batch.
    """
    # What the envelope says, when something in the message has another type than expected.
    envelope = F.from_json(
        F.col("value").cast("string"), _envelope_alone(entity_type), JSON_OPTIONS
    )
    of_odd = F.when(F.col(f"v.{CORRUPT}").isNotNull(), envelope).alias("envelope")
    record = F.array(F.struct("key", "value", "v", "occurred", "recorded", of_odd))
    judged = F.transform(record, lambda judged: _broken_rule(entity_type, judged))
    return F.when(F.col("plain"), F.lit(None).cast("string")).otherwise(F.get(judged, 0))


def _broken_rule(entity_type: EntityType, record: Column) -> Column:
    """The reason of the first rule that a record breaks, from the outside in."""
    name, v, envelope = entity_type.name, record["v"], record["envelope"]
    key, value = record["key"].cast("string"), record["value"].cast("string")
    # Spark's parser reads the first element of an array. The tests of the first and last byte are
    # cheap; the regular expressions are for messages with white space around them.
    one_object = (value.startswith("{") | value.rlike(r"^\s*\{")) & (
        value.endswith("}") | value.rlike(r"\}\s*$")
    )
    rules: list[tuple[Column, Column | str]] = [
        (key.isNull(), "no_key"),
        (value.isNull(), "tombstone"),
        (~F.is_valid_utf8(key) | ~F.is_valid_utf8(value), "malformed"),
        (
            F.contains(value, F.lit("\\u0000")) & value.rlike(_NUL) | F.contains(key, F.lit("\0")),
            "nul_character",
        ),
        (v.isNull() | ~one_object, "malformed"),
        (envelope[CORRUPT].isNotNull(), _wrong_type(entity_type, value, envelope)),
        *(
            (envelope[side].isNotNull() & v[side].isNull(), f"wrong_type:{side}")
            for side in (_CURRENT, _ORIGINAL)
        ),
        (v[_END].isNull(), "malformed"),
        (v["entity"].isNull(), "missing:entity"),
        (v["entity"] != name, "unknown_entity"),
    ]
    for field in ("id", "schemaVersion", "key", "version", "kind", "occurredAt", "recordedAt"):
        rules.append((v[field].isNull(), f"missing:{field}"))
    rules += [
        (v["key"] == "", "missing:key"),
        (v["key"] != key, "key_mismatch"),
        (~v["id"].rlike(_UUID), "wrong_type:id"),
        *((v[field].rlike(FINER), f"too_fine:{field}") for field in ("occurredAt", "recordedAt")),
        (record["occurred"].isNull(), "wrong_type:occurredAt"),
        (record["recorded"].isNull(), "wrong_type:recordedAt"),
        (v["version"] < 1, "invalid:version"),
        (v["schemaVersion"] < 1, "invalid:schemaVersion"),
        (~v["kind"].isin(*(kind.value for kind in Kind)), "invalid:kind"),
        (v["provenance"].isNull(), "missing:provenance"),
    ]
    for field in _REQUIRED_PROVENANCE:
        path = v["provenance"][field]
        rules.append((path.isNull() | (path == ""), f"missing:provenance.{field}"))
    rules += _transaction_rules(v) + _state_rules(v)
    (broken, why), *others = rules
    reason = F.when(broken, why)
    for broken, why in others:
        reason = reason.when(broken, why)
    return reason


def _plain_bytes() -> list[Column]:
    """Conditions under which the bytes of a record break none of the rules; see `plain_bytes`."""
    value, key = F.col("value").cast("string"), F.col("key").cast("string")
    return [
        F.is_valid_utf8(value) & F.is_valid_utf8(key),
        ~F.contains(value, F.lit("\\u0000")) & ~F.contains(key, F.lit("\0")),
        F.col("v.id").rlike(_LOWER_UUID),
    ]


def _plainly_readable(entity_type: EntityType) -> list[Column]:
    """Conditions under which a record breaks none of the rules, whatever its bytes are.

    A condition is null where there is no simple test.
    """
    value, key = F.col("value").cast("string"), F.col("key").cast("string")
    kind, (current, original) = F.col("v.kind"), _states(entity_type)
    block = F.col("v.provenance.transaction")
    has = F.when(current.isNotNull(), 2).otherwise(0) + F.when(original.isNotNull(), 1).otherwise(0)
    created, event = Kind.CREATED.value, Kind.EVENT.value
    conditions = [
        value.startswith("{"),
        value.endswith("}"),
        F.col(f"v.{CORRUPT}").isNull(),
        F.col(f"v.{_END}").isNotNull(),
        F.col("v.entity") == entity_type.name,
        (F.col("v.key") == key) & (key != ""),
        F.col("occurred").isNotNull() & F.col("recorded").isNotNull(),
        (F.col("v.version") >= 1) & (F.col("v.schemaVersion") >= 1),
        (kind.isin(created, event) & (has == 2))
        | ((kind == Kind.UPDATED.value) & (has == 3))
        | ((kind == Kind.DELETED.value) & (has == 1)),
        block.isNull()
        | (block["id"].isNotNull() & block["index"].isNotNull() & block["count"].isNotNull()),
    ]
    conditions += [F.col(f"v.provenance.{field}") != "" for field in _REQUIRED_PROVENANCE]
    fields = tuple(entity_type.arrow_schema)
    if (doubtful := is_doubtful(value, entity_type)) is not None:
        conditions.append(~doubtful)
    for state in (current, original):
        held = _fields_hold(state, fields)
        if held is not None:
            conditions.append(state.isNull() | held)
    if entity_type.former:
        schema, former = state_schema(entity_type), entity_type.former
        sides = [F.col(f"v.{side}") for side in (_CURRENT, _ORIGINAL)]
        conditions += [~has_clash(side, schema, former) for side in sides]
    return conditions


def _states(entity_type: EntityType) -> list[Column]:
    """The states of a message with today's names, current and original."""
    schema, former = state_schema(entity_type), entity_type.former
    return [today(F.col(f"v.{side}"), schema, former) for side in (_CURRENT, _ORIGINAL)]


def _fields_hold(state: Column, fields: tuple[pa.Field[Any], ...]) -> Column | None:
    """Whether each field's value fits its type; ``None`` when no field needs a test."""
    conditions = []
    for field in fields:
        column = state[field.name]
        if not field.nullable:
            conditions.append(column.isNotNull())
        held = holds(column, field.type)
        if pa.types.is_struct(field.type):
            held = _fields_hold(column, tuple(field.type))
        if held is not None:
            conditions.append(column.isNull() | held)
    return reduce(and_, conditions) if conditions else None


def _transaction_rules(v: Column) -> list[tuple[Column, Column | str]]:
    block = v["provenance"]["transaction"]
    return [
        (block.isNotNull() & block[field].isNull(), f"missing:provenance.transaction.{field}")
        for field in ("id", "index", "count")
    ]


def _state_rules(v: Column) -> list[tuple[Column, Column | str]]:
    kind, current, original = v["kind"], v[_CURRENT], v[_ORIGINAL]
    deleted = kind == Kind.DELETED.value
    has_original = kind.isin(Kind.UPDATED.value, Kind.DELETED.value)
    return [
        (~deleted & current.isNull(), f"missing:{_CURRENT}"),
        (deleted & current.isNotNull(), f"unexpected:{_CURRENT}"),
        (has_original & original.isNull(), f"missing:{_ORIGINAL}"),
        (~has_original & original.isNotNull(), f"unexpected:{_ORIGINAL}"),
    ]


def _fits(entity_type: EntityType) -> Column:
    """Both states of a readable record that is not plain; see :func:`fitted_state`."""
    value, version = F.col("value").cast("string"), F.col("v.schemaVersion")
    # A message of an older schema version may lack fields that were added later.
    is_complete = version >= entity_type.schema_version
    sides = [
        fitted_state(value, side, F.col(f"v.{side}"), entity_type, is_complete)
        for side in (_CURRENT, _ORIGINAL)
    ]
    fits = F.struct(sides[0].alias("current"), sides[1].alias("original"))
    return F.when(~F.col("plain") & F.col("reason").isNull(), fits)


def _envelope_alone(entity_type: EntityType) -> StructType:
    """Spark's type of a message's value in which states are JSON text."""
    return struct(
        *(
            (field.name, _TEXT if field.name in (_CURRENT, _ORIGINAL) else field.dataType)
            for field in envelope_schema(entity_type)
            if field.name != _END
        )
    )


def _wrong_type(entity_type: EntityType, text: Column, envelope: Column) -> Column:
    """The reason that names the field which the parser could not read; ``malformed``: no JSON."""
    known = [field for field in _envelope_alone(entity_type) if field.name != CORRUPT]
    present = fields_present(text, [field.name for field in known])
    blamed = _blame(text, envelope, StructType(known), ())
    return F.when(F.get(present, 0).isNull(), "malformed").otherwise(
        F.coalesce(*blamed, F.lit("wrong_type:state"))
    )


def _blame(text: Column, read: Column, schema: StructType, path: tuple[str, ...]) -> list[Column]:
    """Reasons that name a field with a value in the JSON and none in the parsed record."""
    place = "$" + "".join(f"['{name}']" for name in path)
    json = F.get_json_object(text, place) if path else text
    present = fields_present(json, [field.name for field in schema])
    kept = F.coalesce(F.json_object_keys(F.to_json(read)), F.array().cast("array<string>"))
    lost = F.get(F.array_except(present, kept), 0)
    reasons = [F.concat(F.lit("wrong_type:" + "".join(f"{name}." for name in path)), lost)]
    for field in schema:
        if isinstance(field.dataType, StructType):
            reasons += _blame(text, read[field.name], field.dataType, (*path, field.name))
    return reasons
