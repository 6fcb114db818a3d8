"""State of every run of a Slurm sweep, from the ledger, the records and Slurm."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from distexp.launch import ledger
from distexp.launch.slurm import job_states
from distexp.launch.slurm.client import UnreachableError
from distexp.launch.slurm.job_states import JobState
from distexp.launch.slurm.missing_records import has_started, write_missing_record
from distexp.runs.record import RunRecord
from distexp.runs.run_dir import RECORD
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

    Args:
        sweep_dir: Directory of the sweep.
        finished: Runs that earlier calls found finished, and that are not read again; extended by this call.
    """
    finished = {} if finished is None else finished
    entries = ledger.latest(sweep_dir)
    open_entries = [entry for number, entry in entries.items() if number not in finished]
    answer = _ask_slurm(sweep_dir, open_entries)
    found: dict[int, RunState] = {}
    dead: list[ledger.Entry] = []
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

    def error_for(self, run: int) -> str:
        """Return why the job of a run is unknown.

        The text is empty if Slurm answered, or was not asked about the run.
        """
        return self.error if run in self.asked_runs else ""


def _ask_slurm(sweep_dir: Path, entries: Sequence[ledger.Entry]) -> SlurmAnswer:
    undecided = [entry for entry in entries if _needs_slurm(sweep_dir, entry)]
    runs = frozenset(entry.run for entry in undecided)
    try:
        return SlurmAnswer(job_states.query_jobs([entry.job for entry in undecided if entry.job]), runs)
    except UnreachableError as error:
        return SlurmAnswer({}, runs, str(error))


def _needs_slurm(sweep_dir: Path, entry: ledger.Entry) -> bool:
    """Return whether only Slurm knows the state of a run.

    No command has seen its end yet, or it was requeued after its end.
    """
    return entry.state in ("submitted", "cancelled") or not (sweep_dir / entry.directory / RECORD).exists()


def _run_state(sweep_dir: Path, entry: ledger.Entry, answer: SlurmAnswer) -> RunState | None:
    """Return the state of a run; None if its job has ended without a record."""
    directory = sweep_dir / entry.directory
    job = answer.jobs.get(entry.job or "")
    record = _read_record(directory)
    completed = record is not None and record.status == "completed"
    if job is not None and not job.is_final and not (completed and job.state != "PENDING"):
        return _active_state(entry, directory, job)
    if record is not None:
        return RunState.from_record(entry.run, directory, entry.job, record)
    if error := answer.error_for(entry.run):
        return RunState(entry.run, directory, entry.job, "unknown", error)
    return None


def _active_state(entry: ledger.Entry, directory: Path, job: JobState) -> RunState:
    if job.state != "PENDING":
        state = "ending" if job.state == "COMPLETING" else "running"
        return RunState(entry.run, directory, entry.job, state, nodes=job.nodes)
    explanation = PENDING_REASONS.get(job.reason, "")
    reason = f"{job.reason}: {explanation}" if explanation else job.reason
    if job.expected_start:
        reason = f"{reason}, expected to start at {job.expected_start}"
    return RunState(entry.run, directory, entry.job, "pending", reason)


def _read_record(directory: Path) -> RunRecord | None:
    try:
        return RunRecord.read(directory / RECORD)
    except ValueError:
        return None


def _write_missing_records(
    sweep_dir: Path, dead: Sequence[ledger.Entry], jobs: Mapping[str, JobState]
) -> list[RunState]:
    if any(has_started(sweep_dir / entry.directory, entry.job) for entry in dead):
        time.sleep(RECORD_DELAY_S)
    states = []
    for entry in dead:
        directory = sweep_dir / entry.directory
        try:
            record = _read_record(directory) or write_missing_record(sweep_dir, entry, jobs.get(entry.job or ""))
        except (OSError, ValueError) as error:  # as after the run directory was deleted
            states.append(RunState(entry.run, directory, entry.job, "no record", str(error)))
        else:
            states.append(RunState.from_record(entry.run, directory, entry.job, record))
    return states


def _append_final_states(sweep_dir: Path, entries: Mapping[int, ledger.Entry], found: Mapping[int, RunState]) -> None:
    """Add final states to the ledger, so that later commands need not ask Slurm."""
    new = [
        ledger.Entry(entry.run, entry.id, entry.directory, entry.job, found[number].state)
        for number, entry in entries.items()
        if number in found and found[number].record is not None and entry.state in ("submitted", "cancelled")
    ]
    try:
        ledger.append(sweep_dir, new)
    except PermissionError:
        return  # another user's sweep can be read, but not written
