"""The all-gathers of a micro-batch with ZeRO-3: which parameters, before which module, and who waits for them.

DeepSpeed gathers the parameters of a module before its forward and its backward pass, and more of them ahead, in the
order of the first micro-batch. This follows DeepSpeed 0.19.8, ``partitioned_param_coordinator.py``, as
``distexp.plan.zero3_fetcher`` does with real modules.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from distexp.forecast.settings import ZeroOptions


@dataclass(frozen=True)
class Gather:
    """An all-gather of some parameters.

    Attributes:
        position: Number of the module before which it is launched: first the modules of the forward pass, then those
            of the backward pass.
        elements: Elements of its parameters.
        used_at: Number of the module that waits for it.
    """

    position: int
    elements: int
    used_at: int


def persistent_parameters(elements: Sequence[int], options: ZeroOptions) -> list[int]:
    """Return the positions of the parameters that each worker keeps whole between two updates."""
    return [position for position, size in enumerate(elements) if size <= options.stage3_param_persistence_threshold]


def gathers_of_micro_batch(
    modules: Sequence[Sequence[int]], elements: Sequence[int], options: ZeroOptions
) -> list[Gather]:
    """Return the all-gathers of a micro-batch, in the order of their launches.

    The backward pass is taken to use the modules in the reverse order.

    Args:
        modules: Positions of the parameters of each module, in the order of the forward pass.
        elements: Elements of each parameter.
        options: Options of DeepSpeed.
    """
    order = [*modules, *reversed(modules)]
    fetcher = _Fetcher(order, elements, options)
    for position in range(len(order)):
        fetcher.fetch(position)
        fetcher.release(position)
    return fetcher.gathers


class _Fetcher:
    """The parameters that a worker has, during a micro-batch whose order is known."""

    def __init__(self, order: Sequence[Sequence[int]], elements: Sequence[int], options: ZeroOptions) -> None:
        self.order, self.elements, self.options = order, elements, options
        self.persistent = set(persistent_parameters(elements, options))
        self.available = set(self.persistent)
        self.in_flight: dict[int, int] = {}  # parameter: position in gathers
        self.gathers: list[Gather] = []
        self.queue = deque((param, use) for use, params in enumerate(order) for param in params)
        self.next_use: dict[int, int] = {}  # of the parameters that left the queue
        self.live = 0

    def fetch(self, position: int) -> None:
        """Gather what a module needs, wait for it, and gather ahead."""
        params = self.order[position]
        self._gather(params, position)
        for param in params:
            if param in self.in_flight:
                self._wait(self.in_flight[param], position)
        self._forget_queued(params, position)
        self._prefetch(position)

    def _gather(self, params: Iterable[int], position: int) -> None:
        missing = [param for param in params if param not in self.available and param not in self.in_flight]
        if not missing:
            return
        size = sum(self.elements[param] for param in missing)
        self.in_flight.update(dict.fromkeys(missing, len(self.gathers)))
        self.gathers.append(Gather(position, size, used_at=len(self.order)))
        self.live += size

    def _wait(self, number: int, position: int) -> None:
        arrived = [param for param, gather in self.in_flight.items() if gather == number]
        self.available.update(arrived)
        for param in arrived:
            del self.in_flight[param]
        self.gathers[number] = replace(self.gathers[number], used_at=position)

    def _forget_queued(self, params: Iterable[int], position: int) -> None:
        """Remove the parameters of this module from the queue."""
        missing = {param for param in params if self.next_use.get(param, -1) < position}
        seen: set[int] = set()
        while self.queue and len(seen) < len(missing):
            param, use = self.queue.popleft()
            self.next_use[param] = use
            seen.add(param)

    def _prefetch(self, position: int) -> None:
        limit = min(self.options.stage3_max_live_parameters - self.live, self.options.stage3_prefetch_bucket_size)
        chosen: dict[int, int] = {}  # parameter: elements
        while self.queue and sum(chosen.values()) < limit:
            param, use = self.queue.popleft()
            self.next_use[param] = max(self.next_use.get(param, -1), use)
            if param not in self.available and param not in self.in_flight:
                chosen[param] = self.elements[param]
        self._gather(chosen, position)

    def release(self, position: int) -> None:
        """Free the parameters of a module that are not used soon."""
        kept = self._needed_soon(position + 1)
        for param in self.order[position]:
            is_queued_again = self.next_use.get(param, -1) > position + 1
            if param in self.available and param not in self.persistent and param not in kept and not is_queued_again:
                self.available.remove(param)
                self.live -= self.elements[param]

    def _needed_soon(self, start: int) -> set[int]:
        """Return the parameters of the next modules, up to the reuse distance."""
        found: set[int] = set()
        passed = 0
        for params in self.order[start:]:
            if passed >= self.options.stage3_max_reuse_distance:
                break
            found.update(params)
            passed += sum(self.elements[param] for param in params)
        return found
