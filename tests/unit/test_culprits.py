"""Which of many make a job fail, in few tries."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from everstate.pipeline.keeping.culprits import culprits


@pytest.mark.parametrize("failing", [set(), {0}, {99}, {37}, {3, 61}])
def test_d_who_fails_among_a_hundred_is_found_in_few_tries(failing: set[int]) -> None:
    tries = list[Sequence[int]]()

    def failure(some: Sequence[int]) -> str | None:
        tries.append(some)
        return f"{min(found)} fails" if (found := failing.intersection(some)) else None

    assert sorted(culprits(range(100), failure)) == [(n, f"{n} fails") for n in sorted(failing)]
    assert len(tries) <= 2 + 15 * max(1, len(failing)), "not one for each of them"


def test_d_what_fails_without_any_of_them_blames_none_of_them() -> None:
    assert culprits(range(100), lambda _: "the core fails") == []
