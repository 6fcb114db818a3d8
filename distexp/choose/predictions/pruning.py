"""Pruning of candidates by the prediction of their memory, with few predictions.

Memory grows with the micro-batch. So the largest one that fits is searched in each family, and the others follow from
it. As many are predicted in parallel as the machine allows. The stages are ordered so that later ones need not be
predicted:

1. without activation checkpointing and offloading, strategies that need less memory first;
2. with checkpointing: only micro-batches that do not fit without it;
3. with offloading: only if nothing fits without it on the same number of workers.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from distexp.choose.candidate import CHECKPOINTING, Candidate, Objective, families_of
from distexp.choose.predictions.family_memory import FamilyMemory
from distexp.config.overrides import format_count
from distexp.plan.fitting_change import EstimateAll
from distexp.plan.process_overheads import step_reserve
from distexp.strategies.base import load_strategy, shipped_strategies

STAGES = ((False, False), (False, True), (True, False), (True, True))
"""Offloading and activation checkpointing of each stage."""

EQUAL_FAILURES = 4
"""If so many predictions fail with one error, and none succeeds, no more are made. For example, the data is missing."""

MAX_ERRORS = 3  # most errors of predictions that are printed


def prune_by_plan(
    candidates: Sequence[Candidate],
    estimate_all: EstimateAll,
    objective: Objective,
    *,
    at_a_time: int,
    limit_s: float = 600.0,
    report: Callable[[str], None] = lambda text: None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Prune the candidates that cannot fit, and those that cannot be better than one that fits.

    The others get their predictions. For the objective memory, nothing is pruned because it is slower. After the limit,
    no more are predicted: the others stay, without a forecast.
    """
    valid = [candidate for candidate in candidates if candidate.config is not None and candidate.is_waiting]
    memories = {name: FamilyMemory(members) for name, members in families_of(valid).items()}
    configs = [family.config for family in memories.values()]
    kinds = {**shipped_strategies(), **{config.strategy.name: type(load_strategy(config)) for config in configs}}
    lighter = {text: other for name, kind in kinds.items() for text, other in kind.lighter_overrides(name).items()}
    pruning = _Pruning(memories, lighter, estimate_all, objective, at_a_time, clock() + limit_s, report, clock)
    for stage in STAGES:
        pruning.predict_stage(stage)
    if not any(candidate.is_waiting for candidate in candidates):
        pruning.predict_smallest()
    pruning.report_errors()


@dataclass
class _Pruning:
    """A pruning that runs. The attributes without a text are the arguments of ``prune_by_plan``."""

    families: dict[tuple[str, ...], FamilyMemory]  # what is known of each family, by its overrides
    lighter: Mapping[str, str]  # the override that needs less memory, by that of an option of a strategy
    estimate_all: EstimateAll
    objective: Objective
    at_a_time: int
    deadline: float  # time of ``clock`` after which nothing more is predicted
    report: Callable[[str], None]
    clock: Callable[[], float]
    done: int = 0  # number of predictions, also of those that failed
    ended: bool = False  # whether nothing more is predicted: the deadline has passed, or all predictions fail alike
    errors: Counter[str] = field(default_factory=Counter)  # errors of the predictions that failed

    def predict_stage(self, stage: tuple[bool, bool]) -> None:
        """Predict the families of a stage, in the order of their memory."""
        for group in self._groups([family for family in self.families.values() if family.stage == stage]):
            for family in group:
                self._prune_without_prediction(family)
            self._predict(group)

    def _groups(self, families: Sequence[FamilyMemory]) -> list[list[FamilyMemory]]:
        """Return the families that are predicted together: those of a level, or of several if all fit in one batch.

        What a lighter family shows can spare predictions of a heavier one. But in one batch they take no more time.
        """
        groups: list[list[FamilyMemory]] = [[]]
        for level in range(len(self.lighter) + 1):
            of_level = [family for family in families if self._level(family) == level]
            if len(groups[-1]) + len(of_level) > self.at_a_time:
                groups.append([])
            groups[-1] += of_level
        return groups

    def predict_smallest(self) -> None:
        """Predict the smallest member of the families with the least memory, to name the nearest one that would fit."""
        lightest = [family for family in self.families.values() if self._level(family) == 0]
        offloaded = [family for family in lightest if family.config.offload.enabled] or lightest
        chosen = [family for family in offloaded if family.config.train.activation_checkpointing] or offloaded
        self._estimate([(family, family.members[0]) for family in chosen if family.members[0].estimate is None])

    def _prune_without_prediction(self, family: FamilyMemory) -> None:
        offloads, checkpoints = family.stage
        if offloads and self.objective is not Objective.MEMORY:
            self._prune_offloaded(family)
        if checkpoints and self.objective is not Objective.MEMORY:
            self._prune_checkpointed(family)
        lighter = self._lighter(family)
        if lighter is None:
            return
        for member in family.waiting():
            if lighter.is_too_large(member.micro_batch):
                member.prune(f"needs more memory than {' '.join(lighter.name)}, which does not fit")

    def _prune_offloaded(self, family: FamilyMemory) -> None:
        """Prune a family with offloading, which is slow, if something fits without it on the same workers."""
        for other in self.families.values():
            same = other.members[0].workers == family.members[0].workers
            if same and not other.config.offload.enabled and (fitting := other.largest_that_fits) is not None:
                for member in family.waiting():
                    member.prune(f"offloading is slower, and not needed: {' '.join(fitting.overrides)} fits")
                return

    def _prune_checkpointed(self, family: FamilyMemory) -> None:
        """Prune members with activation checkpointing that fit without it. To compute twice takes time."""
        other = self.families.get(tuple(text for text in family.name if not text.startswith(CHECKPOINTING)))
        fitting = other.largest_that_fits if other is not None and other is not family else None
        for member in family.waiting():
            if fitting is not None and member.micro_batch <= fitting.micro_batch:
                member.prune(f"checkpointing is slower, and not needed: micro-batch {fitting.micro_batch} fits without")

    def _lighter(self, family: FamilyMemory) -> FamilyMemory | None:
        """Return the family that differs only in its strategy, and needs less memory; None if there is none."""
        lighter = tuple(self.lighter.get(text, text) for text in family.name)
        found = self.families.get(lighter) if self._level(family) else None
        if found is None or found.config.cluster.device == "cuda":
            return found
        # On CPUs, FSDP may need more than DDP: the C library keeps more of what each step allocates.
        return found if step_reserve(found.config) <= step_reserve(family.config) else None

    def _level(self, family: FamilyMemory) -> int:
        """Return how many options need less memory than that of a family, each less than the one before."""
        levels = [0]
        for text in family.name:
            option, level = text, 0
            # At most once for each, because custom strategies may name each other.
            while option in self.lighter and level < len(self.lighter):
                option, level = self.lighter[option], level + 1
            levels.append(level)
        return max(levels)

    def _predict(self, families: Sequence[FamilyMemory]) -> None:
        """Search the largest micro-batch of each family, all of them in parallel."""
        while True:
            wanted = [(family, member) for family in families if (member := family.next_to_predict()) is not None]
            later = [(family, member) for family, _ in wanted if (member := family.probably_next()) is not None]
            spare = max(0, self.at_a_time - len(wanted))
            if not wanted or not self._estimate([*wanted, *later[:spare]]):
                break
        for family in families:
            family.decide()

    def _estimate(self, wanted: Sequence[tuple[FamilyMemory, Candidate]]) -> bool:
        """Estimate members of families. Return whether all were estimated."""
        for start in range(0, len(wanted), self.at_a_time):
            if self.ended or self._ends():
                return False
            batch = wanted[start : start + self.at_a_time]
            configs = [member.config for _, member in batch if member.config is not None]
            for (family, member), outcome in zip(batch, self.estimate_all(configs), strict=True):
                family.add_estimate(member, outcome)
                self.errors.update([outcome] if isinstance(outcome, str) else [])
            self.done += len(batch)
            if predicted := self.done - self.errors.total():
                self.report(f"predicted the memory of {format_count(predicted, 'configuration')}")
        return True

    def _ends(self) -> bool:
        """Return whether to predict nothing more. It is printed why, except for an error, which is printed later."""
        late = self.clock() >= self.deadline
        if late:
            self.report(
                f"time limit of the predictions reached after {format_count(self.done, 'configuration')}: the memory "
                "of the others is not predicted, so their trials may run out of memory"
            )
        fail_alike = len(self.errors) == 1 and self.errors.total() == self.done >= EQUAL_FAILURES
        self.ended = late or fail_alike
        return self.ended

    def report_errors(self) -> None:
        for error, count in self.errors.most_common(MAX_ERRORS):
            all_of = "all of the first " if self.errors.total() == self.done else ""
            self.report(f"{all_of}{format_count(count, 'prediction')} failed: {error}")
