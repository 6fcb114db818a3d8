"""Records of runs whose Slurm jobs died without writing one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from distexp.launch import ledger
from distexp.launch.failures import Cause, classify_failure
from distexp.launch.outcome import read_result
from distexp.launch.record_measurements import add_traces
from distexp.launch.slurm.job_states import JobState
from distexp.launch.unsuccessful_records import failed_record
from distexp.runs import attempts
from distexp.runs.error_files import read_rank_errors
from distexp.runs.record import RunRecord
from distexp.runs.record_sections import RunError
from distexp.runs.run_dir import SLURM
from distexp.runs.spec import RunSpec

LAST_LINES = 3
MEMORY_KILL = re.compile(r"exceeded (job )?memory limit|oom[-_ ]kill", re.IGNORECASE)
"""slurmstepd's message after an out-of-memory kill; Slurm may then report any state for the job."""

STATE_CAUSES = {
    "CANCELLED": ("killed", "{job} was cancelled {when}"),
    "TIMEOUT": ("timeout", "{job} reached its time limit"),
    "DEADLINE": ("timeout", "{job} reached its deadline"),
    "OUT_OF_MEMORY": ("oom_host", "{job} exceeded its memory limit"),
    "PREEMPTED": ("preempted", "{job} was preempted by another job"),
    "NODE_FAIL": ("killed", "{job} lost a node (nodes: {nodes})"),
    "BOOT_FAIL": ("failed", "a node of {job} did not boot"),
}
"""Status of the run, and message, by the final states of Slurm that name the cause."""


class OutputLine(NamedTuple):
    """A line that a job printed, with its log file."""

    log: Path
    text: str


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


def _find_cause(sweep_dir: Path, entry: ledger.Entry, job: JobState | None, spec: RunSpec, started: bool) -> Cause:
    """Return the cause of the death of a job: from Slurm's state, the output, or the errors of the ranks."""
    name, when = f"job {entry.job}", "while running" if started else "before it started"
    if job is None:
        return Cause(
            "failed", RunError("JobVanished", f"{name} is no longer known to Slurm, and the run has no record")
        )
    if job.state in STATE_CAUSES:
        return _state_cause(job, name, when)
    output = _read_output(sweep_dir / SLURM, entry.job or "")
    # slurmstepd's line may come before or after those of srun.
    kill = next((line for line in output if MEMORY_KILL.search(line.text)), None)
    if kill is not None:
        message = f"{name} exceeded its memory limit: {kill.text} ({kill.log})"
        return Cause("oom_host", RunError("OutOfMemory", message))
    directory = sweep_dir / entry.directory
    if started and read_rank_errors(directory):
        return classify_failure(directory, {0: 1}, spec)
    message = f"{name} ended in state {job.state} {when}, without a record{_last_lines(output)}"
    return Cause("failed", RunError("JobDied", message))


def _state_cause(job: JobState, name: str, when: str) -> Cause:
    status, message = STATE_CAUSES[job.state]
    error_type = job.state.title().replace("_", "")
    return Cause(status, RunError(error_type, message.format(job=name, when=when, nodes=job.nodes)))


def _read_output(folder: Path, job: str) -> list[OutputLine]:
    """Return the lines that a job printed on all its nodes."""
    logs = sorted(folder.glob(f"{job}_*_log.out"))
    return [
        OutputLine(log, line.strip())
        for log in logs for line in log.read_text(errors="replace").splitlines() if line.strip()
    ]  # fmt: skip


def _last_lines(output: Sequence[OutputLine]) -> str:
    """Return the end of a message with the last lines of a job; empty if it printed none."""
    if not output:
        return ""
    return f": {' | '.join(line.text for line in output[-LAST_LINES:])} ({output[0].log})"
