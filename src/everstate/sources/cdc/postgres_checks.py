"""The doctor's checks of a captured PostgreSQL database, with the SQL that repairs it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from everstate.declarations.captures import Capture
from everstate.findings import Finding, FindingOutcome
from everstate.sources.cdc.connectors import POSTGRES_SCHEMA, OwnTables
from everstate.sources.cdc.database import RunQuery, no_table, quoted, quoted_name, verdict
from everstate.sources.cdc.names import CaptureNames
from everstate.sources.cdc.postgres_tables import (
    TableChecks,
    families,
    published_parts,
    published_whole,
)

_VERSION_MIN: Final = 130_000
_HELD_BYTES_WARN: Final = 1_000_000_000
_OPERATIONS: Final = "insert, update, delete, truncate"
"""Kinds of changes that a capture's publication has."""
_READ: Final = ("SELECT",)
_OWN: Final = ("SELECT", "INSERT", "UPDATE", "DELETE")
_RESTART: Final = "Then restart the server."
_SERVER: Final = """\
SELECT current_user::text AS user, current_setting('server_version_num')::int AS version,
  current_setting('wal_level') AS wal_level,
  current_setting('max_slot_wal_keep_size', true) = '-1' AS keeps_all,
  current_setting('max_replication_slots')::int AS max_replication_slots,
  current_setting('max_wal_senders')::int AS max_wal_senders,
  (SELECT count(*) FROM pg_replication_slots) AS slots,
  (SELECT count(*) FROM pg_stat_replication) AS senders,
  (SELECT rolsuper OR rolreplication OR EXISTS (SELECT FROM pg_roles m WHERE m.rolname
     IN ('rds_replication', 'cloudsqlsuperuser') AND pg_has_role(r.oid, m.oid, 'MEMBER'))
   FROM pg_roles r WHERE rolname = current_user) AS may_replicate"""
_RIGHTS: Final = """\
SELECT n.nspname || '.' || c.relname AS name, has_schema_privilege(n.oid, 'USAGE') AS may_use,
  row_security_active(c.oid) AS is_hidden,
  ARRAY(SELECT r FROM unnest(%s::text[]) r WHERE NOT has_schema_privilege(n.oid, 'USAGE')
    OR NOT has_table_privilege(c.oid, r)) AS missing
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname || '.' || c.relname = ANY (%s) AND c.relkind IN ('r', 'p')"""
_SLOT: Final = """\
SELECT active, active_pid, wal_status,
  coalesce(to_jsonb(s) ->> 'invalidation_reason', '') AS reason,
  pg_wal_lsn_diff(confirmed_flush_lsn, '0/0')::bigint AS end,
  pg_wal_lsn_diff(pg_current_wal_lsn(), confirmed_flush_lsn)::bigint AS behind,
  pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn)::bigint AS held
FROM pg_replication_slots s WHERE slot_name = %s"""
_LISTED: Final = """\
SELECT n.nspname || '.' || c.relname AS name FROM pg_publication p
JOIN pg_publication_rel r ON r.prpubid = p.oid JOIN pg_class c ON c.oid = r.prrelid
JOIN pg_namespace n ON n.oid = c.relnamespace WHERE p.pubname = %s"""
_IS_NEWER: Final = """\
SELECT bool_and(greatest(age(p.xmin), age(r.xmin)) < age(s.catalog_xmin)) AS is_newer
FROM pg_publication p JOIN pg_publication_rel r ON r.prpubid = p.oid, pg_replication_slots s
WHERE p.pubname = %s AND s.slot_name = p.pubname AND NOT s.active"""
"""Whether a publication with its tables is newer than what an idle slot has read: the publication
is looked up as it was at that place, so a connector reads nothing."""


class PostgresChecks:
    """Checks of one capture's database; a few round trips, nothing is changed."""

    def __init__(
        self, rows: RunQuery, capture: Capture, names: CaptureNames, own: OwnTables
    ) -> None:
        self._rows, self._capture, self._own = rows, capture, own
        self._name = names.identifier
        self._slot = slot_row(rows, self._name)
        self._again = f"`everstate cdc snapshot {capture.name} --new-epoch`"
        self._server = rows(_SERVER)[0]
        self._user = str(self._server["user"])
        self._families = families(rows, capture.tables)

    def everything(self) -> list[Finding]:
        """What is found of all that the connector needs, and of its slot."""
        found = [*self._settings(), *self.tables(), *self._own_tables()]
        return [*found, self._publication(), self._slot_finding()]

    def _settings(self) -> list[Finding]:
        server, number = self._server, self._server["version"]
        level, may = server["wal_level"], server["may_replicate"]
        has_slot = self._slot is not None
        version, is_new = f"{number // 10_000}.{number % 10_000}", number >= _VERSION_MIN
        logical = "ALTER SYSTEM SET wal_level = 'logical';"
        found = [
            verdict("version", version, is_new, advice="Use PostgreSQL 13 or newer."),
            verdict("wal_level", level, level == "logical", logical, advice=_RESTART),
        ]
        for name, count in ("max_replication_slots", "slots"), ("max_wal_senders", "senders"):
            used, most = server[count], server[name]
            raised = f"ALTER SYSTEM SET {name} = {max(10, most * 2)};"
            is_well, told = used < most or has_slot, f"{used} of {most} used"
            found.append(verdict(name, told, is_well, raised, advice=_RESTART))
        told = f"{self._user} may {'' if may else 'not '}replicate"
        grant = f"ALTER ROLE {quoted_name(self._user)} REPLICATION;"
        return [*found, verdict("replication", told, may, grant)]

    def tables(self) -> Iterator[Finding]:
        """What is found of the captured tables."""
        checked = TableChecks(self._server["version"], self._capture, self._families)
        rights = {row["name"]: row for row in self._rows(_RIGHTS, [*_READ], [*self._families])}
        # A snapshot lacks the rows that row security hides; the log has them all.
        hidden = f"row security holds for {self._user}: a snapshot lacks what a policy hides"
        sees_all = f"ALTER ROLE {quoted_name(self._user)} BYPASSRLS;"
        for table in self._capture.tables:
            if table not in self._families:
                yield no_table(table)
                continue
            yield self._rights(rights[table], _READ)
            yield from checked.of(table)
            if rights[table]["is_hidden"]:
                yield Finding(f"row security of {table}", "fail", hidden, (sees_all,))
        for row in published_parts(self._rows, self._name):
            # A snapshot reads the rows nevertheless that the publication leaves out.
            if row["rowfilter"] is not None and row["name"] in self._families:
                found = f"publication {self._name} leaves out those without {row['rowfilter']}"
                whole = published_whole(self._name, row["name"])
                yield Finding(f"rows of {row['name']}", "fail", found, whole)

    def _publication(self) -> Finding:
        what = f"publication {self._name}"
        for fault in publication_faults(self._rows, self._name, self._capture, self._own):
            return Finding(what, "fail", fault.found, (fault.sql,))
        if self._rows(_IS_NEWER, self._name)[0]["is_newer"]:
            found = "it was made anew, and the connector cannot read the log from before that"
            return Finding(what, "fail", found, advice=f"{self._again} reads all rows anew.")
        return Finding(what, "ok", f"has {len([*self._capture.tables, *self._own.tables])} tables")

    def _slot_finding(self) -> Finding:
        row, capture = self._slot, self._capture.name
        outcome: FindingOutcome = "fail"
        advice: str | None
        if row is None:
            found = "there is none"
            advice = f"`everstate cdc add {capture}` makes the connector, which makes it; where "
            advice += f"there is a connector already, {self._again} makes both anew."
        elif (lost := lost_slot(row, {})) is not None:
            found, advice = lost, f"{self._again} reads all rows anew."
        else:
            held, is_read = int(row["held"] or 0), row["active"]
            found = f"{'in use' if is_read else 'nobody reads it'}, holds {held / 1e6:,.1f} MB"
            advice = f"`everstate cdc status {capture}` shows why"
            if is_read and held > _HELD_BYTES_WARN:
                outcome, advice = "warn", "Look for what keeps it behind."
            elif is_read:
                outcome, advice = "ok", None
                if self._server["keeps_all"]:
                    # Its owner has to choose: keep log without limit, or risk losing the slot.
                    found += "; the server would hold without limit"
        return Finding(f"slot {self._name}", outcome, found, advice=advice)

    def _own_tables(self) -> Iterator[Finding]:
        schema, role = quoted(POSTGRES_SCHEMA), quoted_name(self._user)
        making: list[str] = []
        if not self._rows("SELECT FROM pg_namespace WHERE nspname = %s", POSTGRES_SCHEMA):
            making = [f"CREATE SCHEMA IF NOT EXISTS {schema};"]
            making += [f"GRANT USAGE ON SCHEMA {schema} TO {role};"]
        rights = {row["name"]: row for row in self._rows(_RIGHTS, [*_OWN], [*self._own.tables])}
        for table in self._own.tables:
            if table in rights:
                yield self._rights(rights[table], _OWN)
                continue
            making.append(f"{create_table(table, self._own)};")
            making.append(f"GRANT {', '.join(_OWN)} ON {quoted(table)} TO {role};")
            yield Finding(f"table {table}", "fail", "there is none", tuple(making))
            making = []

    def _rights(self, row: Mapping[str, Any], wanted: Sequence[str]) -> Finding:
        table, missing, role = row["name"], ", ".join(row["missing"]), quoted_name(self._user)
        usage = f"GRANT USAGE ON SCHEMA {quoted(table.partition('.')[0])} TO {role};"
        statements = [] if row["may_use"] else [usage]
        statements.append(f"GRANT {missing} ON {quoted(table)} TO {role};")
        found = f"{self._user} lacks {missing}" if missing else ", ".join(wanted)
        return verdict(f"rights on {table}", found, not missing, *statements)


class PublicationFault(NamedTuple):
    """What a publication lacks, and the statement that repairs it."""

    found: str
    sql: str
    tables: Sequence[str] | None
    """Tables of which changes were not published; ``None``: there is no publication."""


def publication_faults(
    rows: RunQuery, name: str, capture: Capture, own: OwnTables
) -> Iterator[PublicationFault]:
    """What the capture's publication lacks; each is looked for once those before it are repaired.

    Changes of partitions are published as changes of the partitioned table, which is captured: the
    connector's settings do not list the names of the partitions.
    """
    wanted, itself = (*capture.tables, *own.tables), quoted_name(name)
    kinds = rows(
        "SELECT pubinsert AND pubupdate AND pubdelete AND pubtruncate AS is_whole, pubviaroot "
        "FROM pg_publication WHERE pubname = %s",
        name,
    )
    if not kinds:
        listed = ", ".join(map(quoted, wanted))
        made = f"CREATE PUBLICATION {itself} FOR TABLE {listed} WITH (publish_via_partition_root);"
        yield PublicationFault("there is none", made, None)
        return
    if not kinds[0]["is_whole"]:
        alter = f"ALTER PUBLICATION {itself} SET (publish = '{_OPERATIONS}');"
        found = "it does not publish every kind of change"
        yield PublicationFault(found, alter, list(capture.tables))
    parted = sorted(t for t, family in families(rows, wanted).items() if family[0].kind == "p")
    if parted and not kinds[0]["pubviaroot"]:
        found = f"it publishes changes of {', '.join(parted)} under the names of the partitions"
        alter = f"ALTER PUBLICATION {itself} SET (publish_via_partition_root);"
        yield PublicationFault(found, alter, parted)
    published = (str(row["name"]) for row in published_parts(rows, name))
    there = {*published_tables(rows, name), *published}
    if missing := sorted(set(wanted) - there):
        add = f"ALTER PUBLICATION {itself} ADD TABLE {', '.join(map(quoted, missing))};"
        yield PublicationFault(f"it lacks {', '.join(missing)}", add, missing)


def published_tables(rows: RunQuery, name: str) -> list[str]:
    """Tables that a publication lists by name, a partitioned table by its own name."""
    return [str(row["name"]) for row in rows(_LISTED, name)]


def slot_row(rows: RunQuery, name: str) -> dict[str, Any] | None:
    """A slot as the server has it, places and sizes in bytes of its log; ``None``: there is none.

    ``end``: up to where its reader has confirmed the log; None while the slot is being made.
    """
    return next(iter(rows(_SLOT, name)), None)


def lost_slot(row: Mapping[str, Any], offset: Mapping[str, Any]) -> str | None:
    """Why the server does not send all that a connector has still to read; ``None``: it does.

    ``offset``: its stored position. The server sends nothing from before the slot's place. While a
    session reads the slot, that place may be ahead: Connect stores a position after its records.
    """
    if row["wal_status"] == "lost":
        return f"the slot is lost ({row['reason'] or 'its log was removed'})"
    read = max(int(offset.get(name) or 0) for name in ("lsn", "lsn_proc", "lsn_commit"))
    if row["active"] or not read or int(row["end"] or 0) <= read:
        return None
    return (
        f"the slot is at {int(row['end']):,} of the log, and the connector has read to {read:,}: "
        "another session read the slot or made it anew, so the changes between are missing"
    )


def create_table(table: str, own: OwnTables) -> str:
    """The statement that makes one of our two tables."""
    signals = "id text PRIMARY KEY, type text NOT NULL, data text"
    beats = "source text PRIMARY KEY, at timestamptz NOT NULL"
    return f"CREATE TABLE {quoted(table)} ({signals if table == own.signals else beats})"
