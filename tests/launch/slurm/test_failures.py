"""What a cluster does to runs: nodes that go, limits, jobs that matter more, and shells that close.

The samples are slow on purpose, so that there is time to strike and no load while nothing happens.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distexp.runs.spec import RunSpec
from tests.helpers.runs import HELPERS, REPOSITORY, run_distexp
from tests.helpers.slurm_cluster import Cluster, standing
from tests.launch.slurm.test_requeue import lines, start_at_once
from tests.launch.slurm.test_sweeps import agents, jobs, record, settled, status, wait_for

pytestmark = pytest.mark.slurm

SLOW = (
    "model=gpt_tiny",
    "strategy=single",
    "cluster.device=cpu",
    "cluster.cpus_per_worker=1",
    "dataset._target_=failing_runs.slow",
    "dataset.keys=[train_size,eval_size,max_length,padding,num_workers,options]",
    "trusted_packages=[failing_runs]",
    "dataset.train_size=64",
    "dataset.eval_size=8",
    "train.micro_batch_size=4",  # 0.1 s a step
    "train.gradient_accumulation_steps=1",
    "train.num_epochs=10000",
    "train.log_every=1",
)
LEAVE = ("--multirun", "cluster=slurm", "cluster.wait=false")


def user(slurm: Cluster) -> dict[str, str]:
    """The environment of a user who has data sets of their own."""
    return {**slurm.env, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(HELPERS)])}


def submit(slurm: Cluster, sweep: Path, *words: str) -> None:
    done = run_distexp(*LEAVE, *SLOW, *words, f"hydra.sweep.dir={sweep}", env=user(slurm))
    assert done.returncode == 0, done.stdout + done.stderr


def steps(sweep: Path, number: int = 0) -> int:
    """How far a run has come."""
    return len(lines(sweep / str(number) / "metrics.jsonl"))


def assert_whole(sweep: Path, number: int, last: int) -> None:
    """Every step is there, and once."""
    assert [line["step"] for line in lines(sweep / str(number) / "metrics.jsonl")] == list(range(1, last + 1))


def test_one_runs_end_leaves_the_others_alone(slurm: Cluster, tmp_path: Path) -> None:
    """One crashes, one takes more memory than it asked for, and some want more than any node has."""
    sweep = tmp_path / "sweep"
    kinds = "dataset._target_=failing_runs.slow,failing_runs.fails,failing_runs.eats_until_killed"
    words = (kinds, "+dataset.options.at=12", "cluster.memory_gb=2,99", "train.max_steps=40")
    submit(slurm, sweep, *words)
    wait_for(settled(slurm, sweep))
    found = {number: record(sweep, number) for number in range(6)}
    assert {number: record.status for number, record in found.items()} == {
        0: "completed",
        1: "invalid",
        2: "failed",
        3: "invalid",
        4: "oom_host",
        5: "invalid",
    }
    assert_whole(sweep, 0, 40)
    rotten, eaten, impossible = found[2].error, found[4].error, found[1].error
    assert rotten is not None
    assert "this sample is rotten" in rotten.message
    assert eaten is not None
    assert "more memory than it had asked for" in eaten.message
    assert found[4].memory["cpu"], "what was measured until then is kept"
    assert impossible is not None
    assert impossible.type == "SubmissionRefused"
    states = [slurm.accounted(job, "State") for job in jobs(sweep)]  # the impossible ones have no job
    assert states == ["COMPLETED", "FAILED", "FAILED"]


@pytest.mark.slow
def test_a_closed_shell_and_a_restarted_controller_lose_nothing(slurm: Cluster, tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    words = ("--multirun", "cluster=slurm", *SLOW, "train.seed=1,2", "train.max_steps=400", f"hydra.sweep.dir={sweep}")
    shell = subprocess.Popen(
        [sys.executable, "-m", "distexp", *words], env={**os.environ, **user(slurm)}, start_new_session=True
    )
    wait_for(lambda: steps(sweep, 0) > 2 and steps(sweep, 1) > 2)
    os.killpg(shell.pid, signal.SIGKILL)
    shell.wait()
    slurm.stop_controller()
    try:
        assert "unknown" in status(slurm, sweep), "nobody can tell, and nothing is made up"
        before = steps(sweep, 0)
        wait_for(lambda: steps(sweep, 0) > before + 10)
    finally:
        slurm.start_controller()
    wait_for(settled(slurm, sweep))
    assert "2 completed" in status(slurm, sweep)
    for number in (0, 1):
        assert_whole(sweep, number, 400)
        assert len(record(sweep, number).run.attempts) == 1
        assert slurm.accounted(jobs(sweep)[number], "State") == "COMPLETED"


@pytest.mark.slow
def test_lost_nodes_cost_no_more_than_the_steps_since_the_last_checkpoint(slurm: Cluster, tmp_path: Path) -> None:
    """First one is set down by its administrator, then the head's crashes; a second run is left in peace."""
    sweep = tmp_path / "sweep"
    two = ("cluster.nodes=2", "cluster.workers_per_node=1", "cluster.exclusive=true", "strategy=fsdp")
    submit(
        slurm,
        sweep,
        *two,
        "model.dropout=0.1",
        "train.max_steps=200",
        "train.checkpoint_every=20",
        "train.on_nan=stop,record",
    )
    job, struck = jobs(sweep)[0], []
    try:
        wait_for(lambda: steps(sweep) > 30)
        struck.append(hosts(sweep)[1])
        slurm.command("scontrol", "update", f"nodename={struck[0]}", "state=down", "reason=test")
        start_at_once(slurm, job)
        wait_for(lambda: steps(sweep, 1) == 200 and steps(sweep) > 80, 240)
        struck.append(hosts(sweep)[0])
        slurm.crash_node(struck[1])
        start_at_once(slurm, job)
        wait_for(settled(slurm, sweep), 240)
    finally:
        for node in struck:
            slurm.mend_node(node)
    struck_run, whole = record(sweep, 0), record(sweep, 1)
    assert (struck_run.status, whole.status) == ("completed", "completed")
    attempts = struck_run.run.attempts
    assert [attempt["job_id"] for attempt in attempts] == [job] * 3
    assert [attempt["reason"] for attempt in attempts] == ["killed", "ended without a record", "completed"]
    first, second, third = (attempt["resumed_from_step"] for attempt in attempts)
    assert first is None
    assert 20 <= second < third < 200
    assert struck[0] not in attempts[1]["hosts"]
    assert not set(struck) & set(attempts[2]["hosts"])
    assert_whole(sweep, 0, 200)
    for mine, other in zip(lines(sweep / "0/metrics.jsonl"), lines(sweep / "1/metrics.jsonl"), strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-6), mine["step"]
    assert struck_run.metrics.eval_loss == pytest.approx(whole.metrics.eval_loss, rel=1e-6)


def hosts(sweep: Path) -> list[str]:
    """The nodes of the latest attempt."""
    found: list[str] = RunSpec.read(sweep / "0").run.attempts[-1]["hosts"]
    return found


@pytest.mark.slow
def test_an_agent_that_is_lost_costs_no_more_either(slurm: Cluster, tmp_path: Path) -> None:
    """A node may go before Slurm has noticed: the head then asks for another start itself."""
    sweep = tmp_path / "sweep"
    two = ("cluster.nodes=2", "cluster.workers_per_node=1", "strategy=ddp")
    submit(slurm, sweep, *two, "train.max_steps=100", "train.checkpoint_every=10")
    wait_for(lambda: steps(sweep) > 20)
    (agent,) = agents(sweep, "1")
    agent.kill()
    start_at_once(slurm, jobs(sweep)[0])
    wait_for(settled(slurm, sweep), 240)
    assert_whole(sweep, 0, 100)
    first, second = record(sweep, 0).run.attempts
    assert (first["reason"], second["reason"]) == ("killed", "completed")
    assert second["resumed_from_step"] >= 20


@pytest.mark.slow
@pytest.mark.usefixtures("slurm")  # which says why there can be none
def test_a_node_that_is_cut_off_ends_what_goes_on_elsewhere(tmp_path: Path) -> None:
    """It hears nothing of Slurm, but both attempts would write into one directory. On a cluster that nobody mends."""
    sweep = tmp_path / "sweep"
    with standing(tmp_path / "cluster") as own:
        submit(own, sweep, "train.max_steps=900", "train.checkpoint_every=20")
        wait_for(lambda: steps(sweep) > 30)
        (node,) = hosts(sweep)
        workers = [process for process in own.processes(node) if "distexp.worker" in " ".join(process.cmdline())]
        assert workers
        own.cut_off(node)
        start_at_once(own, jobs(sweep)[0])
        wait_for(lambda: hosts(sweep) != [node])
        wait_for(lambda: not any(worker.is_running() for worker in workers), 60)
        assert lines(sweep / "0/attempts/0/metrics.jsonl")[-1]["step"] < 900, "it did not come to its end by itself"
        assert not (sweep / "0/record.json").exists(), "the run goes on"
        wait_for(settled(own, sweep), 240)
    assert_whole(sweep, 0, 900)
    attempts = record(sweep, 0).run.attempts
    assert [attempt["reason"] for attempt in attempts] == ["ended without a record", "completed"]
    assert attempts[1]["resumed_from_step"] >= 20


@pytest.mark.slow
def test_a_time_limit_ends_an_attempt_and_not_the_run(slurm: Cluster, tmp_path: Path) -> None:
    """Slurm speaks up 30 to 60 s before the end of two minutes; the run takes 85 s and the start."""
    sweep = tmp_path / "sweep"
    submit(slurm, sweep, "train.max_steps=850", "cluster.timeout_min=2", "cluster.signal_delay_s=30")
    job = jobs(sweep)[0]
    restarts = 0
    deadline = time.monotonic() + 500
    while "completed" not in status(slurm, sweep):
        assert time.monotonic() < deadline
        if slurm.restarts(job) > restarts:  # a job that is pending may not have started at all
            restarts += 1
            assert "(time_limit): the run goes on from its checkpoint" in str(record(sweep, 0).error)
            start_at_once(slurm, job)
        time.sleep(1)
    attempts = record(sweep, 0).run.attempts
    assert len(attempts) == restarts + 1 > 1
    assert {attempt["reason"] for attempt in attempts[:-1]} == {"preempted"}
    assert_whole(sweep, 0, 850)


@pytest.mark.slow
def test_a_job_that_matters_more_interrupts_and_the_run_goes_on(slurm: Cluster, tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    submit(slurm, sweep, "train.max_steps=150", "cluster.partition=low")
    wait_for(lambda: steps(sweep) > 20)
    (node,) = hosts(sweep)
    urgent = f"sbatch --parsable -p high -w {node} --exclusive -o /dev/null --wrap true".split()
    interrupting = slurm.command(*urgent).strip()
    assert slurm.accounted(interrupting, "State") == "COMPLETED"
    assert "(preemption): the run goes on from its checkpoint" in str(record(sweep, 0).error)
    start_at_once(slurm, jobs(sweep)[0])
    wait_for(settled(slurm, sweep))
    first, second = record(sweep, 0).run.attempts
    assert (first["reason"], second["reason"]) == ("preempted", "completed")
    assert second["resumed_from_step"] > 20
    assert_whole(sweep, 0, 150)
