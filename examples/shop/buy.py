"""Guests who order, change their minds, cancel and leave: over REST, with a book of our own.

`python buy.py URL` writes some hundred changes, and what the views must come to in the end to
expected.json: a plain fold over what was sent, which knows nothing of everstate.
"""

import json
import sys
import time
from collections import defaultdict
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from http.client import HTTPConnection
from random import Random
from typing import Any
from urllib.parse import urlsplit

CITIES = ("Wien", "Graz", "Linz", "Bregenz")
ARTICLES = ("tea", "coffee", "cake", "juice", "soup", "bread", "cheese", "apples")
NAMES = ("Eva", "Tom", "Ada", "Max", "Ida", "Leo", "Mia", "Jan", "Lea", "Ben")
HEADERS = {"Everstate-Service": "shop-front", "Everstate-Identifier": "buy.py"}
BEGIN = datetime(2026, 5, 1, 8, tzinfo=UTC)


class Shop:
    """The shop as its customers see it, and a book of what is in it."""

    def __init__(self, url: str) -> None:
        self.connection = connected(urlsplit(url).netloc)
        self.random = Random(7)
        self.book: dict[str, dict[str, Any]] = {"guest": {}, "purchase": {}, "line": {}}
        self.tokens: dict[str, dict[str, str]] = {"guest": {}, "purchase": {}, "line": {}}
        self.active: dict[str, datetime] = {}
        """When each order changed last, also one that is not there any more."""
        self.now = BEGIN
        self.requests = 0

    def send(self, method: str, entity: str, key: str, body: Any = None) -> None:
        """One request; the book follows it, and the token of each key's newest write is kept."""
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        self.now += timedelta(minutes=self.random.randint(1, 20))
        headers = {
            **HEADERS, "Content-Type": kind, "Everstate-Occurred-At": self.now.isoformat()
        }  # fmt: skip
        text = None if body is None else json.dumps(body)
        self.connection.request(method, f"/v1/{entity}/{key}", text, headers)
        answer = self.connection.getresponse()
        said = answer.read()
        assert answer.status in (200, 201, 204), f"{answer.status} {said!r}"
        self.requests += 1
        if entity == "purchase":
            self.active[key] = self.now
        self.tokens[entity][key] = answer.headers["Everstate-Token"]
        if method == "DELETE":
            del self.book[entity][key]
        else:
            self.book[entity][key] = json.loads(said)

    def arrive(self, number: int) -> None:
        """A new guest."""
        key = f"g{number}"
        name = f"{self.random.choice(NAMES)} {self.random.choice(NAMES)}son"
        note = self.random.choice(("", "likes tea", "allergic to nuts", "window table", "VIP"))
        city = self.random.choice(CITIES)
        self.send("PUT", "guest", key, {"guest_id": key, "name": name, "city": city, "note": note})

    def order(self, number: int) -> None:
        """A guest orders some articles."""
        key = f"o{number}"
        guest = self.random.choice(list(self.book["guest"]))
        lines = self.random.sample(ARTICLES, self.random.randint(1, 3))
        cents = self.random.randint(250, 9_000)
        self.send(
            "PUT",
            "purchase",
            key,
            {
                "order_id": key,
                "guest_id": guest,
                "ordered_at": self.now.isoformat(),
                "total": f"{Decimal(cents) / 100:.2f}",
            },
        )
        for at, article in enumerate(lines):
            line = f"{key}-{at}"
            quantity = self.random.randint(1, 4)
            body = {"line_id": line, "order_id": key, "article": article, "quantity": quantity}
            self.send("PUT", "line", line, body)

    def pay(self) -> None:
        """An open order is paid."""
        if key := self.one("open"):
            self.send("PATCH", "purchase", key, {"status": "paid"})

    def correct(self) -> None:
        """What an order cost was wrong."""
        if key := self.one("open", "paid"):
            cents = self.random.randint(250, 9_000)
            self.send("PATCH", "purchase", key, {"total": f"{Decimal(cents) / 100:.2f}"})

    def cancel(self) -> None:
        """An order is cancelled, paid or not, and nothing of it is sold."""
        if key := self.one("open", "paid"):
            self.send("PATCH", "purchase", key, {"status": "cancelled"})
            for line in [k for k, v in self.book["line"].items() if v["order_id"] == key]:
                self.send("DELETE", "line", line)

    def forget(self) -> None:
        """A cancelled order is deleted."""
        if key := self.one("cancelled"):
            self.send("DELETE", "purchase", key)

    def move(self) -> None:
        """An order was another guest's."""
        if key := self.one("open", "paid"):
            guest = self.random.choice(list(self.book["guest"]))
            self.send("PATCH", "purchase", key, {"guest_id": guest})

    def one(self, *statuses: str) -> str | None:
        """Some order that is in one of these."""
        found = [k for k, v in self.book["purchase"].items() if v["status"] in statuses]
        return self.random.choice(found) if found else None

    def expected(self) -> dict[str, Any]:
        """What each view must have, as rows of texts."""
        spent: dict[str, list[Decimal]] = defaultdict(list)
        for purchase in self.book["purchase"].values():
            if purchase["status"] == "paid":
                spent[purchase["guest_id"]].append(Decimal(purchase["total"]))
        sold: dict[str, list[int]] = defaultdict(list)
        for line in self.book["line"].values():
            sold[line["article"]].append(line["quantity"])
        purchases = self.book["purchase"].values()
        best = sorted(((sum(all_), article) for article, all_ in sold.items()), reverse=True)
        last: dict[str, list[Any]] = defaultdict(list)
        for purchase in sorted(
            purchases, key=lambda each: datetime.fromisoformat(each["ordered_at"]), reverse=True
        ):
            last[purchase["guest_id"]].append(purchase)
        since = max(self.active.values()) - timedelta(hours=4)
        return {
            "best_sellers": [{"article": article, "sold": count} for count, article in best[:3]],
            "last_orders": [
                {name: purchase[name] for name in ("guest_id", "order_id", "total")}
                for all_ in last.values()
                for purchase in all_[:3]
            ],
            "active_orders": [
                {name: purchase[name] for name in ("order_id", "status")}
                for purchase in purchases
                if self.active[purchase["order_id"]] > since
            ],
            "guests": list(self.book["guest"].values()),
            "spend_by_guest": [
                {"guest_id": guest, "orders": len(all_), "spent": str(sum(all_))}
                for guest, all_ in spent.items()
            ],
            "sold_by_article": [
                {"article": article, "orders": len(all_), "sold": sum(all_)}
                for article, all_ in sold.items()
            ],
            "open_orders": [
                {name: purchase[name] for name in ("order_id", "guest_id", "total")}
                for purchase in self.book["purchase"].values()
                if purchase["status"] == "open"
            ],
        }


def connected(server: str, within_s: float = 60.0) -> HTTPConnection:
    """A connection to a server that may just have been started."""
    deadline = time.monotonic() + within_s
    while True:
        connection = HTTPConnection(server, timeout=30)
        try:
            connection.connect()
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
        else:
            return connection


def main(url: str, orders: int = 60) -> None:
    """Write the changes and the expectation."""
    shop = Shop(url)
    for number in range(12):
        shop.arrive(number)
    for number in range(orders):
        shop.order(number)
        for _ in range(shop.random.randint(0, 3)):
            shop.random.choice(
                (shop.pay, shop.pay, shop.correct, shop.cancel, shop.move, shop.forget)
            )()
    with open("expected.json", "w", encoding="utf-8") as file:
        json.dump({"tokens": shop.tokens, "rows": shop.expected()}, file, indent=1)
    shop.connection.close()
    print(f"{shop.requests} requests; expected.json says what the views must have")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080")
