"""Candidates that are not tried, because of their predicted memory."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from distexp.choose.candidate import CHECKPOINTING, Candidate, Objective, families_of
from distexp.config import Config
from distexp.config.overrides import format_count
from distexp.plan.estimate import Estimate, simulated_nodes, step_reserve
from distexp.plan.fitting_change import EstimateAll
from distexp.plan.verdict import DOES_NOT_FIT, FITS, TOO_CLOSE, describe_verdict, memory_to_fit_mib, predict
from distexp.resolve.resources import parameter_count
from distexp.statistics.noise import MemoryLine
from distexp.strategies.base import load_strategy, shipped_strategies
from distexp.system.units import MIB

PER_SAMPLE = ("activations", "logits")  # Parts that grow with the micro-batch in proportion. The others may, too.


@dataclass
class FamilyMemory:
    """Members of a family in the order of their micro-batches, and what is known of their memory."""

    members: Sequence[Candidate]  # the valid ones
    unknown: str = ""  # why the family cannot be predicted; empty if it can
    _verdicts: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.name = self.members[0].family
        train, offload = self.config.train, self.config.offload
        self.stage = offload.enabled, bool(train.activation_checkpointing)
        self.memory_mib = memory_to_fit_mib(self.config)
        # On CPUs the memory of a node is measured, and that of the simulated nodes together decides.
        cluster, on_cpus = self.config.cluster, self.config.cluster.device == "cpu"
        self._workers_measured = (cluster.workers_per_node or 1) if on_cpus else 1
        self._workers_in_memory = self._workers_measured * (simulated_nodes(self.config) if on_cpus else 1)
        self._reserve = step_reserve(self.config) if on_cpus else 1.0  # how often a tensor of a step counts

    @property
    def config(self) -> Config:
        """Return the configuration of a member."""
        config = self.members[0].config
        assert config is not None, "the members are valid"
        return config

    @property
    def largest_that_fits(self) -> Candidate | None:
        """Return the largest member that is predicted or known to fit; None if there is none."""
        fitting = [member for member in self.members if self._verdicts.get(member.micro_batch) == FITS]
        return fitting[-1] if fitting else None

    def is_too_large(self, micro_batch: int) -> bool:
        """Return whether a micro-batch is known not to fit."""
        return self._verdicts.get(micro_batch) == DOES_NOT_FIT

    def waiting(self) -> list[Candidate]:
        """Return the members that are not pruned."""
        return [member for member in self.members if member.is_waiting]

    def next_to_predict(self) -> Candidate | None:
        """Return the member to predict next: the largest one that may fit; None if all are known."""
        if self.unknown:
            return None
        without_verdict = [member for member in self.waiting() if member.micro_batch not in self._verdicts]
        if without_verdict:
            return without_verdict[-1]
        # Accumulated gradients stay in memory during the next forward pass. So the peak of a member that accumulates
        # does not follow from one that does not. The largest one that fits shows it for all of them.
        accumulating = [member for member in self.members if _accumulates(member)]
        if any(member.estimate is not None for member in accumulating):
            return None
        fitting = [member for member in accumulating if self._verdicts.get(member.micro_batch) == FITS]
        return next((member for member in reversed(fitting) if member.is_waiting), None)

    def probably_next(self) -> Candidate | None:
        """Return the largest waiting member that accumulates gradients, if its memory will be needed next."""
        following, accumulating = self.next_to_predict(), [member for member in self.members if _accumulates(member)]
        if following is None or following in accumulating or any(each.estimate is not None for each in accumulating):
            return None
        return next((each for each in reversed(accumulating) if each.is_waiting), None)

    def add_estimate(self, member: Candidate, outcome: Estimate | str) -> None:
        """Keep the estimate of a member, and infer what follows for the others."""
        if isinstance(outcome, str):
            self.unknown = outcome
            return
        predicted = predict(outcome, self.memory_mib)
        member.estimate, member.predicted = outcome, predicted
        member.expected_mib = outcome.host_mib if outcome.on_cpu else outcome.peak_allocated_mib
        verdict = predicted.verdict
        if verdict is None:
            self.unknown = "; ".join(outcome.notes) or "the memory of the machine is unknown"
            return
        self._verdicts[member.micro_batch] = verdict
        if verdict == FITS:
            self._infer_fitting(member, outcome)
        else:
            self._infer_too_large(member, outcome)

    def _infer_fitting(self, member: Candidate, estimate: Estimate) -> None:
        """Infer that smaller members fit. Those that accumulate gradients may need another copy of them."""
        parameters, extra = parameter_count(self.config.model), 0.0
        if not _accumulates(member):
            if parameters is None:
                return
            extra = self._workers_in_memory * 4 * parameters / MIB  # gradients in fp32
        if (estimate.most_mib or 0.0) + extra <= (self.memory_mib or 0.0):
            for other in self.members:
                if other.micro_batch < member.micro_batch:
                    self._verdicts.setdefault(other.micro_batch, FITS)

    def _infer_too_large(self, member: Candidate, estimate: Estimate) -> None:
        """Infer which smaller members do not fit either, because what does not shrink with them is too much."""
        needed, least = estimate.required_mib, estimate.least_mib
        does_not_fit = self._verdicts[member.micro_batch] == DOES_NOT_FIT
        if does_not_fit and needed is None:  # The states alone are too large.
            for other in self.members:
                self._verdicts.setdefault(other.micro_batch, DOES_NOT_FIT)
        if not needed or least is None or self.memory_mib is None:
            return
        shrinking = self._workers_in_memory * self._reserve * _sum_of_parts(estimate, *PER_SAMPLE, "temporaries")
        # A smaller micro-batch may not need the reserve of the allocator.
        used = needed
        if not estimate.on_cpu and estimate.peak_allocated_mib is not None:
            used = min(needed, estimate.peak_allocated_mib + estimate.overhead_mib)
        line = MemoryLine(member.micro_batch, used, shrinking / member.micro_batch)
        for smaller in (other for other in self.members if other.micro_batch < member.micro_batch):
            if line.at(smaller.micro_batch) * least / needed > self.memory_mib:
                self._verdicts.setdefault(smaller.micro_batch, DOES_NOT_FIT)

    def decide(self) -> None:
        """Prune the members that do not fit, and mark those that are not certain to fit."""
        for member in self.waiting():
            if self.unknown:
                member.reason = f"its memory is not predicted: {self.unknown}"
            verdict, size = self._verdicts.get(member.micro_batch), member.micro_batch
            member.too_close = verdict == TOO_CLOSE
            # The member itself, or the next larger one that is predicted.
            larger = (each for each in self.members if each.micro_batch >= size)
            nearest = next((each for each in larger if each.estimate is not None and each.predicted is not None), None)
            if member.expected_mib is None and nearest is not None and nearest.expected_mib is not None:
                assert nearest.estimate is not None
                shrunk = self._workers_measured * self._reserve * _sum_of_parts(nearest.estimate, *PER_SAMPLE)
                line = MemoryLine(nearest.micro_batch, nearest.expected_mib, shrunk / nearest.micro_batch)
                member.expected_mib = line.at(size)
            if verdict == DOES_NOT_FIT:
                assert nearest is not None, "its verdict follows from a prediction"
                assert nearest.predicted is not None
                text = describe_verdict(nearest.predicted)
                other = f"micro-batch {nearest.micro_batch} {text}, and too little of its memory depends on the size"
                member.prune(text if nearest is member else other)


def _sum_of_parts(estimate: Estimate, *parts: str) -> float:
    return sum(estimate.parts.get(part, 0.0) for part in parts)


def _accumulates(member: Candidate) -> bool:
    return member.config is not None and member.config.train.gradient_accumulation_steps > 1


EQUAL_FAILURES = 4
"""If so many predictions fail for each error, and none succeeds, no more are made. For example, the data is missing."""


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
    for offloads, checkpoints in product((False, True), repeat=2):
        pruning.predict_stage((offloads, checkpoints))
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
                self.errors.update([family.unknown] if member.expected_mib is None else [])
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
        fail_alike = self.errors.total() == self.done >= EQUAL_FAILURES * max(1, len(self.errors))
        self.ended = late or fail_alike
        return self.ended

    def report_errors(self) -> None:
        for error, count in self.errors.most_common(3):
            all_of = "all of the first " if self.errors.total() == self.done else ""
            self.report(f"{all_of}{format_count(count, 'prediction')} failed: {error}")
