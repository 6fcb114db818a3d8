"""Limit on the CPU time of work that is repeated."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class CostLimit:
    """Limits repeated work of one thread to a share of one core's time.

    Args:
        share: CPU time divided by elapsed time, for example 0.1.
        window: The cost is the minimum of this many repetitions, so that one slow repetition counts as noise.
    """

    def __init__(self, share: float, window: int = 1) -> None:
        self.share = share
        self._costs: deque[float] = deque(maxlen=window)
        self._started_at = 0.0

    @property
    def cost_s(self) -> float:
        """CPU time of one repetition in seconds; 0 until the window is full."""
        return min(self._costs) if len(self._costs) == self._costs.maxlen else 0.0

    def allows(self) -> bool:
        """Return whether enough time has passed since the last repetition started."""
        return self.cost_s <= self.share * (time.monotonic() - self._started_at)

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Measure the CPU time of one repetition, which is the ``with`` block."""
        self._started_at, before = time.monotonic(), time.thread_time()
        try:
            yield
        finally:
            self._costs.append(time.thread_time() - before)
