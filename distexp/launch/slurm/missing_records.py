"""Records of runs whose Slurm jobs died without writing one."""

from __future__ import annotations

import re
from pathlib import Path

from distexp.launch import ledger
from distexp.launch.failures import classify_failure
from distexp.launch.outcome import add_traces, failed_record, read_result
from distexp.launch.slurm.client import JobState
from distexp.runs import attempts
from distexp.runs.errors import read_rank_errors
from distexp.runs.record import RunError, RunRecord
from distexp.runs.run_dir import SLURM
from distexp.runs.spec import RunSpec

LAST_LINES = 3
MEMORY_KILL = re.compile(r"exceeded (job )?memory limit|oom[-_ ]kill", re.IGNORECASE)
"""slurmstepd's message after an out-of-memory kill; Slurm may then report any state for the job."""


def write_missing_record(sweep_dir: Path, entry: ledger.Entry, job: JobState | None) -> RunRecord:
    """Write the record of a run whose job died without one, and return it.

    Any command may do this.
    """
    directory = sweep_dir / entry.directory
    spec = RunSpec.read(directory)
    started = has_started(directory, entry.job)
    if not started:
        spec.run.attempts.append(attempts.new_attempt(entry.job, []))
    record = read_result(directory) if started else None
    if record is None or record.status != "completed":
        status, error = _find_cause(sweep_dir, entry, job, spec, started)
        record = failed_record(spec, directory, status, error, None)
        record.run.hosts = spec.run.attempts[-1]["hosts"]
    if started:
        add_traces(record, spec, directory)
    attempts.finalize(record)
    record.write(directory)
    return record


def has_started(directory: Path, job: str | None) -> bool:
    """Return whether the head's task of a job has registered its attempt."""
    try:
        registered = RunSpec.read(directory).run.attempts
    except (OSError, ValueError):
        return False
    return bool(registered) and registered[-1].get("job_id") == job and registered[-1].get("reason") is None


def _find_cause(
    sweep_dir: Path, entry: ledger.Entry, job: JobState | None, spec: RunSpec, started: bool
) -> tuple[str, RunError]:
    """Return status and error of a run whose job died.

    They come from Slurm's state, the output of the job, or the errors of the ranks.
    """
    name = f"job {entry.job}"
    if job is None:
        return "failed", RunError("JobVanished", f"{name} is no longer known to Slurm, and the run has no record")
    when = "while running" if started else "before it started"
    causes: dict[str, tuple[str, str]] = {
        "CANCELLED": ("killed", f"{name} was cancelled {when}"),
        "TIMEOUT": ("timeout", f"{name} reached its time limit"),
        "DEADLINE": ("timeout", f"{name} reached its deadline"),
        "OUT_OF_MEMORY": ("oom_host", f"{name} exceeded its memory limit"),
        "PREEMPTED": ("preempted", f"{name} was preempted by another job"),
        "NODE_FAIL": ("killed", f"{name} lost a node (nodes: {job.nodes})"),
        "BOOT_FAIL": ("failed", f"a node of {name} did not boot"),
    }
    if job.state in causes:
        status, message = causes[job.state]
        return status, RunError(job.state.title().replace("_", ""), message)
    output = _read_output(sweep_dir / SLURM, entry.job or "")
    for log, line in output:  # slurmstepd's line may come before or after those of srun
        if MEMORY_KILL.search(line):
            status, message = causes["OUT_OF_MEMORY"]
            return status, RunError("OutOfMemory", f"{message}: {line} ({log})")
    directory = sweep_dir / entry.directory
    if started and read_rank_errors(directory):
        return classify_failure(directory, {0: 1}, spec)
    message = f"{name} ended in state {job.state} {when}, without a record"
    if output:
        message += f": {' | '.join(line for _, line in output[-LAST_LINES:])} ({output[0][0]})"
    return "failed", RunError("JobDied", message)


def _read_output(folder: Path, job: str) -> list[tuple[Path, str]]:
    """Return the lines that a job printed on all its nodes, each with its log file."""
    logs = sorted(folder.glob(f"{job}_*_log.out"))
    return [
        (log, line.strip()) for log in logs for line in log.read_text(errors="replace").splitlines() if line.strip()
    ]
