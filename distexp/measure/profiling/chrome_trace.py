"""Reader of a profiler trace in Chrome's JSON format, the categories of its events, and the share of communication.

The category of an event (``kernel``, ``user_annotation``) separates kernels from annotations on the same timeline.
"""

import json
import re
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

from distexp.measure.profiling.intervals import Interval, ProfileWindow, clip, merge, subtract, total_length
from distexp.system.torch_internals.collectives import DATA, OPTIMIZER

MATMUL, OTHER_KERNEL = "matmul", "other kernel"

# ncclDevKernel_AllReduce_Sum_f32_RING_LL, ncclSymkDevKernel_AllGather_LL, ncclKernel_... before NCCL 2.19.
NCCL = re.compile(r"\b[nr]ccl\w*?Kernel(?:_([A-Za-z]+))?")
GLOO = "gloo:"
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send_recv")
UNKNOWN_COLLECTIVE = "other"

# A pointwise kernel of Inductor may have the name of a matrix product, as ``triton_poi_fused_mm_0``.
TRITON = re.compile(r"\btriton_([a-z]+)_")

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
OPERATOR_NAME = re.compile(r"[a-z_][a-z_0-9]*::")
NOT_COMPUTE = ("c10d::", "_c10d_functional", "autograd::", "torch::autograd", "torch::distributed::autograd")
BACKWARD = "autograd::engine::evaluate_function"

STEP = "ProfilerStep#"
COPY = "copy"
TORCH_OPTIMIZER = "Optimizer.step#"  # of every optimizer of torch, inside OPTIMIZER except with other trainers


@lru_cache(maxsize=4096)
def kernel_category(name: str) -> str:
    """Return ``matmul`` for matrix products, convolutions and attention, else ``other kernel``."""
    if found := TRITON.search(name):
        return MATMUL if found[1] in ("tem", "mm", "bmm") else OTHER_KERNEL
    return MATMUL if MATMUL_KERNELS.search(name) and not NOT_MATMUL_KERNELS.search(name) else OTHER_KERNEL


@lru_cache(maxsize=4096)
def operator_category(name: str) -> str | None:
    """Return the category of an operator on the CPU, or None if it does not compute, as the wait for a collective."""
    if "CompiledFxGraph" in name:
        return OTHER_KERNEL
    if not OPERATOR_NAME.match(name) or name.startswith(NOT_COMPUTE):
        return None
    return MATMUL if MATMUL_OPERATORS.search(name) else OTHER_KERNEL


def nccl_kind(name: str, arguments: Mapping[str, Any]) -> str | None:
    """Return the kind of collective of a kernel of NCCL; None for another kernel.

    A generic kernel runs several kinds, so its name has none: then it is the kind that torch requested.
    """
    if (found := NCCL.search(name)) is None:
        return None
    is_generic = found[1] in (None, "Generic")
    return collective_kind(str(arguments.get("Collective name", UNKNOWN_COLLECTIVE)) if is_generic else found[1])


def collective_kind(name: str) -> str:
    """Return a kind such as ``all_reduce`` for a name such as ``AllReduce`` or ``_allgather_base``."""
    plain = name.replace("_", "").lower().removesuffix("base")
    return next((kind for kind in KINDS if kind.replace("_", "") == plain), name.lower() or UNKNOWN_COLLECTIVE)


@dataclass(frozen=True)
class DeviceEvent:
    """Something on the GPU, and the call on the CPU that launched it; None: unknown."""

    when: Interval
    launch: Interval | None


@dataclass(frozen=True)
class Kernel(DeviceEvent):
    """A kernel or copy on the GPU."""

    category: str  # MATMUL, OTHER_KERNEL or COPY


@dataclass(frozen=True)
class TraceCollective(DeviceEvent):
    """A collective: the time of its kernel on the GPU, or from the call to the end with gloo."""

    kind: str
    group: str  # ranks of its process group, as torch prints them; empty: unknown
    bytes: int | None = None  # as in nccl-tests: buffer of an all-reduce, else the tensor of all ranks; None: unknown
    ranks: int | None = None  # of its process group; None: unknown


@dataclass(frozen=True)
class Trace:
    """Events of one rank that matter; all times are in seconds of the same clock."""

    on_gpu: bool
    steps: list[Interval]
    collectives: list[TraceCollective]
    kernels: list[Kernel]  # empty on the CPU
    operators: dict[str, list[Interval]]  # of the training thread, by category; they may be nested
    data: list[Interval]
    optimizer: list[Interval]
    backward: list[Interval]
    calls: list[tuple[str, Interval]] = field(default_factory=list)  # of FSDP's hooks, and of collectives by kind
    synchronizations: list[Interval] = field(default_factory=list)  # of the CPU with the GPU

    @property
    def window(self) -> Interval:
        """Return the start of the first step and the end of the last."""
        return self.steps[0][0], self.steps[-1][1]

    @property
    def device_events(self) -> list[DeviceEvent]:
        """Return kernels, copies and collectives."""
        return [*self.kernels, *self.collectives]


def read_trace(path: Path, *, on_gpu: bool) -> Trace:
    """Read the events of a rank.

    Collectives of gloo count from the call to their end, including the time in the queue. Collectives of NCCL count
    while their kernels are on the GPU, including the wait for the slowest rank. Raises ValueError if the trace is not
    JSON, or has no step, or has no kernel of the GPU.
    """
    # A trace has a million events and few are needed: the others are dropped while it is parsed.
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            content = json.load(file, object_hook=_parse_event)
    except json.JSONDecodeError as error:
        raise ValueError(f"the profiler trace is not valid JSON: {error}") from error
    events = [event for event in content if isinstance(event, _Event)] if isinstance(content, list) else []
    steps = [event for event in events if event.kind == STEP]
    if not steps:
        raise ValueError("the profiler trace has no step")
    if on_gpu and not any(event.correlated for event in events if event.kind in (KERNEL, COLLECTIVE)):
        raise ValueError(
            "the profiler recorded no GPU kernel (CUPTI is missing, or another tool uses it): "
            "set KINETO_LOG_LEVEL=0 to see the reason"
        )
    return _build_trace(events, on_gpu=on_gpu)


class _Event:
    """An event; ``name`` is the category of a kernel or operator, or the kind of a collective."""

    __slots__ = ("correlated", "correlation", "group", "kind", "name", "ranks", "size", "thread", "when")

    def __init__(self, kind: str, name: str, raw: dict[str, Any], arguments: dict[str, Any]) -> None:
        start = float(raw["ts"]) / 1e6
        self.kind, self.name, self.when = kind, name, (start, start + float(raw.get("dur", 0)) / 1e6)
        self.thread = raw.get("tid")
        self.correlation = arguments.get("correlation")
        self.correlated = raw.get("cat") == "kernel"
        self.group = str(arguments.get("Process Group Ranks", ""))
        self.ranks = arguments.get("Group size")
        elements = [arguments.get(f"{side} msg nelems") for side in ("In", "Out")]
        counts = [count for count in elements if isinstance(count, int)]
        width = DTYPE_BYTES.get(str(arguments.get("dtype")))
        self.size = max(counts) * width if counts and width else None  # bytes of its input or output; None: unknown


KERNEL, COLLECTIVE, OPERATOR, LAUNCH, BACKWARD_EVENT = "kernel", "collective", "operator", "launch", "backward"
CALL, SYNCHRONIZE = "call", "synchronize"
FSDP_HOOK = "FSDP::"
COLLECTIVE_CALL = "c10d::"
DTYPE_BYTES = {
    **dict.fromkeys(("Float", "Int", "UInt32"), 4),
    **dict.fromkeys(("BFloat16", "Half", "Short"), 2),
    **dict.fromkeys(("Double", "Long"), 8),
    **dict.fromkeys(("Byte", "Char", "Bool", "Float8_e4m3fn", "Float8_e5m2"), 1),
}
"""Bytes of an element, by the names of torch's data types in a trace."""
_KEPT_ARGUMENTS = (
    *("correlation", "Collective name", "Process Group Ranks"),
    *("Group size", "In msg nelems", "Out msg nelems", "dtype"),
)


def _parse_event(raw: dict[str, Any]) -> Any:
    """Parse one JSON object of a trace, innermost first; None for everything that is not needed."""
    if "traceEvents" in raw:
        return raw["traceEvents"]
    if raw.get("ph") != "X":
        return {name: raw[name] for name in _KEPT_ARGUMENTS if name in raw} or None
    name, arguments = str(raw.get("name")), raw.get("args") or {}
    event: _Event | None = None
    match raw.get("cat"):
        case "cpu_op":
            event = _parse_operator(name, raw)
        case "kernel":
            kind = nccl_kind(name, arguments)
            event = _Event(*((KERNEL, kernel_category(name)) if kind is None else (COLLECTIVE, kind)), raw, arguments)
        case "gpu_memcpy" | "gpu_memset":
            event = _Event(KERNEL, COPY, raw, arguments)
        case "cuda_runtime" | "cuda_driver" if "Synchronize" in name:
            event = _Event(SYNCHRONIZE, "", raw, {})
        case "cuda_runtime" | "cuda_driver" if "correlation" in arguments:
            event = _Event(LAUNCH, "", raw, arguments)
        case "user_annotation":
            event = _parse_annotation(name, raw)
    return event


def _parse_annotation(name: str, raw: dict[str, Any]) -> _Event | None:
    if name.startswith(STEP):
        return _Event(STEP, "", raw, {})
    if name.startswith(GLOO):
        return _Event(COLLECTIVE, collective_kind(name.removeprefix(GLOO)), raw, {})
    if name.startswith(FSDP_HOOK):
        return _Event(CALL, name, raw, {})
    kind = OPTIMIZER if name.startswith(TORCH_OPTIMIZER) else name
    return _Event(kind, "", raw, {}) if kind in (DATA, OPTIMIZER) else None


def _parse_operator(name: str, raw: dict[str, Any]) -> _Event | None:
    if name.startswith(BACKWARD):
        return _Event(BACKWARD_EVENT, "", raw, {})
    if name.startswith(COLLECTIVE_CALL):
        return _Event(CALL, collective_kind(name.removeprefix(COLLECTIVE_CALL)), raw, {})
    category = operator_category(name)
    return None if category is None else _Event(OPERATOR, category, raw, {})


def _build_trace(events: list[_Event], *, on_gpu: bool) -> Trace:
    by_kind: defaultdict[str, list[_Event]] = defaultdict(list)
    for event in events:
        by_kind[event.kind].append(event)
    times = {kind: [event.when for event in by_kind[kind]] for kind in (DATA, OPTIMIZER, BACKWARD_EVENT)}
    steps = sorted(by_kind[STEP], key=lambda event: event.when)
    launches = {event.correlation: event.when for event in by_kind[LAUNCH]}
    training_thread = steps[0].thread
    operators = [event for event in by_kind[OPERATOR] if event.thread == training_thread]
    # On a GPU the traces of gloo are those of collectives between hosts. They do not occupy the GPU.
    collectives = [event for event in by_kind[COLLECTIVE] if event.correlated == on_gpu]
    calls = sorted((event.name, event.when) for event in by_kind[CALL])
    if not on_gpu:
        _name_as_called(collectives, calls)
    return Trace(
        on_gpu=on_gpu,
        steps=[event.when for event in steps],
        collectives=[
            TraceCollective(e.when, launches.get(e.correlation), e.name, e.group, e.size, e.ranks) for e in collectives
        ],
        kernels=[Kernel(e.when, launches.get(e.correlation), e.name) for e in by_kind[KERNEL] if on_gpu],
        operators={name: [event.when for event in operators if event.name == name] for name in (MATMUL, OTHER_KERNEL)},
        data=times[DATA],
        optimizer=times[OPTIMIZER],
        backward=times[BACKWARD_EVENT],
        calls=calls,
        synchronizations=[event.when for event in by_kind[SYNCHRONIZE] if event.thread == training_thread],
    )


def _name_as_called(collectives: Iterable[_Event], calls: Iterable[tuple[str, Interval]]) -> None:
    """Give collectives of gloo the kind that was called, in that order: it reduce-scatters by an all-reduce."""
    called = deque(sorted((when[0], kind) for kind, when in calls if kind in ("all_reduce", "reduce_scatter")))
    for event in sorted(collectives, key=lambda event: event.when):
        if event.name == "all_reduce" and called and called[0][0] <= event.when[0]:
            event.name = called.popleft()[1]


@dataclass(frozen=True)
class CommunicationShares:
    """Communication of one rank."""

    step_s: float  # duration of a profiled step
    share: float  # of that time with at least one collective running or waiting, 0 to 1
    exposed_share: float | None  # the part without any compute kernel; None on the CPU
    by_collective: dict[str, float]  # seconds per step; overlapping kinds count in each


def communication_shares(trace: Trace) -> CommunicationShares:
    """Return the share of communication of a rank; a copy is none. Raises ValueError if the steps have no duration."""
    (start, end), steps = trace.window, len(trace.steps)
    if end <= start:
        raise ValueError(f"no duration to compute a share of: {steps} steps from {start} s to {end} s")
    times: dict[str, list[Interval]] = {}
    for collective in sorted(trace.collectives, key=lambda collective: collective.kind):
        times.setdefault(collective.kind, []).append(collective.when)
    kinds = {kind: merge(clip(intervals, trace.window)) for kind, intervals in times.items()}
    running = merge(interval for intervals in kinds.values() for interval in intervals)
    computing = merge(clip((kernel.when for kernel in trace.kernels if kernel.category != COPY), trace.window))
    return CommunicationShares(
        step_s=(end - start) / steps,
        share=total_length(running) / (end - start),
        exposed_share=total_length(subtract(running, computing)) / (end - start) if trace.on_gpu else None,
        by_collective={kind: total_length(intervals) / steps for kind, intervals in kinds.items() if intervals},
    )


def combine_shares(ranks: Sequence[CommunicationShares | str], window: ProfileWindow | None) -> dict[str, Any]:
    """Combine the shares of all ranks; if any rank has none, the values are None and a note gives the reason.

    ``first_step``, counted from 1, is the profiler's warm-up: the first step that counts in no other metric.
    """
    known = [result for result in ranks if isinstance(result, CommunicationShares)]
    errors = list(dict.fromkeys(result for result in ranks if isinstance(result, str)))
    entry: dict[str, Any] = {
        "share": None,
        "exposed_share": None,
        "profiled_steps": window.steps if window else 0,
        "first_step": window.steps_before + 1 if window else None,
        "step_s": None,
        "by_collective": {},
        "ranks": [],
        "note": "; ".join(errors) or None,
    }
    if errors:
        return entry
    exposed = [shares.exposed_share for shares in known if shares.exposed_share is not None]
    kinds = sorted({kind for shares in known for kind in shares.by_collective})
    return entry | {
        "share": fmean(shares.share for shares in known),
        "exposed_share": fmean(exposed) if exposed else None,
        "step_s": fmean(shares.step_s for shares in known),
        "by_collective": {kind: fmean(shares.by_collective.get(kind, 0.0) for shares in known) for kind in kinds},
        "ranks": [
            {"rank": rank, "share": shares.share, "exposed_share": shares.exposed_share}
            for rank, shares in enumerate(known)
        ],
    }
