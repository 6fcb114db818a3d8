"""Runs that die or are asked to stop, and resume in their directory: real commands and signals."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distexp.checkpoints import folder as disk
from distexp.config import ConfigError
from distexp.resolve.run_id import run_id
from distexp.runs.record import RunRecord
from distexp.runs.run_dir import STOP_REQUEST
from distexp.system.files import read_entries
from tests.helpers.runs import HELPERS, REPOSITORY, TIMEOUT_S, make_spec, resolve_cell, run_distexp, run_module

ENV = {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(HELPERS)])}
QUICK = (
    "model=gpt_tiny",
    "model.dropout=0.1",
    "dataset.train_size=40",
    "dataset.eval_size=8",
    "train.micro_batch_size=4",
    "train.log_every=1",
    "cluster.device=cpu",
    "trusted_packages=[failing_runs]",
    "dataset.keys=[train_size,eval_size,max_length,padding,num_workers,options,answer_tokens]",
)


def run_again(run_dir: Path, workers: int) -> str:
    """Run a run directory again with torchrun; return the output of rank 0."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
    command += ["-m", "distexp.worker", str(run_dir)]
    env = {**os.environ, **ENV, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    output = (run_dir / "logs" / "node0" / "rank0.log").read_text()
    assert done.returncode == 0, output + done.stderr
    return output


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def attempts(record: RunRecord) -> list[tuple[int | None, str]]:
    return [(attempt["resumed_from_step"], attempt["reason"]) for attempt in record.run.attempts]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_a_killed_run_resumes_from_its_newest_valid_checkpoint(tmp_path: Path) -> None:
    """The worker kills itself at its 29th sample, in step 8. After step 4 it has fewer samples left."""
    overrides = (
        *QUICK,
        "strategy=single",
        "train.max_steps=10",
        "train.checkpoint_every=2",
        f"hydra.run.dir={tmp_path}/a",
    )
    killed = "dataset._target_=failing_runs.killed", "+dataset.options.rank=0"
    done = run_distexp(*overrides, *killed, "+dataset.options.at=29", cwd=tmp_path, env=ENV)
    assert done.returncode == 1
    run_dir = tmp_path / "a"
    record = RunRecord.read(run_dir / "record.json")
    assert record.status == "killed"
    assert attempts(record) == [(None, "killed")]
    assert lines(run_dir)[-1]["step"] == 7
    assert [disk.step_of(path) for path in disk.list_checkpoints(run_dir)] == [6, 4], "the newest two are kept"

    (rank_file,) = disk.checkpoint_dir(run_dir, 6).glob("rank-*.pt")
    rank_file.write_bytes(rank_file.read_bytes()[:-1])
    torn = disk.tmp_dir(run_dir, 8)
    torn.mkdir()
    (torn / "rank-00000.pt").write_bytes(b"half a file")
    output = run_again(run_dir, workers=1)
    assert f"skipping checkpoint {disk.checkpoint_dir(run_dir, 6)}: rank-00000.pt has " in output
    assert "resuming from step 4" in output
    assert not torn.exists()
    record = RunRecord.read(run_dir / "record.json")
    assert record.status == "completed"
    assert attempts(record) == [(None, "killed"), (4, "completed")]

    whole = tmp_path / "whole"
    whole.mkdir()
    spec = json.loads((run_dir / "spec.json").read_text())
    spec["config"]["dataset"]["options"]["at"] = 1000
    (whole / "spec.json").write_text(json.dumps(spec))
    run_again(whole, workers=1)
    expected = [line["loss"] for line in lines(whole)]
    assert len(expected) == 10
    assert [line["loss"] for line in lines(run_dir)] == pytest.approx(expected, rel=1e-6)
    theirs = RunRecord.read(whole / "record.json").metrics
    assert record.metrics.eval_losses == pytest.approx(theirs.eval_losses, rel=1e-6)
    assert record.metrics.train_loss == pytest.approx(theirs.train_loss, rel=1e-6)


@pytest.mark.slow
def test_a_signal_to_the_command_stops_the_run_after_a_checkpoint(tmp_path: Path) -> None:
    """The workers wait in step 4 until the request to stop is written. The other steps take 100 ms each."""
    run_dir, until = tmp_path / "a", tmp_path / "until"
    overrides = (
        *QUICK,
        "strategy=ddp",
        "train.num_epochs=8",
        "dataset._target_=failing_runs.held",
        f"+dataset.options.until={until}",
        f"hydra.run.dir={run_dir}",
    )
    pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    command = subprocess.Popen(
        [sys.executable, "-m", "distexp", *overrides], cwd=tmp_path, env={**os.environ, **ENV}, **pipes
    )
    try:
        wait_for(lambda: len(read_entries(run_dir / "metrics.jsonl")) >= 2)
        shown = run_module("distexp.status", str(run_dir)).stdout
        assert re.search(r"0 +running +\w+ step \d+/40, loss", shown), shown
        command.send_signal(signal.SIGUSR1)
        wait_for((run_dir / STOP_REQUEST).exists)
        until.touch()
        assert command.wait(TIMEOUT_S) == 128 + signal.SIGUSR1
        assert command.stderr is not None
        assert command.stderr.read() == "distexp: stopped by SIGUSR1; no further run is started\n"
        watched = run_module("distexp.status", str(run_dir), "--watch")
        assert re.search(r"0 +preempted +Preempted in phase \w+: stopped after step", watched.stdout), watched.stdout
    finally:
        if command.poll() is None:
            command.terminate()
            command.wait(TIMEOUT_S)
    record = RunRecord.read(run_dir / "record.json")
    assert record.status == "preempted"
    stopped_at = lines(run_dir)[-1]["step"]
    assert 2 <= stopped_at < 40
    assert record.error is not None
    assert f"stopped after step {stopped_at} of 40 (SIGUSR1)" in record.error.message
    assert record.built is not None
    assert [disk.step_of(path) for path in disk.list_checkpoints(run_dir)] == [stopped_at]
    before = lines(run_dir)

    output = run_again(run_dir, workers=2)
    assert f"resuming from step {stopped_at}" in output
    record = RunRecord.read(run_dir / "record.json")
    assert record.status == "completed"
    assert record.error is None
    assert attempts(record) == [(None, "preempted"), (stopped_at, "completed")]
    assert [line["step"] for line in lines(run_dir)] == list(range(1, 41))
    assert lines(run_dir)[:stopped_at] == before
    assert len(record.metrics.eval_losses) == 8


@pytest.mark.parametrize("every", ["0", "-3", "often"])
def test_invalid_checkpoint_intervals_are_rejected(every: str) -> None:
    with pytest.raises(ConfigError, match=r"must be (at least 1|a number \(at least 1\)) or epoch"):
        resolve_cell(f"train.checkpoint_every={every}")


def test_a_folder_without_checkpoints_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="contains no checkpoint"):
        resolve_cell(f"train.resume={tmp_path}")


def test_the_error_suggests_existing_checkpoints(tmp_path: Path) -> None:
    for step in (4, 12):
        disk.checkpoint_dir(tmp_path / "0", step).mkdir(parents=True)
    run, folder = tmp_path / "0", tmp_path / "0" / "checkpoints"
    newest_first = [folder / "step-00000012", folder / "step-00000004"]
    assert disk.candidates(run) == disk.candidates(folder) == newest_first
    for wrong, suggestion in (
        (folder / "step-12", f"use {newest_first[0]}, {newest_first[1]}"),
        (tmp_path, f"use {run}"),
    ):
        with pytest.raises(ConfigError, match=re.escape(f"train.resume={wrong} contains no checkpoint: {suggestion}")):
            resolve_cell(f"train.resume={wrong}")


def test_the_checkpoint_of_train_resume_is_part_of_the_run_id(tmp_path: Path) -> None:
    plain = make_spec().run.id
    assert run_id(resolve_cell("train.checkpoint_every=epoch")) == plain
    source = disk.checkpoint_dir(tmp_path / "source", 4)
    source.mkdir(parents=True)
    meta = disk.CheckpointMeta("0", 4, 2, 8, 1000, "torch", 2)
    disk.write_manifest(source, meta, {"file": (1, 2)}, {})
    resumed = make_spec(f"train.resume={tmp_path}/source").run.id
    assert resumed != plain
    shutil.copytree(tmp_path / "source", tmp_path / "copy")
    assert make_spec(f"train.resume={tmp_path}/copy").run.id == resumed
    disk.write_manifest(disk.checkpoint_dir(tmp_path / "copy", 4), meta, {"file": (1, 3)}, {})
    shutil.move(tmp_path / "copy", tmp_path / "other")
    assert make_spec(f"train.resume={tmp_path}/other").run.id != resumed


def test_a_checkpoint_that_was_moved_and_linked_is_removed_as_a_link(tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    (moved / "engine").mkdir(parents=True)
    (tmp_path / "checkpoints").mkdir()
    for link in (disk.checkpoint_dir(tmp_path, 1), disk.checkpoint_dir(tmp_path, 2), disk.tmp_dir(tmp_path, 9)):
        link.symlink_to(moved)
    disk.remove_unfinished(tmp_path)
    for step in (2, 3):  # The first replaces a link, the second removes one.
        disk.tmp_dir(tmp_path, step).mkdir()
        disk.publish(tmp_path, step)
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == ["step-00000002", "step-00000003"]
    assert (moved / "engine").is_dir()
