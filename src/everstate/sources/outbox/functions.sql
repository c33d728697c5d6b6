-- What services in any language call, inside their own transaction. Errors have codes of ours:
-- EV001 invalid change, EV002 too large, EV003 chain broken, EV004 not registered, EV005 no slot;
-- COLUMN names the field, DETAIL the key.

-- UUIDv7 of RFC 9562, which PostgreSQL makes itself only from release 18 on.
CREATE OR REPLACE FUNCTION everstate_store.new_change_id() RETURNS uuid
LANGUAGE sql VOLATILE PARALLEL SAFE AS $$
    SELECT encode(set_bit(set_bit(overlay(uuid_send(gen_random_uuid()) PLACING
        substring(int8send((extract(epoch FROM clock_timestamp()) * 1000)::bigint) FROM 3)
        FROM 1 FOR 6), 52, 1), 53, 1), 'hex')::uuid
$$;

-- The entity type's registration; refuses what is no entity, no key, no time with an offset.
CREATE OR REPLACE FUNCTION everstate_store.checked_type(
    entity text, key text, occurred_at text, is_event boolean
) RETURNS everstate_store.registered LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
DECLARE
    found_type everstate_store.registered;
    other text := CASE WHEN checked_type.is_event THEN 'emit' ELSE 'emit_event' END;
BEGIN
    SELECT * INTO found_type FROM everstate_store.registered AS r
    WHERE r.entity = checked_type.entity;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'entity type "%" is not registered with this outbox', checked_type.entity
            USING ERRCODE = 'EV004', COLUMN = 'entity',
            HINT = 'Run `everstate outbox install` with the app that has it.';
    ELSIF found_type.is_event <> checked_type.is_event THEN
        RAISE EXCEPTION 'it is written by everstate_store.%', other
            USING ERRCODE = 'EV001', COLUMN = 'entity', DETAIL = checked_type.key;
    ELSIF coalesce(checked_type.key, '') = '' THEN
        RAISE EXCEPTION 'the key is missing or empty' USING ERRCODE = 'EV001', COLUMN = 'key';
    ELSIF checked_type.occurred_at !~
        '^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?(Z|[+-]\d\d:\d\d)$' THEN
        RAISE EXCEPTION 'the time is no RFC 3339 text with an offset'
            USING ERRCODE = 'EV001', COLUMN = 'occurredAt', DETAIL = checked_type.key;
    END IF;
    -- A 31st of June is refused by PostgreSQL itself.
    PERFORM checked_type.occurred_at::timestamptz;
    RETURN found_type;
END $$;

-- Raises when a state is no object, or lacks what every stored state has.
CREATE OR REPLACE FUNCTION everstate_store.check_state(
    state jsonb, required text[], field text, key text
) RETURNS void LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    missing text;
BEGIN
    IF state IS NULL THEN
        RETURN;
    ELSIF jsonb_typeof(state) <> 'object' THEN
        RAISE EXCEPTION 'a state is a JSON object'
            USING ERRCODE = 'EV001', COLUMN = field, DETAIL = key;
    END IF;
    SELECT name INTO missing FROM unnest(required) AS name
    WHERE coalesce(jsonb_typeof(state -> name), 'null') = 'null' LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION '% is required and must not be null', missing
            USING ERRCODE = 'EV001', COLUMN = field || '.' || missing, DETAIL = key;
    END IF;
END $$;

-- The provenance as the outbox keeps it, from the names of the envelope (apiVersion, …).
CREATE OR REPLACE FUNCTION everstate_store.checked_provenance(provenance json, key text)
RETURNS text LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    given jsonb := provenance::jsonb;
    name text;
BEGIN
    FOREACH name IN ARRAY ARRAY['apiVersion', 'serviceName', 'identifier'] LOOP
        IF btrim(coalesce(given ->> name, '')) = '' THEN
            RAISE EXCEPTION 'provenance is required and must not be empty'
                USING ERRCODE = 'EV001', COLUMN = 'provenance.' || name, DETAIL = key;
        END IF;
    END LOOP;
    SELECT k INTO name FROM jsonb_object_keys(given) AS k WHERE k NOT IN ('apiVersion',
        'serviceName', 'identifier', 'actor', 'reason', 'correlationId', 'causationId') LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'provenance has no field of this name'
            USING ERRCODE = 'EV001', COLUMN = 'provenance.' || name, DETAIL = key;
    END IF;
    RETURN jsonb_build_object(
        'api_version', given ->> 'apiVersion', 'service_name', given ->> 'serviceName',
        'identifier', given ->> 'identifier', 'actor', given ->> 'actor',
        'reason', given ->> 'reason', 'correlation_id', given ->> 'correlationId',
        'causation_id', given ->> 'causationId');
END $$;

CREATE OR REPLACE FUNCTION everstate_store.checked_event(event json, key text)
RETURNS text LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    given jsonb := event::jsonb;
BEGIN
    IF event IS NULL OR jsonb_typeof(given) = 'null' THEN
        RETURN NULL;
    ELSIF jsonb_typeof(given) <> 'object' OR coalesce(given ->> 'type', '') = ''
        OR given - 'type' - 'data' <> '{}' THEN
        RAISE EXCEPTION 'an event is {"type": …, "data": …}'
            USING ERRCODE = 'EV001', COLUMN = 'event', DETAIL = key;
    END IF;
    RETURN event::text;
END $$;

CREATE OR REPLACE FUNCTION everstate_store.now_text() RETURNS text LANGUAGE sql VOLATILE AS $$
    SELECT to_char(clock_timestamp() AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"')
$$;

-- One step of one entity: its row, the outbox row, the pending row. The entity's row is locked, or
-- was not there; false when somebody inserted it in between.
CREATE OR REPLACE FUNCTION everstate_store.append(
    known everstate_store.registered, key text, next_version bigint, before text, after text,
    provenance text, event text, occurred_at text, change_id uuid
) RETURNS boolean LANGUAGE plpgsql AS $$
#variable_conflict use_variable
DECLARE
    written integer;
    recorded timestamptz := clock_timestamp();
    size integer := coalesce(octet_length(before), 0) + coalesce(octet_length(after), 0)
        + octet_length(provenance) + coalesce(octet_length(event), 0) + 6 * octet_length(key) + 704;
BEGIN
    IF size > known.message_bytes_max THEN
        RAISE EXCEPTION '%', size USING ERRCODE = 'EV002', COLUMN = 'size', DETAIL = key,
            HINT = known.message_bytes_max::text;
    END IF;
    IF next_version = 1 THEN
        EXECUTE format('INSERT INTO everstate_store.%I (key, version, state, change_id,'
            ' recorded_at) VALUES ($1, 1, $2, $3, $4) ON CONFLICT DO NOTHING', known.entity)
            USING key, after, change_id, recorded;
    ELSE
        EXECUTE format('UPDATE everstate_store.%I SET version = $2, state = $3, change_id = $4,'
            ' recorded_at = $5 WHERE key = $1', known.entity)
            USING key, next_version, after, change_id, recorded;
    END IF;
    GET DIAGNOSTICS written = ROW_COUNT;
    IF written = 0 THEN
        RETURN false;
    END IF;
    -- The outbox takes its id here, after the entity's row is ours: of two changes of one key the
    -- later has the higher id (C1).
    WITH sent AS (
        INSERT INTO everstate_store.outbox (entity, key, version, kind, change_id,
            schema_version, occurred_at, recorded_at, provenance, event, before, after)
        VALUES (known.entity, key, next_version,
            CASE WHEN before IS NULL THEN 'created' WHEN after IS NULL THEN 'deleted'
                ELSE 'updated' END,
            change_id, known.schema_version, occurred_at, recorded, provenance, event, before,
            after)
        RETURNING outbox.id, outbox.xid, outbox.entity, outbox.key
    )
    INSERT INTO everstate_store.outbox_pending (id, xid, entity, key, bytes)
    SELECT sent.id, sent.xid, sent.entity, sent.key,
        coalesce(octet_length(before), 0) + coalesce(octet_length(after), 0)
    FROM sent;
    RETURN true;
END $$;

-- Emit one change of one entity in the caller's transaction. `before` and `after` are its whole
-- states; null: it did not exist, it is deleted. Version and chain are ours to keep: the entity's
-- row is locked until the caller commits. `before` must be the state that was emitted last (compared
-- as JSON); else chain 'strict' raises EV003, and 'mend' first adds the change that nobody emitted.
-- Equal states without an event are no change: then kind and id are null.
CREATE OR REPLACE FUNCTION everstate_store.emit(
    entity text, key text, before json, after json, provenance json, event json DEFAULT NULL,
    occurred_at text DEFAULT NULL, change_id uuid DEFAULT NULL, chain text DEFAULT 'strict',
    OUT version bigint, OUT kind text, OUT id uuid
) LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_variable
DECLARE
    moment text := coalesce(occurred_at, everstate_store.now_text());
    known everstate_store.registered := everstate_store.checked_type(entity, key, moment, false);
    source text := everstate_store.checked_provenance(provenance, key);
    intent text := everstate_store.checked_event(event, key);
    was jsonb := nullif(before::jsonb, 'null');
    new jsonb := nullif(after::jsonb, 'null');
    after_text text := CASE WHEN new IS NOT NULL THEN after::text END;
    before_text text := CASE WHEN was IS NOT NULL THEN before::text END;
    state text;
BEGIN
    IF chain NOT IN ('strict', 'mend') THEN
        RAISE EXCEPTION 'strict or mend' USING ERRCODE = 'EV001', COLUMN = 'chain', DETAIL = key;
    ELSIF was IS NULL AND new IS NULL THEN
        RAISE EXCEPTION 'before and after are both null'
            USING ERRCODE = 'EV001', COLUMN = 'after', DETAIL = key;
    END IF;
    PERFORM everstate_store.check_state(was, known.required, 'before', key);
    PERFORM everstate_store.check_state(new, known.required, 'after', key);
    LOOP
        EXECUTE format('SELECT t.version, t.state FROM everstate_store.%I AS t WHERE t.key = $1'
            ' FOR UPDATE', entity) INTO version, state USING key;
        version := coalesce(version, 0);
        IF state::jsonb IS DISTINCT FROM was THEN
            IF chain = 'strict' THEN
                RAISE EXCEPTION 'before is not the state that was emitted last (version %)', version
                    USING ERRCODE = 'EV003', COLUMN = 'before', DETAIL = key,
                    HINT = 'Somebody wrote without emit; chain => ''mend'' adds the lost change.';
            END IF;
            CONTINUE WHEN NOT everstate_store.append(known, key, version + 1, state, before_text,
                jsonb_set(source::jsonb, '{reason}', '"written without emit"')::text, NULL, moment,
                everstate_store.new_change_id());
            version := version + 1;
            state := before_text;
        END IF;
        IF was IS NOT DISTINCT FROM new AND intent IS NULL THEN
            RETURN;
        END IF;
        id := coalesce(change_id, everstate_store.new_change_id());
        EXIT WHEN everstate_store.append(known, key, version + 1, state, after_text, source,
            intent, moment, id);
    END LOOP;
    version := version + 1;
    kind := CASE WHEN was IS NULL THEN 'created' WHEN new IS NULL THEN 'deleted'
        ELSE 'updated' END;
END $$;

-- Emit a behavioural fact without writing a row: a message in the WAL, there exactly when the
-- caller commits. Facts only: version 1, nothing before, nothing to chain; the key is the fact's own
-- id, and the same key is the same change. It needs a relay that reads by replication, and is
-- refused (EV005) while no slot would keep it.
CREATE OR REPLACE FUNCTION everstate_store.emit_event(
    entity text, key text, fact json, provenance json, event json DEFAULT NULL,
    occurred_at text DEFAULT NULL
) RETURNS uuid
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_variable
DECLARE
    now_text text := everstate_store.now_text();
    moment text := coalesce(occurred_at, now_text);
    known everstate_store.registered := everstate_store.checked_type(entity, key, moment, true);
    source text := everstate_store.checked_provenance(provenance, key);
    intent text := everstate_store.checked_event(event, key);
    id uuid := md5('everstate' || chr(10) || entity || chr(10) || key)::uuid;
    size integer := octet_length(fact::text) + octet_length(source)
        + coalesce(octet_length(intent), 0) + 6 * octet_length(key) + 704;
BEGIN
    IF fact IS NULL THEN
        RAISE EXCEPTION 'a fact is never null' USING ERRCODE = 'EV001', COLUMN = 'fact',
            DETAIL = key;
    END IF;
    PERFORM everstate_store.check_state(fact::jsonb, known.required, 'fact', key);
    IF size > known.message_bytes_max THEN
        RAISE EXCEPTION '%', size USING ERRCODE = 'EV002', COLUMN = 'size', DETAIL = key,
            HINT = known.message_bytes_max::text;
    ELSIF NOT EXISTS (
        SELECT FROM everstate_store.relay_slot AS ours
        JOIN pg_replication_slots AS slots ON slots.slot_name = ours.slot
        WHERE slots.wal_status IS DISTINCT FROM 'lost' AND slots.database = current_database()
    ) THEN
        RAISE EXCEPTION 'no replication slot would keep this fact: it would be lost'
            USING ERRCODE = 'EV005', COLUMN = 'slot', DETAIL = key,
            HINT = 'Start a relay with [store] relay = "replication" first.';
    END IF;
    PERFORM pg_logical_emit_message(true, 'everstate', json_build_object(
        'xid', pg_current_xact_id()::text, 'entity', entity, 'key', key, 'change_id', id,
        'schema_version', known.schema_version, 'occurred_at', moment, 'recorded_at', now_text,
        'provenance', source, 'event', intent, 'after', fact::text)::text);
    RETURN id;
END $$;

-- Nobody but who was given them may call them, whoever may use the schema.
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA everstate_store FROM PUBLIC;
