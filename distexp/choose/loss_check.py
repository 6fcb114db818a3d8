"""Check that the losses of a candidate equal those of ``single``, or of the nearest configuration that can run."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import inf, nan
from pathlib import Path
from typing import Any

from distexp.choose.candidate import CHECKPOINTING, MICRO_BATCH, Candidate, Objective, SearchRules, Status, Trial, label
from distexp.choose.policy import expected_gpu_seconds
from distexp.choose.predictions.pruning import prune_by_plan
from distexp.choose.ranking import PlannedTrial, by_score
from distexp.choose.space import with_overrides, without_other_strategy
from distexp.choose.trials import EXCLUDED_STEPS, Trials
from distexp.compose.composition import MakeCell
from distexp.config.model_checks import depends_on_micro_batch
from distexp.plan.planner import Planner, parallel_processes
from distexp.plan.verdict import FITS
from distexp.resolve.run_id import run_id
from distexp.runs.run_dir import METRICS
from distexp.statistics.same_training import LossComparison, compare_trials
from distexp.strategies.base import load_strategy, reference_name
from distexp.strategies.single import REFERENCE
from distexp.system.files import read_entries
from distexp.system.typed_values import number_of

MAX_REFERENCES = 3  # Most references to try. One that fails, as out of memory, is followed by the next.

DROPOUT = (
    "the model has a dropout rate of {rate:g}, with which each strategy draws other random numbers: set the rate to 0 "
    "to compare them"
)
"""Why losses that differ are not compared, if no override switches the dropout of a custom model off."""


@dataclass(frozen=True)
class LossCheck:
    """Result of the check."""

    reference: str = ""  # label of the configuration that the losses are compared with; empty if there is none
    comparison: LossComparison | None = None  # the differences; None if nothing could be compared
    reason: str = ""  # why nothing could be compared, or why the reference is not ``single``
    outside_speed: float | None = None  # samples/s of the reference, if it is no candidate of the search

    @property
    def equal(self) -> bool | None:
        """Return whether the losses are equal; None if that is unknown."""
        return None if self.comparison is None else self.comparison.equal

    def to_json(self) -> dict[str, Any]:
        """Return the check for programs."""
        found = self.comparison
        return {
            "reference": self.reference or None,
            "equal": self.equal,
            "steps": found.steps if found else None,
            "largest_relative_difference": found.largest if found else None,
            "mean_relative_difference": found.mean if found else None,
            "largest_allowed": found.bounds.step if found else None,
            "mean_allowed": found.bounds.mean if found else None,
            "reason": self.reason,
        }


@dataclass
class LossChecker:
    """Checks of candidates. A reference runs once. If it is a candidate, its trial counts in the search."""

    candidates: Sequence[Candidate]  # all candidates of the search
    trials: Trials  # runs trials
    singles: Sequence[Candidate] = ()  # configurations of ``single`` that are no candidates but are predicted to fit
    _errors: dict[Candidate, str] = field(default_factory=dict)
    _outside_speeds: dict[Candidate, float | None] = field(default_factory=dict)

    def check(self, winner: Candidate) -> LossCheck:
        """Compare the losses of a candidate with those of the reference, and run the trials that are missing."""
        assert winner.config is not None
        without_dropout, precision = dropout_overrides(winner), winner.config.precision.name
        references = list(references_of(winner, self.candidates, self.singles))
        if not references:
            return LossCheck(reason="no other configuration can run")
        own: Sequence[Trial] = winner.completed
        steps = min(trial.steps for trial in own)
        if without_dropout:  # Each strategy draws other random numbers.
            tried = self.trials.try_all([PlannedTrial(winner, steps)], without_dropout, compares_losses=True)
            own = _only_completed(tried)
            if not own:
                trial = f"the trial of {label(winner)} with {' '.join(without_dropout)}"
                return LossCheck(reason=f"{trial} failed: {tried[0].error or tried[0].status}")
        for reference in references[:MAX_REFERENCES]:
            # A trial of equal steps is there already, or one is run.
            found = None if without_dropout else _compare_trials(own, reference.completed, precision)
            found = found or _compare_trials(own, self._run_reference(reference, steps, without_dropout), precision)
            if found is not None and not found.equal and (equal_threads := _thread_overrides(reference, winner)):
                trials = self._run_reference(reference, steps, (*without_dropout, *equal_threads))
                found = _compare_trials(own, trials, precision) or found
            rate = max((trial.dropout or 0.0 for trial in own), default=0.0)
            if found is not None and rate and not found.equal:
                return LossCheck(label(reference), reason=DROPOUT.format(rate=rate))
            if found is not None:
                configs = [candidate.config for candidate in (reference, winner) if candidate.config is not None]
                has_single = any(load_strategy(config).is_reference for config in configs)
                reason = "" if has_single else f"{reference_name()} cannot run here"
                return LossCheck(label(reference), found, reason, self._outside_speeds.get(reference))
        failed = [f"{label(failure)}: {self._errors[failure]}" for failure in references if failure in self._errors]
        reason = f"no reference completed: {'; '.join(failed)}" if failed else "no trial has equal steps"
        return LossCheck(label(references[0]), reason=reason)

    def _run_reference(self, reference: Candidate, steps: int, further: Sequence[str]) -> list[Trial]:
        """Run a trial of a reference; return it if it completed. Without further overrides it counts in the search."""
        trials = self.trials.try_all([PlannedTrial(reference, steps)], further, compares_losses=True)
        completed = _only_completed(trials)
        if not completed:
            self._errors[reference] = trials[0].error or trials[0].status
        elif further:
            pass  # These trials are of another training, for example without dropout.
        elif reference not in self.candidates:
            self._outside_speeds[reference] = completed[0].samples_per_second
        else:
            reference.trials, reference.status, reference.reason = (*reference.trials, *completed), Status.TRIED, ""
        return completed


def references_of(
    winner: Candidate, candidates: Sequence[Candidate], singles: Sequence[Candidate]
) -> Iterator[Candidate]:
    """Yield the configurations to compare the losses of a candidate with, the simplest first."""
    assert winner.config is not None
    own = run_id(winner.config)
    # A search prunes candidates that fit but cannot win, too. They can run.
    runnable = [
        each for each in candidates
        if each.is_tried
        or (not each.has_failed and each.predicted is not None and each.predicted.verdict == FITS)
    ]  # fmt: skip
    others = [each for each in (*runnable, *singles) if each.config is not None and run_id(each.config) != own]
    other_training, size = depends_on_micro_batch(winner.config), winner.micro_batch
    # Of two that are equally simple, one with a trial needs no other.
    yield from sorted(
        others,
        key=lambda other: (other_training and other.micro_batch != size, *_simplicity(other), not other.completed),
    )


def dropout_overrides(candidate: Candidate) -> tuple[str, ...]:
    """Return the overrides without dropout, if the model may have some: by default it has its own rates."""
    assert candidate.config is not None
    model, adapter = candidate.config.model, candidate.config.adapter
    may_have = model.dropout != 0 and "dropout" in model.keys
    without = model.dropout is None and any(trial.dropout == 0 for trial in candidate.completed)
    found = ["model.dropout=0"] if may_have and not without else []
    if adapter.freezes_model and adapter.dropout:
        found.append("adapter.dropout=0")
    return tuple(found)


def _thread_overrides(reference: Candidate, winner: Candidate) -> tuple[str, ...]:
    """Return the override that gives a reference on a CPU as many threads as the winner; empty if it has them.

    Other threads add in another order. A batch norm may enlarge this in a few steps, from 4e-6 to 5e-2 with ResNet-50.
    """
    configs = [candidate.config for candidate in (reference, winner) if candidate.config is not None]
    threads = [config.cluster.cpus_per_worker for config in configs if config.cluster.device == "cpu"]
    return () if len(set(threads)) < 2 else (f"cluster.cpus_per_worker={threads[-1]}",)


def _compare_trials(own: Sequence[Trial], others: Sequence[Trial], precision: str) -> LossComparison | None:
    """Return the first comparison of two trials with equal steps; None if there are no such trials with losses."""
    for trial, other in product(own, others):
        if trial.steps == other.steps and trial.directory is not None and other.directory is not None:
            found = compare_trials(read_losses(trial.directory), read_losses(other.directory), precision)
            if found is not None:
                return found
    return None


def read_losses(run_dir: Path) -> list[float]:
    """Return the losses of all steps, logged with ``train.log_every=1``. One that is not finite is logged as null."""
    losses = [number_of(entry, "loss") for entry in read_entries(run_dir / METRICS) if "loss" in entry]
    return [nan if loss is None else loss for loss in losses]


def _only_completed(trials: Sequence[Trial]) -> list[Trial]:
    return [trial for trial in trials if trial.status == "completed"]


def _simplicity(candidate: Candidate) -> tuple[int, bool, bool, bool, int]:
    config = candidate.config
    assert config is not None
    train = config.train
    return (
        load_strategy(config).own_complexity(),
        config.kernels.name != "reference",
        config.offload.enabled,
        bool(train.activation_checkpointing),
        candidate.workers,
    )


def fitting_singles(
    candidates: Sequence[Candidate], command: Sequence[str], make: MakeCell, planner: Planner
) -> list[Candidate]:
    """Return configurations of ``single`` that may fit, the fastest first; none if a candidate of ``single`` does."""
    waiting = [candidate for candidate in candidates if candidate.is_waiting]
    if not waiting or any(each.config and load_strategy(each.config).is_reference for each in waiting):
        return []
    singles = list(_valid_singles(waiting, command, make))
    prune_by_plan(singles, planner.estimate, Objective.THROUGHPUT, at_a_time=parallel_processes())
    # Sorting keeps the order of equal ones.
    return sorted((single for single in singles if single.is_waiting), key=lambda each: each.too_close)


def _valid_singles(candidates: Sequence[Candidate], command: Sequence[str], make: MakeCell) -> Iterator[Candidate]:
    """Yield the valid configurations of ``single`` with the micro-batches of the candidates, the fastest first."""
    kept, base = without_other_strategy(command, REFERENCE), candidates[0].config
    sizes = sorted({candidate.micro_batch for candidate in candidates}, reverse=True)
    choices = [(size, value) for value in ("false", "true") for size in dict.fromkeys((*sizes, 1))]
    if base is not None and depends_on_micro_batch(base):
        choices = [(size, "false") for size in sizes]  # With a batch norm, another micro-batch is another training.
    for size, is_checkpointed in choices:
        family = (*REFERENCE, f"{CHECKPOINTING}={is_checkpointed}")
        overrides = (*family, f"{MICRO_BATCH}={size}")
        config = make(with_overrides(kept, overrides)).config
        if config is not None:
            yield Candidate(overrides, family, config.train.micro_batch, 1, config)


def check_gpu_seconds(candidates: Sequence[Candidate], singles: Sequence[Candidate], objective: Objective) -> float:
    """Return the expected GPU-seconds of the trials that compare the losses of the best candidate so far.

    Before the first trial, the best candidate is the best forecast one. The cost is 0 if the reference has a trial of
    as many steps already, and if there is no reference.
    """
    waiting = [each for each in candidates if each.is_waiting and each.config is not None]
    by_forecast = sorted(waiting, key=lambda each: each.forecast(objective) or inf)
    best = next(iter([*by_score(candidates, objective), *by_forecast]), None)
    reference = next(references_of(best, candidates, singles), None) if best is not None else None
    if best is None or best.config is None or reference is None:
        return 0.0
    steps = min((trial.steps for trial in best.completed), default=SearchRules.steps)
    if dropout_overrides(best):
        missing = [best, reference]
    else:
        known = {trial.steps for trial in best.completed} & {trial.steps for trial in reference.completed}
        missing = [] if known else [reference]
    # The steps that are not measured are longer for the reference than for the trials that give the start-up.
    return sum(expected_gpu_seconds(PlannedTrial(each, steps + EXCLUDED_STEPS), candidates) for each in missing)
