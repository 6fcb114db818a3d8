"""Counter of the work of a traced step: floating point operations, launched kernels, and bytes that are written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from torch import fx
from torch.utils.flop_counter import flop_registry

from distexp.plan.step_trace import StepWork

PER_MICRO_BATCH = ("forward", "backward")
"""Phases that are repeated for each micro-batch of a step."""

NO_KERNEL = ("empty", "empty_strided", "empty_like", "new_empty", "detach", "lift_fresh", "_unsafe_view")
"""Operations without a kernel, besides views."""

NAMESPACES_WITHOUT_KERNELS = ("prim", "profiler")
"""Namespaces of operations that read a property of a tensor, such as its device, or that mark a range."""


class WorkCounter:
    """Counts of the operations of a step, by phase."""

    def __init__(self) -> None:
        self.flops: Counter[str] = Counter()
        self.operations: Counter[str] = Counter()

    def clear(self) -> None:
        """Start again at zero."""
        self.flops.clear()
        self.operations.clear()

    def add(self, phase: str, func: Any, args: Any, kwargs: Any, outputs: Any) -> None:
        """Count an operation."""
        packet = getattr(func, "overloadpacket", func)
        count = flop_registry.get(packet)
        if count is not None:
            self.flops[phase] += int(count(*args, **(kwargs or {}), out_val=outputs))
        if _has_kernel(func, packet):
            self.operations[phase] += 1

    def add_graph(self, phase: str, nodes: Iterable[fx.Node]) -> None:
        """Count the nodes of a compiled graph whose results leave a kernel."""
        for node in nodes:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda argument: argument.meta.get("val"))
            self.add(phase, node.target, args, kwargs, node.meta.get("val"))

    def step(self, micro_batches: int, traced: int, written: Mapping[str, int]) -> StepWork:
        """Return the work of a whole step.

        Args:
            micro_batches: number of micro-batches of a step.
            traced: how many of them were traced.
            written: bytes that were allocated, by phase.
        """
        factor = micro_batches / traced

        def total(counts: Mapping[str, int]) -> float:
            return sum(counts.get(phase, 0) for phase in PER_MICRO_BATCH) * factor + counts.get("optimizer", 0)

        return StepWork(total(self.flops), round(total(self.operations)), self.operations["optimizer"], total(written))


def _has_kernel(func: Any, packet: Any) -> bool:
    """Return whether an operation launches a kernel. A view launches none."""
    if getattr(func, "namespace", "") in NAMESPACES_WITHOUT_KERNELS:
        return False
    return not getattr(func, "is_view", False) and getattr(packet, "__name__", "") not in NO_KERNEL
