"""Cause of a failed run, found from exit codes, the ends of workers, error files and the kernel's OOM counters."""

import json
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from distexp.config.overrides import join_first
from distexp.exceptions import memory_limit_hint, name_limit
from distexp.measure.memory.sampler import run_traces
from distexp.measure.stragglers import read_gpu_evidence
from distexp.runs import attempts, texts
from distexp.runs.events import RankProgress, ranks_behind, read_phase_events, read_rank_progress
from distexp.runs.record import RunRecord, RunSpec
from distexp.runs.record_sections import RunError
from distexp.runs.run_dir import EVENTS, GROUP_LOG, LOGS, OOM_KILLS, OOM_MARK, RANK_LOG, STOPPED_RANKS, WORKER_EXITS
from distexp.system import files, processes
from distexp.system.cgroups import have_increased, oom_kills

PEER_LOSS = re.compile(
    r"connection (reset|closed|refused|was)|closed by peer|broken pipe|socket|timed? ?out|DistBackendError|NCCL",
    re.IGNORECASE,
)
"""Errors of a rank whose peer has died."""

LOST_LOADER = re.compile(r"DataLoader worker .*(exited unexpectedly|killed by signal: Killed)")
"""Errors of a rank whose data loader process was killed. torch writes the second one if it gets the signal's number."""

OTHER_SIZES_LOG = "op.preamble.length <= op.nbytes"
OTHER_SIZES = (
    "a worker sent a tensor of another size, as if workers skip different layers. For strategy=ddp add "
    "ddp.find_unused_parameters=true"
)
"""Text in the log of a rank that gloo has ended, and what it means."""


class Cause(NamedTuple):
    """Why a run did not complete."""

    status: str
    error: RunError


def classify_failure(directory: Path, codes: Mapping[int, int], spec: RunSpec) -> Cause:
    """Return the cause of a run that did not complete. ``codes`` has the exit code of each node's agent."""
    phase, cluster = current_phase(directory), spec.config.cluster
    if TIMEOUT_CODE in codes.values():
        limit = f"the run took longer than cluster.timeout_min={cluster.timeout_min:g}"
        return Cause("timeout", RunError("Timeout", limit, phase))
    if HANG_CODE in codes.values():
        return Cause("failed", hang_error(directory, phase, f"cluster.hang_timeout_min={cluster.hang_timeout_min:g}"))
    for node, code in codes.items():
        if code < 0:
            return _signal_cause(directory, -code, f"the agent of node {node}", phase)
    for node, code in codes.items():
        number = decode_group_signal(code)
        if number is not None:
            return _signal_cause(directory, number, f"the parent process of the workers on node {node}", phase)
    # The agents of other nodes may be stopped because a worker has failed. Its own agent has another code then.
    stopped = [node for node, code in codes.items() if code == STOPPED_CODE]
    is_stopped = bool(stopped) and set(codes.values()) <= {0, STOPPED_CODE}
    return _worker_cause(directory, phase, f"the agent of node {stopped[0]}" if is_stopped else None)


def _worker_cause(directory: Path, phase: str | None, stopped_agent: str | None) -> Cause:
    """Return the cause by the first error of a worker. Later errors are its consequences.

    ``stopped_agent`` names an agent that got SIGTERM from outside, and has ended its workers.
    """
    errors = attempts.read_rank_errors(directory)
    first, deaths = next(iter(errors), None), signal_deaths(directory)
    is_victim = first is not None and bool(PEER_LOSS.search(first.message) or PEER_LOSS.search(first.type))
    if deaths and (first is None or is_victim):
        rank, number = deaths[0]
        return _signal_cause(directory, number, f"rank {rank}", phase, rank)
    if stopped_agent is not None and (first is None or is_victim):
        return _signal_cause(directory, signal.SIGTERM, stopped_agent, phase)
    earliest = next((end for end in _worker_ends(directory) if not end["stopped"]), None)
    is_silent = first is None or is_victim
    if is_silent and earliest and earliest["rank"] not in {error.rank for error in errors}:
        rank, code = earliest["rank"], earliest["code"]
        reason = f"rank {rank} ended with exit code {code} and without an error: does its code call os._exit?"
        if first is not None:
            reason += f" Another rank has the error: {first.message.partition(chr(10))[0]}"
        return _silent_cause(directory, reason, phase, rank)
    if first is None:
        codes = ", ".join(f"rank {end['rank']}: {end['code']}" for end in _worker_ends(directory) if end["code"])
        reason = f"no rank reported an error (exit codes: {codes or 'none'}): see logs/node*/*.log."
        return _silent_cause(directory, reason, phase)
    if LOST_LOADER.search(first.message) and oom_killed(directory):
        process = f"a data loader process of rank {first.rank}"
        return _signal_cause(directory, signal.SIGKILL, process, first.phase, first.rank)
    first.message = name_limit(first.message) or (memory_limit_hint() if first.type == "MemoryError" else "")
    return Cause(texts.out_of_memory_status(first.type, first.message) or "failed", first)


def _silent_cause(directory: Path, reason: str, phase: str | None, rank: int | None = None) -> Cause:
    """Return the cause of a run in which no rank wrote why it ended. What was printed may show it."""
    logs = (path.read_text(errors="replace") for path in GROUP_LOG.find(directory))
    printed = [line.strip() for log in logs for line in log.splitlines() if line.strip()]
    last = printed[-1] if printed and not printed[-1].startswith(attempts.FORKED) else ""
    if last:
        reason = f"{reason.removesuffix('.')}. The parent process of the workers printed last: {name_limit(last)}"
    # Only of modules that distexp imports, as this process has done.
    names = sys.stdlib_module_names & sys.modules.keys()
    hiding = next((file for file in sorted(Path.cwd().glob("*.py")) if file.stem in names), None)
    if hiding and not (directory / LOGS).exists():
        reason = f"no rank started. {hiding} hides the module {hiding.stem} of Python: rename yours"
    status = texts.out_of_memory_status("WorkerDied", last) or "failed"
    return Cause(status, RunError("WorkerDied", reason.removesuffix("."), phase, rank))


def _signal_cause(directory: Path, number: int, process: str, phase: str | None, rank: int | None = None) -> Cause:
    """Return the cause of a run that ended because a signal ended one of its processes."""
    name = processes.signal_name(number)
    if number == signal.SIGKILL and oom_killed(directory):
        message = f"the kernel ran out of memory and killed {process}"
        return Cause("oom_host", RunError("OutOfMemoryKilled", message, phase, rank))
    status = "killed" if number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT) else "failed"
    # Libraries crash if they cannot allocate memory.
    hint = memory_limit_hint() if number in (signal.SIGSEGV, signal.SIGBUS) else ""
    if number == signal.SIGABRT and rank is not None:
        logs = (path.read_text(errors="replace") for path in RANK_LOG.find(directory, rank=rank))
        hint = OTHER_SIZES if any(OTHER_SIZES_LOG in log for log in logs) else ""
    message = f"{process} was terminated by {name}{f': {hint}' if hint else ''}"
    return Cause(status, RunError(name, message, phase, rank))


def signal_deaths(directory: Path) -> list[tuple[int, int]]:
    """Return rank and signal of workers killed by signals, in order; not of those stopped after another had failed."""
    return [(end["rank"], -end["code"]) for end in _worker_ends(directory) if end["code"] < 0 and not end["stopped"]]


def _worker_ends(directory: Path) -> list[dict[str, Any]]:
    """Return how the workers of all nodes ended, in the order of time."""
    ends = [end for path in WORKER_EXITS.find(directory) for end in json.loads(path.read_text())]
    return sorted(ends, key=lambda end: float(end["unix_time_s"]))


def current_phase(directory: Path) -> str | None:
    """Return the latest phase of a run, or None."""
    events = read_phase_events(directory / EVENTS)
    return events[-1].phase if events else None


# Exit codes of an agent. The process that writes the record finds the cause of a failed run from them.

HANG_CODE = 75
TERMINATED_CODE = 76
"""The parent process of the workers got SIGTERM from outside."""

TIMEOUT_CODE = 124

SIGNAL_OFFSET = 128
"""The code is this plus N if signal N ended the parent process of the workers."""

STOPPED_CODE = SIGNAL_OFFSET + signal.SIGTERM
"""The agent got SIGTERM itself."""


def encode_group_code(code: int) -> int:
    """Return an agent's exit code from that of the parent process of its workers, negative for a signal."""
    if code == -signal.SIGTERM:
        return TERMINATED_CODE
    return code if code >= 0 else SIGNAL_OFFSET - code


def decode_group_signal(code: int) -> int | None:
    """Return the signal that ended the parent process of the workers; None if no signal did."""
    if code == TERMINATED_CODE:
        return signal.SIGTERM
    is_signal = SIGNAL_OFFSET < code < SIGNAL_OFFSET + signal.NSIG and code != STOPPED_CODE
    return code - SIGNAL_OFFSET if is_signal else None


STACK_DUMP_S = 2.0
"""Time that workers get to write their stacks."""


STOPPED_PARENT = -1
"""Entry in the list of stopped ranks, if no rank is stopped but the parent process of the workers."""


def inspect_workers(group_pid: int, run_dir: Path, node: int) -> None:
    """Write which workers of a node are stopped by a signal, and make every worker write its stacks to its log.

    Every agent calls it before it ends its workers, because only a live process can be seen to be stopped.
    """
    workers = processes.descendants(group_pid, recursive=False)
    stopped_pids = set()
    for pid in (group_pid, *(worker.pid for worker in workers)):
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() == psutil.STATUS_STOPPED:
                stopped_pids.add(pid)
    stopped = [progress.rank for progress in read_rank_progress(run_dir, node) if progress.pid in stopped_pids]
    if not stopped and group_pid in stopped_pids:
        stopped = [STOPPED_PARENT]
    files.write_json(STOPPED_RANKS.path(run_dir, node), stopped)
    for worker in workers:
        worker.send_signal(signal.SIGUSR1)
    time.sleep(STACK_DUMP_S)


def hang_error(run_dir: Path, phase: str | None, limit: str) -> RunError:
    """Return the error of a run without progress, with the phase and the rank that the others wait for."""
    progress = read_rank_progress(run_dir)
    stopped = {rank for path in STOPPED_RANKS.find(run_dir) for rank in json.loads(path.read_text())}
    stopped_ranks = [entry for entry in progress if entry.rank in stopped]
    culprits = stopped_ranks or ([] if STOPPED_PARENT in stopped else ranks_behind(progress))
    where = f": no step or new phase within {limit}. The stacks of {{}} ranks are in logs/node*/rank*.log"
    if not culprits:
        reason, rank = "no worker has started", None
        if STOPPED_PARENT in stopped:
            reason = "the parent process of the workers is stopped by a signal (SIGSTOP)"
        elif progress:
            reason, rank = _describe_stacks(run_dir, progress)
        phase = phase or (progress[0].phase if progress else "setup")
        return RunError("Hang", reason + where.format("all") + _logged_error(run_dir, rank), phase, rank)
    verb = "is" if len(culprits) == 1 else "are"
    state = "stopped by a signal (SIGSTOP)" if stopped_ranks else "behind, and the other ranks wait"
    logged = "" if stopped_ranks else _logged_error(run_dir, culprits[0].rank)
    message = f"{join_first(map(str, culprits))} {verb} {state}{where.format('the')}{logged}"
    return RunError("Hang", message, culprits[0].phase, culprits[0].rank)


TRACEBACK = re.compile(r"^Traceback \(most recent call last\):\n(?:[ \t].*\n)+(\S.*)$", re.MULTILINE)
"""A traceback in a log, with the line of its error."""


def _read_log(run_dir: Path, rank: int) -> str:
    return "".join(path.read_text(errors="replace") for path in RANK_LOG.find(run_dir, rank=rank))


def _logged_error(run_dir: Path, rank: int | None) -> str:
    """Return the last error in the log of a rank that hangs, as the end of a message: a thread may have failed."""
    errors = [] if rank is None else TRACEBACK.findall(_read_log(run_dir, rank))
    return f". The log of rank {rank} has an error: {errors[-1]}" if errors else ""


INNERMOST = re.compile(r'^Current thread .*\n  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
"""The first two lines of a stack in a log."""

WAITS = re.compile(r"/torch/(distributed|autograd)/|/deepspeed/|/slow_rank_watch\.py$")
"""Files in which a rank waits for others. The backward pass of DDP waits in autograd."""


def _describe_stacks(run_dir: Path, progress: Sequence[RankProgress]) -> tuple[str, int | None]:
    """Return why ranks with equal progress hang, and the rank that the others wait for; None if it is unknown."""
    stacks = {entry.rank: INNERMOST.findall(_read_log(run_dir, entry.rank))[-1:] for entry in progress}
    busy = [(rank, *found[0]) for rank, found in stacks.items() if found and not WAITS.search(found[0][0])]
    if len(busy) == 1 and all(stacks.values()):
        rank, file, line, function = busy[0]
        others = ", and the other ranks wait" if len(progress) > 1 else ""
        return f"rank {rank} is at {'/'.join(Path(file).parts[-2:])}:{line} in {function}{others}", rank
    if not busy and all(stacks.values()) and len(progress) > 1:
        return "all ranks wait in collective operations, and some may call other ones", None
    return "all ranks wait at the same point", None


def save_counters(directory: Path) -> None:
    """Save the kernel's OOM counters at the start of a run, on the node that writes the record."""
    files.write_json(directory / OOM_KILLS, oom_kills())


def mark_if_killed(directory: Path, node: int, before: Mapping[str, int]) -> None:
    """Leave a mark for the node that writes the record, if the OOM counter of this node has increased."""
    if have_increased(before, oom_kills()):
        with suppress(OSError):  # The run has failed anyway, and has a signal as its cause then.
            OOM_MARK.path(directory, node).touch()


def oom_killed(directory: Path) -> bool:
    """Return whether the kernel has killed a process of a run for memory, on this node or on one that left a mark."""
    if OOM_MARK.find(directory):
        return True
    path = directory / OOM_KILLS
    return path.exists() and have_increased(json.loads(path.read_text()), oom_kills())


def add_evidence(record: RunRecord, spec: RunSpec, directory: Path) -> None:
    """Add what the agents saw to ``metrics.stragglers``. A GPU with a problem is added even if no rank is slow."""
    if spec.config.cluster.device != "cuda" or not spec.config.measure.enabled:
        return
    evidence = read_gpu_evidence(run_traces(directory, spec.nodes), directory / EVENTS, spec.workers_per_node)
    slow, hosts = record.metrics.stragglers or [], record.run.hosts
    for entry in slow:
        found = evidence.get(entry["rank"])
        if found is not None:
            entry["gpu"] = found.index
            entry["evidence"] = "; ".join([entry["evidence"], *found.problems, *found.differences])
    named = {entry["rank"] for entry in slow}
    entries = [
        {
            "rank": rank,
            "gpu": found.index,
            "host": hosts[rank // spec.workers_per_node] if len(hosts) == spec.nodes else None,
            "slower_by_pct": None,
            "evidence": "; ".join(found.problems),
        }
        for rank, found in sorted(evidence.items())
        if found.problems and rank not in named
    ]
    if entries:
        record.metrics.stragglers = [*slow, *entries]
