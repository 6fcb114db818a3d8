"""Where every run of a sweep stands: by the ledger, the records and Slurm, from any machine of the cluster."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from distexp.launch import ledger
from distexp.launch.outcome import add_traces, classify_failure, failed_record, read_rank_errors
from distexp.launch.slurm import client
from distexp.launch.slurm.client import JobState
from distexp.launch.slurm.script import FOLDER
from distexp.runs import attempts
from distexp.runs.record import RECORD, RunError, RunRecord
from distexp.runs.spec import RunSpec

ACTIVE = ("pending", "running", "ending", "unknown")
"""States of a run that has not ended, for all that is known."""

LATE_S = 2.0
"""How long a job that has ended may take to show its record: other nodes' writes come late through a file system."""

LAST_LINES = 3
MEMORY_KILL = re.compile(r"exceeded (job )?memory limit|oom[-_ ]kill", re.IGNORECASE)
"""What slurmstepd says of a step that was ended for its memory, whatever Slurm then calls the job's state."""

REASONS = {
    "Priority": "others are before it",
    "Resources": "no nodes are free",
    "JobArrayTaskLimit": "cluster.array_parallelism runs at once",
    "BeginTime": "its time to begin is not yet come",
    "ReqNodeNotAvail": "nodes that it needs are down or reserved",
    "PartitionTimeLimit": "cluster.timeout_min is more than the partition allows",
    "PartitionNodeLimit": "cluster.nodes is more than the partition allows",
    "PartitionConfig": "the partition does not allow such a job",
    "AssocGrpGRES": "the account's share of GPUs is in use",
    "QOSMaxGRESPerUser": "your share of GPUs is in use",
    "QOSMaxJobsPerUserLimit": "you have as many jobs as you may",
    "MaxGRESPerAccount": "the account's share of GPUs is in use",
}
"""What Slurm's reasons for waiting mean."""


@dataclass(frozen=True)
class RunState:
    """One run: ``state`` is pending, running, ending, unknown, or the status of its record."""

    number: int
    directory: Path
    job: str | None
    state: str
    why: str = ""
    nodes: str = ""
    record: RunRecord | None = None


Known = dict[int, RunState]


def look(sweep_dir: Path, known: Known | None = None) -> list[RunState]:
    """The state of every run of the ledger; one that died without a record gets it now.

    Args:
        known: runs whose record was read before, by number; it is added to.

    Where Slurm does not answer, runs that only it could tell of are ``unknown``.
    """
    known = {} if known is None else known
    entries = ledger.latest(sweep_dir)
    rest = {number: entry for number, entry in entries.items() if number not in known}
    undecided = [entry for entry in rest.values() if _undecided(sweep_dir, entry)]
    trouble, said = "", {}
    try:
        said = client.states([entry.job for entry in undecided if entry.job])
    except client.UnreachableError as error:
        trouble = str(error)
    asked = {entry.run for entry in undecided}
    found: dict[int, RunState] = {}
    dead: list[ledger.Entry] = []
    for entry in rest.values():
        job = said.get(entry.job or "")
        state = _state(sweep_dir, entry, job, trouble if entry.run in asked else "")
        if state is None:
            dead.append(entry)
        else:
            found[entry.run] = state
    found |= {state.number: state for state in _bury_all(sweep_dir, dead, said)}
    _remember(sweep_dir, entries, found)
    known |= {state.number: state for state in found.values() if state.record is not None}
    return [known.get(number) or found[number] for number in sorted(entries)]


def _undecided(sweep_dir: Path, entry: ledger.Entry) -> bool:
    """Whether only Slurm can tell: nobody has seen the end, or the run was started anew after it."""
    return entry.state in ("submitted", "cancelled") or not (sweep_dir / entry.directory / RECORD).exists()


def _state(sweep_dir: Path, entry: ledger.Entry, job: JobState | None, trouble: str) -> RunState | None:
    """What is known of a run; None where its job has ended without a record."""
    directory = sweep_dir / entry.directory
    record = _settled(directory)
    done = record is not None and record.status == "completed"
    if job is not None and not job.ended and not (done and job.state != "PENDING"):
        return RunState(entry.run, directory, entry.job, *_active(job))
    if record is not None:
        return RunState(entry.run, directory, entry.job, record.status, _cause(record), record=record)
    if trouble:
        return RunState(entry.run, directory, entry.job, "unknown", trouble)
    return None


def _active(job: JobState) -> tuple[str, str, str]:
    if job.state != "PENDING":
        return "ending" if job.state == "COMPLETING" else "running", "", job.nodes
    words = REASONS.get(job.reason, "")
    why = f"{job.reason}: {words}" if words else job.reason
    return "pending", f"{why}, expected {job.expected}" if job.expected else why, ""


def _record(directory: Path) -> RunRecord | None:
    try:
        return RunRecord.read(directory / RECORD)
    except ValueError:
        return None


def _settled(directory: Path) -> RunRecord | None:
    """A record that is complete: rank 0 writes its part, and the head's task then adds the memory and closes it."""
    record = _record(directory)
    return record if record is not None and attempts.is_final(record) else None


def _cause(record: RunRecord) -> str:
    return f"{record.error.type}: {record.error.message}" if record.error is not None else ""


def _bury_all(sweep_dir: Path, dead: Sequence[ledger.Entry], said: Mapping[str, JobState]) -> list[RunState]:
    if any(_begun(sweep_dir / entry.directory, entry.job) for entry in dead):
        time.sleep(LATE_S)
    states = []
    for entry in dead:
        directory = sweep_dir / entry.directory
        record = _settled(directory) or bury(sweep_dir, entry, said.get(entry.job or ""))
        states.append(RunState(entry.run, directory, entry.job, record.status, _cause(record), record=record))
    return states


def bury(sweep_dir: Path, entry: ledger.Entry, job: JobState | None) -> RunRecord:
    """The record of a run whose job died without leaving one, by whoever looks first."""
    directory = sweep_dir / entry.directory
    spec = RunSpec.read(directory)
    begun = _begun(directory, entry.job)
    if not begun:
        spec.run.attempts.append({"job_id": entry.job, "hosts": [], "resumed_from_step": None, "reason": None})
    record = _record(directory)
    if record is None or record.status != "completed":
        status, error = _post_mortem(sweep_dir, entry, job, spec, begun)
        record = failed_record(spec, directory, status, error, None)
        record.run.hosts = spec.run.attempts[-1]["hosts"]
    if begun:
        add_traces(record, spec, directory)
    attempts.finalize(record)
    record.write(directory)
    return record


def _begun(directory: Path, job: str | None) -> bool:
    """Whether the head's task of a job has listed its attempt."""
    try:
        listed = RunSpec.read(directory).run.attempts
    except (OSError, ValueError):
        return False
    return bool(listed) and listed[-1]["job_id"] == job and listed[-1]["reason"] is None


def _post_mortem(
    sweep_dir: Path, entry: ledger.Entry, job: JobState | None, spec: RunSpec, begun: bool
) -> tuple[str, RunError]:
    name, directory = f"job {entry.job}", sweep_dir / entry.directory
    if job is None:
        return "failed", RunError("JobVanished", f"Slurm knows nothing of {name} any more, and it left no record")
    when = "while it ran" if begun else "before it began"
    endings: dict[str, tuple[str, str]] = {
        "CANCELLED": ("killed", f"{name} was cancelled {when}"),
        "TIMEOUT": ("timeout", f"{name} reached its time limit"),
        "DEADLINE": ("timeout", f"{name} reached its deadline"),
        "OUT_OF_MEMORY": ("oom_host", f"{name} used more memory than it had asked for"),
        "PREEMPTED": ("preempted", f"{name} had to give way to another one"),
        "NODE_FAIL": ("killed", f"{name} lost a node of {job.nodes}"),
        "BOOT_FAIL": ("failed", f"a node of {name} did not boot"),
    }
    if job.state in endings:
        status, message = endings[job.state]
        return status, RunError(job.state.title().replace("_", ""), message)
    printed = _printed(sweep_dir / FOLDER, entry.job or "")
    for log, line in printed:  # by slurmstepd, before or after what srun says of the tasks that it killed
        if MEMORY_KILL.search(line):
            status, message = endings["OUT_OF_MEMORY"]
            return status, RunError("OutOfMemory", f"{message}: {line} ({log})")
    if begun and read_rank_errors(directory):
        return classify_failure(directory, {0: 1}, spec)
    said = f"{name} ended as {job.state} {when}, without a record"
    if printed:
        said += f": {' | '.join(line for _, line in printed[-LAST_LINES:])} ({printed[0][0]})"
    return "failed", RunError("JobDied", said)


def _printed(folder: Path, job: str) -> list[tuple[Path, str]]:
    """The lines that a job printed, on whichever node, each with its log."""
    logs = sorted(folder.glob(f"{job}_*_log.out"))
    return [
        (log, line.strip()) for log in logs for line in log.read_text(errors="replace").splitlines() if line.strip()
    ]


def _remember(sweep_dir: Path, entries: Mapping[int, ledger.Entry], found: Mapping[int, RunState]) -> None:
    """Adds to the ledger how runs ended, so that nobody needs to ask Slurm again."""
    news = [
        ledger.Entry(entry.run, entry.id, entry.directory, entry.job, found[number].state)
        for number, entry in entries.items()
        if number in found and found[number].record is not None and entry.state in ("submitted", "cancelled")
    ]
    try:
        ledger.append(sweep_dir, news)
    except PermissionError:
        return  # somebody else's sweep, which one may look at
