"""Memory as a line over the micro-batch: what a search of the largest micro-batch expects of sizes it has not tried.

``distexp plan`` searches between two sizes by the line through the two nearest predictions. ``distexp choose`` goes
down from a size that was predicted, by its activations. ``train.micro_batch_size=auto`` goes up, by the line through
the two largest sizes that ran. The three differ in what an answer costs: a prediction, or a trial.
"""

from __future__ import annotations

from dataclasses import dataclass

Point = tuple[int, float]
"""A micro-batch and its memory in MiB."""


@dataclass(frozen=True)
class MemoryLine:
    """Line through the memory of a size, with the MiB of each further sample."""

    size: int
    mib: float
    mib_per_sample: float

    @classmethod
    def through(cls, point: Point, other: Point) -> MemoryLine:
        """Return the line through two points."""
        return cls(*point, (other[1] - point[1]) / (other[0] - point[0]))

    def at(self, size: int) -> float:
        """Return the memory of a size in MiB."""
        return self.mib + self.mib_per_sample * (size - self.size)

    def largest_size(self, mib: float) -> int:
        """Return the largest size that this memory is enough for. The line must rise."""
        return int(self.size + (mib - self.mib) / self.mib_per_sample)
