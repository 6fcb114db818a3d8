"""Which size the search tries next, and which one it chooses. The same results give the same answer on all ranks.

The sizes are the divisors of the samples of a step on each worker. In eager mode they are tried in ascending order, by
doubling, until the next size does not fit or the speed no longer rises. A compiled model costs a compilation for each
size, so the search jumps from one small size to the largest that should fit, and then goes down while that is faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distexp.runs.micro_batch import FITS, TriedSize
from distexp.statistics.memory_line import MemoryLine

MIN_GAIN = 0.01
"""Relative gain in speed below which a size counts as no faster."""

PATIENCE = 2
"""Sizes in a row without a gain after which the eager search ends. One may be a slow moment of the machine."""

FIRST_COMPILED = 4
"""Largest first size of a compiled model. Its memory predicts that of the others."""

USABLE_SHARE = 0.95
"""Fraction of the memory that a size may need. The rest is for fragmentation."""


def ladder(sizes: Sequence[int]) -> list[int]:
    """Return the sizes of a search by doubling: each is the largest up to twice the one before, or else the next."""
    rungs = list(sizes[:1])
    while rungs and rungs[-1] < sizes[-1]:
        larger = [size for size in sizes if size > rungs[-1]]
        rungs.append(max((size for size in larger if size <= 2 * rungs[-1]), default=larger[0]))
    return rungs


UNTRIED_SHARE = 0.7
"""Fraction of the memory that a size may need which is chosen without a trial."""


@dataclass(frozen=True)
class SizeSearch:
    """The results of a search so far.

    Attributes:
        sizes: all sizes that are allowed, in ascending order.
        tried: the candidates so far, in the order of the search.
        compiled: whether each size costs a compilation.
        whole_saves_mib: what a step of a single micro-batch, the largest size, needs less than one of several.
    """

    sizes: Sequence[int]
    tried: Sequence[TriedSize]
    compiled: bool
    whole_saves_mib: float = 0.0

    def next_size(self) -> int | None:
        """Return the size to try next; None if the search is complete."""
        return self._next_compiled() if self.compiled else self._next_eager()

    def choose(self) -> int | None:
        """Return the fastest size that fits; of sizes that are equally fast the smallest. None if none fits.

        If there was time for one size of a compiled model only, it is the largest that will fit by a wide margin. A
        larger micro-batch is rarely slower, but the small first size nearly always is.
        """
        if self.compiled and len(self._fitting()) == 1 and self.next_size() is not None:
            return max(size for size in self.sizes if self._needs_no_trial(size))
        best = self._best_speed()
        fast = [candidate for candidate in self._fitting() if _speed(candidate) >= best * (1 - MIN_GAIN)]
        return min((candidate.micro_batch_size for candidate in fast), default=None)

    def too_large(self) -> int | None:
        """Return the smallest size that was not tried because it needs more memory than there is; None if none."""
        tried = {candidate.micro_batch_size for candidate in self.tried}
        open_sizes = [size for size in self.sizes if size not in tried and size < self._bound()]
        return next((size for size in open_sizes if not self._should_fit(size)), None)

    def _next_eager(self) -> int | None:
        fitting = self._fitting()
        if not self.tried:
            return self.sizes[0]
        if not fitting or self._has_plateau():
            return None
        largest = max(candidate.micro_batch_size for candidate in fitting)
        rungs = [size for size in ladder(self.sizes) if size > largest]
        if rungs and rungs[0] < self._bound() and self._should_fit(rungs[0]):
            return rungs[0]
        between = [size for size in self.sizes if largest < size < (rungs[0] if rungs else 0)]
        return max(filter(self._may_try, between), default=None)

    def _next_compiled(self) -> int | None:
        fitting, bound = self._fitting(), self._bound()
        if not fitting:
            smaller = [size for size in self.sizes if size <= FIRST_COMPILED and size < bound]
            return max(smaller, default=None)
        largest = max(candidate.micro_batch_size for candidate in fitting)
        if above := [size for size in self.sizes if size > largest and self._may_try(size)]:
            return max(above)
        after_first = sorted(fitting[1:], key=lambda candidate: candidate.micro_batch_size)
        if not after_first or _speed(after_first[0]) < max(map(_speed, after_first)):
            return None
        below = [size for size in ladder(self.sizes) if size < after_first[0].micro_batch_size]
        return max(filter(self._may_try, below), default=None)

    def _fitting(self) -> list[TriedSize]:
        return [candidate for candidate in self.tried if candidate.outcome == FITS]

    def _best_speed(self) -> float:
        return max(map(_speed, self._fitting()), default=0.0)

    def _bound(self) -> float:
        """Return the smallest size that did not fit, or infinity."""
        return min(
            (candidate.micro_batch_size for candidate in self.tried if candidate.outcome != FITS), default=float("inf")
        )

    def _has_plateau(self) -> bool:
        """Return whether the last sizes are not faster than the best one before them."""
        fitting = self._fitting()
        before, last = fitting[:-PATIENCE], fitting[-PATIENCE:]
        best = max(map(_speed, before), default=0.0)
        return bool(before) and all(_speed(candidate) < best * (1 + MIN_GAIN) for candidate in last)

    def _may_try(self, size: int) -> bool:
        is_new = all(candidate.micro_batch_size != size for candidate in self.tried)
        return is_new and size < self._bound() and self._should_fit(size)

    def _should_fit(self, size: int) -> bool:
        """Return whether a size should fit, if memory grows linearly. Growth is never slower than that.

        The largest size should, if it does without what it saves. Its trial measures whether it saves that at its peak.
        """
        needed, usable = (
            self._predicted_mib(size),
            min((candidate.usable_mib or 0 for candidate in self._fitting()), default=0),
        )
        saved = self.whole_saves_mib if size == self.sizes[-1] else 0.0
        return needed is None or not usable or needed - saved <= usable * USABLE_SHARE

    def _needs_no_trial(self, size: int) -> bool:
        """Return whether a size fits by a wide margin, or was tried."""
        fitting = self._fitting()[0]
        if size == fitting.micro_batch_size:
            return True
        needed, usable = self._predicted_mib(size), fitting.usable_mib
        larger = fitting.micro_batch_size < size < self._bound()
        return larger and needed is not None and usable is not None and needed <= usable * UNTRIED_SHARE

    def _predicted_mib(self, size: int) -> float | None:
        known = sorted(
            (candidate.micro_batch_size, candidate.peak_mib, candidate.base_mib or 0.0)
            for candidate in self._fitting()
            if candidate.peak_mib is not None
        )
        if not known:
            return None
        last, peak, base = known[-1]
        before = known[-2][:2] if len(known) > 1 else (0, base)
        return MemoryLine.through((last, peak), before).at(size)


def _speed(candidate: TriedSize) -> float:
    return candidate.samples_per_second or 0.0
