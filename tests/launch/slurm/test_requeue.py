"""Tests of requeued runs: by hand, after a dead agent, at a time limit and for a preemption."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from distexp.runs.run_dir import STOP_REQUEST
from tests.helpers.runs import run_distexp
from tests.helpers.slurm_cluster import Cluster
from tests.helpers.slurm_sweeps import (
    all_ended,
    assert_all_steps,
    gated,
    hosts,
    latest_jobs,
    logged_steps,
    node_tasks,
    read_lines,
    read_record,
    restart_now,
    start_now,
    status,
    submit,
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
    "train.max_steps=400",
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
    assert 0 < second["resumed_from_step"] < 400
    lines, expected = read_lines(metrics), read_lines(sweep / "1/metrics.jsonl")
    assert [line["step"] for line in lines] == [line["step"] for line in expected] == list(range(10, 401, 10))
    for line, other in zip(lines, expected, strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-6), line["step"]
    assert resumed.metrics.eval_loss == pytest.approx(uninterrupted.metrics.eval_loss, rel=1e-6)


@pytest.mark.release
def test_the_head_requeues_the_job_if_an_agent_dies(slurm: Cluster, tmp_path: Path) -> None:
    """The head may notice a lost node before Slurm does."""
    sweep, gate = tmp_path / "sweep", tmp_path / "gate"
    two = ("cluster.nodes=2", "cluster.workers_per_node=1", "strategy=ddp")
    submit(slurm, sweep, *two, *gated(gate), "train.max_steps=100", "train.checkpoint_every=10")
    wait_for(lambda: logged_steps(sweep) > 20)
    (task,) = node_tasks(sweep, "1")
    task.kill()
    wait_requeued(slurm, latest_jobs(sweep)[0])
    gate.touch()
    # Slurm starts the job after ``REQUEUE_DELAY_S``. It may repeat its kill of the first attempt's step after one
    # minute, and a new attempt has a step with the same id.
    wait_for(all_ended(slurm, sweep))
    assert_all_steps(sweep, 0, 100)
    first, second = read_record(sweep, 0).run.attempts
    assert (first["reason"], second["reason"]) == ("killed", "completed")
    assert second["resumed_from_step"] >= 20


@pytest.mark.slow
def test_a_run_continues_after_the_time_limit_of_its_job(slurm: Cluster, tmp_path: Path) -> None:
    """Slurm sends its signal 30 to 60 s before the limit of two minutes. The run waits for it after 40 steps."""
    sweep, gate = tmp_path / "sweep", tmp_path / "gate"
    limits = ("cluster.timeout_min=2", "cluster.signal_delay_s=30")
    submit(slurm, sweep, *gated(gate), "train.max_steps=150", *limits)
    job = latest_jobs(sweep)[0]
    restarts = 0
    deadline = time.monotonic() + 2000
    while "completed" not in status(slurm, sweep):
        assert time.monotonic() < deadline
        if (sweep / "0" / STOP_REQUEST).exists():
            gate.touch()
        if slurm.restarts(job) > restarts:  # a pending job may not have started at all
            restarts += 1
            assert "(time_limit): the run can be resumed from the checkpoint" in str(read_record(sweep, 0).error)
            restart_now(slurm, job)
        time.sleep(1)
    attempts = read_record(sweep, 0).run.attempts
    assert len(attempts) == restarts + 1 > 1
    assert {attempt["reason"] for attempt in attempts[:-1]} == {"preempted"}
    assert_all_steps(sweep, 0, 150)


@pytest.mark.slow
def test_a_preempted_run_resumes(slurm: Cluster, tmp_path: Path) -> None:
    sweep, gate = tmp_path / "sweep", tmp_path / "gate"
    submit(slurm, sweep, *gated(gate), "train.max_steps=150", "cluster.partition=low")
    wait_for(lambda: logged_steps(sweep) > 20)
    (node,) = hosts(sweep)
    urgent = f"sbatch --parsable -p high -w {node} --exclusive -o /dev/null --wrap true".split()
    interrupting = slurm.command(*urgent).strip()
    wait_for((sweep / "0" / STOP_REQUEST).exists)
    gate.touch()
    assert slurm.wait_accounted(interrupting, "State") == "COMPLETED"
    assert "(preemption): the run can be resumed from the checkpoint" in str(read_record(sweep, 0).error)
    restart_now(slurm, latest_jobs(sweep)[0])
    wait_for(all_ended(slurm, sweep))
    first, second = read_record(sweep, 0).run.attempts
    assert (first["reason"], second["reason"]) == ("preempted", "completed")
    assert second["resumed_from_step"] > 20
    assert_all_steps(sweep, 0, 150)
