"""Trials of candidates: their starts, their metrics, and what a failed one prunes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from distexp.choose.candidate import CHECKPOINTING, STRATEGY_OF, Candidate, Objective, Status, Trial, override_pairs
from distexp.choose.ranking import PlannedTrial
from distexp.choose.space import with_overrides, without_other_strategy
from distexp.compose.composition import Cell, MakeCell
from distexp.config import Config, ConfigError
from distexp.config.overrides import suggest_command
from distexp.launch import outcome
from distexp.launch.launcher import TrialRunner
from distexp.launch.run_dirs import AssignedRun, claim_run_dir, make_run_info, run_dir_for
from distexp.runs import attempts, texts
from distexp.runs.memory_trace import cpu_process_mib
from distexp.runs.record import RunRecord
from distexp.runs.run_dir import CHOICE, OPERATORS, RECORD, SPEC
from distexp.system.files import read_entries, read_json, write_json
from distexp.system.typed_values import cpu_peak_mib, device_values, number_of, parse_dataclass

INTERRUPTED = frozenset({"killed", "preempted"})  # statuses of trials that run again when a search is resumed


@dataclass(frozen=True)
class _TrialRun:
    """A trial with its run: the cell, its configuration, the entry in ``choose.json``, and the directory."""

    cell: Cell
    config: Config
    stored: StoredTrial
    composed: DictConfig
    directory: Path

    @property
    def has_ended(self) -> bool:
        """Return whether the run has a final record, so that it must not run again."""
        record = outcome.read_record(self.directory / RECORD)
        if record is None or record.status in INTERRUPTED:
            return False
        # If Slurm has refused the job, another command may submit it.
        return record.error is None or record.error.type != attempts.SUBMISSION_REFUSED

    def store_cost(self) -> None:
        record, stored = outcome.read_record(self.directory / RECORD), self.stored
        if record is not None:
            stored.status = record.status
            stored.gpu_seconds = gpu_seconds(record, self.directory, self.config)
            if record.status == "completed":  # A run that failed does not know how long it trained.
                training_s = (record.metrics.train_runtime or 0.0) * self.config.cluster.world_size
                stored.startup_gpu_seconds = max(0.0, stored.gpu_seconds - training_s)


@dataclass
class Trials:
    """Runs trials in the directory of a search, and stores them in ``choose.json``."""

    state: SearchState  # the file of the search, with the overrides of the command
    make: MakeCell  # composes a cell
    runner: TrialRunner  # runs batches
    budget_min: float  # budget of the search in minutes, which limits each trial too
    _repeats: dict[tuple[tuple[str, ...], int], int] = field(default_factory=dict)
    _cells: dict[tuple[tuple[str, ...], int], Cell] = field(default_factory=dict)

    def try_all(
        self, batch: Sequence[PlannedTrial], further: Sequence[str] = (), *, compares_losses: bool = False
    ) -> list[Trial]:
        """Run a batch of trials. Those that ended before the search was resumed are not repeated."""
        cells = [self._cell(planned, further) for planned in batch]
        claimed = [self._claim(cell, planned, further) for cell, planned in zip(cells, batch, strict=True)]
        runs = [run for run in claimed if run is not None]
        for run in runs:
            run.stored.compares_losses |= compares_losses
        self._run_missing(runs)
        results: list[Trial] = []
        for done, cell, planned in zip(claimed, cells, batch, strict=True):
            if done is None:
                results.append(Trial(planned.steps, "invalid", error=texts.join_errors(cell.errors)))
            else:
                record, cost = outcome.read_record(done.directory / RECORD), done.stored.gpu_seconds
                results.append(trial_of(record, done.directory, planned.steps, done.config, cost))
        return results

    def _cell(self, planned: PlannedTrial, further: Sequence[str]) -> Cell:
        """Return the cell of a trial. Repeated trials share it."""
        candidate, steps = planned.candidate, planned.steps
        key = (*candidate.overrides, *further), steps
        if key in self._cells:
            return self._cells[key]
        assert candidate.config is not None, "an invalid candidate is pruned"
        # The overrides of the candidate come last, because tables show the last ones.
        new = [*trial_overrides(candidate.config, steps, self.budget_min), *candidate.overrides, *further]
        command = without_other_strategy(self.state.command, candidate.overrides)
        cell = self._cells[key] = self.make(with_overrides(command, new))
        if not further and candidate.predicted is not None and candidate.estimate is not None:
            cell.predicted, cell.curve = candidate.predicted, candidate.estimate.curve
        return cell

    def _claim(self, cell: Cell, planned: PlannedTrial, further: Sequence[str]) -> _TrialRun | None:
        """Return the run of a trial, with a new directory if it was not started before; None for an invalid cell."""
        if cell.config is None:
            return None
        overrides, steps = (*planned.candidate.overrides, *further), planned.steps
        repeat = self._repeats.get((overrides, steps), 0)
        self._repeats[overrides, steps] = repeat + 1
        composed = cell.composed  # a new object, in which ``run_dir_for`` sets the number of the run
        directory_of = partial(run_dir_for, composed, self.state.folder)
        stored = self.state.find(overrides, steps, repeat)
        if stored is None:
            number = claim_run_dir(directory_of, 0, self.state.folder).number
            stored = StoredTrial(list(overrides), steps, repeat, number)
            self.state.trials.append(stored)
        return _TrialRun(cell, cell.config, stored, composed, directory_of(stored.number))

    def _run_missing(self, runs: Sequence[_TrialRun]) -> None:
        """Run the trials that have not ended, and store what each has cost."""
        missing = [run for run in runs if not run.has_ended]
        # An interrupted command may have ended between a record and its entry.
        self._store([run for run in runs if run.stored.status is None])
        if missing:
            assigned = []
            for run in missing:
                info = make_run_info(run.cell, run.stored.number, self.runner.code, self.runner.snapshot)
                assigned.append(AssignedRun(run.cell, info, run.directory, run.composed))
            try:
                self.runner.run_all(assigned, lambda: self._store(missing))
            finally:  # A signal may come after a trial and before its entry.
                self._store([run for run in missing if run.has_ended])

    def _store(self, runs: Sequence[_TrialRun]) -> None:
        for run in runs:
            run.store_cost()
        self.state.write()


EXCLUDED_STEPS = 3  # first steps of a trial that are not measured: compilation, and the recording of CUDA graphs


def trial_overrides(config: Config, steps: int, budget_min: float) -> list[str]:
    """Return what makes a training a trial: few steps, each logged, no evaluation, and no other output."""
    total, train = steps + EXCLUDED_STEPS, config.train
    limit = max(budget_min, 10.0)  # The first trial may download and tokenize the data.
    found = [
        f"train.max_steps={total}",
        f"train.num_epochs={total}",  # A small data set has fewer steps in an epoch.
        f"train.measure_after_step={EXCLUDED_STEPS}",
        *("train.log_every=1", "train.checkpoint_every=null", "train.resume=null", "train.save_model=false"),
        *("train.evaluate=false", "train.score_answers=false", "train.profile_steps=0"),
        *("profile=false", "tracker=none", "preflight.enabled=false"),
        f"cluster.timeout_min={min(limit, config.cluster.timeout_min or limit):g}",
    ]
    samples, known = train.global_batch_size, config.dataset.eval_size
    if samples is not None and known is not None:  # How many samples are all of them, only loading shows.
        found.append(f"dataset.eval_size={min(samples, known)}")
    return found


@dataclass
class StoredTrial:
    """A trial in ``choose.json``: which run it is, and what it has cost."""

    overrides: list[str]  # overrides of the candidate, and further ones of the trial
    steps: int  # number of measured steps
    repeat: int  # number of equal trials before it
    number: int  # number of its run
    status: str | None = None  # status of its record; None if it has not ended
    gpu_seconds: float = 0.0  # time of the run times the number of workers
    startup_gpu_seconds: float = 0.0  # the part of it outside of training and evaluation
    compares_losses: bool = False  # whether it was run to compare the losses, after the search


@dataclass
class SearchState:
    """The file of a search."""

    folder: Path  # directory of the search
    command: list[str]  # overrides that the search is about
    describe: Callable[[], dict[str, Any]] = dict  # returns what else the file contains: the winner and candidates
    trials: list[StoredTrial] = field(default_factory=list)  # trials that were started, in order

    @classmethod
    def open(cls, folder: Path, command: Sequence[str]) -> SearchState:
        """Return the state of a directory, perhaps empty. Raise a ConfigError for another search or a damaged file."""
        path = folder / CHOICE
        try:
            raw = read_json(path)
            stored, trials = raw["command"], [parse_dataclass(StoredTrial, trial) for trial in raw["trials"]]
        except FileNotFoundError:
            return cls(folder, list(command))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is damaged ({error}): start the search in another directory") from None
        if stored != list(command):
            raise ConfigError(
                f"{folder} contains the search for '{' '.join(map(str, stored))}', and this one is for "
                f"'{' '.join(command)}': choose another hydra.sweep.dir, or continue that one with "
                f"{suggest_command('resume', folder)}"
            )
        return cls(folder, list(command), trials=trials)

    def find(self, overrides: Sequence[str], steps: int, repeat: int) -> StoredTrial | None:
        """Return a trial that was started before; None if it was not."""
        wanted = (list(overrides), steps, repeat)
        return next((trial for trial in self.trials if (trial.overrides, trial.steps, trial.repeat) == wanted), None)

    @property
    def gpu_seconds(self) -> float:
        """Return the cost of all trials."""
        return sum(trial.gpu_seconds for trial in self.trials)

    @property
    def startup_gpu_seconds(self) -> float:
        """Return the part of the cost outside of training and evaluation."""
        return sum(trial.startup_gpu_seconds for trial in self.trials)

    @property
    def check_gpu_seconds(self) -> float:
        """Return the part of the cost for trials that compare the losses."""
        return sum(trial.gpu_seconds for trial in self.trials if trial.compares_losses)

    def to_json(self) -> dict[str, Any]:
        """Return the content of the file."""
        return {
            **self.describe(),
            "gpu_seconds": round(self.gpu_seconds, 1),
            "startup_gpu_seconds": round(self.startup_gpu_seconds, 1),
            "check_gpu_seconds": round(self.check_gpu_seconds, 1),
            "command": self.command,
            "trials": [asdict(trial) for trial in self.trials],
            "version": 1,
        }

    def write(self) -> None:
        """Write the file atomically."""
        write_json(self.folder / CHOICE, self.to_json())


def trial_of(record: RunRecord | None, run_dir: Path, steps: int, config: Config, cost: float) -> Trial:
    """Return the trial of a run that has ended, with its cost in GPU-seconds. The record is None if it left none."""
    if record is None:
        return Trial(steps, "failed", run_dir, error=f"the run left no record in {run_dir}")
    if record.status != "completed":
        return Trial(steps, record.status, run_dir, gpu_seconds=cost, error=texts.failure_text(record))
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
        price_per_sample=cluster.world_size * (price or 0.0) / 3600 / (speed or 1.0) if has_price else None,
        gpu_seconds=cost,
        dropout=None if record.built is None else record.built.dropout,
        process_mib=cpu_process_mib(record),
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


def add_trial(candidate: Candidate, trial: Trial, family: Sequence[Candidate], objective: Objective) -> None:
    """Add a trial to its candidate, and set the status. If it failed, prune what would fail too."""
    candidate.trials = (*candidate.trials, trial)
    if trial.status == "completed":
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
    # The rest of a family is pruned if two of its trials failed for another reason than memory.
    failed = [member for member in family if member.has_failed and not member.ran_out_of_memory]
    for member in waiting:
        if len(failed) > 1 and member.is_waiting:
            member.prune(f"{len(failed)} trials of this family failed: {candidate.reason}")


def prune_unmeasured(candidates: Sequence[Candidate], objective: Objective) -> None:
    """Prune all that wait if trials have completed and none measured the objective, because others will not either."""
    completed = [trial for candidate in candidates for trial in candidate.completed]
    if completed and all(trial.minimized(objective) is None for trial in completed):
        for waiting in (candidate for candidate in candidates if candidate.is_waiting):
            waiting.prune(UNMEASURED[objective])


def prune_unneeded(candidates: Sequence[Candidate], objective: Objective) -> None:
    """Prune what is slower to save memory, if a trial has fitted without it. Predictions may have shown it before."""
    if objective is Objective.MEMORY:
        return
    completed = [candidate for candidate in candidates if candidate.completed]
    for waiting in (candidate for candidate in candidates if candidate.is_waiting):
        plain = tuple(text for text in waiting.family if not text.startswith(f"{CHECKPOINTING}="))
        for other in completed:
            slower = ""
            if waiting.offloads and not other.offloads and waiting.workers == other.workers:
                slower = "offloading"
            elif waiting.checkpoints and other.family == plain and waiting.micro_batch <= other.micro_batch:
                slower = "checkpointing"
            if slower:
                waiting.prune(f"{slower} is slower, and not needed: {' '.join(other.overrides)} fits")
                break


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
    # Other errors, such as too little memory or time, do not concern all candidates.
    failed = [candidate for candidate in tried if candidate.trials[-1].status in ("failed", "invalid")]
    errors = {candidate.trials[-1].error for candidate in failed}
    if len(errors) != 1 or "" in errors or any(candidate.completed for candidate in tried):
        return [], set()
    keys = {key for candidate in (*failed, *waiting) for key, _ in override_pairs(candidate)}
    return failed, set.intersection(*(_settings(candidate, keys) for candidate in failed))


def _settings(candidate: Candidate, keys: Iterable[str]) -> set[tuple[str, str]]:
    """Return the values that a candidate has for some keys; an empty one for a key that it does not override.

    A sharding or a stage that it does not have is no setting, because its strategy implies it.
    """
    values = dict(override_pairs(candidate))
    return {(key, values.get(key, "")) for key in keys if key in values or key not in STRATEGY_OF}
