"""Tests of sweeps on a real Slurm cluster.

They cover job arrays, status, cancel, resume, and the snapshot of the code. The GPUs of the test cluster are fake,
so a run that requests GPUs fails at once and still gets its record. Tests that need no training use this to save
the minute that importing torch takes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from distexp.launch import run_dirs
from distexp.runs.record import RunRecord
from tests.helpers.runs import REPOSITORY, run_distexp, run_module, start_distexp
from tests.helpers.slurm_cluster import NODES, Cluster
from tests.helpers.slurm_sweeps import all_ended, latest_jobs, node_tasks, read_record, start_now, status, wait_for

pytestmark = pytest.mark.slurm

TRAINING = (
    "model=gpt_tiny",
    "cluster.device=cpu",
    "cluster.cpus_per_worker=1",
    "train.max_steps=6",
    "train.num_epochs=1",
    "train.log_every=1",
    "train.measure_after_step=1",
    "dataset.train_size=64",
    "dataset.eval_size=8",
)
ENDLESS = ("train.max_steps=null", "train.num_epochs=100000")
MEASURED_COMMAND = """
import statistics
import sys
import time
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from distexp.cli.main import main

load, compositions = ConfigLoaderImpl.load_sweep_config, []

def measured(*arguments):
    for _ in range(5):
        before = time.process_time()
        composed = load(*arguments)
        compositions.append(time.process_time() - before)
    return composed

ConfigLoaderImpl.load_sweep_config = measured
code = main()
others = time.process_time() - sum(compositions)
print(f"without composing: {others / statistics.median(compositions)} compositions")
sys.exit(code)
"""
"""``python -m distexp`` that prints its CPU time without Hydra's compositions, in units of one composition."""
HELD = ("+cluster.sbatch.hold=true", "cluster.wait=false")


@pytest.fixture(scope="module")
def trained(slurm: Cluster, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Train a sweep over nodes; return its directory and the command's output."""
    sweep = tmp_path_factory.mktemp("trained") / "sweep"
    nodes = ("--multirun", "cluster=slurm", "cluster.nodes=1,2", "cluster.workers_per_node=1")
    overrides = ("strategy=fsdp", "sharding=hybrid_shard", "+cluster.environment.NCCL_SOCKET_IFNAME=eth0")
    done = run_distexp(*nodes, *overrides, *TRAINING, f"hydra.sweep.dir={sweep}", cwd=sweep.parent, env=slurm.env)
    assert done.returncode == 0, done.stdout + done.stderr
    return sweep, done.stdout


def test_a_sweep_over_nodes_trains_and_is_followed(slurm: Cluster, trained: tuple[Path, str]) -> None:
    sweep, output = trained
    one, two = read_record(sweep, 0), read_record(sweep, 1)
    assert (one.status, two.status) == ("completed", "completed")
    assert two.built is not None
    assert (two.built.world_size, two.built.mesh) == (2, [2, 1])
    assert len(two.run.hosts) == 2
    assert [entry["node"] for entry in two.memory["cpu"]] == [0, 1]
    log = (sweep / "1/logs/node1/rank1.log").read_text()
    assert f"rank 1 of 2: {two.run.hosts[1]}, cpu, rendezvous {two.run.hosts[0]}:" in log
    assert not list(sweep.rglob(".reserve"))
    for text in ("run 1 (job", "completed: train loss", "to draw the report:"):
        assert text in output
    assert re.search(r"running: \w.* on node", output), "in the phase that the first query has met"


def test_runs_with_different_resources_are_different_arrays(slurm: Cluster, trained: tuple[Path, str]) -> None:
    first, second = latest_jobs(trained[0])
    assert first.partition("_")[0] != second.partition("_")[0]
    for job, nodes in ((first, "1"), (second, "2")):
        assert slurm.wait_accounted(job, "AllocNodes,AllocCPUS,State") == f"{nodes}|{nodes}|COMPLETED"


def test_the_record_has_job_git_commit_and_variables(trained: tuple[Path, str]) -> None:
    sweep, _ = trained
    found = read_record(sweep, 1)
    (attempt,) = found.run.attempts
    assert (attempt["job_id"], attempt["hosts"], attempt["reason"]) == (
        latest_jobs(sweep)[1],
        found.run.hosts,
        "completed",
    )
    assert found.config["cluster"]["environment"] == {"NCCL_SOCKET_IFNAME": "eth0"}
    assert found.environment is not None
    assert found.environment.variables["NCCL_SOCKET_IFNAME"] == "eth0"
    sha = subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert found.run.git_sha == (sha.stdout.strip() or None)
    assert found.run.snapshot == "snapshot"
    assert "torch==" in (sweep / "snapshot.info/pip-freeze.txt").read_text()


def test_resume_runs_only_missing_and_new_runs(slurm: Cluster, trained: tuple[Path, str]) -> None:
    sweep, _ = trained
    kept = (sweep / "1/record.json").read_bytes()
    (sweep / "0/record.json").unlink()
    done = run_module("distexp.resume", str(sweep), "cluster.nodes=1,2,9", cwd=sweep.parent, env=slurm.env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (sweep / "1/record.json").read_bytes() == kept
    again = read_record(sweep, 0)
    assert again.status == "completed"
    assert [attempt["reason"] for attempt in again.run.attempts] == ["failed", "completed"]
    assert (sweep / "0/attempts/0/metrics.jsonl").exists()
    refused = read_record(sweep, 2)
    assert refused.status == "invalid", "more nodes than the cluster has"
    assert refused.error is not None
    assert refused.error.type == "SubmissionRefused"


def test_nodes_and_workers_of_a_sweep_reach_slurm(slurm: Cluster, tmp_path: Path) -> None:
    command = "--multirun cluster=slurm cluster.nodes=2,4 cluster.workers_per_node=2 sharding=hybrid_shard"
    done = run_distexp(*command.split(), cwd=tmp_path, env=slurm.env)
    assert done.returncode == 1, "every run fails because the GPUs of the test cluster are fake"
    assert "Traceback" not in done.stdout + done.stderr
    (sweep,) = (tmp_path / "multirun_outputs/distexp").iterdir()
    for number, (nodes, workers) in enumerate(((2, 2), (4, 2))):
        cpus, gpus = nodes * workers * 4, nodes * workers
        allocated = slurm.wait_accounted(latest_jobs(sweep)[number], "State,AllocNodes,AllocCPUS,AllocTRES")
        assert allocated.startswith(f"FAILED|{nodes}|{cpus}|")
        assert f"gres/gpu={gpus}" in allocated
        found = read_record(sweep, number)
        assert found.status == "failed"
        assert found.error is not None
        assert found.error.type == "TooFewGpus"
        assert f"cluster.workers_per_node={workers} needs {workers} GPUs, but" in found.error.message


def test_status_follows_a_sweep_submitted_without_waiting(slurm: Cluster, tmp_path: Path) -> None:
    command = "--multirun cluster=slurm zero_stage=1,2 offload=true,false cluster.wait=false"
    done = run_distexp(*command.split(), cwd=tmp_path, env=slurm.env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "runs 0-3, 1 node with 1 cuda worker" in done.stdout
    (sweep,) = (tmp_path / "multirun_outputs/distexp").iterdir()
    array = latest_jobs(sweep)[0].partition("_")[0]
    assert f"job {array}:" in done.stdout
    assert latest_jobs(sweep) == [f"{array}_{index}" for index in range(4)]
    wait_for(all_ended(slurm, sweep))
    assert "4 failed" in status(slurm, sweep, cwd=tmp_path)
    assert [entry.state for entry in run_dirs.latest(sweep).values()] == ["failed"] * 4
    watched = run_module("distexp.status", str(sweep), "--watch", env=slurm.env)
    assert watched.returncode == 1

    # A run that is requeued by hand after its end is active again.
    wait_for(lambda: slurm.count_idle() == NODES)
    slurm.command("scontrol", "requeue", f"{array}_3")
    (sweep / "3/record.json").unlink()
    assert "pending" in status(slurm, sweep)
    start_now(slurm, f"{array}_3")
    wait_for(all_ended(slurm, sweep))
    assert [attempt["job_id"] for attempt in read_record(sweep, 3).run.attempts] == [f"{array}_3"] * 2


def test_pending_runs_have_a_reason_and_can_be_cancelled(slurm: Cluster, tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    arguments = ("--multirun", "cluster=slurm", "zero_stage=1,2", *HELD, f"hydra.sweep.dir={sweep}")
    assert run_distexp(*arguments, cwd=tmp_path, env=slurm.env).returncode == 0
    assert "JobHeldUser" in status(slurm, sweep)
    more = run_module("distexp.resume", str(sweep), "zero_stage=3", HELD[0], env=slurm.env)
    assert more.returncode == 0, more.stdout + more.stderr
    assert "not resumed" not in more.stdout, "pending runs are not resumed"
    without_slurm = run_module("distexp.status", str(sweep), env={"PATH": "/nowhere"})
    assert "unknown" in without_slurm.stdout
    done = run_module("distexp.cancel", str(sweep), env=slurm.env)
    assert (done.returncode, done.stdout.strip()) == (0, "3 runs cancelled")
    for number in (0, 1, 2):
        found = read_record(sweep, number)
        assert found.status == "killed"
        assert found.error is not None
        assert "was cancelled before it started" in found.error.message
        assert found.run.attempts[0]["hosts"] == []
    assert "3 killed" in status(slurm, sweep)
    other = run_module("distexp.resume", str(sweep), "zero_stage=0", HELD[0], env=slurm.env)
    assert "runs 0 (killed), 1 (killed), 2 (killed) were not resumed" in " ".join(other.stdout.split())
    run_module("distexp.cancel", str(sweep), env=slurm.env)


@pytest.mark.slow
def test_jobs_continue_after_ctrl_c_and_running_jobs_can_be_cancelled(slurm: Cluster, tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    overrides = ["--multirun", "cluster=slurm", "train.seed=1,2,3", "cluster.array_parallelism=1", *TRAINING]
    metrics = sweep / "0/metrics.jsonl"
    command = subprocess.Popen(
        [sys.executable, "-m", "distexp", *overrides, *ENDLESS, f"hydra.sweep.dir={sweep}"],
        cwd=tmp_path,
        env=slurm.env,
        stdout=subprocess.PIPE,
        text=True,
        # A shell starts background processes with SIGINT ignored, and these tests may run in the background.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None,  # noqa: PLW1509
    )
    wait_for(lambda: metrics.exists() and metrics.stat().st_size > 0)
    assert "loss" in status(slurm, sweep)
    wait_for(lambda: "JobArrayTaskLimit: limited by cluster.array_parallelism" in status(slurm, sweep))
    command.send_signal(signal.SIGINT)
    output, _ = command.communicate(timeout=600)
    assert command.returncode == 130
    assert f"distexp cancel {sweep}" in output
    assert slurm.command("squeue", "-h", "-r", "-t", "RUNNING"), "the job is still running"

    # Slurm signals every process of the job: the run writes a checkpoint and ends, and the next run starts.
    # scancel may retry and then report that the job is ending.
    subprocess.run(["scancel", "--signal=USR2", latest_jobs(sweep)[0]], env=slurm.env, check=False)
    second = sweep / "1/metrics.jsonl"
    wait_for(lambda: second.exists() and second.stat().st_size > 0)
    ended = read_record(sweep, 0)
    assert ended.status == "preempted"
    assert ended.error is not None
    assert "(preemption): the run can be resumed from the checkpoint" in ended.error.message, (
        "not time_limit: the job has none"
    )
    assert ended.run.attempts[-1]["reason"] == "preempted"
    assert len(list((sweep / "0/checkpoints").glob("step-*/manifest.json"))) == 1
    done = run_module("distexp.cancel", str(sweep), env=slurm.env)
    assert done.returncode == 0, done.stdout + done.stderr
    running, pending = read_record(sweep, 1), read_record(sweep, 2)
    assert (running.status, pending.status) == ("killed", "killed")
    assert running.error is not None
    assert running.error.message == "the job was cancelled"
    assert running.memory["cpu"], "measurements up to the end are kept"
    assert slurm.wait_accounted(latest_jobs(sweep)[1], "State").startswith("CANCELLED")


def test_a_job_that_fails_in_its_setup_gets_a_record(slurm: Cluster, tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    overrides = ("cluster=slurm", "cluster.setup=['echo no such module; exit 3']", f"hydra.run.dir={sweep}")
    done = run_distexp(*overrides, cwd=tmp_path, env=slurm.env)
    assert done.returncode == 1
    found = RunRecord.read(sweep / "record.json")
    assert (found.status, found.error and found.error.type) == ("failed", "JobDied")
    assert "no such module" in done.stdout


def test_a_killed_agent_stops_the_run_on_every_node(slurm: Cluster, tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    overrides = ("cluster=slurm", "cluster.nodes=2", "cluster.workers_per_node=1", "cluster.wait=false", *TRAINING)
    done = run_distexp(*overrides, *ENDLESS, "--multirun", f"hydra.sweep.dir={sweep}", cwd=tmp_path, env=slurm.env)
    assert done.returncode == 0, done.stderr
    wait_for((sweep / "0/logs/node1/workers.log").exists)
    wait_for(lambda: len(node_tasks(sweep, "1")) == 1)
    (task,) = node_tasks(sweep, "1")
    task.kill()
    wait_for(all_ended(slurm, sweep))
    found = read_record(sweep, 0)
    assert found.status == "killed"
    assert found.error is not None
    assert "node 1" in found.error.message
    wait_for(lambda: not node_tasks(sweep, "0"))


def test_jobs_run_the_code_as_it_was_at_submission(slurm: Cluster, tmp_path: Path) -> None:
    checkout, sweep = tmp_path / "checkout", tmp_path / "sweep"
    command_line = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command_line, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        if (REPOSITORY / name).is_file():
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, checkout / name)
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@t"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "all"]):
        subprocess.run([*git, *command], cwd=checkout, check=True, capture_output=True)
    edit(checkout, "request nodes with more GPUs", "CHANGED BEFORE and not committed")
    (checkout / "distexp/new.py").write_text("NEW = True\n")
    env = {**slurm.env, "PYTHONPATH": str(checkout)}
    overrides = ("cluster=slurm", *HELD, f"hydra.sweep.dir={sweep}", "--multirun")
    done = start_distexp(*overrides, cwd=checkout, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    edit(checkout, "CHANGED BEFORE", "CHANGED AFTER")
    shutil.rmtree(checkout)
    slurm.command("scontrol", "release", latest_jobs(sweep)[0])
    wait_for(all_ended(slurm, sweep))

    found = read_record(sweep, 0)
    assert found.error is not None
    assert "CHANGED BEFORE and not committed" in found.error.message
    assert found.run.git_dirty is True
    assert (sweep / "snapshot/distexp/new.py").exists()
    assert "+" in (sweep / "snapshot.info/uncommitted.diff").read_text()
    assert not list(sweep.glob(".snapshot*"))


def edit(checkout: Path, old: str, new: str) -> None:
    """Replace a text in the source of a message of the agent."""
    path = checkout / "distexp/launch/node_setup.py"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.release
def test_two_hundred_runs_are_one_array(slurm: Cluster, tmp_path: Path) -> None:
    """Each run takes less CPU time than 30 % of a composition by Hydra, without composing its cell. 12 % is usual."""
    calls = tmp_path / "bin" / "sbatch"
    calls.parent.mkdir()
    real = shutil.which("sbatch", path=slurm.env["PATH"])
    calls.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\nexec {real} "$@"\n')
    calls.chmod(0o755)
    env = {**slurm.env, "PATH": f"{calls.parent}:{slurm.env['PATH']}"}

    def submit(runs: int) -> float:
        """Submit a sweep; return its CPU time without Hydra's compositions, in units of one composition."""
        arguments = ("--multirun", "cluster=slurm", f"train.seed=range(0,{runs})", *HELD)
        command = [sys.executable, "-c", MEASURED_COMMAND, *arguments, f"hydra.sweep.dir={tmp_path / str(runs)}"]
        output = subprocess.check_output(command, cwd=tmp_path, env=env, text=True)
        found = re.search(r"without composing: (\S+) compositions", output)
        assert found is not None
        return float(found[1])

    def cpu_of_status(expected: str, folder: Path) -> float:
        """Return the CPU seconds of the status command, in a process whose time is counted."""
        before = os.times().children_user
        command = [sys.executable, "-m", "distexp.status", str(folder)]
        assert expected in subprocess.check_output(command, cwd=REPOSITORY, env=slurm.env, text=True)
        return os.times().children_user - before

    sweep = tmp_path / "200"
    assert (submit(200) - submit(1)) / 199 < 0.3
    assert len((tmp_path / "calls").read_text().splitlines()) == 2, "one submission for each sweep"
    assert len(latest_jobs(sweep)) == 200
    assert run_module("distexp.cancel", str(sweep), env=slurm.env).returncode == 0
    assert json.loads((sweep / "199/record.json").read_text())["status"] == "killed"

    big, entries = tmp_path / "big", []
    for number in range(2000):
        directory = big / str(number)
        directory.mkdir(parents=True)
        for name in ("record.json", "spec.json"):
            raw = json.loads((sweep / str(number % 200) / name).read_text())
            raw["run"]["number"] = number
            (directory / name).write_text(json.dumps(raw))
        entries.append(run_dirs.Entry(number, raw["run"]["id"], str(number), f"9999_{number}", "killed"))
    run_dirs.append(big, entries)
    few, many = cpu_of_status("200 killed", sweep), cpu_of_status("2000 killed", big)
    assert many < 10 * few, "the time grows no faster than the number of runs"
