"""What `everstate status` prints of conditions beside the table of roles."""

from __future__ import annotations

import os
import time

import pytest

from everstate.attention.conditions import Concern
from everstate.cli.results import show_pieces
from everstate.cli.status import _conditions_pieces
from everstate.parts import Part, RoleState
from everstate.process_mark import start_mark


def test_a_condition_is_left_out_only_where_its_part_is_printed_with_the_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = time.time()
    parts = {
        "view totals": Part("running", now),
        "view sums, version 2": Part("stopped", now, "refused: no such column"),
    }
    pid = os.getpid()
    role = RoleState("pipeline", pid, now, now, parts, mark=start_mark(pid))

    def concern(key: str, what: str, why: str) -> Concern:
        return Concern(key, "views", "views", "view", what, why)

    conditions = [
        concern("view-refused:totals", "view totals", "has no such function."),
        concern("view-behind:totals.3", "view totals, version 3", "waits for a reader."),
        concern("view-behind:sums.2", "view sums, version 2", "refused: no such column"),
    ]
    show_pieces(*_conditions_pieces(conditions, [role]))
    printed = capsys.readouterr().out
    assert "view totals has no such function." in printed
    assert "view totals, version 3 waits for a reader." in printed
    assert "sums" not in printed
