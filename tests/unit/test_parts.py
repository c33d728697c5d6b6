"""Parts of a role: each fails alone, is started again, and says why in the state file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import everstate.parts as parts_module
from everstate.errors import DataLoss, Fenced, SparkLost, Unavailable
from everstate.parts import (
    Journal,
    Part,
    PartRun,
    begins,
    note,
    read_states,
    run_parts,
    states_folder,
    waits,
    works,
)

QUICK = (0.01,)
JOURNAL = (
    "import sys; from pathlib import Path; from everstate.parts import *\n"
    "journal = Journal('pipeline', states_folder(Path(sys.argv[1])))\n"
    "print('written', flush=True); sys.stdin.read()"
)
"""A role in a process of its own, until its input ends."""


def journal_in(folder: Path) -> Journal:
    return Journal("pipeline", states_folder(folder))


def parts_of(folder: Path) -> dict[str, Part]:
    return {name: part for role in read_states(folder) for name, part in role.parts.items()}


def wait_for(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_part_that_fails_is_started_again_while_the_others_go_on(tmp_path: Path) -> None:
    stop, starts, steady = threading.Event(), [0], [0]

    def failing(stop: threading.Event) -> None:
        starts[0] += 1
        raise DataLoss("the log begins too late.", advice="Restore it.")

    def works(stop: threading.Event) -> None:
        steady[0] += 1
        stop.wait()

    parts: dict[str, PartRun] = {"failing": failing, "steady": works}
    running = threading.Thread(
        target=run_parts, args=(journal_in(tmp_path), parts, stop), kwargs={"retry_s": QUICK}
    )
    running.start()
    wait_for(lambda: starts[0] > 3)
    stop.set()
    running.join(30)
    assert steady[0] == 1


def test_a_failed_part_says_why_and_when_it_is_started_again(tmp_path: Path) -> None:
    stop, journal = threading.Event(), journal_in(tmp_path)

    def failing(stop: threading.Event) -> None:
        raise DataLoss("the log begins too late.", advice="Restore it.")

    running = threading.Thread(
        target=run_parts, args=(journal, {"archive": failing}, stop), kwargs={"retry_s": (60.0,)}
    )
    running.start()
    wait_for(lambda: parts_of(tmp_path).get("archive", Part("running", 0)).state == "waiting")
    found = parts_of(tmp_path)["archive"]
    assert (found.reason, found.advice) == ("the log begins too late.", "Restore it.")
    assert found.retry_at is not None
    assert found.retry_at > time.time()
    stop.set()
    running.join(30)
    assert read_states(tmp_path) == [], "a role that ends in order leaves no state"


def test_a_part_that_fails_again_and_again_always_says_why(tmp_path: Path) -> None:
    stop, journal, starts = threading.Event(), journal_in(tmp_path), [0]
    seen = []

    def failing(stop: threading.Event) -> None:
        starts[0] += 1
        if starts[0] > 1:
            seen.append(parts_of(tmp_path)["archive"])
        raise DataLoss("the log begins too late.")

    running = threading.Thread(
        target=run_parts, args=(journal, {"archive": failing}, stop), kwargs={"retry_s": QUICK}
    )
    running.start()
    wait_for(lambda: starts[0] > 3)
    stop.set()
    running.join(30)
    assert {(part.state, part.reason) for part in seen} == {("waiting", "the log begins too late.")}


@pytest.mark.parametrize("says_so", [True, False])
def test_a_part_that_was_started_again_runs_when_it_works_or_does_not_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says_so: bool
) -> None:
    monkeypatch.setattr(parts_module, "_RECOVERED_S", 0.1)
    monkeypatch.setattr(parts_module, "_BEAT_S", 3600 if says_so else 0.02)
    stop, journal, starts = threading.Event(), journal_in(tmp_path), [0]

    def fails_once(stop: threading.Event) -> None:
        starts[0] += 1
        if starts[0] == 1:
            raise DataLoss("the log begins too late.")
        assert parts_of(tmp_path)["archive"].state == "waiting"
        if says_so:
            works()
        stop.wait()

    running = threading.Thread(
        target=run_parts, args=(journal, {"archive": fails_once}, stop), kwargs={"retry_s": QUICK}
    )
    running.start()
    wait_for(
        lambda: starts[0] == 2 and parts_of(tmp_path)["archive"].state == "running",
    )
    stop.set()
    running.join(30)


def test_a_fatal_error_ends_every_part_and_is_raised(tmp_path: Path) -> None:
    begun, ended = threading.Event(), threading.Event()

    def lost(stop: threading.Event) -> None:
        begun.wait(30)
        raise SparkLost("the JVM is gone.")

    def works(stop: threading.Event) -> None:
        begun.set()
        stop.wait()
        ended.set()

    with pytest.raises(SparkLost):
        run_parts(
            journal_in(tmp_path),
            {"lost": lost, "works": works},
            threading.Event(),
            fatal=(SparkLost,),
        )
    assert ended.is_set()
    assert parts_of(tmp_path)["lost"].state == "stopped"


def test_a_fenced_part_is_not_started_again(tmp_path: Path) -> None:
    stop, starts = threading.Event(), [0]

    def fenced(stop: threading.Event) -> None:
        starts[0] += 1
        raise Fenced("another process cleans it.")

    def ends_later(stop: threading.Event) -> None:
        wait_for(lambda: parts_of(tmp_path).get("fenced", Part("running", 0)).state == "stopped")
        time.sleep(0.1)
        stop.set()

    run_parts(journal_in(tmp_path), {"fenced": fenced, "other": ends_later}, stop, retry_s=QUICK)
    assert starts[0] == 1


def test_a_role_whose_parts_are_all_fenced_ends(tmp_path: Path) -> None:
    def fenced(stop: threading.Event) -> None:
        raise Fenced("another process cleans it.")

    with pytest.raises(Fenced):
        run_parts(journal_in(tmp_path), {"a": fenced, "b": fenced}, threading.Event())


def test_what_is_no_state_file_is_left_out(tmp_path: Path) -> None:
    folder = states_folder(tmp_path)
    folder.mkdir()
    (folder / "broken.json").write_text("{")
    Journal("relay", folder).running("relay")
    assert [role.role for role in read_states(tmp_path)] == ["relay"]


def test_a_part_that_waits_by_itself_says_so_until_it_works(tmp_path: Path) -> None:
    stop, server = threading.Event(), threading.Event()

    def asks(stop: threading.Event) -> None:
        waits(Unavailable("Kafka does not answer.", advice="Start it."), 1.0)
        note("view board", Part("waiting", 0, "it failed at offset 3"))
        server.wait(30)
        works()
        stop.wait()

    running = threading.Thread(
        target=run_parts, args=(journal_in(tmp_path), {"keeper": asks}, stop)
    )
    running.start()
    wait_for(lambda: "view board" in parts_of(tmp_path))
    found = parts_of(tmp_path)["keeper"]
    assert (found.state, found.reason) == ("waiting", "Kafka does not answer.")
    assert parts_of(tmp_path)["view board"].reason == "it failed at offset 3"
    server.set()
    wait_for(lambda: parts_of(tmp_path)["keeper"].state == "running")
    stop.set()
    running.join(30)


def test_what_no_part_says_is_written_nowhere(tmp_path: Path) -> None:
    waits(Unavailable("Kafka does not answer."), 1.0)
    works()
    assert read_states(tmp_path) == []


def test_a_reason_that_stays_keeps_the_time_since_when(tmp_path: Path) -> None:
    journal = journal_in(tmp_path)
    journal.note("keeper", Part("waiting", 100.0, "no Kafka", retry_at=105.0))
    journal.note("keeper", Part("waiting", 105.0, "no Kafka", retry_at=110.0))
    assert parts_of(tmp_path)["keeper"] == Part("waiting", 100.0, "no Kafka", retry_at=110.0)


def killed_role(folder: Path, parts: dict[str, object]) -> int:
    """The state file of a process that is gone; its pid."""
    gone = subprocess.Popen((sys.executable, "-c", ""))
    gone.wait()
    told = {"role": "pipeline", "pid": gone.pid, "started": 1.0, "beat": 1.0, "parts": parts}
    states_folder(folder).mkdir(parents=True, exist_ok=True)
    (states_folder(folder) / f"pipeline-{gone.pid}.json").write_text(json.dumps(told))
    return gone.pid


def test_a_role_whose_process_is_gone_was_killed_or_has_said_why_it_ended(tmp_path: Path) -> None:
    killed_role(tmp_path, {"keeper": {"state": "running", "since": 1.0}})
    assert [role.health for role in read_states(tmp_path)] == ["killed"]
    (only,) = states_folder(tmp_path).iterdir()
    only.unlink()
    killed_role(tmp_path, {"keeper": {"state": "stopped", "since": 1.0, "reason": "fenced"}})
    assert [role.health for role in read_states(tmp_path)] == ["ended"]


def test_the_successor_of_a_killed_role_takes_its_place(tmp_path: Path) -> None:
    killed_role(tmp_path, {})
    journal = journal_in(tmp_path)
    assert [role.pid for role in read_states(tmp_path)] == [os.getpid()]
    assert len(list(states_folder(tmp_path).iterdir())) == 1
    journal.remove()
    assert read_states(tmp_path) == []


def test_a_step_of_the_clock_ends_no_role(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux computes the start of a process from the clock; a successor deletes killed states."""
    with subprocess.Popen(
        (sys.executable, "-c", JOURNAL, str(tmp_path)), text=True, stdin=-1, stdout=-1
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "written\n"
        started = psutil.Process.create_time
        monkeypatch.setattr(psutil.Process, "create_time", lambda process: started(process) + 90)
        assert [role.health for role in read_states(tmp_path)] == ["running"]
        journal_in(tmp_path)
        assert {role.pid for role in read_states(tmp_path)} == {os.getpid(), other.pid}
        other.communicate("")


def test_a_role_of_an_earlier_release_is_known_by_the_time_of_its_start(tmp_path: Path) -> None:
    journal_in(tmp_path)
    (path,) = states_folder(tmp_path).iterdir()
    told = json.loads(path.read_text())
    del told["mark"]
    path.write_text(json.dumps(told))
    assert [role.health for role in read_states(tmp_path)] == ["running"]
    path.write_text(json.dumps({**told, "started": 1.0}))
    assert [role.health for role in read_states(tmp_path)] == ["killed"]


def test_a_role_that_is_silent_does_not_answer(tmp_path: Path) -> None:
    journal = journal_in(tmp_path)
    assert journal.state.health == "running"
    path = states_folder(tmp_path) / f"pipeline-{os.getpid()}.json"
    told = json.loads(path.read_text())
    path.write_text(json.dumps({**told, "beat": told["beat"] - 60}))
    assert [role.health for role in read_states(tmp_path)] == ["not answering"]


def test_a_part_begins_more_parts_while_it_runs(tmp_path: Path) -> None:
    """Once for each name; they end with the role."""
    ran = list[str]()
    stop = threading.Event()

    def later(stopping: threading.Event) -> None:
        ran.append("later")
        stopping.wait()

    def first(stopping: threading.Event) -> None:
        for _ in range(3):
            begins("later", later)
        while not ran:
            time.sleep(0.001)
        stop.set()

    run_parts(journal_in(tmp_path), {"first": first}, stop)
    assert ran == ["later"]
    begins("nobody", later)  # in a thread that is no part
    assert ran == ["later"]
