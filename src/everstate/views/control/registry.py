"""Versions of views: what each means, how it stands, and which one readers see."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from psycopg import sql
from psycopg.types.json import Jsonb

from everstate.views.control.schema import Schema

LIVE: Final = "live"
"""It is kept, and readers see it."""
BUILDING: Final = "building"
"""It is built or catches up, and is published when it has met the core."""
WAITING: Final = "waiting"
"""It is built when somebody asks for it: `[views] on_change = "ask"`."""
KEPT: Final = "kept"
"""Another version took its place; it stands still for `views rebuild --undo`."""
RETIRED: Final = "retired"
"""No app declares it; readers still see it as it was."""

_COLUMNS: Final = (
    "name, version, entity, definition, fingerprint, status, reason, built, published, "
    "published_at, options, changed_at, verified_at, verified"
)


@dataclass(frozen=True, slots=True)
class ViewVersion:
    """One version of a view.

    ``reason`` tells why it is behind, or waits. ``built`` is the vector that it was built up to
    (`generation/partition` → next offset) and the archive's version, once it is built.
    """

    name: str
    version: int
    entity: str
    definition: Mapping[str, Any]
    fingerprint: str
    status: str = LIVE
    reason: str | None = None
    built: Mapping[str, Any] | None = None
    published: bool = False
    published_at: datetime | None = None
    """When readers last began to see it."""
    options: Mapping[str, Any] | None = None
    """How it is to be published: `force`, `require_equal`."""
    changed_at: datetime | None = None
    verified_at: datetime | None = None
    verified: Mapping[str, Any] | None = None

    @property
    def shown(self) -> str:
        """How it stands in one word: a live view that has a reason is behind."""
        return "behind" if self.status == LIVE and self.reason is not None else self.status


class Registry(Schema):
    """The table of versions."""

    def versions(self, name: str | None = None, entity: str | None = None) -> list[ViewVersion]:
        """Versions by name and number: all, of one view, or of one entity type."""
        query = sql.SQL(
            "SELECT " + _COLUMNS + " FROM {} WHERE (%(name)s::text IS NULL OR name = %(name)s) "
            "AND (%(entity)s::text IS NULL OR entity = %(entity)s) ORDER BY name, version"
        ).format(self.table("view"))
        rows = self.connection.execute(query, {"name": name, "entity": entity})
        return [ViewVersion(*row) for row in rows]

    def add_version(self, row: ViewVersion) -> None:
        """Register a version of a view; one that is there stays as it is."""
        query = sql.SQL(
            "INSERT INTO {} (name, version, entity, definition, fingerprint, status, reason, "
            "built, published) VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s) ON CONFLICT DO NOTHING"
        ).format(self.table("view"))
        self.connection.execute(
            query,
            (
                *(row.name, row.version, row.entity, Jsonb(dict(row.definition))),
                *(row.fingerprint, row.status, row.reason),
                *(None if row.built is None else Jsonb(dict(row.built)), row.published),
            ),
        )

    def set_status(self, name: str, version: int, status: str, reason: str | None = None) -> None:
        """Note how a version stands."""
        query = sql.SQL(
            "UPDATE {} SET status = %s, reason = %s, changed_at = now() "
            "WHERE name = %s AND version = %s AND (status, reason) IS DISTINCT FROM (%s, %s)"
        ).format(self.table("view"))
        self.connection.execute(query, (status, reason, name, version, status, reason))

    def set_reason(self, name: str, version: int, reason: str | None) -> None:
        """Note why a version is behind; ``None``: it is not."""
        query = sql.SQL(
            "UPDATE {} SET reason = %s, changed_at = now() "
            "WHERE name = %s AND version = %s AND reason IS DISTINCT FROM %s"
        ).format(self.table("view"))
        self.connection.execute(query, (reason, name, version, reason))

    def set_definition(self, name: str, version: int, definition: Mapping[str, Any]) -> None:
        """Note another text of the same meaning."""
        query = sql.SQL("UPDATE {} SET definition = %s WHERE name = %s AND version = %s")
        values = (Jsonb(dict(definition)), name, version)
        self.connection.execute(query.format(self.table("view")), values)

    def set_built(self, name: str, version: int, built: Mapping[str, Any] | None) -> None:
        """Note up to where a version was built, or that it is to be built."""
        query = sql.SQL("UPDATE {} SET built = %s WHERE name = %s AND version = %s")
        value = None if built is None else Jsonb(dict(built))
        self.connection.execute(query.format(self.table("view")), (value, name, version))

    def set_options(self, name: str, version: int, options: Mapping[str, Any]) -> None:
        """Note how a version is to be published."""
        query = sql.SQL("UPDATE {} SET options = %s WHERE name = %s AND version = %s")
        values = (Jsonb(dict(options)), name, version)
        self.connection.execute(query.format(self.table("view")), values)

    def set_met(self, name: str, version: int) -> str:
        """Note the moment at which a version met the core, once; the number of a transaction."""
        query = sql.SQL(
            "UPDATE {} SET met_at = coalesce(met_at, pg_current_xact_id()) "
            "WHERE name = %s AND version = %s RETURNING met_at::text"
        ).format(self.table("view"))
        row = self.connection.execute(query, (name, version)).fetchone()
        assert row is not None
        return str(row[0])

    def older_snapshots(self, met_at: str) -> list[tuple[int, str]]:
        """Process and application of readers whose snapshot is older than a transaction (V13).

        They would read an empty table under the name that is pointed to the new version.
        """
        query = (
            "SELECT pid, coalesce(nullif(application_name, ''), usename, '?') "
            "FROM pg_stat_activity WHERE datname = current_database() "
            "AND pid <> pg_backend_pid() AND backend_xmin IS NOT NULL "
            "AND age(backend_xmin) > age(%s::xid8::xid) ORDER BY xact_start"
        )
        return self.connection.execute(query, (met_at,)).fetchall()

    def swap_published(self, name: str, old: int | None, new: int) -> bool:
        """Compare and swap the version that readers see; whether it was ``old``."""
        if old is not None:
            query = sql.SQL(
                "UPDATE {} SET published = false, status = %s, reason = NULL, changed_at = now() "
                "WHERE name = %s AND version = %s AND published"
            ).format(self.table("view"))
            if self.connection.execute(query, (KEPT, name, old)).rowcount != 1:
                return False
        else:
            if any(row.published for row in self.versions(name)):
                return False
        query = sql.SQL(
            "UPDATE {} SET published = true, status = %s, reason = NULL, changed_at = now(), "
            "published_at = now(), options = NULL "
            "WHERE name = %s AND version = %s"
        ).format(self.table("view"))
        return self.connection.execute(query, (LIVE, name, new)).rowcount == 1

    def remove_version(self, name: str, version: int) -> None:
        """Forget a version; its table and positions are the caller's."""
        query = sql.SQL("DELETE FROM {} WHERE name = %s AND version = %s")
        self.connection.execute(query.format(self.table("view")), (name, version))

    def set_verified(self, name: str, version: int, report: Mapping[str, Any]) -> None:
        """Note the outcome of a proof, with the database's time."""
        query = sql.SQL(
            "UPDATE {} SET verified_at = now(), verified = %s WHERE name = %s AND version = %s"
        ).format(self.table("view"))
        self.connection.execute(query, (Jsonb(dict(report)), name, version))

    def replaced_before(self, hours: float) -> list[ViewVersion]:
        """Versions that were replaced so long ago that they are kept no more."""
        query = sql.SQL(
            "SELECT " + _COLUMNS + " FROM {} WHERE status = %s "
            "AND changed_at < now() - make_interval(secs => %s) ORDER BY name, version"
        ).format(self.table("view"))
        rows = self.connection.execute(query, (KEPT, hours * 3600))
        return [ViewVersion(*row) for row in rows]
