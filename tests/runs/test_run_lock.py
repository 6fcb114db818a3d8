"""The locks of runs and sweeps: two commands never write to the same directory at the same time."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from distexp.runs import attempts
from distexp.runs.attempts import run_lock
from distexp.runs.run_dir import LOCK, SWEEP_LOCK
from tests.helpers.records import record, write
from tests.helpers.runs import run_distexp

HOLD = """
import sys, time
from pathlib import Path
from distexp.runs import attempts as run_lock
with getattr(run_lock, sys.argv[2])(Path(sys.argv[1])) as owner:
    print(owner, flush=True)
    time.sleep(600)
"""
WAIT = """
import sys
from pathlib import Path
from distexp.runs.attempts import write_agent_process
write_agent_process(Path(sys.argv[1]))
print("started", flush=True)
sys.stdin.read()
"""
SMALL = ("strategy=single", "model=gpt_tiny", "dataset=synthetic", "cluster.device=cpu", "train.max_steps=1")


@contextmanager
def holder(directory: Path, lock: str) -> Iterator[subprocess.Popen[str]]:
    """Start a process that has a lock."""
    command = [sys.executable, "-c", HOLD, str(directory), lock]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "None\n"
        yield process
        process.kill()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_second_command_learns_which_process_has_the_lock(tmp_path: Path) -> None:
    with run_lock(tmp_path) as mine:
        assert mine is None
        with run_lock(tmp_path) as other:
            assert other is not None
            assert other.startswith(f"process {os.getpid()} on ")
    assert list(tmp_path.iterdir()) == [], "nothing is left"


def test_a_killed_process_frees_the_lock(tmp_path: Path) -> None:
    with holder(tmp_path, "run_lock") as process:
        with run_lock(tmp_path) as other:
            assert other is not None
            assert str(process.pid) in other
        process.kill()
        process.wait()
        with run_lock(tmp_path) as other:
            assert other is None


@pytest.mark.parametrize("command", ["rm", "status"])
def test_a_lock_that_is_a_link_changes_no_other_file(command: str, tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    write(sweep, record(0))
    (sweep / "command.json").write_text(json.dumps({"words": SMALL, "directory": str(tmp_path), "cells": 1}))
    (tmp_path / "thesis").write_text("mine")
    for folder in (sweep, sweep / "0"):
        (folder / SWEEP_LOCK).symlink_to(tmp_path / "thesis")
        (folder / LOCK).symlink_to(tmp_path / "thesis")
    done = run_distexp(command, *(["--yes"] if command == "rm" else []), str(sweep), cwd=tmp_path)
    assert (tmp_path / "thesis").read_text() == "mine"
    if command == "rm":
        assert f"{sweep / SWEEP_LOCK} is a link to another place" in done.stderr
        assert done.returncode == 2


@pytest.mark.parametrize("command", ["start", "resume"])
def test_a_second_command_for_a_sweep_is_refused(command: str, tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    write(sweep, record(0))
    (sweep / "command.json").write_text(json.dumps({"words": SMALL, "directory": str(tmp_path), "cells": 1}))
    arguments = {"start": (f"hydra.sweep.dir={sweep}", *SMALL), "resume": ("resume", str(sweep))}[command]
    with holder(sweep, "sweep_lock") as process:
        before = contents(sweep)
        done = run_distexp(*arguments, cwd=tmp_path)
        assert contents(sweep) == before, "nothing is written"
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"distexp: process {process.pid} on {socket.gethostname()} runs the sweep in {sweep}: follow it with 'distexp "
        f"status {sweep} --watch', end it with 'distexp cancel {sweep}', or choose another directory with "
        "hydra.sweep.dir=DIR\n"
    )


def test_the_agent_of_a_killed_launcher_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-c", WAIT, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdin is not None
        assert agent.stdout is not None
        assert agent.stdout.readline() == "started\n"
        monkeypatch.setattr(attempts, "AGENT_TIMEOUT_S", 0.0)
        assert attempts.wait_for_agent(tmp_path) == f"process {agent.pid} on {socket.gethostname()}"
        monkeypatch.undo()
        agent.stdin.close()
        assert attempts.wait_for_agent(tmp_path) is None
