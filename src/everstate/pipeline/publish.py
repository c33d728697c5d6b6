"""Publishing: readers of a name see another version, once it has met the core (V13)."""

from __future__ import annotations

import logging

import psycopg

from everstate.errors import PublishRefused
from everstate.pipeline.kept import KeptView
from everstate.views.control import Control, ViewVersion
from everstate.views.stores import view_tables
from everstate.views.tables import covers, latest_of

log = logging.getLogger(__name__)


def publish(control: Control, view: KeptView) -> bool:
    """Point readers to a version that was built, if it stands with the core; whether it was done.

    Not while a reader's snapshot is older than the moment at which both met: that reader would see
    an empty table (the option `force` does not wait). A version that means the same as the one that
    readers see is compared with it; with the option `require_equal` it must have the same rows. A
    reader that is in the way for more than 200 ms lets the next step try again. What is in the way
    is told as the version's reason.
    """
    row = view.row
    options = row.options or {}
    if not _stands_with_core(control, view):
        return False
    older = (
        []
        if options.get("force")
        else control.older_snapshots(control.set_met(row.name, row.version))
    )
    if older:
        pid, application = older[0]
        reason = f"built; waits for {application} (process {pid}), which reads since before that"
        control.set_reason(row.name, row.version, reason)
        return False
    seen = next((r for r in control.versions(row.name) if r.published), None)
    if seen is not None and seen.fingerprint == row.fingerprint:
        different = _different_rows(control, seen, view)
        if different and options.get("require_equal"):
            reason = f"built; {different:,} rows differ from version {seen.version}: not published"
            control.set_reason(row.name, row.version, reason)
            return False
    published = None if seen is None else seen.version
    try:
        with control.connection.transaction():
            if not _stands_with_core(control, view):
                return False
            view_tables(control).point(row.name, row.version, view.plan)
            if not control.swap_published(row.name, published, row.version):
                raise psycopg.Rollback
    except psycopg.errors.LockNotAvailable:
        control.set_reason(row.name, row.version, "built; waits for a reader of the name")
        return False
    except PublishRefused as refusal:
        control.set_reason(row.name, row.version, str(refusal))
        return False
    log.info("view %s: readers see version %d", row.name, row.version)
    return True


def _different_rows(control: Control, seen: ViewVersion, view: KeptView) -> int:
    """How many rows the version that readers see does not share with a new one; asked once."""
    row, built = view.row, dict(view.row.built or {})
    if "different" not in built:
        tables = view_tables(control)
        built["different"] = tables.different_rows(row.name, seen.version, view.table, view.plan)
        control.set_built(row.name, row.version, built)
        log.info("view %s: %s rows differ from before", row.name, built["different"])
    return int(built["different"])


def _stands_with_core(control: Control, view: KeptView) -> bool:
    """Whether a version is where its core is, as of one moment."""
    vectors: dict[str, dict[int, int]] = {"core": {}, "view": {}}
    for place in control.positions(view.row.entity):
        if place.view == latest_of(view.row.entity):
            vectors["core"][place.partition] = place.next_offset
        elif (place.view, place.version) == (view.row.name, view.row.version):
            vectors["view"][place.partition] = place.next_offset
    return bool(vectors["view"]) and covers(vectors["view"], vectors["core"])
