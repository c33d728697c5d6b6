"""What this project keeps: an entity type, and a view of it."""

from typing import Literal

from pydantic import BaseModel, Field

from everstate import App

app = App("parcels")


# An entity type is a pydantic model with a key. Everstate keeps every version of every parcel:
# who changed it, the whole parcel before, and the whole parcel after.
@app.entity("parcel", key="parcel_id")
class Parcel(BaseModel):
    """A parcel on its way to a customer."""

    parcel_id: str
    city: str
    status: Literal["registered", "in transit", "delivered"] = "registered"
    weight_g: int = Field(default=0, ge=0)


# A view is SQL over the parcels as they are now. It is kept up to date change by change, in a
# table of PostgreSQL. Change the SQL, and the view is built again beside the old one.
app.view(
    "parcels_by_city",
    sql="SELECT city, count(*) AS parcels, sum(weight_g) AS weight_g FROM parcel GROUP BY city",
)
