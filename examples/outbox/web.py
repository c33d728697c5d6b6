"""A FastAPI service on SQLAlchemy: one session, one transaction, row and change together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from fastapi import Depends, FastAPI, Header, HTTPException
from pydantic import BaseModel
from shop import Purchase, app
from sqlalchemy import create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from everstate import DomainEvent, Provenance, project_config
from everstate.sources.outbox.emit_sqlalchemy import emit

shop = FastAPI()
PURCHASE = app.entity_type("purchase")
ADDRESS = project_config().store_dsn.replace("postgresql://", "postgresql+psycopg://")
engine = create_engine(ADDRESS)


class Base(DeclarativeBase):
    """The shop's own tables."""


class PurchaseRow(Base):
    """A row of the shop's own table."""

    __tablename__ = "purchase"

    id: Mapped[str] = mapped_column(primary_key=True)
    total: Mapped[int]
    paid: Mapped[bool] = mapped_column(default=False)

    def entity(self) -> Purchase:
        """The whole entity, as it goes to the log."""
        return Purchase(id=self.id, total=self.total, paid=self.paid)


Base.metadata.create_all(engine)


class Body(BaseModel):
    """What a client sends."""

    total: int


def transaction() -> Iterator[Session]:
    """A session that commits when the request succeeded, and rolls back when it did not."""
    with Session(engine) as session, session.begin():
        yield session


def caller(x_user: Annotated[str, Header()] = "anonymous") -> Provenance:
    """Who writes."""
    return Provenance(api_version="v1", service_name="shop", identifier="web", actor=x_user)


Db = Annotated[Session, Depends(transaction, scope="function")]
Caller = Annotated[Provenance, Depends(caller)]


def locked(db: Session, key: str) -> PurchaseRow | None:
    """The row, locked: nobody else changes it until we commit."""
    return db.get(PurchaseRow, key, with_for_update=True)


@shop.put("/purchase/{key}")
def put(key: str, body: Body, db: Db, who: Caller) -> dict[str, int]:
    """Create a purchase, or change its total."""
    row = locked(db, key)
    before = row.entity() if row else None
    if row is None:
        row = PurchaseRow(id=key, total=body.total, paid=False)
        db.add(row)
    row.total = body.total
    written = emit(db, PURCHASE, before=before, after=row.entity(), provenance=who)
    return {"version": written.version}


@shop.post("/purchase/{key}/pay")
def pay(key: str, db: Db, who: Caller) -> dict[str, int]:
    """Pay a purchase; the log tells the intent, too."""
    row = locked(db, key)
    if row is None:
        raise HTTPException(404, "no such purchase")
    before = row.entity()
    row.paid = True
    written = emit(
        db,
        PURCHASE,
        before=before,
        after=row.entity(),
        provenance=who,
        event=DomainEvent(type="PurchasePaid", data={"amount": row.total}),
    )
    if row.total < 0:
        # Whatever was written and emitted before is rolled back together.
        raise HTTPException(422, "a negative total cannot be paid")
    return {"version": written.version}
