"""Compares the views with expected.json; each is read when it has the last write of every key."""

import json
import sys
from typing import Any

from shop import app


def rows_of(view: str, columns: list[str], tokens: list[str]) -> list[dict[str, str]]:
    """Rows of a view that has some writes, as texts, in an order of their own."""
    for token in tokens:
        found = app.snapshot(view, wait_for=token, wait_s=60)
    return in_order([{name: str(row[name]) for name in columns} for row in found.records()])


def in_order(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Rows in an order that does not depend on how they came."""
    return sorted(rows, key=lambda row: sorted(row.items()))


def main() -> int:
    """1 when a view differs."""
    with open("expected.json", encoding="utf-8") as file:
        expected: dict[str, Any] = json.load(file)
    wrong = 0
    for view, rows in expected["rows"].items():
        entity = app.views[view].entity
        wanted = in_order([{name: str(value) for name, value in row.items()} for row in rows])
        columns = list(rows[0])
        found = rows_of(view, columns, list(expected["tokens"][entity].values()))
        print(f"{view}: {len(found)} rows", "as expected" if found == wanted else "DIFFER")
        wrong += found != wanted
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
