"""Runs of cells on this machine. Each is a Hydra job, with Hydra's callbacks and its ``.hydra/`` folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path
from types import FrameType
from typing import Any

from hydra.core.utils import JobReturn, run_job
from hydra.types import HydraContext

from distexp.config import Config, ConfigError, overrides
from distexp.config.custom_code import check_returned, shorten_errors
from distexp.console.screen import Screen
from distexp.exceptions import InterruptedRunError, SweepFailedError, describe_os_error, is_closed_output
from distexp.launch import failures, outcome, run_dirs
from distexp.launch.failures import HANG_CODE
from distexp.launch.launcher import Sweep
from distexp.launch.local.shared_start import SharedStart
from distexp.launch.run_dirs import AssignedRun
from distexp.runs import attempts, run_state, texts
from distexp.runs.record import DONE, FAILURES, RunRecord, RunSpec
from distexp.runs.run_dir import RECORD
from distexp.system.cgroups import cpu_count, cpu_limit
from distexp.system.processes import collect_interrupts, end_tree, handle_signals, start_module, wait_until
from distexp.system.silence import set_step
from distexp.tracking.trackers import tracked


def run_cells(sweep: Sweep, sweep_dir: Path, shared_start: SharedStart, agent_command: AgentCommand) -> list[JobReturn]:
    """Run every cell, even if others fail, and show a table.

    Raise SweepFailedError at the end, if a run failed, or InterruptedRunError before the next cell, if a run was
    interrupted.
    """
    cells = sweep.cells
    for warning in crowded_core_warnings(cell.config for cell in cells if cell.config is not None):
        print(f"distexp: warning: {warning}", file=sys.stderr)
    invalid = [texts.join_errors(cell.errors) for cell in cells if cell.config is None]
    screen = Screen(total=len(cells), sweep_dir=sweep_dir, invalid=invalid)
    shared_start.note = screen.print
    rules = run_dirs.ExistingRunRules(should_skip=lambda run: show_if_done(screen, run.directory), warn=screen.print)
    code, resume = run_dirs.package_git_state(), sweep.master.sweep.resume
    runs = run_dirs.assign_run_dirs(cells, sweep_dir, code, rules, resume=resume)
    try:
        runner = CellRunner(sweep.context, screen, shared_start, agent_command)
        with handle_signals(stop_at_once, signal.SIGTERM):  # between two runs
            returns = [done for run in runs if (done := runner.run_if_free(run)) is not None]
    except (InterruptedRunError, KeyboardInterrupt, OSError, ConfigError) as error:
        if screen.shown or not isinstance(error, ConfigError):  # Else this command has left nothing to continue.
            screen.show_interrupted()
        raise
    screen.show_comparison()
    if any(record.status in FAILURES for record in screen.records):
        raise SweepFailedError
    return returns


@dataclass(frozen=True)
class CellRunner:
    """Runner of cells."""

    context: HydraContext
    screen: Screen
    shared_start: SharedStart
    agent_command: AgentCommand

    def run_if_free(self, run: AssignedRun) -> JobReturn | None:
        """Run a cell, unless another command runs it or has just finished it."""
        with attempts.run_lock(run.directory) as other:
            owner = other or attempts.wait_for_agent(run.directory)
            if owner is not None:
                self.screen.show_busy(run.info.number, owner)
                return None
            if show_if_done(self.screen, run.directory):
                return None
            with texts.name_folder(run.directory):
                return self._run_job(run)

    def _run_job(self, run: AssignedRun) -> JobReturn:
        failures: list[OSError | ConfigError] = []

        def task(_: Any) -> str | None:
            try:
                return self._run(run).status
            except (OSError, ConfigError) as error:  # Hydra would print a line about it.
                failures.append(error)
                return None

        done = run_job(
            hydra_context=self.context,
            task_function=task,
            config=run.composed,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )
        if failures:
            with suppress(OSError):  # The first error matters.
                texts.release_reserve(run.directory)
            raise failures[0]
        done.return_value  # noqa: B018  # It raises what the task raised.
        done.cfg = done.hydra_cfg = None  # Thousands of configurations would fill the memory.
        return done

    def _run(self, run: AssignedRun) -> RunRecord:
        if run.cell.config is None:
            record = run_dirs.write_invalid(run)
            self.screen.show_invalid(record)
            return record
        self.screen.run_header(run.info.number, " ".join(map(overrides.format_override, run.cell.varied)))
        run.cell.write_prediction(run.directory)
        spec = RunSpec(run.cell.config, run.info)
        return run_locally(spec, run.directory, self.screen, self.shared_start, self.agent_command)


def show_if_done(screen: Screen, directory: Path) -> bool:
    """Show the run of a directory and return True, if it has a readable record and needs no further attempt."""
    record = outcome.read_record(directory / RECORD)
    if record is None or record.status not in DONE:
        return False
    screen.show_skipped(record)
    return True


POLL_S = 0.1
AGENT_GRACE_S = 7.0
"""Time between SIGTERM and SIGKILL for an agent, which ends its workers first."""

OUTPUT_CLOSED = "the program that read the output has ended, for example `head`"

HANG_GRACE_S = 4.0
"""Time that the other agents get to detect a hang too, and to write the stacks of their workers."""


AgentCommand = Callable[[Config, Sequence[str]], Sequence[str]]
"""Function that returns the command for the agents of a run, from its configuration and the arguments of Python."""


def stop_at_once(number: int, _: FrameType | None) -> None:
    """Stop the command at a signal; a handler of signals."""
    raise InterruptedRunError(number)


def run_locally(
    spec: RunSpec, directory: Path, screen: Screen, shared_start: SharedStart, agent_command: AgentCommand
) -> RunRecord:
    """Run a spec on this machine with one agent per node, and return its record.

    Raise InterruptedRunError if this process got a signal, and BrokenPipeError or SystemExit if the output was closed.
    The record is written first. SIGINT and SIGTERM end the run at once, SIGUSR1 and SIGUSR2 after a checkpoint.
    """
    started = time.time()
    outcome.start_attempt(spec, directory)
    attempts.write_launcher_process(directory)
    failures.save_counters(directory)
    interruption: InterruptedRunError | None = None
    stopped: str | None = None
    failure: OSError | ConfigError | None = None
    agents: list[subprocess.Popen[bytes]] = []
    received: list[int] = []

    def stop_after_checkpoint(number: int, _: FrameType | None) -> None:
        received.append(number)
        run_state.request_stop(directory, signal.Signals(number).name)

    with (
        tracked(spec, directory) as messages,
        handle_signals(stop_at_once, signal.SIGINT, signal.SIGTERM),
        handle_signals(stop_after_checkpoint, *run_state.SIGNALS),
    ):
        try:
            for node in range(spec.nodes):
                agents.append(_start_agent(spec, directory, node, shared_start, agent_command))
            with screen.follow(spec, directory) as live:
                _watch(agents, live.refresh)
        except InterruptedRunError as error:
            interruption, stopped = error, error.reason
        except (BrokenPipeError, SystemExit) as error:
            stopped = OUTPUT_CLOSED if is_closed_output(error) else None
            raise
        except (OSError, ConfigError) as error:  # The latter is that of a custom launcher.
            failure = error
            raise
        finally:
            set_step("completing the record")
            with collect_interrupts() as late:  # The record is written completely.
                codes = {node: _end(agent) for node, agent in enumerate(agents)}
                codes = shared_start.true_codes(directory, codes)
                if failure is not None and not attempts.read_rank_errors(directory):
                    reason = describe_os_error(failure) if isinstance(failure, OSError) else failure
                    stopped = f"the command failed: {reason}"
                status = "killed" if failure is None else "failed"
                record = outcome.finalize_run(spec, directory, codes, started, stopped, stopped_status=status)
    screen.show_result(record, directory, messages)
    if interruption is None and (signals := [*received, *late]):  # They did not stop the run at once.
        interruption = InterruptedRunError(signals[0])
    if interruption is not None:
        raise interruption
    return record


def _start_agent(
    spec: RunSpec, directory: Path, node: int, shared_start: SharedStart, agent_command: AgentCommand
) -> subprocess.Popen[bytes]:
    """Start the agent of a node, with a connection to the process from which its workers are forked."""
    # Only the agent keeps the connection, so that the other process notices its end.
    with shared_start.connect(spec, node) as connection:
        # SIGTERM and not SIGKILL, so that the agent of a dead launcher ends its workers and writes the record.
        return start_module(
            "distexp.launch.agent",
            *(str(directory), str(node), str(connection.fileno())),
            env=os.environ,
            death_signal=signal.SIGTERM,
            inherited=[connection.fileno()],
            command=partial(_checked_command, agent_command, spec.config),
        )


def _checked_command(agent_command: AgentCommand, config: Config, arguments: Sequence[str]) -> Sequence[str]:
    """Return the command of an agent. Raise ConfigError if a custom launcher fails, or returns no list of texts."""
    target = config.cluster._target_
    with shorten_errors(target, "agent_command()"):
        found = agent_command(config, arguments)
    check_returned(list(found) if isinstance(found, tuple) else found, list, f"{target}: agent_command()")
    return found


def _watch(agents: Sequence[subprocess.Popen[bytes]], refresh: Callable[[], None]) -> None:
    """Wait until all agents have succeeded, or one has failed."""
    while True:
        codes = [agent.poll() for agent in agents]
        refresh()
        if HANG_CODE in codes:
            wait_until(lambda: all(agent.poll() is not None for agent in agents), HANG_GRACE_S)
            return
        if any(code not in (None, 0) for code in codes) or all(code == 0 for code in codes):
            return
        time.sleep(POLL_S)


def _end(agent: subprocess.Popen[bytes]) -> int:
    """End an agent and its workers; return its exit code, or 0 if it was still running."""
    ended_by_itself = agent.poll() is not None
    end_tree(agent, AGENT_GRACE_S)
    return agent.returncode if ended_by_itself else 0


def crowded_core_warnings(configs: Iterable[Config]) -> Iterator[str]:
    """Yield a warning if runs on the CPUs of this machine have more workers than it has cores.

    It may be a typing error. Simulated nodes share the cores.
    """
    cores = max(1, min(cpu_count(), ceil(cpu_limit() or cpu_count())))
    workers = [config.cluster.world_size for config in configs if config.cluster.device == "cpu"]
    if (most := max(workers, default=0)) > cores:
        yield (
            f"{most} workers will share {cores} CPU core{'s' if cores > 1 else ''}, so speeds cannot be compared "
            f"between numbers of workers, and each worker needs its own memory. To measure speed, use at most "
            f"{cores} workers (cluster.nodes x cluster.workers_per_node)"
        )
