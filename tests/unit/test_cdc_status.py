"""The doctor tells what the status of a capture tells, and nothing twice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from everstate.sources.cdc.database import ConnectorStanding, Finding
from everstate.sources.cdc.status import CaptureStatus, told_by, why_not

ANEW = "`everstate cdc snapshot shop --new-epoch` reads all rows as they are now"
READS = CaptureStatus("shop", "RUNNING", "RUNNING", True, 0.0, 0, None, None)


def test_a_connector_that_reads_is_a_finding() -> None:
    (found,) = told_by(READS, [])
    assert (found.name, found.outcome) == ("connector", "ok")


def test_a_connector_that_does_not_read_is_told_with_the_reason() -> None:
    status = replace(READS, connected=False, reason="the server has removed bin.000001")
    (found,) = told_by(status, [])
    assert (found.name, found.outcome) == ("connector", "fail")
    assert "the server has removed bin.000001" in found.found
    assert "cdc status shop" in str(found.advice)


def test_a_problem_that_no_other_finding_has_is_told() -> None:
    problems = ("table public.t: there is none", "table public.u: there is none")
    known = Finding("table public.t", "fail", "there is none")
    _, found = told_by(replace(READS, problems=problems), [known])
    assert (found.name, found.found) == ("table public.u", "there is none")


@pytest.mark.parametrize(
    ("reason", "note", "is_lost", "told"),
    [
        ("the task failed", "no position yet", False, "the task failed"),
        (None, "no position yet", False, "no position yet"),
        ("the task failed", "the log was removed", True, f"the log was removed; {ANEW}"),
        ("the task failed", None, False, "the task failed"),
    ],
)
def test_the_reason_is_a_lost_log_or_else_what_the_connector_says(
    reason: str | None, note: str | None, is_lost: bool, told: str
) -> None:
    assert (
        why_not("shop", reason, ConnectorStanding(False, None, None, note, is_lost=is_lost)) == told
    )
    assert why_not("shop", reason, None) == reason
