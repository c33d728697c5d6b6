"""Given / When / Then for the two functions of a handler group; no servers."""

from __future__ import annotations

import json
from collections.abc import Iterable
from copy import deepcopy
from typing import Any

from everstate.changes.values import model_json
from everstate.declarations.commands import CommandGroup, Decide, Evolve, facts_of
from everstate.errors import Rejected


class Behaviour:
    """How an entity type answers commands: ``given(facts).when(command).then(facts)``."""

    def __init__(self, decide: Decide, evolve: Evolve) -> None:
        self.decide = decide
        self.evolve = evolve

    @classmethod
    def of(cls, group: CommandGroup) -> Behaviour:
        """The behaviour of a handler group that an app has declared."""
        return cls(group.decide, group.evolve)

    def given(self, *facts: Any) -> Given:
        """Start with the state after these facts; without any, the entity does not exist.

        Raises AssertionError when ``evolve`` changes the state it was passed.
        """
        return Given(self, self.evolved(None, facts))

    def evolved(self, state: Any, facts: Iterable[Any]) -> Any:
        """The state after these facts; raises AssertionError as :meth:`given`."""
        for fact in facts:
            before = deepcopy(state)
            after = self.evolve(state, fact)
            assert _is_still(state, before), f"evolve changed its state {before!r} to {state!r}"
            state = after
        return state

    def given_state(self, state: Any) -> Given:
        """Start with an entity in this state."""
        return Given(self, state)


class Given:
    """An entity in its state before the command."""

    def __init__(self, behaviour: Behaviour, state: Any) -> None:
        self._behaviour, self.state = behaviour, state

    def when(self, command: Any) -> Then:
        """Decide a command twice: a pure function returns the same both times.

        Raises AssertionError when it does not, or when it changes the state it was passed.
        """
        before = deepcopy(self.state)
        first, second = self._decided(command), self._decided(command)
        assert _same(first, second), f"decide is not pure: {first!r}, then {second!r}"
        changed = f"decide changed its state {before!r} to {self.state!r}"
        assert _is_still(self.state, before), changed
        return Then(self._behaviour, self.state, command, first)

    def _decided(self, command: Any) -> Any:
        try:
            decided = self._behaviour.decide(self.state, command)
        except Rejected as refusal:
            return refusal
        return decided if isinstance(decided, Rejected) else list(facts_of(decided))


class Then:
    """Result of a command; every method raises AssertionError when the result differs."""

    def __init__(self, behaviour: Behaviour, state: Any, command: Any, decided: Any) -> None:
        self._behaviour, self._state = behaviour, state
        self._command, self.decided = command, decided

    def then(self, *facts: Any) -> Then:
        """The command gave these facts, in this order; none: it was accepted without a fact."""
        assert not isinstance(self.decided, Rejected), (
            f"{self._command!r} was rejected: {self.decided.reason}"
        )
        is_same = self.decided == list(facts) and _said(self.decided) == _said(facts)
        assert is_same, f"{self._command!r}: expected {list(facts)!r}, decided {self.decided!r}"
        return self

    def then_rejected(self, reason: str | None = None, *, code: str | None = None) -> Then:
        """The command was rejected, with this reason (a part of it) and code when given."""
        assert isinstance(self.decided, Rejected), (
            f"{self._command!r} was not rejected; decided {self.decided!r}"
        )
        found = self.decided
        assert reason is None or reason in found.reason, f"the reason is {found.reason!r}"
        assert code is None or code == found.code, f"the code is {found.code!r}"
        return self

    def then_state(self, state: Any) -> Then:
        """The entity has this state afterwards."""
        facts = () if isinstance(self.decided, Rejected) else self.decided
        after = self._behaviour.evolved(self._state, facts)
        assert after == state, f"the state is {after!r}, expected {state!r}"
        return self


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, Rejected) and isinstance(second, Rejected):
        return (first.reason, first.code, first.data) == (second.reason, second.code, second.data)
    return bool(first == second)


def _is_still(state: Any, before: Any) -> bool:
    """Whether a state is as it was copied; by its text where its class compares by identity."""
    if before == deepcopy(before):
        return bool(state == before)
    return repr(state).partition(" at 0x")[0] == repr(before).partition(" at 0x")[0]


def _booleans(value: Any) -> Any:
    """A JSON value with null for all that is no boolean: Python calls ``True`` and ``1`` equal."""
    if isinstance(value, dict):
        return {name: _booleans(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_booleans(each) for each in value]
    return value if isinstance(value, bool) else None


def _said(facts: Iterable[Any]) -> list[Any]:
    """Where facts say ``true`` or ``false`` in the log."""
    return [_booleans(json.loads(model_json(fact))) for fact in facts]
