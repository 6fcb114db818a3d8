"""What a trial measured, by the record of its run, and what it means for its candidate and for the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from distexp.choose.candidate import COMPLETED, STRATEGY, STRATEGY_OF, Candidate, Objective, Status, Trial
from distexp.config import Config
from distexp.runs.record import RunRecord
from distexp.runs.run_dir import OPERATORS, RECORD, SPEC
from distexp.runs.texts import failure_text
from distexp.system.files import read_entries
from distexp.system.typed_values import cpu_peak_mib, device_values, number_of

SECONDS_PER_HOUR = 3600.0


def read_record(run_dir: Path) -> RunRecord | None:
    """Return the record of a run; None if there is none that can be read."""
    try:
        return RunRecord.read(run_dir / RECORD)
    except ValueError:
        return None


def trial_of(record: RunRecord | None, run_dir: Path, steps: int, config: Config, cost: float) -> Trial:
    """Return the trial of a run that has ended, with its cost in GPU-seconds. The record is None if it left none."""
    if record is None:
        return Trial(steps, "failed", run_dir, error=f"the run left no record in {run_dir}")
    if record.status != COMPLETED:
        return Trial(steps, record.status, run_dir, gpu_seconds=cost, error=failure_text(record))
    metrics, cluster = record.metrics, config.cluster
    speed, price = metrics.train_samples_per_second, cluster.price_per_gpu_hour
    has_price = price is not None and speed and cluster.device != "cpu"
    return Trial(
        steps,
        record.status,
        run_dir,
        step_s=(metrics.step_time_s or {}).get("p50"),
        samples_per_second=speed,
        peak_allocated_mib=peak_mib(record),
        j_per_sample=(metrics.energy or {}).get("j_per_sample"),
        price_per_sample=cluster.world_size * (price or 0.0) / SECONDS_PER_HOUR / (speed or 1.0) if has_price else None,
        gpu_seconds=cost,
        dropout=None if record.built is None else record.built.dropout,
    )


def gpu_seconds(record: RunRecord, run_dir: Path, config: Config) -> float:
    """Return the time of a run times the number of its workers, with the imports that the record leaves out.

    An attempt starts with its spec, and ends with its record. A Slurm job writes its spec again when it starts. An
    attempt that never starts has no hosts, and its time in the queue costs nothing. Neither does the compilation of
    DeepSpeed's operators, which happens once on a machine.
    """
    if record.run.attempts and not record.run.hosts:
        return 0.0
    try:
        seconds = (run_dir / RECORD).stat().st_mtime - (run_dir / SPEC).stat().st_mtime
    except OSError:
        return 0.0
    # A node compiles the operators, or waits for another run that does.
    entries = read_entries(run_dir / OPERATORS)
    times = (number_of(entry, key) for entry in entries for key in ("compiled_s", "waited_s"))
    compilation_s = max((time for time in times if time is not None), default=0.0)
    return max(0.0, seconds - compilation_s) * config.cluster.world_size


def peak_mib(record: RunRecord) -> float | None:
    """Return the highest peak of torch's memory on a GPU; for a run on CPUs that of the processes of a node."""
    allocated = device_values(record.memory.get("torch"), "peak_allocated_mib")
    return max(allocated) if allocated else cpu_peak_mib(record.memory)


UNMEASURED = {
    Objective.THROUGHPUT: "the run measured no throughput",
    Objective.ENERGY: "the run measured no energy: use choose.objective=throughput",
    Objective.COST: "the run has no price: set cluster.price_per_gpu_hour",
    Objective.MEMORY: "the run measured no memory",
}
"""Why a completed trial has no score."""

MAX_FAILURES = 1
"""Most trials of a family that may fail for another reason than memory before the rest of the family is pruned."""


def add_trial(candidate: Candidate, trial: Trial, family: Sequence[Candidate], objective: Objective) -> None:
    """Add a trial to its candidate, and set the status. If it failed, prune what would fail too."""
    candidate.trials = (*candidate.trials, trial)
    if trial.status == COMPLETED:
        if candidate.score(objective) is not None:
            candidate.status, candidate.reason = Status.TRIED, ""
        elif trial.minimized(objective) is None:
            candidate.status, candidate.reason = Status.FAILED, UNMEASURED[objective]
        else:
            reason = "its measured value is 0: the counter did not advance in so short a run"
            candidate.status, candidate.reason = Status.FAILED, reason
        return
    candidate.status = Status.FAILED
    ran_out, size = trial.ran_out_of_memory, candidate.micro_batch
    candidate.reason = trial.error or ("it ran out of memory" if ran_out else f"the run is {trial.status}")
    waiting = [member for member in family if member.is_waiting]
    for member in waiting:
        if ran_out and member.micro_batch > size:
            member.prune(f"micro-batch {member.micro_batch} needs more than {size}, which ran out of memory")
    # The rest of a family is pruned if too many of its trials failed for another reason than memory.
    failed = [member for member in family if member.has_failed and not member.ran_out_of_memory]
    for member in waiting:
        if len(failed) > MAX_FAILURES and member.is_waiting:
            member.prune(f"{len(failed)} trials of this family failed: {candidate.reason}")


def prune_unmeasured(candidates: Sequence[Candidate], objective: Objective) -> None:
    """Prune all that wait if trials have completed and none measured the objective, because others will not either."""
    completed = [trial for candidate in candidates for trial in candidate.completed]
    if completed and all(trial.minimized(objective) is None for trial in completed):
        for waiting in (candidate for candidate in candidates if candidate.is_waiting):
            waiting.prune(UNMEASURED[objective])


UNSUCCESSFUL = ("failed", "invalid")
"""Statuses of trials whose error may concern all candidates. Too little memory, or too little time, does not."""


def prune_by_common_error(candidates: Sequence[Candidate]) -> None:
    """Prune all candidates that wait if no trial completed, and no setting explains why the others failed.

    A setting explains an error if all trials that failed have it, and some candidate that waits does not.
    """
    waiting = [candidate for candidate in candidates if candidate.is_waiting]
    failed, common = _failed_alike(candidates, waiting)
    if len(failed) > 1 and all(common <= _settings(candidate, dict(common)) for candidate in waiting):
        for candidate in waiting:
            candidate.prune(f"{len(failed)} trials with other settings failed: {failed[0].trials[-1].error}")


def most_different(waiting: Sequence[Candidate], candidates: Iterable[Candidate]) -> Candidate | None:
    """Return the first waiting candidate with the fewest settings of all failed ones; None if it is not needed."""
    failed, common = _failed_alike(candidates, waiting)
    if not failed:
        return None
    return min(waiting, key=lambda candidate: len(common & _settings(candidate, dict(common))), default=None)


def _failed_alike(
    candidates: Iterable[Candidate], waiting: Sequence[Candidate]
) -> tuple[list[Candidate], set[tuple[str, str]]]:
    """Return the candidates that failed, and the settings that all of them have, as pairs of key and value.

    There are none if a trial completed, or the errors differ.
    """
    tried = [candidate for candidate in candidates if candidate.trials]
    failed = [candidate for candidate in tried if candidate.trials[-1].status in UNSUCCESSFUL]
    errors = {candidate.trials[-1].error for candidate in failed}
    if len(errors) != 1 or "" in errors or any(candidate.completed for candidate in tried):
        return [], set()
    keys = {key for candidate in (*failed, *waiting) for key, _ in _overrides(candidate)}
    return failed, set.intersection(*(_settings(candidate, keys) for candidate in failed))


def _settings(candidate: Candidate, keys: Iterable[str]) -> set[tuple[str, str]]:
    """Return the values that a candidate has for some keys; an empty one for a key that it does not override.

    A sharding or a stage that it does not have is no setting, because its strategy implies it.
    """
    values = dict(_overrides(candidate))
    return {(key, values.get(key, "")) for key in keys if key in values or key not in STRATEGY_OF}


def _overrides(candidate: Candidate) -> Iterator[tuple[str, str]]:
    """Yield the overrides as pairs of key and value. A sharding or a stage also names its strategy."""
    for override in candidate.overrides:
        key, _, value = override.partition("=")
        if key in STRATEGY_OF:
            yield STRATEGY, STRATEGY_OF[key]
        yield key, value
