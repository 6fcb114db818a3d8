"""The record at the end of a run, from rank 0's result and the exit codes of the agents."""

from __future__ import annotations

import errno
import json
import resource
import signal
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from distexp import exceptions
from distexp.checkpoints.folder import checkpoint_dir, tmp_dir
from distexp.exceptions import name_limit
from distexp.launch import failures, run_dirs
from distexp.launch.agent import write_start_error
from distexp.launch.failures import HANG_CODE, SIGNAL_OFFSET, STOPPED_CODE
from distexp.launch.outcome import finalize_dead_run, finalize_run, invalid_record, start_attempt
from distexp.launch.slurm.client import JobState
from distexp.launch.slurm.status import write_missing_record
from distexp.runs.attempts import NO_RECORD, write_error_file
from distexp.runs.metrics import Metrics
from distexp.runs.record import RunRecord, RunSpec
from distexp.runs.record_sections import RunError, package_version
from distexp.runs.run_dir import DISK_RESERVE, GROUP_LOG, RANK_ERROR, RANK_LOG, RECORD, RESULT, WORKER_EXITS
from distexp.system.files import write_json
from distexp.worker.rank import write_outcome
from tests.helpers.runs import make_spec
from tests.helpers.small_disk import fill, small_disk


@pytest.fixture
def spec() -> RunSpec:
    """Return the spec of a run of one worker, whose environment has a variable of NCCL."""
    overrides = ("strategy=single", "cluster.device=cpu", "measure.enabled=false")
    return make_spec(*overrides, "+cluster.environment.NCCL_ALGO=Ring")


def write_result(spec: RunSpec, directory: Path, status: str = "completed") -> None:
    """Write what rank 0 writes at the end of a run."""
    RunRecord(status, spec.run, asdict(spec.config), metrics=Metrics(train_loss=1.5)).write_result(directory)


@pytest.mark.parametrize("status", ["completed", "preempted"])
def test_the_result_becomes_the_record(status: str, spec: RunSpec, tmp_path: Path) -> None:
    start_attempt(spec, tmp_path)
    write_result(spec, tmp_path, status)
    assert not (tmp_path / RECORD).exists(), "only the launcher writes the record"
    record = finalize_run(spec, tmp_path, {0: 0}, time.time())
    assert RunRecord.read(tmp_path / RECORD) == record
    assert (record.status, record.metrics.train_loss) == (status, 1.5)
    assert [attempt["reason"] for attempt in record.run.attempts] == [status]
    assert {path.name for path in tmp_path.iterdir()} == {"spec.json", RECORD}


@pytest.mark.parametrize(
    ("codes", "stopped", "expected"),
    [
        ({0: 0, 1: HANG_CODE}, None, ("failed", "Hang")),
        ({0: STOPPED_CODE}, "stopped by SIGTERM", ("killed", "Stopped")),
        ({0: STOPPED_CODE}, None, ("killed", "SIGTERM")),
        ({0: STOPPED_CODE, 1: 1}, None, ("failed", "WorkerDied")),
        ({0: 1}, None, ("failed", "WorkerDied")),
    ],
)
def test_a_failed_agent_outweighs_the_result(
    codes: dict[int, int], stopped: str | None, expected: tuple[str, str], spec: RunSpec, tmp_path: Path
) -> None:
    start_attempt(spec, tmp_path)
    write_result(spec, tmp_path)
    record = finalize_run(spec, tmp_path, codes, time.time(), stopped)
    assert record.error is not None
    assert (record.status, record.error.type) == expected
    assert not (tmp_path / RESULT).exists()
    assert not (tmp_path / DISK_RESERVE).exists()


def test_a_limit_of_the_system_is_named_also_if_only_the_log_has_it(spec: RunSpec, tmp_path: Path) -> None:
    start_attempt(spec, tmp_path)
    log = GROUP_LOG.path(tmp_path, 0)
    log.parent.mkdir(parents=True)
    log.write_text("Traceback ...\nBlockingIOError: [Errno 11] Resource temporarily unavailable\n\n")
    error = finalize_run(spec, tmp_path, {0: 1}, time.time()).error
    assert error is not None
    assert error.message.endswith("Resource temporarily unavailable: " + exceptions.PROCESSES)
    write_start_error(tmp_path, 0, OSError(errno.EMFILE, "Too many open files"))
    error = finalize_run(spec, tmp_path, {0: 1}, time.time()).error
    assert error is not None
    assert error.message == "[Errno 24] Too many open files: raise their limit (ulimit -n)"


def test_a_printed_error_that_quotes_a_full_memory_is_no_full_memory(spec: RunSpec, tmp_path: Path) -> None:
    start_attempt(spec, tmp_path)
    log = GROUP_LOG.path(tmp_path, 0)
    log.parent.mkdir(parents=True)
    log.write_text("Traceback ...\nValueError: the word 'out of memory' is not in the vocabulary\n")
    assert finalize_run(spec, tmp_path, {0: 1}, time.time()).status == "failed"


@pytest.mark.parametrize(
    ("code", "log"),
    [
        (SIGNAL_OFFSET + signal.SIGSEGV, ""),
        (1, "OpenBLAS error: Memory allocation still failed after 10 retries, giving up.\n"),
        (1, "Traceback ...\nMemoryError\n"),
        (1, "terminate called after throwing an instance of 'std::bad_alloc'\n"),
    ],
)
def test_a_limit_of_the_address_space_is_named(
    code: int, log: str, spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hint = "the address space is limited (ulimit -v 3000000): raise the limit, or use a shell without it"
    for limit, is_named in ((resource.RLIM_INFINITY, False), (3_000_000 * 1024, True)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        start_attempt(spec, tmp_path)
        path = GROUP_LOG.path(tmp_path, 0)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(log)
        record = finalize_run(spec, tmp_path, {0: code}, time.time())
        assert record.status == ("oom_host" if log else "failed")
        assert record.error is not None
        assert record.error.message.endswith(f": {hint}") == is_named


@pytest.mark.parametrize(
    ("limit", "hint"), [(900_000 * 1024, "ulimit -d 900000"), (resource.RLIM_INFINITY, "ulimit -u")]
)
def test_a_limit_of_the_data_is_named_for_a_thread(limit: int, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {resource.RLIMIT_DATA: limit}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits.get(kind, resource.RLIM_INFINITY),) * 2)
    assert hint in name_limit("RuntimeError: can't start new thread")


def test_the_limit_of_files_of_the_machine_is_not_that_of_a_process() -> None:
    message = "[Errno 23] Too many open files in system"
    hint = "this machine has as many as it allows (sysctl fs.file-max): end other programs"
    assert name_limit(name_limit(message)) == f"{message}: {hint}"


@pytest.mark.parametrize("kills", [0, 1])
def test_a_data_loader_killed_by_the_kernel_for_memory_is_oom_host(
    kills: int, spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counters = {"cgroup": 3}
    monkeypatch.setattr(failures, "oom_kills", lambda: dict(counters))
    start_attempt(spec, tmp_path)
    failures.save_counters(tmp_path)
    counters["cgroup"] += kills
    lost = RunError("RuntimeError", "DataLoader worker (pid(s) 7) exited unexpectedly", "train", 0)
    write_error_file(RANK_ERROR.path(tmp_path, 0, 0), lost)
    record = finalize_run(spec, tmp_path, {0: 1}, time.time())
    assert record.error is not None
    assert (record.status, record.error.type, record.error.message) == (
        ("oom_host", "OutOfMemoryKilled", "the kernel ran out of memory and killed a data loader process of rank 0")
        if kills
        else ("failed", lost.type, lost.message)
    )


@pytest.mark.parametrize(
    ("number", "name"),
    [(signal.SIGILL, "SIGILL"), (signal.SIGRTMIN, "SIGRTMIN"), (signal.SIGRTMIN + 1, "SIGRTMIN+1"), (33, "signal 33")],
)
def test_a_signal_without_a_name_in_python_is_the_cause(number: int, name: str, spec: RunSpec, tmp_path: Path) -> None:
    start_attempt(spec, tmp_path)
    WORKER_EXITS.path(tmp_path, 0).parent.mkdir(parents=True)
    ends = [{"rank": 1, "code": -number, "stopped": False, "unix_time_s": 1.0}]
    write_json(WORKER_EXITS.path(tmp_path, 0), ends)
    for codes, process in (({0: 1}, "rank 1"), ({0: -number}, "the agent of node 0")):
        record = finalize_run(spec, tmp_path, codes, time.time())
        assert record.error is not None
        assert (record.status, record.error.type) == ("failed", name)
        assert record.error.message == f"{process} was terminated by {name}"


def test_an_exit_code_above_all_signals_is_no_signal(spec: RunSpec, tmp_path: Path) -> None:
    start_attempt(spec, tmp_path)
    error = finalize_run(spec, tmp_path, {0: 255}, time.time()).error
    assert error is not None
    assert error.type == "WorkerDied"


def test_a_run_whose_cause_cannot_be_determined_has_a_record(spec: RunSpec, tmp_path: Path) -> None:
    start_attempt(spec, tmp_path)
    WORKER_EXITS.path(tmp_path, 0).parent.mkdir(parents=True)
    WORKER_EXITS.path(tmp_path, 0).write_text("{")
    record = finalize_run(spec, tmp_path, {0: 1}, time.time())
    assert RunRecord.read(tmp_path / RECORD).error == record.error
    assert record.error is not None
    assert record.error.message.startswith("the run failed, and its cause cannot be determined (Expecting")


def test_workers_that_skip_different_layers_get_the_key_that_helps(spec: RunSpec, tmp_path: Path) -> None:
    start_attempt(spec, tmp_path)
    RANK_LOG.path(tmp_path, 0, 1).parent.mkdir(parents=True)
    ends = [{"rank": 1, "code": -6, "stopped": False, "unix_time_s": 1.0}]
    write_json(WORKER_EXITS.path(tmp_path, 0), ends)
    log = "[enforce fail at gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 55552 vs 8."
    RANK_LOG.path(tmp_path, 0, 1).write_text(log)
    error = finalize_run(spec, tmp_path, {0: 1}, time.time()).error
    assert error is not None
    assert error.message.startswith("rank 1 was terminated by SIGABRT: a worker sent a tensor of another size")
    assert error.message.endswith(" ddp.find_unused_parameters=true")


def test_the_possible_causes_of_a_launcher_that_died_before_an_agent_started(spec: RunSpec, tmp_path: Path) -> None:
    start_attempt(spec, tmp_path)
    finalize_dead_run(tmp_path, 7, ())
    record = RunRecord.read(tmp_path / RECORD)
    assert record.error is not None
    assert (record.status, record.error.message) == (
        "killed",
        "its launcher (process 7) died before an agent started, as by kill -9 or on a full disk",
    )


def test_the_result_of_an_earlier_attempt_is_archived(spec: RunSpec, tmp_path: Path) -> None:
    start_attempt(spec, tmp_path)
    write_result(spec, tmp_path)
    start_attempt(spec, tmp_path)
    record = finalize_run(spec, tmp_path, {0: 0}, time.time())
    assert record.status == "failed"
    assert [attempt["reason"] for attempt in record.run.attempts] == [NO_RECORD, "failed"]
    assert (tmp_path / "attempts" / "0" / RESULT).exists()


def test_a_training_with_an_impossible_number_is_completed_without_it(
    spec: RunSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start_attempt(spec, tmp_path)
    breakdown = [{"rank": 0, "step_ms": 1.0, "matmul_ms": 2.0}]
    metrics = Metrics(train_loss=1.5, train_runtime=-1.0, communication={"share": -0.1}, step_breakdown=breakdown)
    trained = RunRecord("completed", spec.run, asdict(spec.config), metrics=metrics)
    write_outcome(trained, tmp_path, launched=True)
    finalize_run(spec, tmp_path, {0: 0}, time.time())
    record = RunRecord.read(tmp_path / RECORD)
    assert record.status == "completed"
    assert record.metrics == Metrics(train_loss=1.5, communication={"share": None})
    assert "metrics.train_runtime=-1.0 is too small" in capsys.readouterr().err
    assert json.loads((tmp_path / RESULT).read_text())["metrics"]["train_runtime"] == -1.0, "nothing is lost"


def test_a_result_that_cannot_be_read_is_named_and_kept(spec: RunSpec, tmp_path: Path) -> None:
    start_attempt(spec, tmp_path)
    (tmp_path / RESULT).write_text("{}")
    error = finalize_run(spec, tmp_path, {0: 0}, time.time()).error
    assert error is not None
    assert error.type == "UnreadableResult"
    assert error.message.startswith("the training has ended, but its result cannot be read: ")
    assert (tmp_path / RESULT).exists()


def test_a_completed_training_survives_a_full_disk(spec: RunSpec, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        run_dir = disk / "run"
        run_dir.mkdir()
        start_attempt(spec, run_dir)
        fill(disk)
        trained = RunRecord("completed", spec.run, asdict(spec.config), metrics=Metrics(train_loss=1.5))
        write_outcome(trained, run_dir, launched=True)
        assert not (run_dir / DISK_RESERVE).exists(), "its space is used"
        record = finalize_run(spec, run_dir, {0: 0}, time.time())
        assert RunRecord.read(run_dir / RECORD) == record
        assert (record.status, record.metrics.train_loss) == ("completed", 1.5)
        assert {path.name for path in run_dir.iterdir()} == {"spec.json", RECORD}


def test_an_unfinished_checkpoint_is_removed_and_an_older_one_stays(spec: RunSpec, tmp_path: Path) -> None:
    start_attempt(spec, tmp_path)
    for folder in (checkpoint_dir(tmp_path, 1), tmp_dir(tmp_path, 2)):
        folder.mkdir(parents=True)
        (folder / "weights").write_text("weights")
    finalize_run(spec, tmp_path, {0: 1}, time.time())
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    assert (checkpoint_dir(tmp_path, 1) / "weights").exists()


def test_failed_and_invalid_runs_have_the_versions_of_the_software(spec: RunSpec, tmp_path: Path) -> None:
    start_attempt(spec, tmp_path)
    failed = finalize_run(spec, tmp_path, {0: 1}, time.time()).environment
    invalid = invalid_record(spec.run, {}, ["no"]).environment
    assert failed is not None
    assert invalid is not None
    for environment in (failed, invalid):
        assert environment.torch == torch.__version__
        assert environment.transformers == package_version("transformers")
        assert environment.deepspeed == package_version("deepspeed")
    assert failed.variables["NCCL_ALGO"] == "Ring"
    assert (failed.cuda, failed.gpu_name) == (None, None), "the run is on the CPU"


@pytest.mark.parametrize(("result", "status"), [(True, "completed"), (False, "killed")])
def test_a_job_that_died_after_the_training_keeps_its_result(
    result: bool, status: str, spec: RunSpec, tmp_path: Path
) -> None:
    directory = tmp_path / "0"
    directory.mkdir()
    start_attempt(spec, directory, "7_0", ["node1"])
    if result:
        write_result(spec, directory)
    entry = run_dirs.Entry(0, spec.run.id, "0", "7_0", "submitted")
    job = JobState("NODE_FAIL", nodes="node1")
    assert (directory / DISK_RESERVE).exists()
    assert write_missing_record(tmp_path, entry, job).status == status
    assert not (directory / DISK_RESERVE).exists()
    raw = json.loads((directory / RECORD).read_text())
    assert [attempt["reason"] for attempt in raw["run"]["attempts"]] == [status]
