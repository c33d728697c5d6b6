"""Tests of the view and of the model. They need no server: run `pytest`."""

import pytest
from parcels import Parcel, app
from pydantic import ValidationError

from everstate.testing.view_behaviour import ViewBehaviour

to_wien = Parcel(parcel_id="p1", city="Wien", weight_g=500)
to_graz = Parcel(parcel_id="p2", city="Graz", weight_g=200)


def test_parcels_are_counted_and_weighed_by_city():
    view = ViewBehaviour.of(app, "parcels_by_city")
    (
        view.given(to_wien, to_graz)
        .when(Parcel(parcel_id="p3", city="Wien", weight_g=700))
        .then(
            {"city": "Wien", "parcels": 2, "weight_g": 1200},
            {"city": "Graz", "parcels": 1, "weight_g": 200},
        )
    )


def test_a_parcel_that_is_redirected_counts_in_its_new_city():
    view = ViewBehaviour.of(app, "parcels_by_city")
    redirected = to_wien.model_copy(update={"city": "Graz"})
    (
        view.given(to_wien, to_graz)
        .when(redirected)
        .then({"city": "Graz", "parcels": 2, "weight_g": 700})
    )


def test_a_parcel_that_is_deleted_counts_no_more():
    view = ViewBehaviour.of(app, "parcels_by_city")
    view.given(to_wien).when_deleted(to_wien).then()


def test_a_status_that_nobody_knows_is_refused():
    with pytest.raises(ValidationError):
        Parcel(parcel_id="p1", city="Wien", status="lost")
