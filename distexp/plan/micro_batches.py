"""The largest micro-batch that fits into the memory of a GPU."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from distexp.config import Config
from distexp.config.batch_sizes import divisors, samples_per_worker
from distexp.plan.estimate import Estimate
from distexp.plan.verdict import TOO_CLOSE, verdict_of
from distexp.statistics.memory_line import MemoryLine

LARGEST_MICRO_BATCH = 1 << 20
MAX_ROUNDS = 5
"""Most rounds of a search. In each, two sizes are estimated at the same time."""

MAX_SIZES = 2 * MAX_ROUNDS + 1
"""Most sizes that a search estimates: those of the rounds, and the whole global batch."""

NOT_PREDICTED = "the memory of a larger one could not be predicted"

MICRO_BATCH = "train.micro_batch_size"

EstimateAll = Callable[[Sequence[Config]], Sequence[Estimate | str]]
Compose = Callable[[Sequence[str]], Config | str]
"""Function that returns the configuration of a cell with further overrides, or why it is invalid."""


@dataclass(frozen=True)
class LargestMicroBatch:
    """Result of a search.

    Attributes:
        size: The largest micro-batch that fits; None if not even one sample is certain to fit.
        is_exact: Whether all larger ones are known not to fit.
        invalid: Why a larger one is invalid; empty if its memory is the limit.
        one_may_fit: Whether no size is certain to fit, but one sample may.
    """

    size: int | None
    is_exact: bool = True
    invalid: str = ""
    one_may_fit: bool = False


@dataclass
class MicroBatchSizes:
    """Search among the micro-batches of one configuration.

    Without ``train.global_batch_size``, the number of micro-batches per step stays the same. With it, the global batch
    does, so that only its divisors are sizes.
    """

    config: Config
    compose: Compose
    estimate: EstimateAll
    memory_mib: float
    _most: dict[int, float] = field(default_factory=dict)
    _invalid: dict[int, str] = field(default_factory=dict)
    _not_certain: set[int] = field(default_factory=set)

    def largest(self, known: Estimate) -> LargestMicroBatch:
        """Return the largest micro-batch that fits, with the estimate of the configuration at hand."""
        sizes, first = self._sizes(), self.config.train.micro_batch
        self._remember(first, known, known.most_mib or 0.0)
        # A step of a single micro-batch may need less memory than one of several, which adds up whole gradients.
        if self.config.train.global_batch_size is not None and self._fit([sizes[-1]]) == [sizes[-1]]:
            return LargestMicroBatch(sizes[-1], invalid="it is the whole global batch of a worker")
        position = sizes.index(first)
        low, high = (position, len(sizes)) if self._fit([first]) else (-1, position)
        for _ in range(MAX_ROUNDS):
            positions = self._next_positions(sizes, low, high)
            if not positions:
                break
            fitting = self._fit([sizes[index] for index in positions])
            low = max([low, *(index for index in positions if sizes[index] in fitting)])
            high = min([high, *(index for index in positions if sizes[index] not in fitting)])
            high = self._first_invalid(sizes, low, high)
        is_exact = high - low == 1 or low == len(sizes) - 1
        reason = self._invalid.get(sizes[high], "") if high < len(sizes) else ""
        if low < 0:
            return LargestMicroBatch(None, is_exact, reason, one_may_fit=1 in self._not_certain)
        return LargestMicroBatch(sizes[low], is_exact, reason)

    def _first_invalid(self, sizes: Sequence[int], low: int, high: int) -> int:
        """Return the first position whose size is invalid, if that of ``high`` is; else ``high``."""
        if high == len(sizes) or sizes[high] in self._most:
            return high
        while high - low > 1:
            middle = (low + high) // 2
            found = self.compose([f"{MICRO_BATCH}={sizes[middle]}"])
            if isinstance(found, str):
                high, self._invalid[sizes[middle]] = middle, found
            else:
                low = middle
        return high

    def _sizes(self) -> Sequence[int]:
        if self.config.train.global_batch_size is None:
            return range(1, LARGEST_MICRO_BATCH + 1)
        return divisors(samples_per_worker(self.config))

    def _fit(self, sizes: Sequence[int]) -> list[int]:
        """Return those of some sizes that fit, up to the first that does not."""
        self._estimate([size for size in sizes if size not in self._most and size not in self._invalid])
        fitting = []
        for size in sizes:
            if size in self._invalid or self._most[size] > self.memory_mib:
                break
            fitting.append(size)
        return fitting

    def _estimate(self, sizes: Sequence[int]) -> None:
        composed = {size: self.compose([f"{MICRO_BATCH}={size}"]) for size in sizes}
        self._invalid |= {size: found for size, found in composed.items() if isinstance(found, str)}
        valid = {size: found for size, found in composed.items() if not isinstance(found, str)}
        for size, outcome in zip(valid, self.estimate(list(valid.values())), strict=True):
            if isinstance(outcome, Estimate) and outcome.most_mib is not None:
                self._remember(size, outcome, outcome.most_mib)
            else:
                self._invalid[size] = NOT_PREDICTED

    def _remember(self, size: int, estimate: Estimate, most_mib: float) -> None:
        self._most[size] = most_mib
        if verdict_of(estimate, self.memory_mib) == TOO_CLOSE:
            self._not_certain.add(size)

    def _next_positions(self, sizes: Sequence[int], low: int, high: int) -> list[int]:
        """Return up to two positions between one that fits and one that does not."""
        if high - low <= 1:
            return []
        sized = self._proposal(sizes[low] if low >= 0 else 0, sizes[high] if high < len(sizes) else None)
        wanted = [bisect_right(sizes, size) - 1 for size in sized] or [(low + high) // 2]
        return sorted({min(max(position, low + 1), high - 1) for position in wanted})

    def _proposal(self, low: int, high: int | None) -> tuple[int, ...]:
        """Return two sizes to estimate, or none. The memory is nearly linear in the micro-batch.

        Args:
            low: The largest size that fits; 0 if none is known.
            high: The smallest larger size that does not fit; None if none is known.
        """
        known = self._nearest(low, low if high is None else high)
        if len(known) < 2:
            return (1, (high or 2) // 2) if low == 0 else (2 * low, 4 * low)
        line = MemoryLine.through(*known)
        if line.mib_per_sample <= 0:
            return (2 * low, 4 * low) if high is None else ()
        size = line.largest_size(self.memory_mib)
        return size, size + 1

    def _nearest(self, low: int, high: int) -> list[tuple[int, float]]:
        """Return the two estimated sizes nearest to both bounds. The whole batch is not on the line of the others."""
        is_kept = self.config.train.global_batch_size is not None
        whole = samples_per_worker(self.config) if is_kept else None
        on_line = [(size, mib) for size, mib in self._most.items() if size != whole]
        return sorted(sorted(on_line, key=lambda point: abs(point[0] - low) + abs(point[0] - high))[:2])
