"""State of every run of a Slurm sweep, from the ledger, the records and Slurm."""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from distexp.launch import outcome, run_dirs
from distexp.launch.failures import Cause, classify_failure
from distexp.launch.slurm import client
from distexp.launch.slurm.client import JobState, UnreachableError
from distexp.runs import attempts, texts
from distexp.runs.attempts import read_rank_errors
from distexp.runs.record import RunRecord, RunSpec
from distexp.runs.record_sections import RunError
from distexp.runs.run_dir import RECORD, RESULT, SLURM
from distexp.runs.run_state import RunState

RECORD_DELAY_S = 2.0
"""How long to wait for the record of a job that has ended; a network file system may show it late."""

PENDING_REASONS = {
    "Priority": "waiting behind higher-priority jobs",
    "Resources": "waiting for free nodes",
    "JobArrayTaskLimit": "limited by cluster.array_parallelism",
    "BeginTime": "start time not reached yet",
    "ReqNodeNotAvail": "required nodes are down or reserved",
    "PartitionTimeLimit": "cluster.timeout_min exceeds the partition's limit",
    "PartitionNodeLimit": "cluster.nodes exceeds the partition's limit",
    "PartitionConfig": "the partition does not allow this job",
    "AssocGrpGRES": "the account's GPU limit is reached",
    "QOSMaxGRESPerUser": "your GPU limit is reached",
    "QOSMaxJobsPerUserLimit": "your job limit is reached",
    "MaxGRESPerAccount": "the account's GPU limit is reached",
}
"""Explanations of Slurm's reasons for a pending job."""

FinishedRuns = dict[int, RunState]
"""Runs whose final record has been read, by number."""


def poll(sweep_dir: Path, finished: FinishedRuns | None = None) -> list[RunState]:
    """Return the state of every run in the ledger.

    Missing records of jobs that have died are written. If Slurm does not answer, runs whose state only Slurm knows
    are ``unknown``.

    ``finished`` has the runs that earlier calls found finished, and that are not read again. It is extended.
    """
    finished = {} if finished is None else finished
    entries = run_dirs.latest(sweep_dir)
    open_entries = [entry for number, entry in entries.items() if number not in finished]
    answer = _ask_slurm(sweep_dir, open_entries)
    found: dict[int, RunState] = {}
    dead: list[run_dirs.Entry] = []
    for entry in open_entries:
        state = _run_state(sweep_dir, entry, answer)
        if state is None:
            dead.append(entry)
        else:
            found[entry.run] = state
    found |= {state.number: state for state in _write_missing_records(sweep_dir, dead, answer.jobs)}
    _append_final_states(sweep_dir, entries, found)
    finished |= {state.number: state for state in found.values() if state.record is not None}
    return [finished.get(number) or found[number] for number in sorted(entries)]


@dataclass(frozen=True)
class SlurmAnswer:
    """Slurm's states of the jobs of runs that may not have ended."""

    jobs: Mapping[str, JobState]
    asked_runs: frozenset[int]
    error: str = ""  # why Slurm did not answer


def _ask_slurm(sweep_dir: Path, entries: Sequence[run_dirs.Entry]) -> SlurmAnswer:
    """Ask about runs whose state only Slurm knows: no command has seen their end, or they were requeued after it."""
    undecided = [
        entry
        for entry in entries
        if entry.state in ("submitted", "cancelled") or not (sweep_dir / entry.directory / RECORD).exists()
    ]
    runs = frozenset(entry.run for entry in undecided)
    try:
        return SlurmAnswer(client.query_jobs([entry.job for entry in undecided if entry.job]), runs)
    except UnreachableError as error:
        return SlurmAnswer({}, runs, str(error))


def _run_state(sweep_dir: Path, entry: run_dirs.Entry, answer: SlurmAnswer) -> RunState | None:
    """Return the state of a run; None if its job has ended without a record."""
    directory = sweep_dir / entry.directory
    job = answer.jobs.get(entry.job or "")
    record = outcome.read_record(directory / RECORD)
    completed = record is not None and record.status == "completed"
    if job is not None and job.state not in client.FINAL_STATES and not (completed and job.state != "PENDING"):
        return _active_state(entry, directory, job)
    if record is not None:
        return RunState.from_record(entry.run, directory, entry.job, record)
    if answer.error and entry.run in answer.asked_runs:
        return RunState(entry.run, directory, entry.job, "unknown", answer.error)
    return None


def _active_state(entry: run_dirs.Entry, directory: Path, job: JobState) -> RunState:
    if job.state != "PENDING":
        state = "ending" if job.state == "COMPLETING" else "running"
        return RunState(entry.run, directory, entry.job, state, nodes=job.nodes)
    explanation = PENDING_REASONS.get(job.reason, "")
    reason = f"{job.reason}: {explanation}" if explanation else job.reason
    if job.expected_start:
        reason = f"{reason}, expected to start at {job.expected_start}"
    return RunState(entry.run, directory, entry.job, "pending", reason)


def _write_missing_records(
    sweep_dir: Path, dead: Sequence[run_dirs.Entry], jobs: Mapping[str, JobState]
) -> list[RunState]:
    if any(has_started(sweep_dir / entry.directory, entry.job) for entry in dead):
        time.sleep(RECORD_DELAY_S)
    states = []
    for entry in dead:
        directory = sweep_dir / entry.directory
        try:
            record = outcome.read_record(directory / RECORD) or write_missing_record(
                sweep_dir, entry, jobs.get(entry.job or "")
            )
        except (OSError, ValueError) as error:  # as after the run directory was deleted
            states.append(RunState(entry.run, directory, entry.job, "no record", str(error)))
        else:
            states.append(RunState.from_record(entry.run, directory, entry.job, record))
    return states


def _append_final_states(sweep_dir: Path, entries: Mapping[int, run_dirs.Entry], found: Mapping[int, RunState]) -> None:
    """Add final states to the ledger, so that later commands need not ask Slurm."""
    new = [
        run_dirs.Entry(entry.run, entry.id, entry.directory, entry.job, found[number].state)
        for number, entry in entries.items()
        if number in found and found[number].record is not None and entry.state in ("submitted", "cancelled")
    ]
    try:
        run_dirs.append(sweep_dir, new)
    except PermissionError:
        return  # another user's sweep can be read, but not written


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


def write_missing_record(sweep_dir: Path, entry: run_dirs.Entry, job: JobState | None) -> RunRecord:
    """Write the record of a run whose job died without one, and return it. Any command may do this."""
    directory = sweep_dir / entry.directory
    spec = RunSpec.read(directory)
    started = has_started(directory, entry.job)
    if not started:
        spec.run.attempts.append(attempts.new_attempt(entry.job, []))
    record = outcome.read_record(directory / RESULT) if started else None
    if record is None or record.status != "completed":
        status, error = _find_cause(sweep_dir, entry, job, spec, started)
        record = outcome.failed_record(spec, directory, status, error, None)
        record.run.hosts = spec.run.attempts[-1]["hosts"]
    if started:
        outcome.add_traces(record, spec, directory)
    attempts.record_attempt_end(record)
    texts.release_reserve(directory)
    record.write(directory)
    if record.status == "completed":
        (directory / RESULT).unlink(missing_ok=True)
    return record


def has_started(directory: Path, job: str | None) -> bool:
    """Return whether the head's task of a job has registered its attempt."""
    try:
        registered = RunSpec.read(directory).run.attempts
    except (OSError, ValueError):
        return False
    return bool(registered) and registered[-1].get("job_id") == job and registered[-1].get("reason") is None


def _find_cause(sweep_dir: Path, entry: run_dirs.Entry, job: JobState | None, spec: RunSpec, started: bool) -> Cause:
    """Return the cause of the death of a job: from Slurm's state, the output, or the errors of the ranks."""
    name, when = f"job {entry.job}", "while running" if started else "before it started"
    if job is None:
        message = f"{name} is no longer known to Slurm, and the run has no record"
        return Cause("failed", RunError("JobVanished", message))
    if job.state in STATE_CAUSES:
        status, message = STATE_CAUSES[job.state]
        error_type = job.state.title().replace("_", "")
        return Cause(status, RunError(error_type, message.format(job=name, when=when, nodes=job.nodes)))
    logs = sorted((sweep_dir / SLURM).glob(f"{entry.job or ''}_*_log.out"))  # one of each node
    lines = [(log, line.strip()) for log in logs for line in log.read_text(errors="replace").splitlines()]
    output = [(log, line) for log, line in lines if line]
    for log, line in output:  # slurmstepd's line may come before or after those of srun.
        if MEMORY_KILL.search(line):
            return Cause("oom_host", RunError("OutOfMemory", f"{name} exceeded its memory limit: {line} ({log})"))
    directory = sweep_dir / entry.directory
    if started and read_rank_errors(directory):
        return classify_failure(directory, {0: 1}, spec)
    message = f"{name} ended in state {job.state} {when}, without a record"
    if output:
        message += f": {' | '.join(line for _, line in output[-LAST_LINES:])} ({output[0][0]})"
    return Cause("failed", RunError("JobDied", message))
