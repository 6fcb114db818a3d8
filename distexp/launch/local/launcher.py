"""Launcher for this machine: runs start one after the other, each with an agent for every simulated node."""

from __future__ import annotations

import os
import signal
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from distexp.config import Config
from distexp.config.overrides import suggest_command
from distexp.guard.config_files import is_own_file
from distexp.launch.launcher import CancelError, Cancelled, Launcher, Sweep, TrialLauncher, trusted_by_user
from distexp.resolve.resources import needs_one_worker
from distexp.runs.attempts import ProcessIdentity, read_agent_process, read_launcher_process
from distexp.runs.record import ExistingRun
from distexp.runs.run_dir import COMMAND, LAUNCHER_LOG
from distexp.runs.run_state import RunState, dead_launcher, local_state
from distexp.system.cgroups import cpu_count, visible_gpus
from distexp.system.processes import handle_signals, wait_until

if TYPE_CHECKING:
    from hydra.core.utils import JobReturn

CPU_WORKERS = 2


class LocalLauncher(Launcher):
    """Launcher of ``cluster=local``. A subclass may start the agents in another way (``agent_command``)."""

    runs_here = True

    def agent_command(self, config: Config, arguments: Sequence[str]) -> list[str]:
        """Return the command that starts the agent of a node, from arguments for Python.

        The agent must be this process, or get its signals.
        """
        return [sys.executable, *arguments]

    def decide_resources(self, config: Config) -> list[str]:
        """Decide what the user left open, for the GPUs and the cores of this machine."""
        cluster, gpus = config.cluster, visible_gpus()
        if cluster.device == "auto":
            cluster.device = "cuda" if gpus or config.is_prediction else "cpu"
        on_gpu = cluster.device == "cuda"
        if cluster.workers_per_node is None:
            available = (len(gpus) if on_gpu else CPU_WORKERS) // cluster.nodes
            cluster.workers_per_node = 1 if needs_one_worker(config) else max(1, available)
        if cluster.cpus_per_worker is None:
            # Simulated nodes share the cores of one machine. Tiny models need one thread only. Then runs with different
            # numbers of workers have the same number of threads per worker, and their speeds can be compared.
            tiny = config.scale.name == "tiny" and not on_gpu
            cluster.cpus_per_worker = 1 if tiny else max(1, cpu_count() // cluster.world_size)
        return _gpu_errors(config)

    def start(self, sweep: Sweep) -> list[JobReturn]:
        """Run every cell, even if others fail."""
        from distexp.launch.local.sweep import run_sweep

        return run_sweep(sweep, self.agent_command)

    def trials(self, sweep: Sweep, label: Callable[[Config], str]) -> TrialLauncher:
        """Return what runs trials one after the other."""
        from distexp.launch.local.sweep import LocalTrials

        return LocalTrials(sweep.context, label, self.agent_command)

    def states(self, sweep_dir: Path, runs: Sequence[ExistingRun]) -> list[RunState]:
        """Return the states of runs, from their files and processes."""
        _finalize_dead_runs(sweep_dir, runs)
        return [local_state(run) for run in runs]

    def cancel(self, sweep_dir: Path, runs: Sequence[ExistingRun]) -> Cancelled:
        """End the commands that run these runs. Each ends its workers, writes the record, and starts no other run."""
        _finalize_dead_runs(sweep_dir, runs)
        return cancel_local(sweep_dir, runs)


def _finalize_dead_runs(sweep_dir: Path, runs: Sequence[ExistingRun]) -> None:
    """Write the records of runs whose launcher and agent died together, in a sweep that this user has started.

    The sweep of another user may name code of a strategy, which would be imported.
    """
    dead = [(run.directory, pid) for run in runs if (pid := dead_launcher(run)) is not None]
    if not dead or not is_own_file(sweep_dir / COMMAND):
        return
    from distexp.launch.outcome import finalize_dead_run

    for directory, pid in dead:
        finalize_dead_run(directory, pid, trusted_by_user(sweep_dir))


def _gpu_errors(config: Config) -> list[str]:
    """Return an error if this machine has too few GPUs. A prediction is for GPUs that it need not have."""
    cluster, gpus = config.cluster, visible_gpus()
    if config.is_prediction or cluster.device != "cuda":
        return []
    if not gpus:
        return ["cluster.device=cuda needs a GPU, but this machine has none: choose cluster.device=cpu"]
    if cluster.world_size > len(gpus):
        return [
            f"cluster.nodes={cluster.nodes} x cluster.workers_per_node={cluster.workers_per_node} needs "
            f"{cluster.world_size} GPUs, but this machine has {len(gpus)}: lower one of them, or choose "
            "cluster.device=cpu"
        ]
    return []


# End of the local runs of a sweep, also if their command has lost its terminal.


TIMEOUT_S = 30.0
"""A launcher needs a few seconds to end its workers and to write the record."""


def cancel_local(sweep_dir: Path, found: Sequence[ExistingRun]) -> Cancelled:
    """End the launchers of runs on this machine, and wait for the runs.

    A launcher ends its workers, writes the record of its run, and starts no other run. Raise CancelError if one belongs
    to another user.
    """
    # By directory, because a folder in the sweep may be another sweep, with the same numbers.
    known = {run.directory: _launcher_of(run.directory) for run in found}
    launchers = {directory: launcher for directory, launcher in known.items() if launcher is not None}
    active = [run for run in found if local_state(run).is_active]
    here = [run for run in active if run.directory in launchers and launchers[run.directory].is_local]
    for pid in {launcher.pid for launcher in launchers.values() if launcher.is_alive}:
        try:
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGCONT)  # One that was stopped, as by Ctrl-Z, handles no signal before.
        except ProcessLookupError:
            continue
        except PermissionError:
            raise CancelError("the runs belong to another user, who can cancel them") from None
    left = _wait(here, launchers.values())
    status, cancel = suggest_command("status", sweep_dir), suggest_command("cancel", sweep_dir)
    hosts = {directory: launcher.host for directory, launcher in launchers.items()}
    elsewhere = [(run.number, hosts.get(run.directory, "an unknown machine")) for run in active if run not in here]
    return Cancelled(
        len(here) - len(left),
        [f"run {run.number} is still ending: check again with {status}" for run in left],
        [f"run {number} was started on {host}: cancel it there with {cancel}" for number, host in elsewhere],
    )


def _launcher_of(run_dir: Path) -> ProcessIdentity | None:
    """Return the launcher of a run; None if it is not known, or if a process that runs is not the launcher."""
    launcher = read_launcher_process(run_dir)
    is_other = launcher is not None and launcher.is_alive and not launcher.holds_lock(run_dir)
    return None if is_other else launcher


def _wait(runs: Sequence[ExistingRun], launchers: Iterable[ProcessIdentity]) -> list[ExistingRun]:
    """Wait for the end of all processes; return the runs that are left."""
    agents = [agent for run in runs if (agent := read_agent_process(run.directory)) is not None]
    processes = [*launchers, *agents]
    wait_until(lambda: not any(process.is_alive for process in processes), TIMEOUT_S)
    return [
        run for run in runs if any(map(_is_alive, (read_agent_process(run.directory), _launcher_of(run.directory))))
    ]


def _is_alive(process: ProcessIdentity | None) -> bool:
    return process is not None and process.is_alive


@contextmanager
def continue_after_hangup(folder: Path) -> Iterator[None]:
    """Keep the runs below a folder after SIGHUP, which a closed terminal sends.

    The output continues in ``launcher.log`` of the folder, because the terminal can no longer be written. The same
    holds for a pipe, because its reader, such as ``tee``, gets the signal too and ends. A signal that the user has
    ignored (``nohup``) stays ignored.
    """
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL:
        yield
        return
    lost = [descriptor for descriptor in (1, 2) if os.isatty(descriptor) or _is_pipe(descriptor)]
    received: list[int] = []

    def leave_terminal(number: int, frame: FrameType | None) -> None:
        if not received:  # The kernel may send the signal to the session and to the process group.
            received.append(number)
            _continue_in_log(folder, lost)

    with handle_signals(leave_terminal, signal.SIGHUP):
        yield


def _is_pipe(descriptor: int) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    except OSError:  # It is closed.
        return False


def _continue_in_log(folder: Path, lost: Sequence[int]) -> None:
    """Redirect the descriptors ``lost`` to a log, and start the log with how to follow and to end the runs."""
    folder.mkdir(parents=True, exist_ok=True)
    log = os.open(folder / LAUNCHER_LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor in lost:
        os.dup2(log, descriptor)
    os.close(log)
    message = (
        f"the terminal was closed (SIGHUP), and the runs continue. To look at them: "
        f"{suggest_command('status', folder)}. To end them: {suggest_command('cancel', folder)}\n"
    )
    os.write(sys.stdout.fileno(), message.encode())  # A signal handler must not use the buffer of print.
