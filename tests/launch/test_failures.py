"""Failures of real runs: each leaves one record with the true cause, and no process."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from distexp.launch.failures import signal_deaths
from distexp.runs.record import RunRecord
from distexp.runs.run_dir import WORKER_EXITS
from tests.helpers.processes import find_processes, have_ended
from tests.helpers.runs import REPOSITORY, run_distexp
from tests.helpers.sabotaged_runs import DEADLINE_S, ENV, QUICK, StartedCommand, sabotage, tree_of, wait_for
from tests.helpers.small_disk import fill, read_only, small_disk

REPEATS = int(os.environ.get("DISTEXP_KILL_REPEATS", "1"))
"""Repetitions of each kill. Use 10 before a release."""


def only_record(folder: Path) -> RunRecord:
    (path,) = folder.rglob("record.json")
    assert not (path.parent / ".reserve").exists()
    return RunRecord.read(path)


def remaining_processes(folder: Path) -> list[list[str]]:
    """Return the command lines of processes that have a folder among their arguments."""
    return [process.info["cmdline"] for process in find_processes(str(folder))]


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.release), 1])
def test_an_exception_on_one_rank_is_the_cause_and_ends_the_other_ranks(rank: int, tmp_path: Path) -> None:
    """The other rank would wait for 30 minutes, which is longer than the time of the command."""
    done = run_distexp(*sabotage("fails", rank), *QUICK, cwd=tmp_path, env=ENV)
    assert done.returncode == 1
    record = only_record(tmp_path)
    assert record.status == "failed"
    assert record.error is not None
    assert record.error.type == "ValueError"
    assert "this sample is broken" in record.error.message
    assert record.error.rank == rank
    assert record.error.phase in ("warmup", "train")
    assert record.error.log == f"logs/node0/rank{rank}.log"
    assert record.error.place is not None
    assert record.error.place.startswith("helpers/failing_runs.py:")
    assert f" at {record.error.place}: " in " ".join(done.stdout.replace("│", " ").split())
    assert f"{record.error.log}\n" in done.stdout
    assert "Traceback" not in done.stdout
    (log,) = tmp_path.rglob(record.error.log)
    assert "Traceback" in log.read_text()
    assert remaining_processes(tmp_path) == []


@pytest.mark.slow
def test_an_error_in_a_stage_of_a_pipeline_is_the_cause(tmp_path: Path) -> None:
    """Torch's own error is a RuntimeError that names the stage, also if a memory is full."""
    stages = ("parallel.pipeline=2", "train.gradient_accumulation_steps=4", "dataset.padding=max_length")
    run_distexp(*sabotage("fails_in_model"), *QUICK, "strategy=ddp", *stages, cwd=tmp_path, env=ENV)
    record = only_record(tmp_path)
    assert record.error is not None
    assert (record.error.type, record.error.message) == ("IndexError", "index out of range in self")


def test_the_first_death_of_all_nodes_is_the_cause(tmp_path: Path) -> None:
    ends = {0: [{"rank": 0, "code": 1, "unix_time_s": 2.0, "stopped": False}], 1: []}
    ends[0].append({"rank": 1, "code": -15, "unix_time_s": 2.1, "stopped": True})
    ends[1].append({"rank": 2, "code": -9, "unix_time_s": 1.0, "stopped": False})
    for node, entries in ends.items():
        path = WORKER_EXITS.path(tmp_path, node)
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(entries))
    assert signal_deaths(tmp_path) == [(2, signal.SIGKILL)]


@pytest.mark.parametrize("attempt", range(REPEATS))
def test_a_killed_worker_is_killed_and_not_its_victims_error(attempt: int, tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    done = run_distexp(*sabotage("killed", rank=1), *QUICK, cwd=tmp_path, env={**ENV, "TMPDIR": str(temporary)})
    left = {path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor_")}
    assert left == set(), "only torch's shared cache may stay in the temporary directory"
    assert done.returncode == 1
    record = only_record(tmp_path)
    assert (record.status, record.error and record.error.type) == ("killed", "SIGKILL")
    assert record.error is not None
    assert record.error.rank == 1
    assert remaining_processes(tmp_path) == []


@pytest.mark.parametrize(
    ("code", "strategy"), [pytest.param(0, "ddp", marks=pytest.mark.release), (7, "ddp"), (0, "single")]
)
def test_a_rank_that_ends_without_an_error_is_named(code: int, strategy: str, tmp_path: Path) -> None:
    rank = 1 if strategy == "ddp" else 0
    exits = (*sabotage("exits", rank=rank), f"+dataset.options.code={code}", f"strategy={strategy}")
    run_distexp(*exits, *QUICK, cwd=tmp_path, env=ENV)
    record = only_record(tmp_path)
    assert (record.status, record.error and record.error.rank) == ("failed", rank)
    assert record.error is not None
    assert record.error.message.startswith(
        f"rank {rank} ended with exit code {code} and without an error: does its code"
    )


def test_a_crash_is_reported_with_its_signal(tmp_path: Path) -> None:
    run_distexp(*sabotage("segfaults", rank=1), *QUICK, cwd=tmp_path, env=ENV)
    record = only_record(tmp_path)
    assert (record.status, record.error and record.error.type) == ("failed", "SIGSEGV")
    (log,) = tmp_path.rglob("rank1.log")
    assert "Segmentation fault" in log.read_text(), "faulthandler is on"


@pytest.mark.slow
def test_a_failed_allocation_is_oom_host_and_the_sweep_continues(tmp_path: Path) -> None:
    often = "measure.interval_s=0.05"  # A run of some steps takes less than the usual half second.
    overrides = ("--multirun", *sabotage("eats_memory"), *QUICK, "train.max_steps=12,3", often)
    done = run_distexp(*overrides, "cluster.workers_per_node=1", "strategy=single", cwd=tmp_path, env=ENV)
    records = [RunRecord.read(path) for path in sorted(tmp_path.rglob("record.json"))]
    assert [record.status for record in records] == ["oom_host", "completed"]
    error = records[0].error
    assert error is not None
    assert error.phase in ("warmup", "train")
    assert records[0].memory["cpu"][0]["peak_mib"] > 100, "sampled until the allocation"
    assert done.returncode == 0, "running out of memory is a result"


@pytest.mark.slow
def test_a_hang_is_detected_and_all_stacks_are_in_the_logs(tmp_path: Path) -> None:
    overrides = (*sabotage("hangs", rank=1), *QUICK, "cluster.hang_timeout_min=0.5")
    done = run_distexp(*overrides, cwd=tmp_path, env=ENV)
    assert done.returncode == 1
    record = only_record(tmp_path)
    assert record.error is not None
    assert (record.status, record.error.type, record.error.rank) == ("failed", "Hang", 1)
    assert record.error.phase in ("warmup", "train")
    (sleeping,) = tmp_path.rglob("rank1.log")
    (waiting,) = tmp_path.rglob("rank0.log")
    assert "failing_runs.py" in sleeping.read_text()
    assert "most recent call first" in waiting.read_text()
    assert remaining_processes(tmp_path) == []


def test_a_run_that_exceeds_its_time_is_a_timeout(tmp_path: Path) -> None:
    overrides = (*sabotage("hangs"), *QUICK, "cluster.timeout_min=0.15")
    done = run_distexp(*overrides, cwd=tmp_path, env=ENV)
    assert done.returncode == 1
    record = only_record(tmp_path)
    assert record.status == "timeout"
    assert record.error is not None
    assert "cluster.timeout_min=0.15" in record.error.message
    assert remaining_processes(tmp_path) == []


@pytest.mark.slow
def test_a_nan_loss_stops_the_run_or_is_recorded(tmp_path: Path) -> None:
    overrides = ("--multirun", "train.on_nan=stop,record", "train.learning_rate=1e30", "train.gradient_clipping=null")
    overrides += ("strategy=single", "train.warmup_steps=0", "train.schedule=constant", "train.max_steps=12")
    done = run_distexp(*overrides, *QUICK, cwd=tmp_path, env=ENV)
    assert done.returncode == 1
    stopped, recorded = (RunRecord.read(path) for path in sorted(tmp_path.rglob("record.json")))
    assert (stopped.status, stopped.error and stopped.error.type) == ("failed", "DivergedError")
    assert recorded.status == "completed"
    assert recorded.metrics.train_loss is None, "JSON has no nan"


@pytest.mark.slow
def test_a_nan_evaluation_loss_stops_the_run(tmp_path: Path) -> None:
    """The loss of the only step is checked before the update, which overflows."""
    overrides = ("strategy=single", "train.learning_rate=1e30", "train.warmup_steps=0", "train.max_steps=1")
    done = run_distexp(*overrides, "train.save_model=true", *QUICK, cwd=tmp_path, env=ENV)
    assert done.returncode == 1
    record = only_record(tmp_path)
    assert (record.status, record.error and record.error.type) == ("failed", "DivergedError")
    assert record.error is not None
    assert "the loss of the evaluation after step 1 is nan" in record.error.message
    assert not list(tmp_path.rglob("model.safetensors")), "weights with NaN are not exported"


@pytest.mark.parametrize("attempt", range(REPEATS))
@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL]
)
def test_a_stopped_launcher_leaves_a_record_and_no_process(
    number: signal.Signals, attempt: int, tmp_path: Path
) -> None:
    overrides = ("--multirun", "train.seed=1,2", *sabotage("hangs", rank=1, at=100), *QUICK)
    with StartedCommand(tmp_path, *overrides) as command:
        run_dir = command.until_training()
        family = tree_of(command.process.pid)
        assert len(family) >= 4
        command.process.send_signal(number)
        assert wait_for(lambda: have_ended(family[1:])), "workers outlived their launcher"
        assert wait_for((run_dir / "record.json").exists)
        command.process.wait(DEADLINE_S)
    record = only_record(tmp_path)
    assert record.status == "killed"
    assert record.error is not None
    if number != signal.SIGKILL:
        assert number.name in record.error.message
        assert command.process.returncode == 128 + number
    assert len(list(tmp_path.rglob("spec.json"))) == 1, "no other run was started"


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.release)])
@pytest.mark.parametrize("attempt", range(REPEATS))
def test_a_killed_agent_ends_its_workers(attempt: int, number: signal.Signals, tmp_path: Path) -> None:
    with StartedCommand(tmp_path, *sabotage("hangs", rank=1, at=100), *QUICK, interpreter=True) as command:
        command.until_training()
        family = tree_of(command.process.pid)
        (agent,) = [p for p in family if "distexp.launch.agent" in p.cmdline()]
        agent.send_signal(number)
        assert command.process.wait(DEADLINE_S) == 1
        assert wait_for(lambda: have_ended(family[1:]))
    record = only_record(tmp_path)
    assert (record.status, record.error and record.error.type) == ("killed", number.name)
    assert record.error is not None
    assert record.error.message == f"the agent of node 0 was terminated by {number.name}"


def test_the_killed_parent_of_the_workers_is_named(tmp_path: Path) -> None:
    with StartedCommand(tmp_path, *sabotage("hangs", rank=1, at=100), *QUICK, interpreter=True) as command:
        command.until_training()
        family = tree_of(command.process.pid)
        (shared,) = [child for child in family[0].children() if "distexp.worker.shared_start" in child.cmdline()]
        (parent,) = shared.children()
        parent.kill()
        assert command.process.wait(DEADLINE_S) == 1
        assert wait_for(lambda: have_ended(family[1:]))
    record = only_record(tmp_path)
    assert (record.status, record.error and record.error.type) == ("killed", "SIGKILL")
    assert record.error is not None
    assert "the parent process of the workers on node 0" in record.error.message


def test_the_record_of_a_launcher_and_an_agent_that_died_together_is_written_later(tmp_path: Path) -> None:
    """By status, report and cancel, each on its own copy of the directory."""
    first = tmp_path / "status"
    overrides = (*QUICK, "strategy=single", "train.num_epochs=100000", f"hydra.sweep.dir={first}")
    with StartedCommand(tmp_path, *overrides, interpreter=True) as command:
        assert wait_for(lambda: any(p.stat().st_size for p in first.rglob("metrics.jsonl")))
        family = tree_of(command.process.pid)
        (agent,) = [child for child in family if "distexp.launch.agent" in child.cmdline()]
        for process in (psutil.Process(command.process.pid), agent):
            process.kill()
        command.process.wait()
        assert wait_for(lambda: have_ended(family[1:]))
    assert not (first / "0" / "record.json").exists()
    for name in ("report", "cancel", "foreign", "changed"):
        shutil.copytree(first, tmp_path / name)
    spec = tmp_path / "changed" / "0" / "spec.json"
    spec.write_text(spec.read_text().replace("distexp.strategies.single.Single", "strange.Single"))
    with (tmp_path / "foreign" / "command.json").open("a") as file:
        file.write(" ")  # no longer what this user has started
    for name, code in (("status", 0), ("report", 0), ("cancel", 0), ("foreign", 0), ("changed", 0)):
        done = run_distexp(
            "status" if name in ("foreign", "changed") else name, str(tmp_path / name), cwd=tmp_path, env=ENV
        )
        assert done.returncode == code, done.stderr
    for name in ("foreign", "changed"):
        assert not (tmp_path / name / "0" / "record.json").exists(), "its strategy's code would be imported"
    for name in ("status", "report", "cancel"):
        record = RunRecord.read(tmp_path / name / "0" / "record.json")
        assert record.status == "killed"
        assert record.error is not None
        assert record.error.message == (
            f"its launcher (process {command.process.pid}) and its agent died, as by kill -9 or on a read-only disk"
        )
        assert record.run.duration_s is not None
        assert 0 < record.run.duration_s < DEADLINE_S
        assert [attempt["reason"] for attempt in record.run.attempts] == ["killed"]
        assert not (tmp_path / name / "0" / ".reserve").exists()


def test_cancel_ends_the_runs_of_a_sweep_and_not_all_below_a_folder(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    arguments = (*QUICK, "strategy=single", "train.num_epochs=100000", f"hydra.sweep.dir={sweep}")
    with StartedCommand(tmp_path, *arguments):
        assert wait_for(lambda: any(p.stat().st_size for p in sweep.rglob("metrics.jsonl")))
        refused = run_distexp("cancel", str(tmp_path), cwd=tmp_path, env=ENV)
        assert refused.returncode == 2
        assert refused.stderr.endswith(f"give the directory of a sweep, such as {sweep}\n")
        assert not (sweep / "0" / "record.json").exists()
        done = run_distexp("cancel", str(sweep), cwd=tmp_path, env=ENV)
        assert (done.returncode, done.stdout) == (0, "1 run cancelled\n")
    assert RunRecord.read(sweep / "0" / "record.json").status == "killed"


BETWEEN_RUNS = """
import os, runpy, signal
from distexp.launch.local import runner
runner.CellRunner.run_if_free = lambda self, run: os.kill(os.getpid(), signal.SIGTERM)
runpy.run_module("distexp", run_name="__main__")
"""


def test_sigterm_between_two_runs_prints_how_to_continue(tmp_path: Path) -> None:
    command = [sys.executable, "-c", BETWEEN_RUNS, "--multirun", "train.seed=1,2", *QUICK, "hydra.sweep.dir=sweep"]
    environment = {**os.environ, **ENV, "PYTHONPATH": str(REPOSITORY)}
    options: Any = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "timeout": DEADLINE_S}
    done = subprocess.run(command, check=False, **options)
    assert done.returncode == 143, done.stderr
    assert done.stdout.endswith("2 runs not started; to continue: distexp resume sweep\n")
    assert done.stderr.endswith("distexp: stopped by SIGTERM; no further run is started\n")


@pytest.mark.slow
def test_sigterm_for_a_command_of_several_presets_ends_its_runs(tmp_path: Path) -> None:
    with StartedCommand(
        tmp_path, "experiments", "fsdp/custom_single", "scale=tiny", *QUICK[2:5], "train.num_epochs=1000"
    ) as command:
        assert wait_for(lambda: any(p.stat().st_size for p in tmp_path.rglob("metrics.jsonl")))
        family = tree_of(command.process.pid)
        command.process.send_signal(signal.SIGTERM)
        assert command.process.wait(DEADLINE_S) == 143
        assert wait_for(lambda: have_ended(family))
    assert only_record(tmp_path).status == "killed"


@pytest.mark.parametrize("inodes", [31, pytest.param(35, marks=pytest.mark.release), 39])
def test_a_disk_without_inodes_is_named(inodes: int, tmp_path: Path) -> None:
    """Files that the run creates: the first fails with 31, one of rank 0 with 35, and the end of the run with 39."""
    with small_disk(tmp_path / "disk", "50m", inodes) as disk:
        done = run_distexp(*QUICK, "strategy=ddp", f"hydra.sweep.dir={disk}/sweep", cwd=tmp_path, env=ENV)
        assert done.returncode == 1
        record = only_record(disk)
    assert record.error is not None
    assert record.error.type == "DiskFull"
    assert "has no inodes left, so it takes no new file: delete files, or" in record.error.message


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.release)])
def test_a_file_system_that_becomes_read_only_is_named(strategy: str, tmp_path: Path) -> None:
    endless = ("train.num_epochs=100000", "train.checkpoint_every=20", f"hydra.sweep.dir={tmp_path}/sweep")
    checkpoints = tmp_path / "sweep" / "0" / "checkpoints"
    with StartedCommand(tmp_path, *QUICK, f"strategy={strategy}", *endless) as command:
        assert wait_for(lambda: any(checkpoints.glob("step-*")))
        with read_only(checkpoints):
            assert command.process.wait(DEADLINE_S) == 1
    record = only_record(tmp_path)
    assert record.error is not None
    assert record.error.phase == "save"
    assert f"the disk of {checkpoints} can no longer be written (read-only file system)" in record.error.message


@pytest.mark.parametrize(
    ("problem", "strategy", "reason"),
    [
        ("taken", "ddp", "EADDRINUSE"),
        ("dropped", "ddp", "rank 1 on {} cannot reach rank 0 at 127.0.0.1:"),
        pytest.param("address", "fsdp", "(Name or service not known): check", marks=pytest.mark.release),
        pytest.param("address", "single", "cannot reach rank 0 at no-such-host.invalid:", marks=pytest.mark.slow),
    ],
)
def test_a_rendezvous_that_fails_is_named(problem: str, strategy: str, reason: str, tmp_path: Path) -> None:
    """The ranks give up after half of the hang timeout, before the agents would report a hang of all ranks."""
    (tmp_path / "sitecustomize.py").write_text("import tests.helpers.broken_network")
    path = os.pathsep.join([str(tmp_path), ENV["PYTHONPATH"]])
    overrides = (f"strategy={strategy}", "cluster.hang_timeout_min=0.5", f"hydra.sweep.dir={tmp_path}/sweep")
    done = run_distexp(*QUICK, *overrides, cwd=tmp_path, env={"PYTHONPATH": path, "BROKEN_NETWORK": problem})
    assert done.returncode == 1
    record = only_record(tmp_path)
    assert record.error is not None
    assert record.error.phase == "setup"
    assert record.error.type == ("DistNetworkError" if problem == "taken" else "ConnectionError")
    assert reason.format(socket.gethostname()) in record.error.message
    assert remaining_processes(tmp_path) == []


def test_a_limit_of_the_size_of_files_is_named(tmp_path: Path) -> None:
    short = ("strategy=single", "train.max_steps=4", "train.checkpoint_every=2")
    with StartedCommand(tmp_path, *QUICK, *short) as command:
        # The workers inherit the limit. They start later, because the command imports its modules first.
        resource.prlimit(command.process.pid, resource.RLIMIT_FSIZE, (200 << 10, resource.RLIM_INFINITY))
        assert command.process.wait(DEADLINE_S) == 1
    record = only_record(tmp_path)
    assert record.error is not None
    assert (record.error.type, record.error.phase) == ("DiskFull", "save")
    limit = "would exceed the largest size of a file: raise the limit with ulimit -f unlimited"
    assert record.error.message.endswith(limit), "another disk would have the same limit"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "1m") as folder:
        yield folder


def test_the_record_is_written_to_a_full_disk(disk: Path, tmp_path: Path) -> None:
    overrides = (*QUICK, "strategy=single", "train.num_epochs=100000", f"hydra.sweep.dir={disk}/sweep")
    with StartedCommand(tmp_path, *overrides) as command:
        assert wait_for(lambda: any(disk.rglob("metrics.jsonl")))
        fill(disk)
        assert command.process.wait(DEADLINE_S) == 1
    record = RunRecord.read(disk / "sweep" / "0" / "record.json")
    assert record.status == "failed"
    assert record.error is not None
    assert record.error.type == "DiskFull"
    assert record.error.message.startswith(f"the disk of {disk}/sweep/0 is full (")
    assert list(disk.rglob("*.json.*")) == [], "a torn file was left"


def cgroup_with_memory_limit(mib: int) -> Path | None:
    """Create a memory cgroup of version 1 or 2 and return it; None if the kernel does not allow it."""
    for root, limit, procs in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "cgroup.procs"),
        (Path("/sys/fs/cgroup"), "memory.max", "cgroup.procs"),
    ):
        group = root / f"distexp-test-{os.getpid()}"
        try:
            group.mkdir()
            (group / limit).write_text(str(mib << 20))
        except OSError:
            if group.exists():
                group.rmdir()
            continue
        assert (group / procs).exists()
        return group
    return None


def test_a_worker_killed_by_the_kernel_for_memory_is_oom_host(tmp_path: Path) -> None:
    group = cgroup_with_memory_limit(2500)
    assert group is not None, "cannot create a memory cgroup: run as root on a kernel with the memory controller"
    try:
        script = f"echo $$ > {group}/cgroup.procs; exec {sys.executable} -m distexp " + " ".join(
            (*sabotage("eats_until_killed"), *QUICK, "strategy=single")
        )
        env = {**os.environ, **ENV}
        done = subprocess.run(
            ["bash", "-c", script], check=False, cwd=tmp_path, env=env, capture_output=True, timeout=900
        )
        record = only_record(tmp_path)
        assert (record.status, record.error and record.error.type) == ("oom_host", "OutOfMemoryKilled")
        assert done.returncode == 0
    finally:
        assert wait_for(lambda: removed(group)), "a process is left in the cgroup"


def removed(group: Path) -> bool:
    """Remove a cgroup, and return whether that was possible. Its processes may still be ending."""
    try:
        group.rmdir()
    except OSError:
        return False
    return True
