"""The outbox in databases of other teams: schema, entity types, and roles of least privilege."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import psycopg
from psycopg import sql

from everstate.changes import EntityType
from everstate.changes.carrying import former_names
from everstate.changes.unknown import refuses_unknown
from everstate.errors import InvalidConfig, NotAllowed, NotRegistered
from everstate.sources.stores.postgres.database import OutboxConnection
from everstate.sources.stores.postgres.schema import (
    ENTITY_TABLE,
    INSTALL_LOCK,
    functions,
    install,
    script,
    table_of,
)

EMITTER: Final = "everstate_emitter"
"""Group role of services: may emit, and nothing else."""
RELAY: Final = "everstate_relay"
"""Group role of relays: may read the outbox and mark rows as published."""

_GROUP: Final = sql.SQL("""
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = {name}) THEN
        CREATE ROLE {role} NOLOGIN;
    END IF;
END $$""")

_GRANTS: Final = (
    f"GRANT USAGE ON SCHEMA everstate_store TO {EMITTER}, {RELAY}",
    "GRANT EXECUTE ON FUNCTION everstate_store.emit(text, text, json, json, json, json, text,"
    f" uuid, text) TO {EMITTER}",
    "GRANT EXECUTE ON FUNCTION everstate_store.emit_event(text, text, json, json, json, text)"
    f" TO {EMITTER}",
    "GRANT SELECT ON everstate_store.identity, everstate_store.registered,"
    " everstate_store.outbox_unpublished TO everstate_relay",
    "GRANT SELECT, DELETE ON everstate_store.outbox TO everstate_relay",
    "GRANT SELECT, INSERT, UPDATE, DELETE ON everstate_store.outbox_pending,"
    " everstate_store.outbox_parked,"
    " everstate_store.outbox_published, everstate_store.published_to, everstate_store.relay,"
    " everstate_store.relay_blocked TO everstate_relay",
)

_REGISTER: Final = sql.SQL("""
INSERT INTO everstate_store.registered AS present (entity, schema_version, key_field, required,
    is_event, message_bytes_max, ahead_hours, shape, refuses_unknown, former)
VALUES ({entity}, {schema_version}, {key_field}, {required}::text[], {is_event}, {bytes_max},
    {ahead_hours}, {shape}::jsonb, {refuses_unknown}, {former}::text[])
ON CONFLICT (entity) DO UPDATE SET schema_version = excluded.schema_version,
    key_field = excluded.key_field, required = excluded.required,
    is_event = excluded.is_event, message_bytes_max = excluded.message_bytes_max,
    ahead_hours = excluded.ahead_hours, shape = excluded.shape,
    refuses_unknown = excluded.refuses_unknown, former = excluded.former
WHERE present IS DISTINCT FROM excluded""")

_UNBIND: Final = sql.SQL("DELETE FROM everstate_store.emitters WHERE role = {role}")
_BIND: Final = sql.SQL("""
INSERT INTO everstate_store.emitters (role, service) VALUES ({role}, {service})
ON CONFLICT DO NOTHING""")


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """What to install in a database: entity types, and the login roles that get rights.

    ``events`` names the entity types that are behavioural facts (`emit_event`). ``roles`` may
    emit, each only under the service names that it maps to; ``relay_roles`` may run the relay.
    """

    entity_types: Collection[EntityType]
    events: Collection[str] = ()
    roles: Mapping[str, Collection[str]] = field(default_factory=dict)
    relay_roles: Collection[str] = ()
    message_bytes_max: int = 1_048_576
    ahead_hours: float = 24

    def statements(self) -> Iterator[sql.SQL | sql.Composed]:
        """All statements in order, for a new or an installed database; each may be repeated."""
        yield sql.SQL(script().decode())
        for each in self.entity_types:
            if each.name not in self.events:
                yield ENTITY_TABLE.format(table=table_of(each.name))
        yield from self.registrations()
        yield from self.rights()

    def registrations(self) -> Iterator[sql.SQL | sql.Composed]:
        """Register the entity types that may be emitted."""
        for each in self.entity_types:
            yield _REGISTER.format(
                entity=sql.Literal(each.name),
                schema_version=sql.Literal(each.schema_version),
                key_field=sql.Literal(each.key_column),
                required=sql.Literal("{" + ",".join(each.required_fields) + "}"),
                is_event=sql.Literal(each.name in self.events),
                bytes_max=sql.Literal(self.message_bytes_max),
                ahead_hours=sql.Literal(self.ahead_hours),
                shape=sql.Literal(json.dumps(each.shape)),
                refuses_unknown=sql.Literal(refuses_unknown(each.model)),
                former=sql.Literal(list(former_names(each.model, each.removed))),
            )

    def rights(self) -> Iterator[sql.SQL | sql.Composed]:
        """The group roles, their rights and their members."""
        for role in (EMITTER, RELAY):
            yield _GROUP.format(name=sql.Literal(role), role=sql.Identifier(role))
        yield from (sql.SQL(grant) for grant in _GRANTS)
        for group, members in ((EMITTER, self.roles), (RELAY, self.relay_roles)):
            for member in members:
                yield sql.SQL("GRANT {} TO {}").format(
                    sql.Identifier(group), sql.Identifier(member)
                )
        for role, services in self.roles.items():
            yield _UNBIND.format(role=sql.Literal(role))
            for service in services:
                yield _BIND.format(role=sql.Literal(role), service=sql.Literal(service))

    def script(self) -> str:
        """The SQL as one text, which an administrator may read and run."""
        texts = (each.as_string(None).strip().rstrip(";") for each in self.statements())
        return "".join(f"{text};\n\n" for text in texts)


def install_outbox(connection: OutboxConnection, wanted: Installation) -> None:
    """Install the outbox in a database, in one transaction; idempotent.

    Existing tables stay; functions, registrations and rights are renewed. Needs the rights to
    create a schema and roles. Raises NotAllowed, and InvalidConfig when a role does
    not exist: then nothing was installed.
    """
    stored = [each for each in wanted.entity_types if each.name not in wanted.events]
    try:
        with connection.transaction():
            install(connection, stored)
            connection.execute("SELECT pg_advisory_xact_lock(%s)", [INSTALL_LOCK])
            connection.execute(functions())
            for statement in (*wanted.registrations(), *wanted.rights()):
                connection.execute(statement)
    except psycopg.errors.InsufficientPrivilege as cause:
        raise NotAllowed(
            f"the outbox cannot be installed: {cause.diag.message_primary}",
            advice="Let an administrator run what `everstate outbox install --print` shows.",
        ) from cause
    except psycopg.errors.UndefinedObject as cause:
        raise InvalidConfig(
            "--role", str(cause.diag.message_primary), "roles that this server has"
        ) from cause


@dataclass(frozen=True, slots=True)
class Registered:
    """An entity type that services of a database may emit."""

    entity: str
    schema_version: int
    is_event: bool


def read_registered(connection: OutboxConnection) -> tuple[Registered, ...]:
    """The entity types that may be emitted; raises NotRegistered when nothing is installed."""
    query = (
        "SELECT entity, schema_version, is_event FROM everstate_store.registered ORDER BY entity"
    )
    try:
        return tuple(Registered(*row) for row in connection.execute(query).fetchall())
    except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName) as cause:
        raise NotRegistered("the outbox is not installed in this database") from cause


def read_emitters(connection: OutboxConnection) -> dict[str, list[str]]:
    """The service names that each login role may use; roles without a binding are left out."""
    query = (
        "SELECT role::text, array_agg(service ORDER BY service) FROM everstate_store.emitters"
        " GROUP BY role ORDER BY role"
    )
    return dict(connection.execute(query).fetchall())
