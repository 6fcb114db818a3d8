"""Test that a requeued run resumes from its checkpoint with the same losses."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.helpers.runs import run_distexp
from tests.helpers.slurm_cluster import Cluster
from tests.helpers.slurm_sweeps import all_ended, latest_jobs, read_lines, read_record, restart_now, status, wait_for

pytestmark = pytest.mark.slurm

LONG_TRAINING = (
    "model=gpt_tiny",
    "strategy=single",
    "cluster.device=cpu",
    "cluster.cpus_per_worker=1",
    "cluster.wait=false",
    "train.on_nan=stop,record",  # two equal trainings; only the first is interrupted
    "train.max_steps=800",
    "train.num_epochs=10000",
    "train.log_every=10",
    "train.checkpoint_every=25",
    "dataset.train_size=64",
    "dataset.eval_size=8",
)


@pytest.mark.slow
def test_a_requeued_run_resumes_with_the_same_losses(slurm: Cluster, tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    done = run_distexp("--multirun", "cluster=slurm", *LONG_TRAINING, f"hydra.sweep.dir={sweep}", env=slurm.env)
    assert done.returncode == 0, done.stdout + done.stderr
    job = latest_jobs(sweep)[0]
    metrics = sweep / "0/metrics.jsonl"

    wait_for(lambda: len(read_lines(metrics)) > 2)
    # Slurm sends the same signal before a time limit. scancel may retry and then report that the job is ending.
    subprocess.run(["scancel", "--signal=USR2", job], env=slurm.env, check=False)
    restart_now(slurm, job)
    assert read_record(sweep, 0).status == "preempted"
    assert "pending" in status(slurm, sweep) or "running" in status(slurm, sweep)

    wait_for(all_ended(slurm, sweep), 240)
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
