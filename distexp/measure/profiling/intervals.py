"""Time intervals, the categories of kernels and collectives, and the steps that are profiled."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from distexp.config import TrainConfig

Interval = tuple[float, float]  # start and end in seconds
Spans = list[tuple[Interval, str]]  # intervals with their labels


def clip(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    """Return the parts of intervals that are inside a window."""
    first, last = window
    return [(max(start, first), min(end, last)) for start, end in intervals if start < last and end > first]


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals as sorted, disjoint and non-empty intervals."""
    merged: list[Interval] = []
    for start, end in sorted(interval for interval in intervals if interval[0] < interval[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def total_length(disjoint: Iterable[Interval]) -> float:
    """Return the total length of disjoint intervals."""
    return sum(end - start for start, end in disjoint)


def intersect(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Return the intersection of two lists, both sorted and disjoint as from ``merge``."""
    found: list[Interval] = []
    i = j = 0
    while i < len(one) and j < len(other):
        start = max(one[i][0], other[j][0])
        end = min(one[i][1], other[j][1])
        if start < end:
            found.append((start, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def subtract(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Return the parts of the first list that are not in the second; both are as from ``merge``."""
    found: list[Interval] = []
    j = 0
    for start, end in one:
        left = start
        while j < len(other) and other[j][1] <= left:
            j += 1
        k = j
        while k < len(other) and other[k][0] < end:
            if other[k][0] > left:
                found.append((left, other[k][0]))
            left = max(left, other[k][1])
            k += 1
        if left < end:
            found.append((left, end))
    return found


def partition(window: Interval, layers: Iterable[tuple[str, Iterable[Interval]]]) -> tuple[Spans, list[Interval]]:
    """Return the spans of a window that layers cover, and the rest. If layers overlap, the first one counts."""
    left, spans = [window], []
    for label, intervals in layers:
        covered = merge(clip(intervals, window))
        spans += [(interval, label) for interval in intersect(left, covered)]
        left = subtract(left, covered)
    return spans, left


MATMUL, OTHER_KERNEL = "matmul", "other kernel"

NCCL = re.compile(r"\b[nr]ccl\w*?Kernel(?:_([A-Za-z]+))?")
"""ncclDevKernel_AllReduce_Sum_f32_RING_LL, ncclSymkDevKernel_AllGather_LL, ncclKernel_... before NCCL 2.19."""
GLOO = "gloo:"
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send_recv")
UNKNOWN_COLLECTIVE = "other"

TRITON = re.compile(r"\btriton_([a-z]+)_")
"""A pointwise kernel of Inductor may have the name of a matrix product, as ``triton_poi_fused_mm_0``."""
TRITON_MATMUL = ("tem", "mm", "bmm")

MATMUL_KERNELS = re.compile(
    r"gemm|gemv|cutlass|wgmma|nvjet|cublas|splitk|xmma|implicit_con|convolve|winograd|wgrad|dgrad|fprop|conv2d|conv_"
    r"|cudnn_generated|cudnn::(?:cnn|fusion|engines)|flash|fmha|attention|_mma_|tensorop|\bmm_|_mm_kernel|mul_mat"
    r"|Cijk_|magma_.*mm",
    re.IGNORECASE,
)
NOT_MATMUL_KERNELS = re.compile(
    r"softmax|elementwise|(?<!splitK)reduce_kernel|layer_norm|multi_tensor|nchwToNhwc|nhwcToNchw"
)

MATMUL_OPERATORS = re.compile(
    r"::_?(?:addmm|mm|bmm|baddbmm|addbmm|mv|addmv|dot|vdot|int_mm|scaled_mm|grouped_mm|addmm_activation)(?:_|$)"
    r"|conv(?:olution|_|\dd|_transpose)|scaled_dot_product|flash_attention|mkldnn_linear|_linear_pointwise|addmm_activ"
)
OPERATOR = re.compile(r"^[a-z_][a-z_0-9]*::")
NOT_COMPUTE = ("c10d::", "_c10d_functional", "autograd::", "torch::autograd", "torch::distributed::autograd")
COMPILED_GRAPH = "CompiledFxGraph"
BACKWARD = "autograd::engine::evaluate_function"


@lru_cache(maxsize=4096)
def kernel_category(name: str) -> str:
    """Return ``matmul`` for matrix products, convolutions and attention, else ``other kernel``."""
    if found := TRITON.search(name):
        return MATMUL if found[1] in TRITON_MATMUL else OTHER_KERNEL
    return MATMUL if MATMUL_KERNELS.search(name) and not NOT_MATMUL_KERNELS.search(name) else OTHER_KERNEL


@lru_cache(maxsize=4096)
def operator_category(name: str) -> str | None:
    """Return the category of an operator on the CPU, or None if it does not compute, as the wait for a collective."""
    if COMPILED_GRAPH in name:
        return OTHER_KERNEL
    if not OPERATOR.match(name) or name.startswith(NOT_COMPUTE):
        return None
    return MATMUL if MATMUL_OPERATORS.search(name) else OTHER_KERNEL


def nccl_kind(name: str, arguments: Mapping[str, Any]) -> str | None:
    """Return the kind of collective of a kernel of NCCL, as ``all_reduce``; None for another kernel.

    For a generic kernel of NCCL it is the collective that torch requested, if the trace contains it.
    """
    if (found := NCCL.search(name)) is None:
        return None
    is_generic = found[1] in (None, "Generic")
    return collective_kind(str(arguments.get("Collective name", UNKNOWN_COLLECTIVE)) if is_generic else found[1])


def collective_kind(name: str) -> str:
    """Return a kind such as ``all_reduce`` for a name such as ``AllReduce`` or ``_allgather_base``."""
    plain = name.replace("_", "").lower().removesuffix("base")
    return next((kind for kind in KINDS if kind.replace("_", "") == plain), name.lower() or UNKNOWN_COLLECTIVE)


WARMUP_STEPS = 1  # steps before the profiled ones; they contain the start-up cost of the profiler


@dataclass(frozen=True)
class ProfileWindow:
    """The steps that are profiled: the last ones of a training, after the profiler's warm-up."""

    steps_before: int  # steps before the profiler's warm-up
    steps: int

    @classmethod
    def of(cls, train: TrainConfig, *, total: int, per_epoch: int, done: int) -> ProfileWindow | None:
        """Return the window, or None if no step can be profiled.

        The window has ``train.profile_steps`` steps, or fewer: At least half of the steps after
        ``measure_after_step`` remain unprofiled, and no evaluation is between two profiled steps.
        """
        measurable = total - done - train.measure_after_step
        in_last_epoch = total - (total - 1) // per_epoch * per_epoch
        steps = min(train.profile_steps, measurable // 2 - WARMUP_STEPS, in_last_epoch - WARMUP_STEPS - 1)
        return cls(total - steps - WARMUP_STEPS, steps) if steps >= 1 else None
