"""A run that is told to end is started again by Slurm, goes on from its checkpoint, and is the same training."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.runs import run_distexp
from tests.helpers.slurm_cluster import Cluster
from tests.launch.slurm.test_sweeps import jobs, record, settled, status, wait_for

pytestmark = pytest.mark.slurm

ENDLESS_ENOUGH = (
    "model=gpt_tiny",
    "strategy=single",
    "cluster.device=cpu",
    "cluster.cpus_per_worker=1",
    "cluster.wait=false",
    "train.on_nan=stop,record",  # two runs of one training; the second is left alone
    "train.max_steps=800",
    "train.num_epochs=10000",
    "train.log_every=10",
    "train.checkpoint_every=25",
    "dataset.train_size=64",
    "dataset.eval_size=8",
)


@pytest.mark.slow
def test_a_run_that_had_to_end_goes_on_and_is_the_same_training(slurm: Cluster, tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    done = run_distexp("--multirun", "cluster=slurm", *ENDLESS_ENOUGH, f"hydra.sweep.dir={sweep}", env=slurm.env)
    assert done.returncode == 0, done.stdout + done.stderr
    job = jobs(sweep)[0]
    metrics = sweep / "0/metrics.jsonl"

    wait_for(lambda: len(lines(metrics)) > 2)
    # As Slurm does before a time limit; scancel may try a second time, and complain that the job is ending.
    subprocess.run(["scancel", "--signal=USR2", job], env=slurm.env, check=False)
    start_at_once(slurm, job)
    assert record(sweep, 0).status == "preempted"
    assert "pending" in status(slurm, sweep) or "running" in status(slurm, sweep)

    wait_for(settled(slurm, sweep), 240)
    went_on, whole = record(sweep, 0), record(sweep, 1)
    assert (went_on.status, whole.status) == ("completed", "completed")
    assert [attempt["job_id"] for attempt in went_on.run.attempts] == [job] * 2
    first, second = went_on.run.attempts
    assert (first["resumed_from_step"], first["reason"], second["reason"]) == (None, "preempted", "completed")
    assert 0 < second["resumed_from_step"] < 800
    ours, theirs = lines(metrics), lines(sweep / "1/metrics.jsonl")
    assert [line["step"] for line in ours] == [line["step"] for line in theirs] == list(range(10, 801, 10))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-6), mine["step"]
    assert went_on.metrics.eval_loss == pytest.approx(whole.metrics.eval_loss, rel=1e-6)


def start_at_once(slurm: Cluster, job: str) -> None:
    """Waits until Slurm has put a job back into its queue, where it would leave it for two minutes."""
    waits = f"squeue -h -j {job} -o %T:%r".split()
    wait_for(lambda: slurm.command(*waits).strip() == "PENDING:BeginTime", 240)
    slurm.command("scontrol", "update", f"jobid={job}", "StartTime=now")


def lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
