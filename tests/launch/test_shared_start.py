"""Workers that are forked from a process with the libraries: which runs share it, and how all processes end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

import psutil
import pytest

from distexp.cli.arguments import normalize_arguments
from distexp.config import ConfigError
from distexp.launch import agent
from distexp.launch.agent import LOST_CODE, ForkedWorkers, NotStartedError
from distexp.launch.failures import HANG_CODE
from distexp.launch.local import shared_start
from distexp.launch.local.shared_start import ImportConditions, SharedProcess, SharedStart
from distexp.measure.memory.process_tree import ProcessTree
from distexp.runs.record import RunRecord, RunSpec
from distexp.runs.run_dir import GROUP_LOG
from distexp.system.processes import message_pair, send
from tests.helpers.processes import find_processes, have_ended
from tests.helpers.runs import REPOSITORY, make_spec, run_distexp
from tests.helpers.sabotaged_runs import ENV, QUICK, StartedCommand, sabotage, tree_of, wait_for

SERVER = """
import os, signal, socket, sys
from distexp.worker import shared_start

held = b"1" * (64 * 2**20)

def run_group(run_dir, node, address, port):
    print("in the group", flush=True)
    if port:  # Its exit code.
        return port
    signal.pause()

shared_start.run_group = run_group
signal.signal(signal.SIGTERM, signal.SIG_IGN)
shared_start.GroupServer(socket.socket(fileno=int(sys.argv[1]))).serve()
"""
SLEEP = 0


class Server:
    """A shared process whose groups do not train, with the socket of its launcher."""

    def __init__(self, control: socket.socket, process: subprocess.Popen[bytes], folder: Path) -> None:
        self.control, self.process, self.log = control, process, folder / "log"

    def connect(self) -> int:
        """Return a connection, as the launcher gives it to an agent."""
        ours, theirs = message_pair()
        with theirs:
            send(self.control, {"others": [1, 2]}, [theirs.fileno()])
        return ours.detach()

    def start(self, code: int) -> ForkedWorkers:
        """Start a group that ends with a code, or sleeps."""
        with self.log.open("w") as output:
            return ForkedWorkers.start(self.connect(), ("run", "0", "127.0.0.1", str(code)), output)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with started_server(tmp_path_factory.mktemp("server")) as server:
        yield server


@contextmanager
def started_server(folder: Path) -> Iterator[Server]:
    ours, theirs = message_pair()
    with theirs:
        command = [sys.executable, "-c", SERVER, str(theirs.fileno())]
        process = subprocess.Popen(command, cwd=REPOSITORY, pass_fds=[theirs.fileno()])
    try:
        with ours:
            yield Server(ours, process, folder)
    finally:
        process.kill()
        process.wait()


def test_a_group_is_watched_as_a_child_process_and_leaves_nothing(server: Server) -> None:
    assert [server.start(code).wait() for code in (1, 7)] == [1, 7]
    assert "in the group" in server.log.read_text()
    sleeping = server.start(SLEEP)
    assert sleeping.poll() is None
    assert os.getsid(sleeping.pid) == sleeping.pid
    sleeping.send_signal(signal.SIGTERM)
    assert sleeping.wait() == -signal.SIGTERM, "it does not ignore the signal, as its server does"
    sleeping.close()
    abandoned = server.start(SLEEP)
    process = psutil.Process(abandoned.pid)
    abandoned.close()
    assert wait_for(lambda: not process.is_running()), "a group dies with its agent"


def test_many_groups_leak_no_files_and_no_processes(server: Server) -> None:
    shared = psutil.Process(server.process.pid)
    used = set()
    for _ in range(40):
        group = server.start(3)
        assert group.wait() == 3
        group.close()
        used.add((shared.num_fds(), len(shared.children())))
    assert wait_for(lambda: not shared.children())
    assert max(files for files, _ in used) <= min(files for files, _ in used) + 4
    assert max(children for _, children in used) <= 2, "the last one, and the one before, which is just reaped"


def test_the_shared_process_ends_with_the_launcher_after_the_last_agent(tmp_path: Path) -> None:
    with started_server(tmp_path) as server:
        group = server.start(SLEEP)
        server.control.close()
        group.kill()
        assert group.wait() == -signal.SIGKILL, "the server has waited for its agent"
        group.close()
        assert server.process.wait(300) == 0


def test_the_death_of_the_shared_process_is_the_death_of_its_groups(tmp_path: Path) -> None:
    with started_server(tmp_path) as server:
        group = server.start(SLEEP)
        process, waiting = psutil.Process(group.pid), server.connect()
        server.process.kill()
        assert group.wait() == -signal.SIGKILL
        assert wait_for(lambda: have_ended([process]))
        with server.log.open("w") as output, pytest.raises(NotStartedError) as raised:
            ForkedWorkers.start(waiting, ("run", "0", "127.0.0.1", "0"), output)
        assert raised.value.code == LOST_CODE


def test_a_stopped_shared_process_does_not_stop_the_end_of_a_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "REPORT_S", 0.2)
    with started_server(tmp_path) as server:
        group = server.start(SLEEP)
        os.kill(group.server, signal.SIGSTOP)
        try:
            os.kill(group.pid, signal.SIGKILL)
            assert group.wait() == -signal.SIGKILL
        finally:
            os.kill(group.server, signal.SIGCONT)


def test_the_limits_of_a_run_end_the_wait_for_the_imports() -> None:
    ours, theirs = message_pair()
    with theirs, Path(os.devnull).open("w") as output, pytest.raises(NotStartedError) as raised:
        ForkedWorkers.start(ours.detach(), ("run", "0", "127.0.0.1", "0"), output, lambda: HANG_CODE)
    assert raised.value.code == HANG_CODE


def test_memory_of_a_forked_group_includes_the_pages_it_shares(server: Server) -> None:
    group = server.start(SLEEP)
    forked, tree = ProcessTree(group.pid), ProcessTree(group.server)
    forked.include(group.pid, group.server)
    alone, found = tree.read(), forked.read()
    assert alone.memory is not None
    assert found.memory is not None
    assert found.pids == {group.pid}, "the shared process is no part of the run"
    assert alone.memory.mib < 64 < found.memory.mib < 2 * 64
    group.kill()
    assert group.wait() == -signal.SIGKILL
    assert forked.read().memory is None


def test_runs_share_a_start_up_only_if_their_imports_are_equal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    common = ("cluster.device=cpu", "cluster.workers_per_node=2", "strategy=ddp")
    first = ImportConditions.of(make_spec(*common), 0)
    for overrides in (("train.seed=7", "train.max_steps=3"), ("sharding=full_shard",)):
        assert ImportConditions.of(make_spec(*common[:2], *overrides), 0) == first
    changes = {
        "OMP_NUM_THREADS": ("cluster.cpus_per_worker=3",),
        "TORCH_LOGS": ("+cluster.environment.TORCH_LOGS=secret",),
        "the libraries": ("strategy=deepspeed",),
    }
    for change, overrides in changes.items():
        other = ImportConditions.of(make_spec(*common[:2], *overrides), 0)
        assert other != first
        assert other.describe_change(first) == change
    monkeypatch.chdir(tmp_path)
    assert ImportConditions.of(make_spec(*common), 0).describe_change(first) == "the working directory"


@pytest.fixture
def sharing(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[SharedStart, list[str]]]:
    """Yield runs that share a start-up, and their notes. The shared processes import nothing."""

    def start_idle(conditions: ImportConditions, spec: RunSpec, weights: int | None) -> SharedProcess:
        assert weights is not None
        assert os.fstat(weights).st_size == 0
        ours, theirs = message_pair()
        receivers.append(theirs)
        process = subprocess.Popen(["sleep", "600"])
        processes.append(process)
        return SharedProcess(conditions, process, ours, StringIO("what it printed"))

    receivers: list[socket.socket] = []
    processes: list[subprocess.Popen[bytes]] = []
    notes: list[str] = []
    monkeypatch.setattr(shared_start, "_start", start_idle)
    with SharedStart() as started:
        started.note = notes.append
        yield started, notes
    for receiver in receivers:
        receiver.close()
    assert all(process.poll() is not None for process in processes), "all shared processes have ended"


def used_by(sharing: SharedStart, *overrides: str) -> tuple[int, list[int]]:
    """Connect a run; return the id of its shared process, and the ids of all shared processes."""
    sharing.connect(make_spec("cluster.device=cpu", "cluster.workers_per_node=2", *overrides), 0).close()
    found = [shared.process.pid for shared in sharing._nodes[0].processes]
    return found[-1], sorted(found)


def test_a_search_that_alternates_between_strategies_keeps_their_processes(
    sharing: tuple[SharedStart, list[str]],
) -> None:
    started, notes = sharing
    ddp, deepspeed = (used_by(started, f"strategy={name}")[0] for name in ("ddp", "deepspeed"))
    again = [used_by(started, f"strategy={name}") for name in ("ddp", "deepspeed", "fsdp")]
    assert [pid for pid, _ in again] == [ddp, deepspeed, ddp]
    assert again[-1][1] == sorted({ddp, deepspeed})
    assert notes == ["note: a run cannot share the imports of an earlier one. Different: the libraries"]


def test_the_oldest_and_useless_shared_processes_end(
    sharing: tuple[SharedStart, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, _ = sharing
    pids = [used_by(started, f"cluster.cpus_per_worker={count}")[0] for count in range(1, 7)]
    assert used_by(started, "cluster.cpus_per_worker=6") == (pids[-1], sorted(pids[-shared_start.KEPT :]))
    monkeypatch.setattr(shared_start, "MIN_FREE_MIB", 1e9)
    pid, left = used_by(started, "cluster.cpus_per_worker=9")
    assert left == [pid], "with little free memory a node keeps one process"
    monkeypatch.setattr(shared_start, "MIN_FREE_MIB", 0)
    assert len(used_by(started, "cluster.cpus_per_worker=1")[1]) == 2
    monkeypatch.chdir(tmp_path)
    pid, left = used_by(started, "cluster.cpus_per_worker=1")
    assert left == [pid], "no later run starts in the other folder"


def test_a_killed_process_is_replaced_and_its_death_is_that_of_the_run(
    sharing: tuple[SharedStart, list[str]], tmp_path: Path
) -> None:
    started, notes = sharing
    first, _ = used_by(started)
    log = GROUP_LOG.path(tmp_path, 0)
    log.parent.mkdir(parents=True)
    log.write_text("")
    assert started.true_codes(tmp_path, {0: LOST_CODE}) == {0: LOST_CODE}, "only the workers were killed"
    os.kill(first, signal.SIGSEGV)
    assert wait_for(lambda: started.true_codes(tmp_path, {0: LOST_CODE}) == {0: 128 + signal.SIGSEGV})
    assert started.true_codes(tmp_path, {0: 1}) == {0: 1}
    assert log.read_text().startswith("what it printed")
    for _ in range(2):
        second, every = used_by(started)
        assert every == [second] != [first]
    assert notes == ["note: a run cannot share the imports of an earlier one. Their process has ended: signal 11"]


def test_the_removed_key_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match=r"sweep\.shared_start cannot be set: leave it out, because"):
        normalize_arguments(["sweep.shared_start=true"])


SHARED = ("--multirun", "strategy=single", "hydra.sweep.dir=out")


@pytest.mark.slow
def test_runs_that_share_a_start_up_have_the_same_losses_and_threads(tmp_path: Path) -> None:
    overrides = (*QUICK, "dataset._target_=failing_runs.reports_threads", "train.seed=2")
    done = run_distexp(*SHARED, "train.max_steps=2,3", *overrides, cwd=tmp_path, env=ENV)
    assert done.returncode == 0, done.stdout + done.stderr
    alone = run_distexp(
        "strategy=single", "train.max_steps=3", *overrides, "hydra.run.dir=alone", cwd=tmp_path, env=ENV
    )
    assert alone.returncode == 0, alone.stdout + alone.stderr
    runs = [tmp_path / "out/0", tmp_path / "out/1", tmp_path / "alone"]
    records = [RunRecord.read(run / "record.json") for run in runs]
    assert [record.status for record in records] == ["completed"] * 3
    assert records[1].metrics.train_losses == records[2].metrics.train_losses
    assert records[0].metrics.train_losses != records[1].metrics.train_losses
    assert _threads(runs[1]) == _threads(runs[2])
    assert "OMP_NUM_THREADS" in "".join(_threads(runs[1]))
    servers = {(run / "logs/node0/workers.log").read_text().splitlines()[0] for run in runs[:2]}
    assert len(servers) == 1, "both were forked from one process"
    assert "forked from process" in servers.pop()
    weights = ["random weights: from memory" in (run / "logs/node0/rank0.log").read_text() for run in runs]
    assert weights == [False, True, False], "the second run of the sweep has those of the first"
    assert not find_processes(str(tmp_path))


def _threads(run: Path) -> list[str]:
    lines = (run / "logs/node0/rank0.log").read_text().splitlines()
    return [line for line in lines if "threads" in line.lower() or "OMP_" in line]


@pytest.mark.slow
def test_runs_replace_a_killed_shared_process_and_none_outlives_the_launcher(tmp_path: Path) -> None:
    overrides = (*SHARED, "train.seed=1,2", *sabotage("hangs", at=100), *QUICK)
    with StartedCommand(tmp_path, *overrides, interpreter=True) as command:
        first = command.until_training()
        children = psutil.Process(command.process.pid).children()
        (shared,) = [child for child in children if "distexp.worker.shared_start" in child.cmdline()]
        family = tree_of(command.process.pid)[1:]
        shared.kill()
        second = first.parent / "1"
        assert wait_for(lambda: (second / "metrics.jsonl").exists() and bool((second / "metrics.jsonl").read_text()))
        assert RunRecord.read(first / "record.json").status == "killed"
        assert have_ended(family)
        family = tree_of(command.process.pid)[1:]
        assert [p for p in family if "distexp.worker.shared_start" in p.cmdline()], "another one has replaced it"
        command.process.kill()
        assert wait_for(lambda: have_ended(family))
