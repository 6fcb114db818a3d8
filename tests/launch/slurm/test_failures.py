"""Tests of lost nodes, failing runs and closed shells."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from distexp.checkpoints.folder import list_checkpoints, step_of
from tests.helpers.processes import have_ended
from tests.helpers.slurm_cluster import Cluster, running_cluster
from tests.helpers.slurm_sweeps import (
    SLOW,
    STEPS_BEFORE_THE_GATE,
    all_ended,
    assert_all_steps,
    gated,
    hosts,
    latest_jobs,
    logged_steps,
    read_lines,
    read_record,
    restart_now,
    status,
    submit,
    user_environment,
    wait_for,
)

pytestmark = pytest.mark.slurm


@pytest.mark.slow
def test_a_failing_run_does_not_affect_the_others(slurm: Cluster, tmp_path: Path) -> None:
    """One run crashes, one exceeds its memory limit, some request too much."""
    sweep = tmp_path / "sweep"
    kinds = "dataset._target_=failing_runs.slow,failing_runs.fails,failing_runs.eats_until_killed"
    overrides = (kinds, "+dataset.options.at=12", "cluster.memory_gb=2,99", "train.max_steps=40")
    submit(slurm, sweep, *overrides)
    wait_for(all_ended(slurm, sweep))
    found = {number: read_record(sweep, number) for number in range(6)}
    assert {number: record.status for number, record in found.items()} == {
        0: "completed",
        1: "invalid",
        2: "failed",
        3: "invalid",
        4: "oom_host",
        5: "invalid",
    }
    assert_all_steps(sweep, 0, 40)
    crash, out_of_memory, refusal = found[2].error, found[4].error, found[1].error
    assert crash is not None
    assert "this sample is broken" in crash.message
    assert out_of_memory is not None
    assert "exceeded its memory limit" in out_of_memory.message
    assert found[4].memory["cpu"], "measurements up to the kill are kept"
    assert refusal is not None
    assert refusal.type == "SubmissionRefused"
    states = [slurm.wait_accounted(job, "State") for job in latest_jobs(sweep)]  # refused runs have no job
    assert states == ["COMPLETED", "FAILED", "FAILED"]


@pytest.mark.slow
def test_a_job_survives_a_closed_shell_and_a_restarted_controller(slurm: Cluster, tmp_path: Path) -> None:
    sweep, gate = tmp_path / "sweep", tmp_path / "gate"
    arguments = ("cluster=slurm", *SLOW, *gated(gate), "train.max_steps=70", f"hydra.sweep.dir={sweep}")
    shell = subprocess.Popen(
        [sys.executable, "-m", "distexp", "--multirun", *arguments],
        env={**os.environ, **user_environment(slurm)},
        start_new_session=True,
    )
    wait_for(lambda: logged_steps(sweep) > 2)
    os.killpg(shell.pid, signal.SIGKILL)
    shell.wait()
    slurm.stop_controller()
    try:
        assert "unknown" in status(slurm, sweep), "the state is unknown while the controller is down"
        gate.touch()
        wait_for(lambda: logged_steps(sweep) > STEPS_BEFORE_THE_GATE + 10)
    finally:
        slurm.start_controller()
    wait_for(all_ended(slurm, sweep))
    assert "1 completed" in status(slurm, sweep)
    assert_all_steps(sweep, 0, 70)
    assert len(read_record(sweep, 0).run.attempts) == 1
    assert slurm.wait_accounted(latest_jobs(sweep)[0], "State") == "COMPLETED"


@pytest.mark.slow
def test_a_run_resumes_after_two_lost_nodes_with_the_same_losses(slurm: Cluster, tmp_path: Path) -> None:
    """An administrator sets a node down, then the head node crashes.

    A second run with the same training is not interrupted. The first one waits in each attempt until it is.
    """
    sweep, gate = tmp_path / "sweep", tmp_path / "gate"
    two = ("cluster.nodes=2", "cluster.workers_per_node=1", "cluster.exclusive=true", "strategy=fsdp")
    submit(
        slurm,
        sweep,
        *two,
        "model.dropout=0.1",
        "train.max_steps=120",
        "train.checkpoint_every=20",
        *gated(gate, Path(os.devnull), steps=45),
    )
    job, lost = latest_jobs(sweep)[0], []
    try:
        wait_for(lambda: logged_steps(sweep) > 30)
        lost.append(hosts(sweep)[1])
        slurm.command("scontrol", "update", f"nodename={lost[0]}", "state=down", "reason=test")
        restart_now(slurm, job)
        # The second attempt resumes from step 20 or 40, and waits 45 steps later.
        wait_for(lambda: any((step_of(path) or 0) >= 60 for path in list_checkpoints(sweep / "0")))
        lost.append(hosts(sweep)[0])
        slurm.crash_node(lost[1])
        gate.touch()
        restart_now(slurm, job)
        wait_for(all_ended(slurm, sweep))
    finally:
        for node in lost:
            slurm.restore_node(node)
    interrupted, uninterrupted = read_record(sweep, 0), read_record(sweep, 1)
    assert (interrupted.status, uninterrupted.status) == ("completed", "completed")
    attempts = interrupted.run.attempts
    assert [attempt["job_id"] for attempt in attempts] == [job] * 3
    assert [attempt["reason"] for attempt in attempts] == ["killed", "ended without a record", "completed"]
    first, second, third = (attempt["resumed_from_step"] for attempt in attempts)
    assert first is None
    assert 20 <= second < third < 120
    assert lost[0] not in attempts[1]["hosts"]
    assert not set(lost) & set(attempts[2]["hosts"])
    assert_all_steps(sweep, 0, 120)
    for line, other in zip(read_lines(sweep / "0/metrics.jsonl"), read_lines(sweep / "1/metrics.jsonl"), strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-6), line["step"]
    assert interrupted.metrics.eval_loss == pytest.approx(uninterrupted.metrics.eval_loss, rel=1e-6)


@pytest.mark.release
@pytest.mark.usefixtures("slurm")  # fails with the reason if no cluster can be started
def test_a_disconnected_node_stops_when_a_new_attempt_has_started(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Both attempts would otherwise write into the same directory.

    The test breaks a node for good, so it starts a separate cluster.
    """
    sweep, gate = tmp_path / "sweep", tmp_path / "gate"
    with running_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        submit(cluster, sweep, *gated(gate), "train.max_steps=150", "train.checkpoint_every=20")
        wait_for(lambda: logged_steps(sweep) > 30)
        (node,) = hosts(sweep)
        inside = cluster.processes(node)
        workers = [process for process in inside if "distexp.worker" in " ".join(process.info["cmdline"] or [])]
        assert workers
        cluster.disconnect_node(node)
        restart_now(cluster, latest_jobs(sweep)[0])
        wait_for(lambda: hosts(sweep) != [node])
        wait_for(lambda: have_ended(workers))
        assert read_lines(sweep / "0/attempts/0/metrics.jsonl")[-1]["step"] < 150, "the first attempt did not complete"
        assert not (sweep / "0/record.json").exists(), "the run is still active"
        gate.touch()
        wait_for(all_ended(cluster, sweep))
    assert_all_steps(sweep, 0, 150)
    attempts = read_record(sweep, 0).run.attempts
    assert [attempt["reason"] for attempt in attempts] == ["ended without a record", "completed"]
    assert attempts[1]["resumed_from_step"] >= 20
