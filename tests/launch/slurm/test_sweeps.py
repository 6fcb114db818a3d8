"""Sweeps on a real Slurm cluster: shapes, leaving and coming back, cancelling, resuming, and the code that runs.

A run that asks for GPUs ends at once on this cluster's pretended ones, in a record of its own: where a
test is not about training, that saves the minute that importing torch costs.
"""

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

import psutil
import pytest

from distexp.launch import ledger
from distexp.runs.record import RunRecord
from tests.helpers.runs import REPOSITORY, run_distexp, run_module
from tests.helpers.slurm_cluster import Cluster

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
COUNTED = """
import sys
import time
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from distexp.cli.main import main

composing, load = 0.0, ConfigLoaderImpl.load_sweep_config

def counted(*arguments):
    global composing
    before = time.process_time()
    try:
        return load(*arguments)
    finally:
        composing += time.process_time() - before

ConfigLoaderImpl.load_sweep_config = counted
code = main()
print(f"beyond composing: {time.process_time() - composing} s")
sys.exit(code)
"""
"""``python -m distexp`` that says how many CPU seconds it took beyond Hydra's own composing of the runs."""
HELD = ("+cluster.sbatch.hold=true", "cluster.wait=false")


def record(sweep: Path, number: int) -> RunRecord:
    return RunRecord.read(sweep / str(number) / "record.json")


def jobs(sweep: Path) -> list[str]:
    """The latest job of each run."""
    return [entry.job or "" for _, entry in sorted(ledger.latest(sweep).items())]


def status(slurm: Cluster, sweep: Path, cwd: Path | None = None) -> str:
    done = run_module("distexp.status", str(sweep), env=slurm.env, cwd=cwd or REPOSITORY)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def wait_for(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return
        time.sleep(0.2)
    raise AssertionError(f"waited {seconds:g} s in vain")


def settled(slurm: Cluster, sweep: Path) -> Callable[[], bool]:
    """A condition: every run of a sweep has its record, and status sees it."""
    return lambda: not any(word in status(slurm, sweep) for word in ("pending", "running", "ending", "unknown"))


@pytest.fixture(scope="module")
def trained(slurm: Cluster, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A sweep over nodes that trains, waited for; its directory and what the command printed."""
    sweep = tmp_path_factory.mktemp("trained") / "sweep"
    words = ("--multirun", "cluster=slurm", "cluster.nodes=1,2", "cluster.workers_per_node=1")
    what = ("strategy=fsdp", "sharding=hybrid_shard", "+cluster.environment.NCCL_SOCKET_IFNAME=eth0")
    done = run_distexp(*words, *what, *TRAINING, f"hydra.sweep.dir={sweep}", cwd=sweep.parent, env=slurm.env)
    assert done.returncode == 0, done.stdout + done.stderr
    return sweep, done.stdout


def test_two_nodes_train_together_and_the_sweep_is_followed(slurm: Cluster, trained: tuple[Path, str]) -> None:
    sweep, said = trained
    one, two = record(sweep, 0), record(sweep, 1)
    assert (one.status, two.status) == ("completed", "completed")
    assert two.built is not None
    assert (two.built.world_size, two.built.mesh) == (2, [2, 1])
    assert len(two.run.hosts) == 2
    assert [entry["node"] for entry in two.memory["cpu"]] == [0, 1]
    log = (sweep / "1/logs/node1/rank1.log").read_text()
    assert f"rank 1: {two.run.hosts[1]}, cpu, head {two.run.hosts[0]}:" in log
    assert not list(sweep.rglob(".reserve"))
    for word in ("run 1 (job", "running: start on node", "completed: train loss", "records:"):
        assert word in said


def test_each_shape_is_an_array_of_its_own(slurm: Cluster, trained: tuple[Path, str]) -> None:
    first, second = jobs(trained[0])
    assert first.partition("_")[0] != second.partition("_")[0]
    for job, nodes in ((first, "1"), (second, "2")):
        assert slurm.accounted(job, "AllocNodes,AllocCPUS,State") == f"{nodes}|{nodes}|COMPLETED"


def test_the_record_tells_of_job_code_and_variables(trained: tuple[Path, str]) -> None:
    sweep, _ = trained
    found = record(sweep, 1)
    (attempt,) = found.run.attempts
    assert (attempt["job_id"], attempt["hosts"], attempt["reason"]) == (jobs(sweep)[1], found.run.hosts, "completed")
    assert found.config["cluster"]["environment"] == {"NCCL_SOCKET_IFNAME": "eth0"}
    assert found.environment is not None
    assert found.environment.variables["NCCL_SOCKET_IFNAME"] == "eth0"
    sha = subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert found.run.git_sha == (sha.stdout.strip() or None)
    assert found.run.snapshot == "snapshot"
    assert "torch==" in (sweep / "snapshot.info/pip-freeze.txt").read_text()


def test_resume_runs_only_what_is_missing_or_new(slurm: Cluster, trained: tuple[Path, str]) -> None:
    sweep, _ = trained
    kept = (sweep / "1/record.json").read_bytes()
    (sweep / "0/record.json").unlink()
    done = run_module("distexp.resume", str(sweep), "cluster.nodes=1,2,9", cwd=sweep.parent, env=slurm.env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (sweep / "1/record.json").read_bytes() == kept
    again = record(sweep, 0)
    assert again.status == "completed"
    assert [attempt["reason"] for attempt in again.run.attempts] == ["failed", "completed"]
    assert (sweep / "0/attempts/0/metrics.jsonl").exists()
    impossible = record(sweep, 2)
    assert impossible.status == "invalid", "more nodes than the cluster has"
    assert impossible.error is not None
    assert impossible.error.type == "SubmissionRefused"


def test_a_shape_for_each_product_of_nodes_and_workers(slurm: Cluster, tmp_path: Path) -> None:
    command = (
        "--multirun cluster=slurm cluster.nodes=2,4 cluster.workers_per_node=1,2 strategy=fsdp sharding=hybrid_shard"
    )
    done = run_distexp(*command.split(), cwd=tmp_path, env=slurm.env)
    assert done.returncode == 1, "the cluster's GPUs are pretended, and every run fails"
    assert "Traceback" not in done.stdout + done.stderr
    (sweep,) = (tmp_path / "multirun_outputs/distexp").iterdir()
    for number, (nodes, workers) in enumerate(((2, 1), (2, 2), (4, 1), (4, 2))):
        cpus, gpus = nodes * workers * 4, nodes * workers
        told = slurm.accounted(jobs(sweep)[number], "State,AllocNodes,AllocCPUS,AllocTRES")
        assert told.startswith(f"FAILED|{nodes}|{cpus}|")
        assert f"gres/gpu={gpus}" in told
        found = record(sweep, number)
        assert found.status == "failed"
        assert found.error is not None
        assert found.error.type == "TooFewGpus"
        assert f"cluster.workers_per_node={workers} needs as many GPUs" in found.error.message


def test_submit_and_leave_and_come_back(slurm: Cluster, tmp_path: Path) -> None:
    command = "--multirun cluster=slurm zero_stage=1,2,3 offload=true,false cluster.wait=false"
    done = run_distexp(*command.split(), cwd=tmp_path, env=slurm.env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "runs 0, 1, 2, 3, 4, 5, 1 node of 1 cuda worker" in done.stdout
    (sweep,) = (tmp_path / "multirun_outputs/distexp").iterdir()
    array = jobs(sweep)[0].partition("_")[0]
    assert f"job {array}:" in done.stdout
    assert jobs(sweep) == [f"{array}_{index}" for index in range(6)]
    wait_for(settled(slurm, sweep))
    assert "6 failed" in status(slurm, sweep, cwd=tmp_path)
    assert [entry.state for entry in ledger.latest(sweep).values()] == ["failed"] * 6
    watched = run_module("distexp.status", str(sweep), "--watch", env=slurm.env)
    assert watched.returncode == 1

    # A run that somebody starts anew after its end is followed again.
    slurm.command("scontrol", "requeue", f"{array}_5")
    (sweep / "5/record.json").unlink()
    assert "pending" in status(slurm, sweep)
    slurm.command("scontrol", "update", f"jobid={array}_5", "StartTime=now")
    wait_for(settled(slurm, sweep))
    assert [attempt["job_id"] for attempt in record(sweep, 5).run.attempts] == [f"{array}_5"] * 2


def test_what_waits_says_why_and_can_be_cancelled(slurm: Cluster, tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    words = ("--multirun", "cluster=slurm", "zero_stage=1,2", *HELD, f"hydra.sweep.dir={sweep}")
    assert run_distexp(*words, cwd=tmp_path, env=slurm.env).returncode == 0
    assert "JobHeldUser" in status(slurm, sweep)
    more = run_module("distexp.resume", str(sweep), "zero_stage=3", env=slurm.env)
    assert more.returncode == 0, more.stdout + more.stderr
    assert "stay as they are" not in more.stdout, "what waits goes on by itself"
    blind = run_module("distexp.status", str(sweep), env={"PATH": "/nowhere"})
    assert "unknown" in blind.stdout, "there is no Slurm on that machine, and nothing is made up"
    done = run_module("distexp.cancel", str(sweep), env=slurm.env)
    assert (done.returncode, done.stdout.strip()) == (0, "3 runs cancelled")
    for number in (0, 1, 2):
        found = record(sweep, number)
        assert found.status == "killed"
        assert found.error is not None
        assert "was cancelled before it began" in found.error.message
        assert found.run.attempts[0]["hosts"] == []
    assert "3 killed" in status(slurm, sweep)
    other = run_module("distexp.resume", str(sweep), "zero_stage=0", env=slurm.env)
    assert "runs 0 (killed), 1 (killed), 2 (killed) stay as they are" in " ".join(other.stdout.split())
    run_module("distexp.cancel", str(sweep), env=slurm.env)


@pytest.mark.slow
def test_the_watcher_may_leave_and_a_running_job_be_cancelled(slurm: Cluster, tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    words = ["--multirun", "cluster=slurm", "train.seed=1,2,3", "cluster.array_parallelism=1", *TRAINING]
    long = ("train.max_steps=null", "train.num_epochs=100000")
    metrics = sweep / "0/metrics.jsonl"
    watcher = subprocess.Popen(
        [sys.executable, "-m", "distexp", *words, *long, f"hydra.sweep.dir={sweep}"],
        cwd=tmp_path,
        env=slurm.env,
        stdout=subprocess.PIPE,
        text=True,
        # A shell starts what it puts into the background with Ctrl-C ignored, and these tests may be there.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None,  # noqa: PLW1509
    )
    wait_for(lambda: metrics.exists() and metrics.stat().st_size > 0)
    shown = status(slurm, sweep)
    assert "loss" in shown
    assert "JobArrayTaskLimit: cluster.array_parallelism runs at once" in shown
    watcher.send_signal(signal.SIGINT)
    said, _ = watcher.communicate(timeout=30)
    assert watcher.returncode == 130
    assert f"python -m distexp.cancel {sweep}" in said
    assert slurm.command("squeue", "-h", "-r", "-t", "RUNNING"), "the job goes on"

    # Slurm announces an end to every process of the job: the run writes a checkpoint and ends, and the next begins.
    # scancel may try a second time, and complain that the job is ending already.
    subprocess.run(["scancel", "--signal=USR2", jobs(sweep)[0]], env=slurm.env, check=False)
    second = sweep / "1/metrics.jsonl"
    wait_for(lambda: second.exists() and second.stat().st_size > 0)
    ended = record(sweep, 0)
    assert ended.status == "preempted"
    assert ended.error is not None
    assert "(preemption): the run goes on from its checkpoint" in ended.error.message, "no time limit is near"
    assert ended.run.attempts[-1]["reason"] == "preempted"
    assert len(list((sweep / "0/checkpoints").glob("step-*/manifest.json"))) == 1
    done = run_module("distexp.cancel", str(sweep), env=slurm.env)
    assert done.returncode == 0, done.stdout + done.stderr
    running, waiting = record(sweep, 1), record(sweep, 2)
    assert (running.status, waiting.status) == ("killed", "killed")
    assert running.error is not None
    assert running.error.message == "the job was cancelled"
    assert running.memory["cpu"], "what was measured until then is kept"
    assert slurm.accounted(jobs(sweep)[1], "State").startswith("CANCELLED")


def test_a_job_that_dies_before_the_run_gets_a_record_from_who_looks(slurm: Cluster, tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    words = ("cluster=slurm", "cluster.setup=['echo no such module; exit 3']", f"hydra.run.dir={sweep}")
    done = run_distexp(*words, cwd=tmp_path, env=slurm.env)
    assert done.returncode == 1
    found = RunRecord.read(sweep / "record.json")
    assert (found.status, found.error and found.error.type) == ("failed", "JobDied")
    assert "no such module" in done.stdout


def test_a_lost_agent_ends_the_run_on_every_node(slurm: Cluster, tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    words = ("cluster=slurm", "cluster.nodes=2", "cluster.workers_per_node=1", "cluster.wait=false", *TRAINING)
    done = run_distexp(*words, "--multirun", f"hydra.sweep.dir={sweep}", cwd=tmp_path, env=slurm.env)
    assert done.returncode == 0, done.stderr
    wait_for((sweep / "0/logs/node1/torchrun.log").exists)
    (agent,) = agents(sweep, "1")
    agent.kill()
    wait_for(settled(slurm, sweep))
    found = record(sweep, 0)
    assert found.status == "killed"
    assert found.error is not None
    assert "node 1" in found.error.message
    wait_for(lambda: not agents(sweep, "0"), seconds=30)


def agents(sweep: Path, node: str) -> list[psutil.Process]:
    """The tasks of a sweep on a node of their job."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        ours = "distexp.launch.slurm.node_task" in command and any(str(sweep) in word for word in command)
        if ours and "srun" not in command[0] and process.environ().get("SLURM_PROCID") == node:
            found.append(process)
    return found


def test_what_was_on_disk_at_submission_is_what_runs(slurm: Cluster, tmp_path: Path) -> None:
    checkout, sweep = tmp_path / "checkout", tmp_path / "sweep"
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        if (REPOSITORY / name).is_file():
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, checkout / name)
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@t"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "all"]):
        subprocess.run([*git, *command], cwd=checkout, check=True, capture_output=True)
    edit(checkout, "needs as many GPUs", "CHANGED BEFORE and not committed")
    (checkout / "distexp/new.py").write_text("NEW = True\n")
    env = {**slurm.env, "PYTHONPATH": str(checkout)}
    words = ("cluster=slurm", *HELD, f"hydra.sweep.dir={sweep}", "--multirun")
    done = run_distexp(*words, cwd=checkout, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    edit(checkout, "CHANGED BEFORE", "CHANGED AFTER")

    # While it waits, the controller is restarted, and somebody looks in between.
    slurm.stop_controller()
    blind = run_module("distexp.status", str(sweep), env=slurm.env)
    assert (blind.returncode, "unknown" in blind.stdout) == (0, True)
    slurm.start_controller()
    shutil.rmtree(checkout)
    wait_for(lambda: "JobHeldUser" in status(slurm, sweep))
    slurm.command("scontrol", "release", jobs(sweep)[0])
    wait_for(settled(slurm, sweep))

    found = record(sweep, 0)
    assert found.error is not None
    assert "CHANGED BEFORE and not committed" in found.error.message
    assert found.run.git_dirty is True
    assert (sweep / "snapshot/distexp/new.py").exists()
    assert "+" in (sweep / "snapshot.info/uncommitted.diff").read_text()
    assert not list(sweep.glob(".snapshot*"))


def edit(checkout: Path, old: str, new: str) -> None:
    path = checkout / "distexp/launch/agent.py"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.slow
def test_many_runs_are_one_array_and_cheap(slurm: Cluster, tmp_path: Path) -> None:
    """Two hundred, for less than 20 ms of CPU each beyond what Hydra takes to compose them."""
    calls = tmp_path / "bin" / "sbatch"
    calls.parent.mkdir()
    real = shutil.which("sbatch", path=slurm.env["PATH"])
    calls.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\nexec {real} "$@"\n')
    calls.chmod(0o755)
    env = {**slurm.env, "PATH": f"{calls.parent}:{slurm.env['PATH']}"}

    def submit(runs: int) -> float:
        """CPU seconds of ours."""
        words = ("--multirun", "cluster=slurm", f"train.seed=range(0,{runs})", *HELD)
        command = [sys.executable, "-c", COUNTED, *words, f"hydra.sweep.dir={tmp_path / str(runs)}"]
        said = subprocess.check_output(command, cwd=tmp_path, env=env, text=True)
        found = re.search(r"beyond composing: (\S+) s", said)
        assert found is not None
        return float(found[1])

    sweep = tmp_path / "200"
    assert (submit(200) - submit(1)) / 199 < 0.02
    assert len((tmp_path / "calls").read_text().splitlines()) == 2, "one for each sweep"
    assert len(jobs(sweep)) == 200
    assert run_module("distexp.cancel", str(sweep), env=slurm.env).returncode == 0
    assert json.loads((sweep / "199/record.json").read_text())["status"] == "killed"

    # Two thousand, for a look at them must stay quick.
    big, entries = tmp_path / "big", []
    for number in range(2000):
        directory = big / str(number)
        directory.mkdir(parents=True)
        for name in ("record.json", "spec.json"):
            raw = json.loads((sweep / str(number % 200) / name).read_text())
            raw["run"]["number"] = number
            (directory / name).write_text(json.dumps(raw))
        entries.append(ledger.Entry(number, raw["run"]["id"], str(number), f"9999_{number}", "killed"))
    ledger.append(big, entries)
    before = os.times().children_user
    assert "2000 killed" in status(slurm, big)
    assert os.times().children_user - before < 2
