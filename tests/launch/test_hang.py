"""The cause of a hang: the agent looks at its workers, and the record names the rank that the others wait for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import cast

import pytest

from distexp.launch import agent
from distexp.launch.agent import watch
from distexp.launch.failures import HANG_CODE, classify_failure
from distexp.runs.events import Events, ProgressWriter
from distexp.runs.record import RunSpec
from distexp.runs.record_sections import RunError
from distexp.runs.run_dir import RANK_LOG, STOPPED_RANKS, log_dir
from distexp.system.processes import WatchedProcess
from tests.helpers.runs import REPOSITORY, make_spec

WORKERS = """
import os, signal, sys, time
from pathlib import Path
from distexp.runs.events import ProgressWriter
run_dir, stopped_rank = Path(sys.argv[1]), int(sys.argv[2])
reader, writer = os.pipe()
for rank in range(2):
    if (pid := os.fork()) == 0:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        ProgressWriter(run_dir, 0, rank).advance("train", 7)
        os.write(writer, b"1")
        if rank == stopped_rank:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(600)
    os.read(reader, 1)
if stopped_rank == 1:
    os.waitpid(pid, os.WUNTRACED)
print("stopped", flush=True)
if stopped_rank == -1:
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(600)
"""
"""A parent process with two workers that have passed the same points. Rank 1 is stopped, or the parent as rank -1."""


@pytest.fixture
def spec() -> RunSpec:
    """Return the spec of a run of two workers that hangs at once."""
    return make_spec("cluster.device=cpu", "cluster.workers_per_node=2", "cluster.hang_timeout_min=0.01")


def pass_points(run_dir: Path, rank: int, batches: int) -> None:
    """Write the progress of a rank that has read some batches of the third step."""
    log_dir(run_dir, rank).mkdir(parents=True)
    events = Events(run_dir, enabled=rank == 0, progress=ProgressWriter(run_dir, node=rank, rank=rank))
    events.advance(2)
    events.set_phase("train")
    for _ in range(batches):
        events.advance()


def cause(run_dir: Path, spec: RunSpec) -> RunError:
    """Return the error of a run whose agents have found a hang."""
    status, error = classify_failure(run_dir, {0: HANG_CODE}, spec)
    assert (status, error.type) == ("failed", "Hang")
    return error


def test_the_rank_that_did_not_read_its_batch_is_named(spec: RunSpec, tmp_path: Path) -> None:
    for rank, batches in enumerate((4, 4, 3)):
        pass_points(tmp_path, rank, batches)
    error = cause(tmp_path, spec)
    assert (error.rank, error.phase) == (2, "train")
    assert error.message.startswith(
        "rank 2 in phase train after step 2 is behind, and the other ranks wait: no step or"
    )
    assert "cluster.hang_timeout_min=0.01" in error.message
    assert "has an error" not in error.message
    lines = ["Traceback (most recent call last):", '  File "queues.py", line 244, in _feed', "    x = dumps(x)"]
    lines += [
        "AttributeError: Can't pickle local object 'f.<locals>.E'",
        "Current thread 0x01 (most recent call first):",
        "",
    ]
    RANK_LOG.path(tmp_path, 2, 2).write_text("\n".join(lines))  # of a data loader process that still runs
    message = cause(tmp_path, spec).message
    assert message.endswith(
        ". The log of rank 2 has an error: AttributeError: Can't pickle local object 'f.<locals>.E'"
    )


def test_no_rank_is_named_if_all_wait_at_the_same_point(spec: RunSpec, tmp_path: Path) -> None:
    for rank in range(2):
        pass_points(tmp_path, rank, batches=1)
    error = cause(tmp_path, spec)
    assert (error.rank, error.phase) == (None, "train")
    assert error.message.startswith("all ranks wait at the same point")


IN_CODE, IN_TORCH = ("/home/ada/net/model.py", 35, "forward"), ("/lib/torch/autograd/graph.py", 979, "run_backward")


@pytest.mark.parametrize(
    ("frames", "rank", "message"),
    [
        ([IN_TORCH, IN_CODE], 1, "rank 1 is at net/model.py:35 in forward, and the other ranks wait: no step"),
        (
            [("/distexp/measure/slow_rank_watch.py", 132, "measure"), IN_CODE],
            1,
            "rank 1 is at net/model.py:35 in forward",
        ),
        ([IN_CODE], 0, "rank 0 is at net/model.py:35 in forward: no step"),
        ([IN_TORCH, IN_TORCH], None, "all ranks wait in collective operations, and some may call other ones"),
        ([IN_CODE, IN_CODE], None, "all ranks wait at the same point"),
        ([IN_TORCH, None], None, "all ranks wait at the same point"),
    ],
)
def test_the_only_rank_that_does_not_wait_in_torch_is_named(
    frames: list[tuple[str, int, str] | None], rank: int | None, message: str, spec: RunSpec, tmp_path: Path
) -> None:
    for number, frame in enumerate(frames):
        pass_points(tmp_path, number, batches=1)
        if frame is not None:
            log = RANK_LOG.path(tmp_path, number, number)
            lines = [
                f'  File "{file}", line {line} in {name}' for file, line, name in (frame, ("/x/torch/a.py", 1, "f"))
            ]
            log.write_text("\n".join(["a line", "Current thread 0x01 (most recent call first):", *lines, ""]))
    error = cause(tmp_path, spec)
    assert error.rank == rank
    assert error.message.startswith(message)


def test_a_rank_that_waits_for_its_stopped_parent_is_not_called_stopped(spec: RunSpec, tmp_path: Path) -> None:
    for rank in range(2):
        pass_points(tmp_path, rank, batches=2 - rank)
    STOPPED_RANKS.path(tmp_path, 0).write_text("[-1]")
    error = cause(tmp_path, spec)
    assert error.rank is None
    assert error.message.startswith("the parent process of the workers is stopped by a signal (SIGSTOP)")


def test_a_hang_before_the_first_worker_is_in_phase_setup(spec: RunSpec, tmp_path: Path) -> None:
    error = cause(tmp_path, spec)
    assert (error.rank, error.phase) == (None, "setup")
    assert error.message.startswith("no worker has started")


@pytest.mark.parametrize(
    ("rank", "message"),
    [(1, "rank 1 in phase train after step 7 is stopped"), (-1, "the parent process of the workers is stopped")],
)
def test_a_stopped_process_is_named(rank: int, message: str, spec: RunSpec, tmp_path: Path) -> None:
    log_dir(tmp_path, 0).mkdir(parents=True)
    command = [sys.executable, "-c", WORKERS, str(tmp_path), str(rank)]
    group = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert group.stdout is not None
        assert group.stdout.readline() == b"stopped\n"
        if rank == -1:
            os.waitpid(group.pid, os.WUNTRACED)
        assert watch(group, spec, tmp_path, 0, started=time.time() - 60) == HANG_CODE
    finally:
        os.killpg(group.pid, signal.SIGKILL)
        group.wait()
    error = cause(tmp_path, spec)
    assert (error.rank, error.phase) == (1 if rank == 1 else None, "train")
    assert error.message.startswith(f"{message} by a signal (SIGSTOP)")


def test_a_run_that_was_suspended_has_no_hang(spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Group:
        """Workers that are suspended with their agent, and end after they have continued."""

        pid, seconds = os.getpid(), [0.0, 0.8, 0.0]

        def poll(self) -> int | None:
            if not self.seconds:
                return 0
            time.sleep(self.seconds.pop(0))
            return None

    monkeypatch.setattr(agent, "SUSPENDED_S", 0.15)  # so short that the other checks together cannot reach the limit
    assert watch(cast(WatchedProcess, Group()), spec, tmp_path, 0, time.time()) == 0
