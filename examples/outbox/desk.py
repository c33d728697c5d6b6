"""The same from Django: its cursor is all that `emit` needs.

In a view it is `with transaction.atomic(), connection.cursor() as cursor:`; here any cursor of a
driver that takes ``%(name)s`` parameters.
"""

from __future__ import annotations

from typing import Any

from shop import Purchase, app

from everstate import Provenance, emit

PURCHASE = app.entity_type("purchase")
DESK = Provenance(api_version="v1", service_name="desk", identifier="till-2")


def refund(cursor: Any, key: str) -> int:
    """Set a purchase's total to zero, in the transaction that is open; returns its version."""
    cursor.execute(
        "SELECT id, total, paid FROM purchase WHERE id = %(key)s FOR UPDATE", {"key": key}
    )
    found, total, paid = cursor.fetchone()
    before = Purchase(id=found, total=total, paid=paid)
    after = before.model_copy(update={"total": 0})
    cursor.execute("UPDATE purchase SET total = 0 WHERE id = %(key)s", {"key": key})
    return emit(cursor, PURCHASE, before=before, after=after, provenance=DESK).version
