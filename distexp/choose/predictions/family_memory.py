"""The memory of one family: which micro-batches fit, from as few predictions as possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from distexp.choose.candidate import Candidate, Status
from distexp.config import Config
from distexp.plan.estimate import Estimate
from distexp.plan.process_overheads import simulated_nodes, step_reserve
from distexp.plan.verdict import DOES_NOT_FIT, FITS, TOO_CLOSE, describe_verdict, memory_to_fit_mib, predict
from distexp.resolve.resources import parameter_count
from distexp.statistics.noise import MemoryLine
from distexp.system.units import MIB

PER_SAMPLE = ("activations", "logits")
"""Parts that grow with the micro-batch in proportion. The others may, too."""

GRADIENT_BYTES = 4


@dataclass
class FamilyMemory:
    """Members of a family in the order of their micro-batches, and what is known of their memory.

    Attributes:
        candidates: The members that are valid.
        unknown: Why the family cannot be predicted; empty if it can.
    """

    candidates: Sequence[Candidate]
    unknown: str = ""
    _verdicts: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.members = sorted(self.candidates, key=attrgetter("micro_batch"))
        self.memory_mib = memory_to_fit_mib(self.config)

    @property
    def config(self) -> Config:
        """Return the configuration of a member."""
        config = self.candidates[0].config
        assert config is not None, "the members are valid"
        return config

    @property
    def workers_of_node(self) -> int:
        """Return how many workers have their tensors in the memory that is measured: on CPUs those of a node."""
        cluster = self.config.cluster
        return (cluster.workers_per_node or 1) if cluster.device == "cpu" else 1

    @property
    def workers_in_memory(self) -> int:
        """Return how many workers have their tensors in the memory that decides whether a member fits."""
        return self.workers_of_node * (simulated_nodes(self.config) if self.config.cluster.device == "cpu" else 1)

    @property
    def _reserve(self) -> float:
        """Return the factor by which a tensor of a step counts in the memory that decides."""
        return step_reserve(self.config) if self.config.cluster.device == "cpu" else 1.0

    @property
    def label(self) -> str:
        """Return the overrides of the family."""
        return " ".join(self.candidates[0].family)

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
        return [member for member in self.members if member.status is Status.WAITING]

    def next_to_predict(self) -> Candidate | None:
        """Return the member to predict next: the largest one that may fit; None if all are known."""
        if self.unknown:
            return None
        without_verdict = [member for member in self.waiting() if member.micro_batch not in self._verdicts]
        return without_verdict[-1] if without_verdict else self._first_that_accumulates()

    def probably_next(self) -> Candidate | None:
        """Return the member that will probably be predicted after ``next_to_predict``; None if there is none.

        It is the largest one that accumulates gradients: its memory is needed if a larger one fits, and if none fits.
        """
        following, accumulating = self.next_to_predict(), [member for member in self.members if _accumulates(member)]
        if following is None or following in accumulating or any(each.estimate is not None for each in accumulating):
            return None
        return next((each for each in reversed(accumulating) if each.status is Status.WAITING), None)

    def _first_that_accumulates(self) -> Candidate | None:
        """Return the largest member that accumulates gradients; None if the memory of such a member is known.

        Accumulated gradients stay in memory during the next forward pass. So the peak of a member that accumulates
        does not follow from one that does not.
        """
        accumulating = [member for member in self.members if _accumulates(member)]
        if any(member.estimate is not None for member in accumulating):
            return None
        fitting = [member for member in accumulating if self._verdicts.get(member.micro_batch) == FITS]
        return next((member for member in reversed(fitting) if member.status is Status.WAITING), None)

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
        extra = 0.0 if _accumulates(member) else self._gradients_mib()
        if extra is not None and (estimate.most_mib or 0.0) + extra <= (self.memory_mib or 0.0):
            for other in self.members:
                if other.micro_batch < member.micro_batch:
                    self._verdicts.setdefault(other.micro_batch, FITS)

    def _gradients_mib(self) -> float | None:
        parameters = parameter_count(self.config.model)
        return None if parameters is None else self.workers_in_memory * GRADIENT_BYTES * parameters / MIB

    def _infer_too_large(self, member: Candidate, estimate: Estimate) -> None:
        """Infer which smaller members do not fit either, because what does not shrink with them is too much."""
        needed, least = estimate.required_mib, estimate.least_mib
        does_not_fit = self._verdicts[member.micro_batch] == DOES_NOT_FIT
        if does_not_fit and needed is None:  # The states alone are too large.
            for other in self.members:
                self._verdicts.setdefault(other.micro_batch, DOES_NOT_FIT)
        if not needed or least is None or self.memory_mib is None:
            return
        shrinking = self.workers_in_memory * self._reserve * _sum_of_parts(estimate, *PER_SAMPLE, "temporaries")
        line = MemoryLine(member.micro_batch, _without_reserve(estimate, needed), shrinking / member.micro_batch)
        for smaller in (other for other in self.members if other.micro_batch < member.micro_batch):
            if line.at(smaller.micro_batch) * least / needed > self.memory_mib:
                self._verdicts.setdefault(smaller.micro_batch, DOES_NOT_FIT)

    def decide(self) -> None:
        """Prune the members that do not fit, and mark those that are not certain to fit."""
        for member in self.waiting():
            if self.unknown:
                member.reason = f"its memory is not predicted: {self.unknown}"
            verdict = self._verdicts.get(member.micro_batch)
            member.too_close = verdict == TOO_CLOSE
            if member.expected_mib is None:
                member.expected_mib = self._expected_mib(member)
            if verdict == DOES_NOT_FIT:
                member.prune(self._reason(member))

    def _nearest_predicted(self, member: Candidate) -> Candidate | None:
        """Return a member if it is predicted, else the next larger one that is predicted; None if there is none."""
        larger = (larger_member for larger_member in self.members if larger_member.micro_batch >= member.micro_batch)
        return next((other for other in larger if other.estimate is not None and other.predicted is not None), None)

    def _expected_mib(self, member: Candidate) -> float | None:
        """Return the peak that follows from a larger member."""
        nearest = self._nearest_predicted(member)
        if nearest is None or nearest.estimate is None or nearest.expected_mib is None:
            return None
        shrunk = self.workers_of_node * self._reserve * _sum_of_parts(nearest.estimate, *PER_SAMPLE)
        return MemoryLine(nearest.micro_batch, nearest.expected_mib, shrunk / nearest.micro_batch).at(
            member.micro_batch
        )

    def _reason(self, member: Candidate) -> str:
        """Return why a member does not fit."""
        nearest = self._nearest_predicted(member)
        assert nearest is not None, "its verdict follows from a prediction"
        assert nearest.predicted is not None
        text = describe_verdict(nearest.predicted)
        if nearest is member:
            return text
        return f"micro-batch {nearest.micro_batch} {text}, and too little of its memory depends on the size"


def _sum_of_parts(estimate: Estimate, *parts: str) -> float:
    """Return some parts of the peak of a worker in MiB."""
    return sum(estimate.parts.get(part, 0.0) for part in parts)


def _without_reserve(estimate: Estimate, needed: float) -> float:
    """Return the needed memory without the reserve of the allocator, which a smaller micro-batch may not need."""
    if estimate.on_cpu or estimate.peak_allocated_mib is None:
        return needed
    return min(needed, estimate.peak_allocated_mib + estimate.overhead_mib)


def _accumulates(member: Candidate) -> bool:
    return member.config is not None and member.config.train.gradient_accumulation_steps > 1
