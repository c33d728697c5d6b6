"""Forms of derived topics as Spark's own expressions, for the real-time trigger.

In that trigger the output of Python is buffered until a batch ends, so all forms are SQL over
variants. States are compared member by member as deep as the model names members; arrays, and
members that are not in the model, are replaced whole. A number with an exponent becomes the
nearest double; others keep their digits.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from everstate.changes import EntityType
from everstate.changes.derived import KIND, OFFSET, PROVENANCE, VERSION, Derivation, Notices
from everstate.pipeline.batch.rules import fires
from everstate.pipeline.spark.states import state_read

_MAP: Final = "'map<string,variant>'"
_NONE: Final = "CAST(NULL AS VARIANT)"
_DEPTH_MAX: Final = 3
"""Models nested deeper are replaced whole: the expression grows with the depth."""


def raw_records(records: DataFrame, entity_type: EntityType, derivation: Derivation) -> DataFrame:
    """Key, value, headers and partition of the form's record of each change that gives one.

    In: a stream of the changelog. A record that is no change gives none; the core dead-letters it.
    """
    state = "currentEntityState", "originalEntityState"
    read = records.select(
        "*", F.expr("try_parse_json(CAST(value AS STRING))").alias("v")
    ).selectExpr(
        "key AS record_key",
        "partition",
        "offset",
        "value",
        f"coalesce(try_variant_get(v, '$.{state[1]}', 'variant'), parse_json('null')) AS old",
        f"coalesce(try_variant_get(v, '$.{state[0]}', 'variant'), parse_json('null')) AS new",
        *(f"try_variant_get(v, '$.{path}', 'string') AS {name}" for name, path in _TEXTS.items()),
        "to_json(try_variant_get(v, '$.provenance', 'variant')) AS provenance_text",
    )
    kept = read.where("id IS NOT NULL AND version IS NOT NULL AND change_key IS NOT NULL")
    if derivation.trigger is not None:
        kept = kept.select("*", *typed_states(entity_type)).where(fires(derivation.trigger))
    if isinstance(derivation.form, Notices):
        kept = kept.where("to_json(old) <> 'null'")
        value = F.expr("to_json(named_struct('key', change_key, 'old', old, 'new', new))")
    else:
        value = F.expr(f"to_json({patch_sql(entity_type.arrow_schema)})")
    return kept.select(
        F.col("record_key").alias("key"),
        value.cast("binary").alias("value"),
        _headers(derivation).alias("headers"),
        "partition",
    )


_TEXTS: Final = {
    "id": "id",
    "change_key": "key",
    "version": "version",
    "kind": "kind",
    "recorded_at": "recordedAt",
    "service": "provenance.serviceName",
    "event_type": "event.type",
}


def typed_states(entity_type: EntityType) -> list[Column]:
    """The typed states, which a trigger's condition reads; values that do not fit are null."""
    names = {"original": "originalEntityState", "current": "currentEntityState"}
    text = F.col("value").cast("string")
    return [state_read(text, name, entity_type).alias(side) for side, name in names.items()]


def _headers(derivation: Derivation) -> Column:
    """The headers of :meth:`Derivation.headers`, as an expression."""
    entity = F.lit(derivation.entity)
    headers: dict[str, Column] = {
        "ce_specversion": F.lit("1.0"),
        "ce_id": F.col("id"),
        "ce_source": F.col("service"),
        "ce_type": F.coalesce(F.col("event_type"), F.concat_ws(".", entity, F.col("kind"))),
        "ce_time": F.col("recorded_at"),
        "ce_subject": F.col("change_key"),
        "content-type": F.lit(derivation.form.content_type),
        VERSION: F.col("version"),
        KIND: F.col("kind"),
        OFFSET: F.col("offset").cast("string"),
        PROVENANCE: F.col("provenance_text"),
    }
    pairs = [
        F.struct(F.lit(name).alias("key"), value.cast("binary").alias("value"))
        for name, value in headers.items()
    ]
    return F.array(*pairs)


def patch_sql(schema: pa.Schema) -> str:
    """Spark SQL of the JSON Patch of the variants `old` → `new`: an array of operations."""
    replaced = "array(named_struct('op', 'replace', 'path', '', 'value', new))"
    old, new = (f"try_variant_get({side}, '$', {_MAP})" for side in ("old", "new"))
    members = _members(pa.struct(list(schema)), "''", 0)
    return (
        f"CASE WHEN to_json(old) = to_json(new) THEN slice({replaced}, 1, 0) "
        f"WHEN {old} IS NULL OR {new} IS NULL THEN {replaced} "
        f"ELSE {_with('s0', old, new, members)} END"
    )


def _with(name: str, old: str, new: str, body: str) -> str:
    """A body in which ``name.o`` and ``name.n`` stand for two expressions, computed once."""
    given = f"array(named_struct('o', {old}, 'n', {new}))"
    return f"element_at(transform({given}, {name} -> {body}), 1)"


def _members(kind: pa.DataType, prefix: str, depth: int) -> str:
    """Patch operations between two objects, given as maps ``o`` and ``n`` of ``s<depth>``."""
    here = f"s{depth}"
    old, new = f"{here}.o", f"{here}.n"
    nested = [field for field in kind if pa.types.is_struct(field.type) and depth + 1 < _DEPTH_MAX]
    below = [
        (f.name, *(f"try_variant_get(try_element_at({m}, {_lit(f.name)}), '$', {_MAP})"
                   for m in (old, new)))
        for f in nested
    ]  # fmt: skip
    apart = " ".join(
        f"AND NOT (e.key = {_lit(name)} AND {o} IS NOT NULL AND {n} IS NOT NULL)"
        for name, o, n in below
    )
    gone = (
        f"transform(filter(map_keys({old}), k -> NOT map_contains_key({new}, k)), k -> "
        f"named_struct('op', 'remove', 'path', {_path(prefix, 'k')}, 'value', {_NONE}))"
    )
    come = (
        f"transform(filter(map_entries({new}), e -> "
        f"NOT (to_json(try_element_at({old}, e.key)) <=> to_json(e.value)) {apart}), e -> "
        f"named_struct('op', IF(map_contains_key({old}, e.key), 'replace', 'add'), "
        f"'path', {_path(prefix, 'e.key')}, 'value', e.value))"
    )
    parts = [gone, come]
    for (name, o, n), field in zip(below, nested, strict=True):
        path = "/" + name.replace("~", "~0").replace("/", "~1")
        inner = _members(field.type, f"{prefix} || {_lit(path)}", depth + 1)
        parts.append(
            f"CASE WHEN {o} IS NOT NULL AND {n} IS NOT NULL "
            f"THEN {_with(f's{depth + 1}', o, n, inner)} ELSE slice({gone}, 1, 0) END"
        )
    return f"concat({', '.join(parts)})"


def _path(prefix: str, name: str) -> str:
    return f"{prefix} || '/' || replace(replace({name}, '~', '~0'), '/', '~1')"


def _lit(text: str) -> str:
    """A Spark SQL string literal; names of fields come from the app's own models."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
