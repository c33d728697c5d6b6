"""Each role serves its figures where Prometheus can ask for them."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest

from everstate.config import load
from everstate.parts import Journal, read_states, states_folder
from everstate.roles import Role
from everstate.runtime.figures import ROLES, serving_figures


def test_a_role_serves_its_figures_on_this_machine_and_says_where(tmp_path: Path) -> None:
    import everstate.sources.outbox.relay  # noqa: F401 (its figures are registered with it)

    config = load(tmp_path)
    with serving_figures(config, "relay"):
        Journal("relay", states_folder(config.project.data_dir))
        (state,) = read_states(config.project.data_dir)
        assert state.figures is not None
        assert state.figures.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(state.figures, timeout=10) as answer:
            text = answer.read().decode()
        assert "everstate_outbox_published_changes_total" in text
        assert "process_resident_memory_bytes" in text
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(state.figures, timeout=10)


def test_roles_have_ports_in_a_row_and_a_taken_port_stops_no_role(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving_figures(load(tmp_path), "relay"):
        Journal("relay", states_folder(load(tmp_path).project.data_dir))
        (state,) = read_states(load(tmp_path).project.data_dir)
        taken = int((state.figures or "").rpartition(":")[2].partition("/")[0])
        config = load(tmp_path, metrics={"port": taken - ROLES.index("serve")})
        with serving_figures(config, "serve"):
            assert f"no figures at 127.0.0.1:{taken}" in caplog.text


def test_every_role_has_a_place_in_the_row() -> None:
    assert {*ROLES} == {*(role.value for role in Role), "serve"}


def test_no_figures_are_served_where_nobody_wants_them(tmp_path: Path) -> None:
    with serving_figures(load(tmp_path, metrics={"enabled": False}), "relay"):
        Journal("relay", states_folder(load(tmp_path).project.data_dir))
    (state,) = read_states(load(tmp_path).project.data_dir)
    assert state.figures is None
