"""Trials of candidates: short runs with records, in the directory of the search."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from distexp.choose.candidate import Candidate, Trial
from distexp.choose.single_reference import without_other_strategy
from distexp.choose.state import SearchState, StoredTrial
from distexp.choose.trial_metrics import gpu_seconds, read_record, training_gpu_seconds, trial_of
from distexp.cli.overrides import quote_choice
from distexp.config import Config
from distexp.config.paths import config_groups
from distexp.launch.composition import Cell, MakeCell
from distexp.launch.snapshot import GitState
from distexp.launch.sweep import AssignedRun, claim_run_dir, make_run_info, run_dir_for
from distexp.plan.cells import replace_overrides
from distexp.runs.errors import SUBMISSION_REFUSED
from distexp.runs.record import RunRecord

EXCLUDED_STEPS = 3
"""First steps of a trial that are not measured: compilation, and the recording of CUDA graphs."""

SHORTEST_LIMIT_MIN = 10.0
"""Least time limit of a trial. The first one may download and tokenize the data."""

INTERRUPTED = frozenset({"killed", "preempted"})
"""Statuses of trials that run again when a search is resumed."""

RunAll = Callable[[Sequence[AssignedRun], Callable[[], None]], None]
"""Function that runs all trials of a batch, and calls another one after each. Each has a record when it returns."""


@dataclass
class Trials:
    """Runs of the trials of a search.

    Attributes:
        command: Overrides of the command.
        make: Composes a cell.
        run_all: Runs a batch.
        sweep_dir: Directory of the search.
        code: Git state of the code.
        state: What is stored of the search.
        snapshot: Copy of the code that the runs use.
        budget_min: Budget of the search in minutes, which limits each trial too.
    """

    command: Sequence[str]
    make: MakeCell
    run_all: RunAll
    sweep_dir: Path
    code: GitState
    state: SearchState
    snapshot: str | None = None
    budget_min: float = SHORTEST_LIMIT_MIN

    def __post_init__(self) -> None:
        self._counts: dict[tuple[tuple[str, ...], int], int] = {}
        self._cells: dict[tuple[tuple[str, ...], int], Cell] = {}

    def try_all(self, batch: Sequence[tuple[Candidate, int]], further: Sequence[str] = ()) -> list[Trial]:
        """Run a batch of candidates with their numbers of measured steps. Trials that have ended are not repeated.

        Args:
            batch: Candidates and steps, in the order in which they run.
            further: More overrides of all trials.
        """
        cells = [self._compose(candidate, steps, further) for candidate, steps in batch]
        stored = [
            self._stored(cell, (*candidate.overrides, *further), steps)
            for cell, (candidate, steps) in zip(cells, batch, strict=True)
        ]
        self._run_missing([(cell, each) for cell, each in zip(cells, stored, strict=True) if each is not None])
        return [self._trial(cell, each, steps) for cell, each, (_, steps) in zip(cells, stored, batch, strict=True)]

    def _compose(self, candidate: Candidate, steps: int, further: Sequence[str]) -> Cell:
        """Return the cell of a trial. Repeated trials have the same."""
        key = (*candidate.overrides, *further), steps
        if key not in self._cells:
            self._cells[key] = self._make(candidate, steps, further)
        return self._cells[key]

    def _make(self, candidate: Candidate, steps: int, further: Sequence[str]) -> Cell:
        config = candidate.config
        assert config is not None, "an invalid candidate is pruned"
        wanted = [
            *trial_overrides(config, steps, self.budget_min),
            *candidate.overrides,
            *further,
        ]  # tables show the last ones
        command = without_other_strategy(self.command, candidate.overrides)
        cell = self.make(replace_overrides(command, [quote_choice(text, config_groups()) for text in wanted]))
        if not further and candidate.predicted is not None and candidate.estimate is not None:
            cell.predicted, cell.curve = candidate.predicted, candidate.estimate.curve
        return cell

    def _stored(self, cell: Cell, overrides: tuple[str, ...], steps: int) -> StoredTrial | None:
        """Return the entry of a trial, a new one if it was not started before; None for an invalid cell."""
        if cell.config is None:
            return None
        repeat = self._counts.get((overrides, steps), 0)
        self._counts[overrides, steps] = repeat + 1
        found = self.state.find(overrides, steps, repeat)
        if found is not None:
            return found
        number, _ = claim_run_dir(partial(run_dir_for, cell.composed, self.sweep_dir), 0, resume=False)
        return self.state.add(StoredTrial(list(overrides), steps, repeat, number))

    def _run_missing(self, trials: Sequence[tuple[Cell, StoredTrial]]) -> None:
        """Run the trials that have not ended."""
        missing = [(cell, stored) for cell, stored in trials if not self._has_ended(cell, stored)]
        self._update(
            [(cell, stored) for cell, stored in trials if stored.status is None]
        )  # The last command ended early.
        if missing:
            self.run_all([self._assign(*each) for each in missing], lambda: self._update(missing))
            self._update(missing)

    def _has_ended(self, cell: Cell, stored: StoredTrial) -> bool:
        record = read_record(run_dir_for(cell.composed, self.sweep_dir, stored.number))
        return record is not None and record.status not in INTERRUPTED and not _is_refused(record)

    def _assign(self, cell: Cell, stored: StoredTrial) -> AssignedRun:
        info, composed = make_run_info(cell, stored.number, self.code, self.snapshot), cell.composed
        return AssignedRun(cell, info, run_dir_for(composed, self.sweep_dir, stored.number), composed)

    def _update(self, trials: Sequence[tuple[Cell, StoredTrial]]) -> None:
        """Store what the trials that have ended cost."""
        for cell, stored in trials:
            directory = run_dir_for(cell.composed, self.sweep_dir, stored.number)
            record = read_record(directory)
            if record is not None and cell.config is not None:
                stored.status = record.status
                stored.gpu_seconds = gpu_seconds(record, directory, cell.config)
                stored.startup_gpu_seconds = max(0.0, stored.gpu_seconds - training_gpu_seconds(record, cell.config))
        self.state.write()

    def _trial(self, cell: Cell, stored: StoredTrial | None, steps: int) -> Trial:
        if stored is None or cell.config is None:
            return Trial(steps, "invalid", error=" | ".join(cell.errors))
        directory = run_dir_for(cell.composed, self.sweep_dir, stored.number)
        return trial_of(read_record(directory), directory, steps, cell.config, stored.gpu_seconds)


def _is_refused(record: RunRecord) -> bool:
    """Return whether Slurm has refused the job of a trial. Another command may submit it."""
    return record.error is not None and record.error.type == SUBMISSION_REFUSED


def trial_overrides(config: Config, steps: int, budget_min: float) -> list[str]:
    """Return what makes a training a trial: few steps, each logged, a small evaluation, and no other output.

    The model, the global batch, the seed and the order of the data stay the same.

    Args:
        config: Resolved configuration of the candidate.
        steps: Number of measured steps.
        budget_min: Budget of the search in minutes.
    """
    total, train = steps + EXCLUDED_STEPS, config.train
    limit = max(budget_min, SHORTEST_LIMIT_MIN)
    found = [
        "choose.only=true",  # The report shows such a run as a trial.
        f"train.max_steps={total}",
        f"train.num_epochs={total}",  # A small data set has fewer steps in an epoch.
        f"train.measure_after_step={EXCLUDED_STEPS}",
        "train.log_every=1",
        "train.checkpoint_every=null",
        "train.save_model=false",
        "train.score_answers=false",
        "train.profile_steps=0",
        "profile=false",
        "tracker=none",
        "preflight.enabled=false",
        f"cluster.timeout_min={min(limit, config.cluster.timeout_min or limit):g}",
    ]
    samples = train.global_batch_size
    if samples is not None and "eval_size" in config.dataset.keys:
        found.append(f"dataset.eval_size={min(samples, config.dataset.eval_size or samples)}")
    return found
