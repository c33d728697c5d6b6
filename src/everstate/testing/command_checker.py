"""Checks that every command was decided once, in order, and answered, with its own oracle.

It reads the log without the handler's code, runs the project's pure functions over the commands in
log order, and compares the results: like Jepsen, with the log as the history. Source:
jepsen-io/jepsen, tests/kafka (lost and duplicated writes, real-time order).
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from everstate.changes.values import model_json
from everstate.config import Config
from everstate.declarations.commands import CommandGroup, facts_of
from everstate.errors import Rejected
from everstate.log.record import Record
from everstate.log.topics import TopicNames
from everstate.testing.log_checker import LogReport, exact, exact_text, read_topic


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A client's command and its answer; times of one monotonic clock, ``None``: no answer."""

    command_id: str
    key: str
    sent_ns: int
    answered_ns: int | None = None
    outcome: str | None = None
    version: int | None = None


@dataclass
class CommandLog:
    """All committed records of one entity type, byte for byte."""

    commands: Sequence[Record] = ()
    changes: Sequence[Record] = ()
    replies: Sequence[Record] = ()
    state: Sequence[Record] = ()


@dataclass(frozen=True)
class _Expected:
    """Results of the oracle: the changes of each key, and the answer of each command."""

    changes: dict[str, list[dict[str, Any]]]
    answers: dict[tuple[str, str], tuple[str, int]]
    places: dict[tuple[str, str], tuple[int, int]]


@dataclass
class CommandReport(LogReport):
    """Result of the check; no problems: each command was decided once, in order, and answered."""

    commands: int = 0


def read_command_log(config: Config, entity: str) -> CommandLog:
    """The four topics of an entity type, from their first offsets. Memory: all of them."""
    names = TopicNames(config.log.prefix)
    return CommandLog(
        commands=read_topic(config, names.commands(entity)),
        changes=read_topic(config, names.changes(entity)),
        replies=read_topic(config, names.replies(entity)),
        state=read_topic(config, names.state(entity)),
    )


def check_commands(group: CommandGroup, log: CommandLog, history: Iterable[Sent]) -> CommandReport:
    """Compare a log at rest with the oracle, and with the answers that clients got.

    It checks that every command has exactly one answer, and the same id always the same; that the
    changes are those which ``decide`` and ``evolve`` make from the commands in their order, with
    dense versions, each with its original, all digits of its numbers, and the time and the
    provenance of its command, those of a key in one partition; that `.state` ends with each key's
    newest change; that no client got another answer; and that a command which was sent after
    another's answer was received comes after it in the log.
    """
    report = CommandReport(len(log.changes), commands=len(log.commands))
    expected = _run_model(group, log.commands)
    _check_changes(expected, log, report)
    _check_replies(expected, log, report)
    _check_history(expected, list(history), report)
    return report


def _run_model(group: CommandGroup, commands: Sequence[Record]) -> _Expected:
    expected = _Expected(defaultdict(list), {}, {})
    states: dict[str, tuple[int, Any]] = defaultdict(lambda: (0, None))
    for record in sorted(commands, key=lambda each: (each.partition, each.offset)):
        message = json.loads(record.value or b"null")
        name = (message["key"], message["id"])
        if name in expected.answers:
            continue
        version, state = states[message["key"]]
        outcome, facts = _decide(group, version, state, message)
        for index, fact in enumerate(facts, 1):
            after = group.evolve(state, fact)
            version += 1
            expected.changes[message["key"]].append(
                {
                    "version": version,
                    "entity": group.entity_type.name,
                    "kind": _kind(state, after),
                    "record key": message["key"],
                    "event": {"type": type(fact).__name__, "data": exact(model_json(fact))},
                    "originalEntityState": _plain(group, state),
                    "currentEntityState": _plain(group, after),
                    "occurredAt": message["occurredAt"],
                    "provenance": {
                        **{_member(n): each for n, each in message["provenance"].items()},
                        "transaction": {
                            "id": f"command:{message['id']}",
                            "index": index,
                            "count": len(facts),
                        },
                    },
                }
            )
            state = after
        states[message["key"]] = (version, state)
        expected.answers[name] = (outcome, version)
        expected.places[name] = (record.partition, record.offset)
    return expected


def _decide(
    group: CommandGroup, version: int, state: Any, message: Mapping[str, Any]
) -> tuple[str, list[Any]]:
    if message.get("expectedVersion") not in (None, version):
        return "conflict", []
    condition = message.get("ifMatch")
    tags = [tag.strip() for tag in (condition or "").split(",")]
    if condition is not None and (state is None or not {"*", f'"{version}"'}.intersection(tags)):
        return "conflict", []
    try:
        command = group.by_name[message["command"]].model_validate(message["data"])
        decided = group.decide(state, command)
    except Rejected:
        return "rejected", []
    except Exception:
        # Any error of the project's own code parks the command.
        return "parked", []
    if isinstance(decided, Rejected):
        return "rejected", []
    return "accepted", list(facts_of(decided))


def _member(name: str) -> str:
    """A field of a command's provenance as changes name it."""
    first, *others = name.split("_")
    return first + "".join(map(str.capitalize, others))


def _plain(group: CommandGroup, state: Any) -> Any:
    return None if state is None else exact(group.entity_type.encode(state))


def _kind(before: Any, after: Any) -> str:
    if before is None:
        return "created"
    return "deleted" if after is None else "updated"


def _check_changes(expected: _Expected, log: CommandLog, report: CommandReport) -> None:
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    newest: dict[str, bytes | None] = {}
    ids: Counter[str] = Counter()
    partition_of: dict[str, int] = {}
    for record in log.changes:
        message = exact(record.value or b"null")
        key = message["key"]
        if (home := partition_of.setdefault(key, record.partition)) != record.partition:
            report.tell(f"{key}: changes in partition {record.partition}, others in {home}")
        ids[message["id"]] += 1
        newest[key] = record.value
        found[key].append(
            {
                "version": message["version"],
                "entity": message["entity"],
                "kind": message["kind"],
                "record key": (record.key or b"").decode(),
                "event": message["event"],
                "originalEntityState": message["originalEntityState"],
                "currentEntityState": message["currentEntityState"],
                "occurredAt": message["occurredAt"],
                "provenance": message["provenance"],
            }
        )
    for change_id, count in ids.items():
        if count > 1:
            report.tell(f"change {change_id} is in the log {count} times")
    for key in expected.changes.keys() | found.keys():
        _compare(key, expected.changes.get(key, []), found.get(key, []), report)
    state = {(each.key or b"").decode(): each.value for each in log.state}
    for key in newest.keys() | state.keys():
        if newest.get(key) != state.get(key):
            report.tell(f"{key}: .state is not the newest change")


def _compare(
    key: str, wanted: list[dict[str, Any]], found: list[dict[str, Any]], report: CommandReport
) -> None:
    last = 0
    for change in found:
        if change["version"] != last + 1:
            report.tell(f"{key}: version {change['version']} follows version {last}")
        last = change["version"]
    if len(wanted) != len(found):
        report.tell(f"{key}: {len(found)} changes, the model says {len(wanted)}")
    for model, change in zip(wanted, found, strict=False):
        for name, value in model.items():
            if exact_text(change[name]) != exact_text(value):
                report.tell(
                    f"{key} version {model['version']}: {name} is {change[name]!r}, "
                    f"the model says {value!r}"
                )
                return


def _check_replies(expected: _Expected, log: CommandLog, report: CommandReport) -> None:
    answered: Counter[tuple[int, int]] = Counter()
    replies: dict[tuple[str, str], bytes | None] = {}
    for record in log.replies:
        message = json.loads(record.value or b"null")
        name = (message["key"], message["id"])
        offset = int(dict(record.headers)["command"] or b"-1")
        answered[record.partition, offset] += 1
        if replies.setdefault(name, record.value) != record.value:
            report.tell(f"{name}: answered {replies[name]!r}, then {record.value!r}")
        model = expected.answers.get(name)
        if model is None:
            report.tell(f"{name}: answered, and never sent")
        elif (message["outcome"], message["version"]) != model:
            report.tell(
                f"{name}: answered {message['outcome']} at version {message['version']}, "
                f"the model says {model[0]} at {model[1]}"
            )
    for record in log.commands:
        count = answered.pop((record.partition, record.offset), 0)
        if count != 1:
            what = "was never answered" if count == 0 else f"was answered {count} times"
            report.tell(f"command at {record.partition}@{record.offset} {what}")
    for (partition, offset), _count in answered.items():
        report.tell(f"an answer to {partition}@{offset}, where no command is")


def _check_history(expected: _Expected, history: Sequence[Sent], report: CommandReport) -> None:
    by_key: dict[str, list[Sent]] = defaultdict(list)
    for each in history:
        name = (each.key, each.command_id)
        if each.answered_ns is None:
            continue
        model = expected.answers.get(name)
        if model is None:
            report.tell(f"{name}: a client was answered, and the log has no such command")
        elif (each.outcome, each.version) != model:
            report.tell(
                f"{name}: a client got the answer {each.outcome} at version {each.version}, "
                f"the model says {model[0]} at {model[1]}"
            )
        else:
            by_key[each.key].append(each)
    for key, answered in by_key.items():
        _check_real_time(key, answered, expected, report)


def _check_real_time(
    key: str, answered: list[Sent], expected: _Expected, report: CommandReport
) -> None:
    """Check that a command sent after another's answer was received follows it in the log."""
    heard = sorted(answered, key=lambda each: each.answered_ns or 0)
    latest, at = (-1, -1), 0
    for each in sorted(answered, key=lambda one: one.sent_ns):
        while at < len(heard) and (heard[at].answered_ns or 0) < each.sent_ns:
            latest = max(latest, expected.places[key, heard[at].command_id])
            at += 1
        # A repeated command has the place of its first record.
        place = expected.places[key, each.command_id]
        first = min(one.sent_ns for one in answered if one.command_id == each.command_id)
        if place < latest and first == each.sent_ns:
            report.tell(
                f"{key}: {each.command_id} stands at {place}, before one that was answered "
                "before it was sent"
            )
