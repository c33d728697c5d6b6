"""Answers as text, for the command line and the demonstration."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import datetime, tzinfo
from typing import Any

from everstate.changes.json_numbers import decode
from everstate.changes.row_json import row_json
from everstate.serving.answers import Explanation, Version
from everstate.serving.differences import ABSENT, Difference

_NONE = "–"


def value_text(value: Any) -> str:
    """One value as text; objects and lists as JSON."""
    if value is ABSENT or value is None:
        return _NONE
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return value
    text = row_json(value).decode()
    # NaN and the infinities are texts in JSON: here they have no quotes, as no text has.
    return text.strip('"') if isinstance(value, float) else text


def difference_text(difference: Difference) -> str:
    """One difference: `status: scheduled → departed`; for a new field only its value."""
    if difference.before is ABSENT:
        return f"{difference.path}: {value_text(difference.after)}"
    before, after = value_text(difference.before), value_text(difference.after)
    return f"{difference.path}: {before} → {after}"


def differences_text(differences: Iterable[Difference]) -> str:
    """Differences, one a line, without those that have no value on either side.

    A created or deleted entity differs from nothing also in fields that are null.
    """
    none = (None, ABSENT)
    shown = (each for each in differences if each.before not in none or each.after not in none)
    return "\n".join(map(difference_text, shown))


def moment_text(moment: datetime, zone: tzinfo | None = None) -> str:
    """A time to the second, in ``zone`` or in its own offset."""
    shown = moment.astimezone(zone) if zone is not None else moment
    return shown.isoformat(sep=" ", timespec="seconds").replace("+00:00", "Z")


def provenance_text(provenance: Mapping[str, Any]) -> str:
    """Who made a change: service, version of its API and identifier, then actor and reason."""
    known = [
        provenance.get("serviceName"),
        provenance.get("apiVersion"),
        provenance.get("identifier"),
    ]
    for field in ("actor", "reason"):
        if provenance.get(field) is not None:
            known.append(f"{field} {provenance[field]}")
    return " ".join(str(part) for part in known if part is not None)


def happening_text(version: Version) -> str:
    """What happened in a version: the type of its event, else its kind."""
    # The event of another writer may have any form.
    if isinstance(version.event, dict) and version.event.get("type"):
        return str(version.event["type"])
    return version.kind


def difference_record(difference: Difference) -> dict[str, Any]:
    """A difference for JSON: `op` add, remove or replace, as in RFC 6902, with both values."""
    record: dict[str, Any] = {"path": difference.path}
    if difference.before is ABSENT:
        return {"op": "add", **record, "after": difference.after}
    if difference.after is ABSENT:
        return {"op": "remove", **record, "before": difference.before}
    return {"op": "replace", **record, "before": difference.before, "after": difference.after}


def version_record(version: Version) -> dict[str, Any]:
    """A version for JSON; differences as RFC 6902 names them, with both values."""
    changed = [difference_record(found) for found in version.differences]
    return {**asdict(version), "differences": changed}


def explanation_lines(explanation: Explanation) -> list[tuple[str, str]]:
    """An explanation as pairs of label and text."""
    version = explanation.version
    place = version.place
    source = version.transaction
    archived = explanation.archived
    lines = [
        ("entity", f"{version.entity} {version.key}, version {version.version}"),
        ("what", happening_text(version)),
        ("change", str(version.change_id)),
        ("by", provenance_text(version.provenance)),
        ("happened", moment_text(version.occurred_at)),
        ("recorded", moment_text(version.recorded_at)),
        (
            "log",
            f"{explanation.topic} partition {place.partition} offset {place.offset:,}",
        ),
        (
            "transaction",
            f"{source['id']}, change {source['index']} of {source['count']}" if source else _NONE,
        ),
    ]
    if archived is None:
        lines.append(("archive", "not yet; it follows the log every archive.trigger_s"))
    else:
        lines.append(("archive", f"{archived.file} (commit {archived.commit})"))
    applied = [found.view for found in explanation.applied_by if found.applied]
    if applied:
        lines.append(("applied by", ", ".join(applied)))
    for found in explanation.applied_by:
        if not found.applied:
            lines.append((f"view {found.view}", f"not yet, at offset {found.position:,}"))
    return lines


def cell(value: object) -> object:
    """A value of a row for a text table."""
    if value is None or isinstance(value, int | float | str):
        return value
    if isinstance(value, bytes):
        return f"\\x{value.hex()}"
    return value_text(value) if isinstance(value, dict | list) else str(value)


def bytes_value(content: bytes | None) -> Any:
    """Bytes as JSON, else as text, else in base64."""
    if content is None:
        return None
    try:
        return decode(content)
    except ValueError:
        pass
    try:
        return content.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(content).decode()}


def bytes_text(content: bytes | None) -> str:
    """Bytes as text for people, unchanged; else in base64; `none` for no bytes at all."""
    if content is None:
        return "none"
    try:
        return content.decode()
    except UnicodeDecodeError:
        return f"base64: {base64.b64encode(content).decode()}"


def duration_text(seconds: float | None) -> str:
    """A duration in its largest unit: `0.4 s`, `12 s`, `5 min`, `2.7 days`."""
    if seconds is None:
        return "–"
    for unit_s, name in ((86_400, "days"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:,.1f} {name}"
    return f"{seconds:.1f} s" if 0 < seconds < 10 else f"{seconds:.0f} s"


def size_text(size: float | None) -> str:
    """A number of bytes in its largest unit: `512 B`, `4.2 MB`, `1,200.0 TB`."""
    if size is None:
        return _NONE
    units = ("B", "kB", "MB", "GB", "TB")
    at = min(len(units) - 1, int(math.log(max(size, 1), 1000)))
    return f"{size / 1000**at:,.1f} {units[at]}" if at else f"{size:,.0f} B"
