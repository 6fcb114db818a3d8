"""Test that a requeued run resumes from its checkpoint with the same losses."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from distexp.runs.run_dir import STOP_REQUEST
from tests.helpers.runs import run_distexp
from tests.helpers.slurm_cluster import Cluster
from tests.helpers.slurm_sweeps import (
    all_ended,
    latest_jobs,
    read_lines,
    read_record,
    start_now,
    status,
    user_environment,
    wait_for,
    wait_requeued,
)

pytestmark = pytest.mark.slurm

LONG_TRAINING = (
    "model=gpt_tiny",
    "strategy=single",
    "cluster.device=cpu",
    "cluster.cpus_per_worker=1",
    "cluster.wait=false",
    "train.max_steps=800",
    "train.num_epochs=10000",
    "train.log_every=10",
    "train.checkpoint_every=25",
    "train.micro_batch_size=4",
    "train.gradient_accumulation_steps=1",
    "dataset._target_=failing_runs.slow",
    "dataset.keys=[train_size,eval_size,max_length,padding,num_workers,options]",
    "trusted_packages=[failing_runs]",
    "dataset.train_size=64",
    "dataset.eval_size=8",
    "+dataset.options.delay=0.002",
    "+dataset.options.at=400",  # a rank waits after 100 steps until the gate exists
)


@pytest.mark.slow
def test_a_requeued_run_resumes_with_the_same_losses(slurm: Cluster, tmp_path: Path) -> None:
    """Two equal trainings; only the first is interrupted. It waits after step 100 until it was asked to stop."""
    sweep, gate = tmp_path / "sweep", tmp_path / "gate"
    gates = f"+dataset.options.gate={gate},{os.devnull}"
    arguments = ("--multirun", "cluster=slurm", *LONG_TRAINING, gates, f"hydra.sweep.dir={sweep}")
    done = run_distexp(*arguments, env=user_environment(slurm))
    assert done.returncode == 0, done.stdout + done.stderr
    job = latest_jobs(sweep)[0]
    metrics = sweep / "0/metrics.jsonl"

    wait_for(lambda: len(read_lines(metrics)) > 2)
    # Slurm sends the same signal before a time limit. scancel may retry and then report that the job is ending.
    subprocess.run(["scancel", "--signal=USR2", job], env=slurm.env, check=False)
    wait_for((sweep / "0" / STOP_REQUEST).exists)
    gate.touch()
    wait_requeued(slurm, job)
    assert read_record(sweep, 0).status == "preempted"
    assert "pending" in status(slurm, sweep)
    start_now(slurm, job)

    wait_for(all_ended(slurm, sweep))
    resumed, uninterrupted = read_record(sweep, 0), read_record(sweep, 1)
    assert (resumed.status, uninterrupted.status) == ("completed", "completed")
    assert [attempt["job_id"] for attempt in resumed.run.attempts] == [job] * 2
    first, second = resumed.run.attempts
    assert (first["resumed_from_step"], first["reason"], second["reason"]) == (None, "preempted", "completed")
    assert 0 < second["resumed_from_step"] < 800
    lines, expected = read_lines(metrics), read_lines(sweep / "1/metrics.jsonl")
    assert [line["step"] for line in lines] == [line["step"] for line in expected] == list(range(10, 801, 10))
    for line, other in zip(lines, expected, strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-6), line["step"]
    assert resumed.metrics.eval_loss == pytest.approx(uninterrupted.metrics.eval_loss, rel=1e-6)
