-- Functions that services in any language call in their own transactions. Their errors have these
-- codes: EV001 the change is invalid, EV002 it is too large, EV003 the chain is broken, EV004 the
-- entity type is not registered, EV006 the login role may not write for this
-- service. COLUMN of an error has the name of the field, DETAIL the key.

-- Adds the column that tables of an earlier release lack; other tables are not locked.
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_attribute WHERE attname = 'former'
        AND attrelid = 'everstate_store.registered'::regclass) THEN
        ALTER TABLE everstate_store.registered ADD COLUMN IF NOT EXISTS former text[];
    END IF;
END $$;

-- A UUIDv7 of RFC 9562; PostgreSQL has its own function for it only from release 18 on.
CREATE OR REPLACE FUNCTION everstate_store.new_change_id() RETURNS uuid
LANGUAGE sql VOLATILE PARALLEL SAFE AS $$
    SELECT encode(set_bit(set_bit(overlay(uuid_send(gen_random_uuid()) PLACING
        substring(int8send((extract(epoch FROM clock_timestamp()) * 1000)::bigint) FROM 3)
        FROM 1 FOR 6), 52, 1), 53, 1), 'hex')::uuid
$$;

-- Pattern of the time of a day with seconds, as every reader of the log takes it: without 24:00:00 and
-- without leap seconds.
CREATE OR REPLACE FUNCTION everstate_store.clock_pattern() RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT 'T([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?'
$$;

-- Pattern of a UTC offset.
CREATE OR REPLACE FUNCTION everstate_store.offset_pattern() RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT '(Z|[+-]([01]\d|2[0-3]):[0-5]\d)'
$$;

-- Raises when JSON text is nested more than 100 levels deep (as in changes/depth.py), or has a number
-- that is beyond the range of a double. It reads the text, because jsonb drops repeated names.
CREATE OR REPLACE FUNCTION everstate_store.check_json(value text, field text, key text) RETURNS void
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    is_nested boolean := length(value) - length(translate(value, '[{', '')) > 100;
    bare text;
BEGIN
    -- Nearly every text ends here. Fewer digits in number and exponent cannot be beyond the range.
    IF NOT is_nested AND value !~ '[eE]\+?\d{3}|\d{200}' THEN
        RETURN;
    END IF;
    bare := regexp_replace(value, '"([^"\\]|\\.)*"', '', 'g');
    IF EXISTS (SELECT FROM regexp_matches(bare, '\d+(?:\.\d+)?(?:[eE][+-]?\d+)?', 'g') AS number
        WHERE number[1]::numeric > 1.7976931348623157e308) THEN
        RAISE EXCEPTION 'it has a number that is beyond the range of a double'
            USING ERRCODE = 'EV001', COLUMN = field, DETAIL = key;
    END IF;
    FOR level IN 1..100 LOOP
        EXIT WHEN bare !~ '[[{]';
        bare := regexp_replace(bare, '[[{][^][{}]*[]}]', '', 'g');
    END LOOP;
    IF bare ~ '[[{]' THEN
        RAISE EXCEPTION 'it is nested more than 100 levels deep'
            USING ERRCODE = 'EV001', COLUMN = field, DETAIL = key;
    END IF;
END $$;

-- Raises when these texts are too long for the headers of a message.
CREATE OR REPLACE FUNCTION everstate_store.check_names(key text, service text, event_type text)
RETURNS void LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF octet_length(key) + octet_length(service) + coalesce(octet_length(event_type), 0) > 16384 THEN
        RAISE EXCEPTION 'key, service and event type have more than 16,384 bytes'
            USING ERRCODE = 'EV001', COLUMN = 'headers', DETAIL = key;
    END IF;
END $$;

-- Returns the registration of an entity type. Raises when the type is not registered, the key is not
-- valid, or the time has no UTC offset.
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
        RAISE EXCEPTION 'changes of this entity type are written by everstate_store.%', other
            USING ERRCODE = 'EV001', COLUMN = 'entity', DETAIL = checked_type.key;
    ELSIF coalesce(checked_type.key, '') = '' THEN
        RAISE EXCEPTION 'the key is missing or empty' USING ERRCODE = 'EV001', COLUMN = 'key';
    ELSIF octet_length(checked_type.key) > 2048 THEN
        RAISE EXCEPTION 'it has % bytes, and 2,048 are the most that can be kept',
            octet_length(checked_type.key)
            USING ERRCODE = 'EV001', COLUMN = 'key', DETAIL = left(checked_type.key, 40);
    ELSIF checked_type.key IN ('.', '..') THEN
        RAISE EXCEPTION 'it is a step in a path, so that no address can name it'
            USING ERRCODE = 'EV001', COLUMN = 'key', DETAIL = checked_type.key;
    ELSIF checked_type.occurred_at !~ ('^\d{4}-\d\d-\d\d' || everstate_store.clock_pattern()
        || everstate_store.offset_pattern() || '$') THEN
        RAISE EXCEPTION 'the time is no RFC 3339 text with an offset'
            USING ERRCODE = 'EV001', COLUMN = 'occurredAt', DETAIL = checked_type.key;
    END IF;
    -- PostgreSQL itself rejects a date that does not exist, such as 31 June.
    IF checked_type.occurred_at::timestamptz
        NOT BETWEEN '0001-01-01T00:00:00Z' AND '9999-12-31T23:59:59.999999Z' THEN
        RAISE EXCEPTION 'the time is not of the years 1 to 9999 in UTC'
            USING ERRCODE = 'EV001', COLUMN = 'occurredAt', DETAIL = checked_type.key;
    END IF;
    IF checked_type.occurred_at::timestamptz
        > clock_timestamp() + make_interval(secs => found_type.ahead_hours * 3600) THEN
        RAISE EXCEPTION 'the time is more than % hours ahead (log.occurred_ahead_hours)',
            found_type.ahead_hours
            USING ERRCODE = 'EV001', COLUMN = 'occurredAt', DETAIL = checked_type.key;
    END IF;
    RETURN found_type;
END $$;

-- Raises when a state is not a JSON object, or lacks a required field.
CREATE OR REPLACE FUNCTION everstate_store.check_state(
    state jsonb, required text[], field text, key text
) RETURNS void LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    missing text;
BEGIN
    IF state IS NULL THEN
        RETURN;
    ELSIF jsonb_typeof(state) <> 'object' THEN
        RAISE EXCEPTION 'the state must be a JSON object'
            USING ERRCODE = 'EV001', COLUMN = field, DETAIL = key;
    END IF;
    SELECT name INTO missing FROM unnest(required) AS name
    WHERE coalesce(jsonb_typeof(state -> name), 'null') = 'null' LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION '% is required and must not be null', missing
            USING ERRCODE = 'EV001', COLUMN = field || '.' || missing, DETAIL = key;
    END IF;
END $$;

-- Whether a float has the value of a number, which is rounded otherwise. The setting has floats
-- written with all their digits.
CREATE OR REPLACE FUNCTION everstate_store.float_holds(told text)
RETURNS boolean LANGUAGE sql IMMUTABLE SET extra_float_digits TO 1 AS $$
    SELECT told::float8::text::numeric = told::numeric
$$;

-- Whether readers of the log accept a JSON value for this type; for a text they accept any value.
CREATE OR REPLACE FUNCTION everstate_store.value_fits(value json, shape jsonb)
RETURNS boolean LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_variable
DECLARE
    is_number boolean := json_typeof(value) = 'number';
    is_string boolean := json_typeof(value) = 'string';
    told text := value #>> '{}';
    number numeric;
BEGIN
    CASE shape ->> 'type'
    WHEN 'text' THEN
        RETURN true;
    WHEN 'boolean' THEN
        RETURN json_typeof(value) = 'boolean';
    WHEN 'integer' THEN
        RETURN is_number AND told ~ '^-?\d{1,19}$'
            AND told::numeric BETWEEN -9223372036854775808 AND 9223372036854775807;
    WHEN 'float' THEN
        RETURN is_number AND everstate_store.float_holds(told);
    WHEN 'decimal' THEN
        IF NOT (is_number OR is_string AND told ~ '^-?\d+(\.\d+)?([eE][+-]?\d{1,3})?$')
            OR length(told) > 60 THEN
            RETURN false;
        END IF;
        number := told::numeric;
        RETURN scale(trim_scale(number)) <= (shape ->> 'places')::integer
            AND abs(number) < 10::numeric ^ ((shape ->> 'digits')::integer
                - (shape ->> 'places')::integer);
    WHEN 'date' THEN
        PERFORM told::date;
        RETURN is_string AND told ~ '^\d{4}-\d\d-\d\d$';
    WHEN 'timestamp' THEN
        IF NOT is_string OR told !~ ('^\d{4}-\d\d-\d\d' || everstate_store.clock_pattern()
            || CASE WHEN (shape ->> 'zoned')::boolean
                THEN everstate_store.offset_pattern() || '?$' ELSE '$' END) THEN
            RETURN false;
        END IF;
        RETURN (told::timestamptz AT TIME ZONE 'UTC')
            BETWEEN '0001-01-01' AND '9999-12-31 23:59:59.999999';
    WHEN 'list' THEN
        RETURN json_typeof(value) = 'array';
    ELSE
        RETURN json_typeof(value) = 'object';
    END CASE;
EXCEPTION WHEN data_exception THEN
    RETURN false;
END $$;

-- Raises when a value, or a value nested in it, does not have the type of its field.
CREATE OR REPLACE FUNCTION everstate_store.check_value(
    value json, shape jsonb, field text, key text
) RETURNS void LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_variable
DECLARE
    name text;
    part jsonb;
    item json;
BEGIN
    IF value IS NULL OR json_typeof(value) = 'null' THEN
        IF (shape ->> 'required')::boolean THEN
            RAISE EXCEPTION '% is required and must not be null', field
                USING ERRCODE = 'EV001', COLUMN = field, DETAIL = key;
        END IF;
        RETURN;
    ELSIF NOT everstate_store.value_fits(value, shape) THEN
        RAISE EXCEPTION '% is %; readers of the log expect %', field, left(value::text, 100),
            shape ->> 'type' USING ERRCODE = 'EV001', COLUMN = field, DETAIL = key,
            HINT = 'The entity type''s model says what each field is.';
    END IF;
    CASE shape ->> 'type'
    WHEN 'struct' THEN
        FOR name, part IN SELECT * FROM jsonb_each(shape -> 'fields') LOOP
            PERFORM everstate_store.check_value(value -> name, part, field || '.' || name, key);
        END LOOP;
    WHEN 'list' THEN
        FOR item IN SELECT * FROM json_array_elements(value) LOOP
            PERFORM everstate_store.check_value(item, shape -> 'element', field || '[]', key);
        END LOOP;
    WHEN 'map' THEN
        FOR name, item IN SELECT * FROM json_each(value) LOOP
            PERFORM everstate_store.check_value(item, shape -> 'element',
                field || '.' || name, key);
        END LOOP;
    ELSE
    END CASE;
END $$;

-- Raises when an object has a field that its type does not have, at any depth.
CREATE OR REPLACE FUNCTION everstate_store.check_known(
    value json, shape jsonb, field text, key text
) RETURNS void LANGUAGE plpgsql IMMUTABLE AS $$
#variable_conflict use_variable
DECLARE
    name text;
    part jsonb;
    item json;
BEGIN
    IF json_typeof(value) = 'array' THEN
        FOR item IN SELECT * FROM json_array_elements(value) LOOP
            PERFORM everstate_store.check_known(item, shape -> 'element', field || '[]', key);
        END LOOP;
    ELSIF json_typeof(value) = 'object' AND shape ->> 'type' = 'map' THEN
        FOR name, item IN SELECT * FROM json_each(value) LOOP
            PERFORM everstate_store.check_known(item, shape -> 'element', field || '.' || name,
                key);
        END LOOP;
    ELSIF json_typeof(value) = 'object' AND shape ->> 'type' = 'struct' THEN
        SELECT k INTO name FROM json_object_keys(value) AS k WHERE NOT shape -> 'fields' ? k LIMIT 1;
        IF FOUND THEN
            RAISE EXCEPTION 'there is no field of this name'
                USING ERRCODE = 'EV001', COLUMN = field || '.' || name, DETAIL = key,
                HINT = 'A model with ConfigDict(extra="allow") keeps such fields.';
        END IF;
        FOR name, part IN SELECT * FROM jsonb_each(shape -> 'fields') LOOP
            PERFORM everstate_store.check_known(value -> name, part, field || '.' || name, key);
        END LOOP;
    END IF;
END $$;

-- Returns a value in the form that all equal values have: decimals without zeros at their end, and
-- times with an offset in UTC.
CREATE OR REPLACE FUNCTION everstate_store.canonical(value jsonb, shape jsonb)
RETURNS jsonb LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_variable
DECLARE
    told text := value #>> '{}';
    kind text := shape ->> 'type';
BEGIN
    IF kind IN ('decimal', 'timestamp') AND jsonb_typeof(value) IN ('number', 'string') THEN
        BEGIN
            IF kind = 'decimal' THEN
                RETURN to_jsonb(trim_scale(told::numeric)::text);
            ELSIF told ~ '(Z|[+-]\d\d:\d\d)$' THEN
                RETURN to_jsonb(replace(to_char(told::timestamptz AT TIME ZONE 'UTC',
                    'YYYY-MM-DD"T"HH24:MI:SS.US'), '.000000', '') || 'Z');
            END IF;
        EXCEPTION WHEN data_exception THEN
            RETURN value;
        END;
    ELSIF kind = 'struct' AND jsonb_typeof(value) = 'object' THEN
        RETURN (SELECT jsonb_object_agg(name, everstate_store.canonical(part,
            shape -> 'fields' -> name)) FROM jsonb_each(value) AS each (name, part));
    ELSIF kind = 'map' AND jsonb_typeof(value) = 'object' THEN
        RETURN (SELECT jsonb_object_agg(name, everstate_store.canonical(part,
            shape -> 'element')) FROM jsonb_each(value) AS each (name, part));
    ELSIF kind = 'list' AND jsonb_typeof(value) = 'array' THEN
        RETURN (SELECT jsonb_agg(everstate_store.canonical(item, shape -> 'element')
            ORDER BY place) FROM jsonb_array_elements(value) WITH ORDINALITY AS t (item, place));
    END IF;
    RETURN value;
END $$;

-- Whether two states have equal values; null: the entity does not exist.
CREATE OR REPLACE FUNCTION everstate_store.is_equal(one jsonb, other jsonb, shape jsonb)
RETURNS boolean LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF one IS NOT DISTINCT FROM other THEN
        RETURN true;
    ELSIF one IS NULL OR other IS NULL
        OR coalesce(shape::text, '') !~ '"type": "(decimal|timestamp)"' THEN
        RETURN false;
    END IF;
    RETURN NOT EXISTS (
        SELECT FROM jsonb_each(one) AS a (name, part)
        FULL JOIN jsonb_each(other) AS b (name, part) USING (name)
        WHERE a.part IS DISTINCT FROM b.part
            AND everstate_store.canonical(a.part, shape -> 'fields' -> name)
                IS DISTINCT FROM everstate_store.canonical(b.part, shape -> 'fields' -> name));
END $$;

-- Returns a field of a stored state that a given state does not have, at any depth: the writer's
-- release does not know it. Null: there is none. A Python model writes all of its fields.
CREATE OR REPLACE FUNCTION everstate_store.unknown_field(
    stored jsonb, given jsonb, shape jsonb, former text[], path text DEFAULT ''
) RETURNS text LANGUAGE plpgsql IMMUTABLE AS $$
#variable_conflict use_variable
DECLARE
    name text;
    part jsonb;
    found text;
BEGIN
    IF jsonb_typeof(stored) IS DISTINCT FROM jsonb_typeof(given) OR path || '*' = ANY (former) THEN
        RETURN NULL;
    ELSIF jsonb_typeof(stored) = 'object' AND shape ->> 'type' IN ('struct', 'map') THEN
        FOR name, part IN SELECT * FROM jsonb_each(stored) LOOP
            IF shape ->> 'type' = 'map' THEN
                found := everstate_store.unknown_field(part, given -> name, shape -> 'element', former,
                    path);
            ELSIF given ? name THEN
                found := everstate_store.unknown_field(part, given -> name, shape -> 'fields' -> name,
                    former, path || name || '.');
            ELSIF path || name <> ALL (former) THEN
                found := path || name;
            END IF;
            EXIT WHEN found IS NOT NULL;
        END LOOP;
    ELSIF jsonb_typeof(stored) = 'array' AND shape ->> 'type' = 'list' THEN
        -- Which element became which is not known, but all of the given ones are of one release.
        SELECT everstate_store.unknown_field(element, given -> 0, shape -> 'element', former, path)
        INTO found FROM jsonb_array_elements(stored) AS element ORDER BY 1 LIMIT 1;
    END IF;
    RETURN found;
END $$;

-- Raises when a state is that of another key.
CREATE OR REPLACE FUNCTION everstate_store.check_own_key(
    state jsonb, known everstate_store.registered, field text, key text
) RETURNS void LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_variable
DECLARE
    shape jsonb := known.shape -> 'fields' -> known.key_field;
    own text := everstate_store.canonical(state -> known.key_field, shape) #>> '{}';
BEGIN
    IF state IS NOT NULL AND shape IS NOT NULL AND own IS DISTINCT FROM key THEN
        RAISE EXCEPTION 'the key is "%", and the state has the key "%"', key,
            coalesce(own, 'null')
            USING ERRCODE = 'EV001', COLUMN = field || '.' || known.key_field, DETAIL = key;
    END IF;
END $$;

-- Returns the provenance as the outbox stores it, from one with the message's names (apiVersion, …).
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

-- Raises when the login role may not write for this service; the role that installed the outbox may
-- write for any. It checks session_user, because current_user is the owner of these functions.
CREATE OR REPLACE FUNCTION everstate_store.check_service(service text, key text) RETURNS void
LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF session_user <> current_user
        AND NOT EXISTS (
            SELECT FROM everstate_store.emitters AS e JOIN pg_roles AS r ON r.rolname = e.role
            WHERE e.service = check_service.service AND pg_has_role(session_user, r.oid, 'MEMBER'))
        AND NOT (SELECT rolsuper FROM pg_roles WHERE rolname = session_user) THEN
        RAISE EXCEPTION 'role % may not emit as service "%"', session_user, service
            USING ERRCODE = 'EV006', COLUMN = 'provenance.serviceName', DETAIL = key,
            HINT = format('Bind it: everstate outbox install --role %s=%s', session_user, service);
    END IF;
END $$;

CREATE OR REPLACE FUNCTION everstate_store.checked_event(event json, key text)
RETURNS text LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    given jsonb := event::jsonb;
BEGIN
    IF event IS NULL OR jsonb_typeof(given) = 'null' THEN
        RETURN NULL;
    ELSIF jsonb_typeof(given) <> 'object'
        OR jsonb_typeof(given -> 'type') IS DISTINCT FROM 'string' OR given ->> 'type' = ''
        OR given - 'type' - 'data' <> '{}'
        OR (SELECT count(*) <> count(DISTINCT name) FROM json_object_keys(event) AS name) THEN
        RAISE EXCEPTION 'the event must be {"type": "…", "data": …}'
            USING ERRCODE = 'EV001', COLUMN = 'event', DETAIL = key;
    END IF;
    PERFORM everstate_store.check_json(event::text, 'event', key);
    RETURN event::text;
END $$;

CREATE OR REPLACE FUNCTION everstate_store.now_text() RETURNS text LANGUAGE sql VOLATILE AS $$
    SELECT to_char(clock_timestamp() AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"')
$$;

-- Writes one change of one entity: the entity's row, the outbox row and the pending row. The caller
-- has locked the entity's row, or found none; false when another session inserted it since then.
CREATE OR REPLACE FUNCTION everstate_store.append(
    known everstate_store.registered, key text, next_version bigint, before text, after text,
    provenance text, event text, occurred_at text, change_id uuid
) RETURNS boolean LANGUAGE plpgsql AS $$
#variable_conflict use_variable
DECLARE
    written integer;
    recorded timestamptz := clock_timestamp();
    size integer := greatest(octet_length(before), octet_length(after)) + octet_length(provenance)
        + coalesce(octet_length(event), 0) + 6 * octet_length(key) + 704;
BEGIN
    IF size > known.message_bytes_max THEN
        RAISE EXCEPTION '%', size USING ERRCODE = 'EV002', COLUMN = 'size', DETAIL = key,
            HINT = known.message_bytes_max::text;
    END IF;
    IF next_version = 1 THEN
        EXECUTE format('INSERT INTO everstate_store.%I (key, version, state, change_id,'
            ' recorded_at) VALUES ($1, 1, $2, $3, $4) ON CONFLICT DO NOTHING'
            ' RETURNING recorded_at', known.entity)
            INTO recorded USING key, after, change_id, recorded;
    ELSE
        -- The last version may come from a writer whose clock is ahead: time must not run back.
        EXECUTE format('UPDATE everstate_store.%I SET version = $2, state = $3, change_id = $4,'
            ' recorded_at = greatest(recorded_at, $5) WHERE key = $1'
            ' RETURNING recorded_at', known.entity)
            INTO recorded USING key, next_version, after, change_id, recorded;
    END IF;
    GET DIAGNOSTICS written = ROW_COUNT;
    IF written = 0 THEN
        RETURN false;
    END IF;
    -- The outbox assigns its id here, while this transaction has the lock on the entity's row: of two
    -- changes of one key the later one has the higher id (C1).
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
            + coalesce(octet_length(event), 0)
    FROM sent;
    RETURN true;
END $$;

-- Returns a state with today's names of its fields, see everstate.changes.former.
CREATE OR REPLACE FUNCTION everstate_store.today(value jsonb, shape jsonb)
RETURNS jsonb LANGUAGE plpgsql IMMUTABLE AS $$
#variable_conflict use_variable
DECLARE
    name text;
    part jsonb;
    was text;
BEGIN
    IF value IS NULL OR coalesce(shape::text, '') !~ '"former"' THEN
        RETURN value;
    ELSIF shape ->> 'type' = 'struct' AND jsonb_typeof(value) = 'object' THEN
        FOR name, part IN SELECT * FROM jsonb_each(shape -> 'fields') LOOP
            FOR was IN SELECT jsonb_array_elements_text(part -> 'former') LOOP
                IF value ? was AND coalesce(value -> name, 'null') = 'null' THEN
                    value := value || jsonb_build_object(name, value -> was);
                END IF;
                IF value -> was IN ('null', value -> name) THEN
                    value := value - was;
                END IF;
            END LOOP;
            IF value ? name THEN
                value := value || jsonb_build_object(name,
                    everstate_store.today(value -> name, part - 'former'));
            END IF;
        END LOOP;
    ELSIF shape ->> 'type' = 'map' AND jsonb_typeof(value) = 'object' THEN
        RETURN (SELECT coalesce(jsonb_object_agg(k, everstate_store.today(v, shape -> 'element')),
            '{}') FROM jsonb_each(value) AS each (k, v));
    ELSIF shape ->> 'type' = 'list' AND jsonb_typeof(value) = 'array' THEN
        RETURN (SELECT coalesce(jsonb_agg(everstate_store.today(item, shape -> 'element')
            ORDER BY place), '[]')
            FROM jsonb_array_elements(value) WITH ORDINALITY AS t (item, place));
    END IF;
    RETURN value;
END $$;

-- Emit one change of one entity in the caller's transaction. `before` and `after` are its whole
-- states; null means that it did not exist, or is deleted. This function assigns the version and
-- checks the chain: it locks the entity's row until the caller commits. `before` must be the state
-- that was emitted last (by its values); otherwise chain 'strict' raises EV003, and 'mend' first
-- adds the missing change that was made without emit. Equal states without an event are not a
-- change: then kind and id are null.
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
    was jsonb := everstate_store.today(nullif(before::jsonb, 'null'), known.shape);
    new jsonb := everstate_store.today(nullif(after::jsonb, 'null'), known.shape);
    given json := CASE WHEN new = after::jsonb THEN after ELSE new::json END;
    after_text text := CASE WHEN new IS NOT NULL THEN after::text END;
    before_text text := CASE WHEN was IS NOT NULL THEN before::text END;
    state text;
    stored jsonb;
    lacking text;
BEGIN
    IF chain NOT IN ('strict', 'mend') THEN
        RAISE EXCEPTION 'chain must be strict or mend' USING ERRCODE = 'EV001', COLUMN = 'chain', DETAIL = key;
    ELSIF was IS NULL AND new IS NULL THEN
        RAISE EXCEPTION 'before and after are both null'
            USING ERRCODE = 'EV001', COLUMN = 'after', DETAIL = key;
    END IF;
    PERFORM everstate_store.check_service(provenance ->> 'serviceName', key);
    PERFORM everstate_store.check_names(key, provenance ->> 'serviceName', event ->> 'type');
    PERFORM everstate_store.check_state(was, known.required, 'before', key);
    PERFORM everstate_store.check_state(new, known.required, 'after', key);
    IF known.shape IS NOT NULL THEN
        PERFORM everstate_store.check_value(given, known.shape, 'after', key);
        PERFORM everstate_store.check_own_key(was, known, 'before', key);
        PERFORM everstate_store.check_own_key(new, known, 'after', key);
        IF known.refuses_unknown THEN
            PERFORM everstate_store.check_known(given, known.shape, 'after', key);
        END IF;
    END IF;
    PERFORM everstate_store.check_json(before_text, 'before', key);
    PERFORM everstate_store.check_json(after_text, 'after', key);
    LOOP
        EXECUTE format('SELECT t.version, t.state FROM everstate_store.%I AS t WHERE t.key = $1'
            ' FOR UPDATE', entity) INTO version, state USING key;
        version := coalesce(version, 0);
        stored := everstate_store.today(state::jsonb, known.shape);
        IF NOT everstate_store.is_equal(stored, was, known.shape) THEN
            lacking := everstate_store.unknown_field(stored, was, known.shape, known.former);
            IF lacking IS NOT NULL THEN
                RAISE EXCEPTION 'the state that was emitted last has this field; emit with the release'
                    ' that has it, or name it in `removed` of the entity type and run `everstate outbox'
                    ' install`' USING ERRCODE = 'EV001', COLUMN = 'before.' || lacking, DETAIL = key;
            ELSIF chain = 'strict' THEN
                RAISE EXCEPTION 'before is not the state that was emitted last (version %)', version
                    USING ERRCODE = 'EV003', COLUMN = 'before', DETAIL = key,
                    HINT = 'Somebody wrote without emit; chain => ''mend'' adds the lost change.';
            END IF;
            -- Only here: in other cases the original state is the text that was emitted last.
            IF known.shape IS NOT NULL THEN
                PERFORM everstate_store.check_value(before, known.shape, 'before', key);
            END IF;
            CONTINUE WHEN NOT everstate_store.append(known, key, version + 1, state, before_text,
                jsonb_set(source::jsonb, '{reason}', '"written without emit"')::text, NULL, moment,
                everstate_store.new_change_id());
            version := version + 1;
            state := before_text;
        END IF;
        IF intent IS NULL AND everstate_store.is_equal(was, new, known.shape) THEN
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

-- Emit a behavioural fact: it is published when the caller commits. A fact has version 1 and
-- no state before it, so there is no row of the entity, and nothing is locked. The key is the fact's
-- own id: a second fact with the same key is the same change.
CREATE OR REPLACE FUNCTION everstate_store.emit_event(
    entity text, key text, fact json, provenance json, event json DEFAULT NULL,
    occurred_at text DEFAULT NULL
) RETURNS uuid
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_variable
DECLARE
    moment text := coalesce(occurred_at, everstate_store.now_text());
    known everstate_store.registered := everstate_store.checked_type(entity, key, moment, true);
    source text := everstate_store.checked_provenance(provenance, key);
    intent text := everstate_store.checked_event(event, key);
    id uuid := md5('everstate' || chr(10) || entity || chr(10) || key)::uuid;
    size integer := octet_length(fact::text) + octet_length(source)
        + coalesce(octet_length(intent), 0) + 6 * octet_length(key) + 704;
BEGIN
    IF fact IS NULL THEN
        RAISE EXCEPTION 'the fact must not be null' USING ERRCODE = 'EV001', COLUMN = 'fact',
            DETAIL = key;
    END IF;
    PERFORM everstate_store.check_service(provenance ->> 'serviceName', key);
    PERFORM everstate_store.check_names(key, provenance ->> 'serviceName', event ->> 'type');
    PERFORM everstate_store.check_state(fact::jsonb, known.required, 'fact', key);
    IF known.shape IS NOT NULL THEN
        PERFORM everstate_store.check_value(fact, known.shape, 'fact', key);
        PERFORM everstate_store.check_own_key(fact::jsonb, known, 'fact', key);
        IF known.refuses_unknown THEN
            PERFORM everstate_store.check_known(fact, known.shape, 'fact', key);
        END IF;
    END IF;
    PERFORM everstate_store.check_json(fact::text, 'fact', key);
    IF size > known.message_bytes_max THEN
        RAISE EXCEPTION '%', size USING ERRCODE = 'EV002', COLUMN = 'size', DETAIL = key,
            HINT = known.message_bytes_max::text;
    END IF;
    WITH sent AS (
        INSERT INTO everstate_store.outbox (entity, key, version, kind, change_id,
            schema_version, occurred_at, recorded_at, provenance, event, after)
        VALUES (known.entity, key, 1, 'event', id, known.schema_version, moment,
            clock_timestamp(), source, intent, fact::text)
        RETURNING outbox.id, outbox.xid, outbox.entity, outbox.key
    )
    INSERT INTO everstate_store.outbox_pending (id, xid, entity, key, bytes)
    SELECT sent.id, sent.xid, sent.entity, sent.key,
        octet_length(fact::text) + coalesce(octet_length(intent), 0)
    FROM sent;
    RETURN id;
END $$;

-- Only roles with an explicit GRANT may call the functions, also if others may use the schema.
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA everstate_store FROM PUBLIC;
