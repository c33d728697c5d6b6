-- The same from any language, in the transaction that writes the shop's own table.
BEGIN;
UPDATE purchase SET total = 30 WHERE id = 'p-1';
SELECT everstate_store.emit(
    entity => 'purchase', key => 'p-1',
    before => '{"id": "p-1", "total": 0, "paid": true}',
    after => '{"id": "p-1", "total": 30, "paid": true}',
    provenance => '{"apiVersion": "v1", "serviceName": "desk", "identifier": "psql"}',
    event => '{"type": "PriceCorrected", "data": {"by": "manager"}}');
COMMIT;
