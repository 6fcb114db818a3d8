"""The memory of one family: which micro-batches fit, from as few predictions as possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from distexp.choose.candidate import Candidate
from distexp.config import Config
from distexp.plan.estimate import Estimate
from distexp.plan.process_overheads import simulated_nodes, step_reserve
from distexp.plan.verdict import DOES_NOT_FIT, FITS, TOO_CLOSE, describe_verdict, memory_to_fit_mib, predict
from distexp.resolve.resources import parameter_count
from distexp.statistics.noise import MemoryLine
from distexp.system.units import MIB

PER_SAMPLE = ("activations", "logits")  # Parts that grow with the micro-batch in proportion. The others may, too.
GRADIENT_BYTES = 4


@dataclass
class FamilyMemory:
    """Members of a family in the order of their micro-batches, and what is known of their memory."""

    members: Sequence[Candidate]  # the valid ones
    unknown: str = ""  # why the family cannot be predicted; empty if it can
    _verdicts: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.name = self.members[0].family
        train, offload = self.config.train, self.config.offload
        self.stage = offload.enabled, train.activation_checkpointing  # see ``pruning.STAGES``
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
            extra = self._workers_in_memory * GRADIENT_BYTES * parameters / MIB
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
