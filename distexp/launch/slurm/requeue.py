"""Requeue of an interrupted Slurm job, so that its run resumes from the last checkpoint."""

from __future__ import annotations

from pathlib import Path

from distexp.checkpoints.folder import list_checkpoints, step_of
from distexp.launch.slurm.client import SlurmError, requeue
from distexp.launch.slurm.job_states import query_jobs
from distexp.runs.record import RunRecord
from distexp.runs.spec import RunSpec


def requeue_if_needed(spec: RunSpec, run_dir: Path, job: str, record: RunRecord, *, node_lost: bool) -> bool:
    """Requeue an interrupted job, and return whether it was requeued.

    A job is requeued if it was stopped or lost a node, and left a later checkpoint than the one it started from. An
    attempt that made no progress is not repeated.

    Args:
        spec: The run.
        run_dir: Directory of the run.
        job: The job as ARRAY_INDEX.
        record: Record of the attempt.
        node_lost: Whether a node wrote no exit code. Slurm requeues the job itself when it notices this, but the head
            may notice first.
    """
    interrupted = record.status == "preempted" or (node_lost and record.status == "killed")
    if not interrupted or not spec.config.cluster.requeue:
        return False
    newest, first = _newest_checkpoint(run_dir), record.run.attempts[-1]["resumed_from_step"] or 0
    if newest <= first:
        print(f"not requeued: this attempt started at step {first} and left no later checkpoint", flush=True)
        return False
    try:
        if node_lost and not _is_running(job):
            return False  # The job was cancelled, or Slurm requeues it itself.
        requeue(job)
    except SlurmError as error:
        print(f"not requeued: {error}", flush=True)
        return False
    print(f"requeued as job {job}, to resume from step {newest}", flush=True)
    return True


def _newest_checkpoint(run_dir: Path) -> int:
    """Return the step of the newest checkpoint; 0 if there is none."""
    return next((step for path in list_checkpoints(run_dir) if (step := step_of(path)) is not None), 0)


def _is_running(job: str) -> bool:
    """Return whether Slurm still considers the job as running."""
    state = query_jobs([job]).get(job)
    return state is not None and state.state == "RUNNING"
