"""Tests of the process that traces: a real one, with tiny models."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn, cast

import psutil
import pytest

from distexp.exceptions import InterruptedRunError
from distexp.launch.memory_check import predicted_change
from distexp.plan import verdict
from distexp.plan.estimate import Estimate
from distexp.plan.planner import Planner, TraceServer, cache_path, started_server
from distexp.plan.trace import server as plan_server
from distexp.plan.trace.server import FALLBACK_S, TraceJob, continue_job
from distexp.system.cgroups import Gpu
from distexp.system.files import read_json
from distexp.system.processes import handle_signals
from tests.helpers.runs import resolve_cell
from tests.helpers.sabotaged_runs import wait_for

NOW_S = 1000.0


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTEXP_CACHE", str(tmp_path))


def refuse(*arguments: object) -> NoReturn:
    raise AssertionError("a cached estimate was traced again")


def test_estimates_come_from_a_process_and_then_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = ("command=plan", "strategy=single", "train.micro_batch_size=2")
    configs = [resolve_cell(*tiny), resolve_cell(*tiny, "model.num_layers=1"), resolve_cell(*tiny)]
    advanced = []
    children = psutil.Process().children(recursive=True)  # of other tests, such as those of torch's compiler
    with Planner() as planner:
        first, shallow, again = planner.estimate(configs, lambda: advanced.append(1))
    assert isinstance(first, Estimate), first
    assert isinstance(shallow, Estimate), shallow
    assert len(advanced) == 2, "equal configurations are traced once"
    assert first is again
    assert first.traced
    assert shallow.parts["parameters"] < first.parts["parameters"]
    assert (first.peak_reserved_mib or 0) >= (first.peak_allocated_mib or 0) > sum(first.parts.values()) * 0.99
    assert set(first.curve["phase"]) >= {"forward", "backward"}
    left = [process for process in psutil.Process().children(recursive=True) if process not in children]
    assert left == [], "the process was ended"
    monkeypatch.setattr(TraceServer, "trace", refuse)
    with Planner() as planner:
        assert planner.estimate(configs) == [first, shallow, first]


def test_estimate_without_a_trace_is_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = [Estimate(notes=["not traced: no network"]), Estimate(peak_allocated_mib=1.0)]
    left = list(outcomes)
    monkeypatch.setattr(Planner, "trace", lambda _, configs, advance: [left.pop(0) for _ in configs])
    config = resolve_cell("command=plan", "strategy=single")
    with Planner() as planner:
        assert [planner.estimate([config])[0] for _ in range(3)] == [*outcomes, outcomes[1]]


def test_simulated_nodes_share_no_estimate_with_nodes_of_slurm() -> None:
    """On CPUs the former are processes of one machine, and their memory counts together."""
    words = ("command=plan", "strategy=ddp", "cluster.device=cpu", "cluster.nodes=2", "cluster.workers_per_node=2")
    assert cache_path(resolve_cell(*words)) != cache_path(resolve_cell(*words, "cluster=slurm"))


def test_all_look_for_an_estimate_under_the_gpu_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A V100 has a smaller cuBLAS workspace, so its estimates are in other files."""
    v100 = Gpu(0, "GPU-1", "Tesla V100-SXM2-16GB", 16_384.0)
    config = resolve_cell("command=plan", "strategy=single", "train.micro_batch_size=4")
    elsewhere = cache_path(config)
    monkeypatch.setattr(verdict, "visible_gpus", lambda: (v100,))
    estimate = Estimate(step_mib=1_000.0, peak_allocated_mib=900.0)
    monkeypatch.setattr(Planner, "trace", lambda _, configs, advance: [estimate for _ in configs])
    with Planner() as planner:
        assert planner.count_missing([config]) == 1
        assert planner.estimate([config, replace(config, train=replace(config.train, logits="targets"))])
        assert planner.count_missing([config]) == 0
        assert planner.cached(config) == estimate
    assert cache_path(config) != elsewhere
    assert predicted_change(config, 15_000.0) == ["train.logits=targets"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_leaves_no_process_and_no_folder(number: signal.Signals) -> None:
    with handle_signals(signal.SIG_DFL, number):  # a test that nohup has started ignores SIGHUP
        with pytest.raises(InterruptedRunError), started_server(1) as server:
            signal.raise_signal(number)
        assert server.process.poll() is not None
        assert not server.folder.exists()
        assert signal.getsignal(number) is signal.SIG_DFL


def test_ignored_signal_stays_ignored() -> None:
    with handle_signals(signal.SIG_IGN, signal.SIGHUP), started_server(1):
        signal.raise_signal(signal.SIGHUP)


@dataclass
class EndedProcess:
    """A process that was started, seen from the one that waits for it."""

    exitcode: int | None = None
    pid: int = 0

    def is_alive(self) -> bool:
        return self.exitcode is None

    def join(self) -> None:
        """Wait until a process that was killed has ended."""
        if self.exitcode is None:
            self.exitcode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.fixture
def _stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the clock of the deadlines."""
    monkeypatch.setattr(plan_server, "time", SimpleNamespace(monotonic=lambda: NOW_S))


def job(process: EndedProcess, tmp_path: Path, seconds: float, reason: str = "") -> TraceJob:
    """Return a job whose deadline is in some seconds of the stopped clock."""
    config = resolve_cell("command=plan", "strategy=single")
    path = tmp_path / "result0.json"
    return TraceJob(cast("BaseProcess", process), config, path, NOW_S + seconds, reason)


def start(target: object, arguments: tuple[object, ...]) -> BaseProcess:
    """Start nothing: a process that is forked here, where torch has threads, may wait forever."""
    return cast("BaseProcess", EndedProcess())


@pytest.mark.usefixtures("_stopped_clock")
@pytest.mark.parametrize(
    ("number", "cause"), [(signal.SIGKILL, "out of memory"), (signal.SIGSEGV, "a custom operator reads the memory")]
)
def test_trace_that_dies_is_followed_by_the_estimate_by_arithmetic(
    tmp_path: Path, number: signal.Signals, cause: str
) -> None:
    left = continue_job(job(EndedProcess(-number), tmp_path, 1e6), start)
    assert left is not None
    assert f"ended by {signal.Signals(number).name}, possibly because" in left.reason
    assert cause in left.reason
    assert not left.path.exists()
    assert continue_job(left, refuse) is left, "the fallback runs"


@pytest.mark.usefixtures("_stopped_clock")
def test_late_trace_is_killed_with_its_processes(tmp_path: Path) -> None:
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"1\n"
        (child,) = psutil.Process(parent.pid).children()
        left = continue_job(job(EndedProcess(pid=parent.pid), tmp_path, -1.0), start)
        assert parent.stdout.read() == b"", "the pipe is closed once the child has ended too"
        assert wait_for(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    assert left is not None
    assert left.reason.startswith("it took longer than plan.timeout_s=900: set a larger one")
    assert left.deadline == NOW_S + FALLBACK_S


@pytest.mark.usefixtures("_stopped_clock")
@pytest.mark.parametrize("exit_code", [1, -signal.SIGKILL])
def test_estimate_by_arithmetic_that_fails_leaves_the_reason(tmp_path: Path, exit_code: int) -> None:
    assert continue_job(job(EndedProcess(exit_code), tmp_path, 1e6, "it took too long"), refuse) is None
    assert read_json(tmp_path / "result0.json") == {"error": "it took too long"}


@pytest.mark.usefixtures("_stopped_clock")
def test_job_with_a_result_is_done(tmp_path: Path) -> None:
    (tmp_path / "result0.json").write_text("{}")
    assert continue_job(job(EndedProcess(0), tmp_path, 1e6), refuse) is None


@pytest.mark.slow
def test_prediction_that_takes_too_long_is_stopped() -> None:
    config = resolve_cell("command=plan", "strategy=single", "plan.timeout_s=0.001")
    with started_server(1) as server:
        (outcome,) = server.trace([config], lambda: None)
    assert isinstance(outcome, Estimate)
    assert not outcome.traced
    assert outcome.parts["parameters"] > 0
    assert outcome.notes[0] == (
        "not traced: it took longer than plan.timeout_s=0.001: set a larger one, or plan.timeout_s=null for no limit"
    )


def test_process_that_dies_is_reported() -> None:
    with started_server(1) as server:
        os.kill(server.process.pid, signal.SIGKILL)
        (outcome,) = server.trace([resolve_cell("command=plan")], lambda: None)
    assert outcome == "the process that traces failed: it wrote no message"
