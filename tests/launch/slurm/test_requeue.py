"""Tests of requeued runs: at a time limit, for a preemption and after a dead agent."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from distexp.runs.run_dir import STOP_REQUEST
from tests.helpers.slurm_cluster import Cluster
from tests.helpers.slurm_sweeps import (
    STEPS_BEFORE_THE_GATE,
    all_ended,
    assert_all_steps,
    gated,
    hosts,
    latest_jobs,
    logged_steps,
    node_tasks,
    read_lines,
    read_record,
    start_now,
    status,
    submit,
    wait_for,
    wait_requeued,
)

pytestmark = pytest.mark.slurm


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
def test_runs_continue_after_a_preemption_and_a_time_limit(slurm: Cluster, tmp_path: Path) -> None:
    """Three equal trainings, each on its own node: another job preempts the first, and the second has a time limit.

    Slurm sends its signal 30 to 60 s before the limit of two minutes. Both runs wait after 40 steps until they were
    asked to stop. The second attempt of the second run has fewer steps than that.
    """
    sweep, gate, messages = tmp_path / "sweep", tmp_path / "gate", {0: [""], 1: [""]}
    gates = [f"+dataset.options.gate={path}" for path in (gate, sweep / "1" / STOP_REQUEST, os.devnull)]
    cells = [[gates[0]], [gates[1], "cluster.timeout_min=2"], [gates[2]]]
    shared = ("cluster.exclusive=true", "cluster.partition=low", "cluster.signal_delay_s=30", "model.dropout=0.1")
    at = f"+dataset.options.at={4 * STEPS_BEFORE_THE_GATE}"
    submit(slurm, sweep, f"sweep.cells={json.dumps(cells)}", at, *shared, "train.max_steps=75")
    jobs = latest_jobs(sweep)

    def restart_requeued() -> None:
        """Start each requeued job at once, and keep the message about its end."""
        waiting = slurm.command("squeue", "-h", "-r", "-t", "PENDING", "-o", "%i:%r").split()
        for number in (0, 1):
            if f"{jobs[number]}:BeginTime" in waiting:
                assert read_record(sweep, number).status == "preempted"
                messages[number].append(str(read_record(sweep, number).error))
                start_now(slurm, jobs[number])

    def reached(condition: Callable[[], bool]) -> Callable[[], bool]:
        return lambda: restart_requeued() or condition()

    wait_for(reached(lambda: logged_steps(sweep) > 20))
    (node,) = hosts(sweep)
    urgent = f"sbatch --parsable -p high -w {node} --exclusive -o /dev/null --wrap true".split()
    interrupting = slurm.command(*urgent).strip()
    wait_for((sweep / "0" / STOP_REQUEST).exists)
    gate.touch()
    wait_for(reached(lambda: "3 completed" in status(slurm, sweep)))
    assert slurm.wait_accounted(interrupting, "State") == "COMPLETED"

    assert "(preemption): the run can be resumed from the checkpoint" in messages[0][-1]
    assert "(time_limit): the run can be resumed from the checkpoint" in messages[1][-1]
    preempted, limited, uninterrupted = (read_record(sweep, number) for number in range(3))
    first, second = preempted.run.attempts
    assert (first["job_id"], second["job_id"]) == (jobs[0], jobs[0])
    assert (first["resumed_from_step"], first["reason"], second["reason"]) == (None, "preempted", "completed")
    assert 20 < second["resumed_from_step"] < 75
    assert [attempt["reason"] for attempt in limited.run.attempts] == ["preempted"] * (len(messages[1]) - 1) + [
        "completed"
    ]
    expected = read_lines(sweep / "2/metrics.jsonl")
    for number, record in enumerate((preempted, limited)):
        assert_all_steps(sweep, number, 75)
        for line, other in zip(read_lines(sweep / f"{number}/metrics.jsonl"), expected, strict=True):
            assert line["loss"] == pytest.approx(other["loss"], rel=1e-6), line["step"]
        assert record.metrics.eval_loss == pytest.approx(uninterrupted.metrics.eval_loss, rel=1e-6)
