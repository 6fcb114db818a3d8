"""How long ``torch.compile`` took in a training, and how often it compiled."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from distexp.measure.watcher import MeasuredSteps, Watcher
from distexp.system.torch_internals.compilation import CompileEvent, compile_counters, on_compilation


class CompileWatch(Watcher):
    """Time and counts of the compilations between ``start`` and ``stop``.

    The first steps contain these times. They are the time from the start to the end of each compilation, also of a
    backward graph, which is compiled in the first backward pass, and of the recording of a CUDA graph.
    """

    section = "metrics"

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self.seconds = 0.0
        self.recompilations = 0
        self._started: float | None = None
        self._before: dict[str, int] = {}
        self._remove: Callable[[], None] | None = None

    def start(self, done: int) -> None:
        """Start to watch."""
        if self.enabled:
            self._before = compile_counters()
            self._remove = on_compilation(self._begin, self._end)

    def stop(self) -> None:
        """Stop to watch."""
        if self._remove is not None:
            self._remove()
            self._remove = None

    def summary(self, steps: MeasuredSteps) -> dict[str, Any]:
        """Return ``metrics.compile``, if anything is compiled."""
        if not self.enabled:
            return {}
        counts = {name: value - self._before.get(name, 0) for name, value in compile_counters().items()}
        return {"compile": {"seconds": self.seconds, "recompilations": self.recompilations, **counts}}

    def _begin(self, event: CompileEvent) -> None:
        self.recompilations += event.is_recompilation
        self._started = time.perf_counter()

    def _end(self, _: CompileEvent) -> None:
        if self._started is not None:
            self.seconds += time.perf_counter() - self._started
        self._started = None
