"""State and end of local runs whose launcher is a known process, with fabricated run directories."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from distexp import cancel, status
from distexp.runs import attempts, run_state
from distexp.runs.attempts import read_agent_process, read_launcher_process, register_manual_attempt
from distexp.runs.record_sections import RunInfo
from distexp.runs.run_dir import COMMAND, EVENTS, LAUNCHER_PROCESS, LOGS
from distexp.runs.run_state import RunState
from distexp.status import read_folder

LAUNCHER = """
import sys
from contextlib import ExitStack
from pathlib import Path
from distexp.runs.attempts import run_lock, write_agent_process, write_launcher_process
kind = sys.argv[1]
with ExitStack() as stack:
    for directory in map(Path, sys.argv[2:]):
        if kind == "launcher":
            stack.enter_context(run_lock(directory))
        (write_agent_process if kind == "agent" else write_launcher_process)(directory)
    print(flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take files as new for ten minutes, because a busy machine may stop a test for seconds."""
    monkeypatch.setattr(run_state, "MAX_IDLE_S", 600.0)


def make_run(sweep: Path, number: int) -> Path:
    """Write the directory of a run that has not ended, in that of a sweep."""
    directory = sweep / str(number)
    directory.mkdir(parents=True)
    (sweep / COMMAND).write_text("{}")
    run = {"number": number, "id": f"id{number}", "overrides": [f"train.seed={number}"], "attempts": []}
    (directory / "spec.json").write_text(json.dumps({"run": run}))
    (directory / EVENTS).write_text(json.dumps({"unix_time_s": time.time(), "phase": "train"}) + "\n")
    return directory


def set_age(directory: Path, seconds: float) -> None:
    """Set the time at which all files of a run were written."""
    for path in directory.rglob("*"):
        os.utime(path, (time.time() - seconds,) * 2)


@contextmanager
def process_of(kind: str, *directories: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that is the launcher, the agent, or only the launcher by its file (``other``) of some runs."""
    command = [sys.executable, "-c", LAUNCHER, kind, *map(str, directories)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.communicate()


def states(sweep: Path) -> dict[int, RunState]:
    return {run.number: run for run in read_folder(sweep).runs}


def test_the_launcher_decides_whether_a_run_is_running(tmp_path: Path) -> None:
    run = make_run(tmp_path, 0)
    with process_of("launcher", run) as launcher:
        set_age(run, 3600)
        assert states(tmp_path)[0].state == "running", "although no file has changed for an hour"
        with process_of("agent", run):
            launcher.kill()
            launcher.wait()
            assert states(tmp_path)[0].state == "ending", "the agent still writes the record"
    set_age(run, 0)
    found = states(tmp_path)[0]
    assert (found.state, found.reason) == ("no record", f"its launcher (process {launcher.pid}) ended without a record")
    (run / "record.json").write_text("torn {")
    found = states(tmp_path)[0]
    assert found.state == "no record"
    assert found.reason.startswith(f"{run}/record.json is not a JSON file")


def test_a_stopped_process_of_a_running_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path, 0)
    with process_of("launcher", run), process_of("agent", run) as agent:
        agent.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, agent.pid, os.WSTOPPED)
        assert status.main([str(tmp_path)]) == 0
        hint = f"its agent (process {agent.pid}) is stopped by a signal: kill -CONT {agent.pid}"
        assert f"running  train, {hint}\n" in capsys.readouterr().out
        agent.send_signal(signal.SIGCONT)
        os.waitid(os.P_PID, agent.pid, os.WCONTINUED)
        assert states(tmp_path)[0].reason == ""


def test_another_process_with_the_same_id_is_not_the_launcher(tmp_path: Path) -> None:
    run = make_run(tmp_path, 0)
    with process_of("launcher", run):
        known = json.loads((run / LAUNCHER_PROCESS).read_text())
        (run / LAUNCHER_PROCESS).write_text(json.dumps({**known, "started": known["started"] - 1}))
        assert states(tmp_path)[0].state == "no record"


@pytest.mark.parametrize("content", [None, "torn {", '{"pid": 1}'])
def test_files_decide_without_a_launcher_on_this_machine(tmp_path: Path, content: str | None) -> None:
    run = make_run(tmp_path, 0)
    if content is not None:
        (run / LAUNCHER_PROCESS).write_text(content)
    assert states(tmp_path)[0].state == "running"
    set_age(run, run_state.MAX_IDLE_S + 60)
    assert states(tmp_path)[0].state == "no record"
    assert "last activity" in states(tmp_path)[0].reason


@pytest.mark.parametrize(
    ("file", "state"), [(None, "no record"), ("logs/node0/workers.log", "running"), ("memory/node0.csv", "running")]
)
def test_a_run_has_started_if_it_has_files_of_an_attempt(tmp_path: Path, file: str | None, state: str) -> None:
    run = make_run(tmp_path, 0)
    (run / EVENTS).unlink()
    if file is not None:
        (run / file).parent.mkdir(parents=True)
        (run / file).touch()
    found = states(tmp_path)[0]
    assert found.state == state
    assert found.reason == ("" if file else f"not started: distexp resume {tmp_path}")
    with attempts.sweep_lock(tmp_path):  # as a command that has not submitted the run yet
        assert states(tmp_path)[0].state == "running"


def test_a_run_started_by_hand_does_not_belong_to_an_earlier_launcher(tmp_path: Path) -> None:
    run = make_run(tmp_path, 0)
    with process_of("launcher", run):
        pass
    register_manual_attempt(RunInfo("id0", "name", 0, []), run)
    assert states(tmp_path)[0].state == "running"


def test_cancel_ends_the_launcher_of_a_local_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path, 0)
    with process_of("launcher", make_run(tmp_path, 1)) as launcher:
        launcher.send_signal(signal.SIGSTOP)  # as Ctrl-Z does
        assert cancel.main([str(tmp_path)]) == 1, "run 0 has no known launcher, but its files are new"
        assert launcher.wait() == -signal.SIGTERM
    shown = capsys.readouterr()
    assert shown.out == "1 run cancelled\n"
    assert "run 0 was started on an unknown machine" in shown.err
    assert {number: run.state for number, run in states(tmp_path).items()} == {0: "running", 1: "no record"}


def test_cancel_accepts_a_sweep_and_neither_a_run_of_it_nor_a_folder_above(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = tmp_path / "name" / "sweep"
    run = make_run(sweep, 0)
    with process_of("launcher", run) as launcher:
        assert cancel.main([str(tmp_path)]) == 2
        assert capsys.readouterr().err == (
            f"distexp: {tmp_path} contains no command.json: give the directory of a sweep, such as {sweep}\n"
        )
        assert cancel.main([str(run)]) == 2
        assert capsys.readouterr().err == f"distexp: {run} is not a sweep but is inside one: give {sweep}\n"
        assert launcher.poll() is None
        assert cancel.main([str(sweep)]) == 0
        assert launcher.wait() == -signal.SIGTERM
    (tmp_path / "empty").mkdir()
    assert cancel.main([str(tmp_path / "empty")]) == 2
    assert capsys.readouterr().err.endswith("give the directory of a sweep. 'distexp ls' lists the newest ones\n")


def test_cancel_ends_no_other_process_that_a_folder_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path, 0)
    with process_of("other", run) as process:
        assert json.loads((run / LAUNCHER_PROCESS).read_text())["pid"] == process.pid
        cancel.main([str(tmp_path)])
        assert process.poll() is None
    assert capsys.readouterr().out == "0 runs cancelled\n"


def test_cancel_names_the_machine_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path, 0)
    with process_of("launcher", run) as launcher:
        owner = read_launcher_process(run)
        assert owner is not None
        assert owner.pid == launcher.pid
        elsewhere = replace(owner, machine="other", host="node7")
        (run / LAUNCHER_PROCESS).write_text(json.dumps(asdict(elsewhere)))
        assert cancel.main([str(tmp_path)]) == 1
        assert launcher.poll() is None
    shown = capsys.readouterr()
    assert shown.out == "0 runs cancelled\n"
    assert f"run 0 was started on node7: cancel it there with distexp cancel {tmp_path}" in shown.err


def test_cancel_of_a_finished_sweep_ends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path, 0)
    set_age(run, 3600)
    assert cancel.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == "0 runs cancelled\n"


def test_the_agent_is_known_before_it_writes_a_log(tmp_path: Path) -> None:
    run = make_run(tmp_path, 0)
    assert not (run / LOGS).exists()
    with process_of("agent", run) as agent:
        found = read_agent_process(run)
        assert found is not None
        assert (found.pid, found.is_alive) == (agent.pid, True)
