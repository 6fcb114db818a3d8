"""Reader of collectives and kernels from a profiler trace in Chrome's JSON format.

The category of an event (``kernel``, ``user_annotation``) separates kernels from annotations on the same timeline.
Kernels of NCCL are named after their collectives.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from distexp.measure.profiling.communication import Interval, Timeline

STEP = "ProfilerStep#"
GLOO = "gloo:"
NCCL = re.compile(r"\b[nr]ccl\w*?Kernel(?:_([A-Za-z]+))?")
"""ncclDevKernel_AllReduce_Sum_f32_RING_LL, ncclSymkDevKernel_AllGather_LL, ncclKernel_... before NCCL 2.19."""
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send_recv")
OTHER = "other"


def read_timeline(path: Path, *, on_gpu: bool) -> Timeline:
    """Read the steps, collectives and kernels of a rank.

    Collectives of gloo count from the call to their end, including the time in the queue, with the names that gloo
    uses (it executes a reduce-scatter as an all-reduce). Collectives of NCCL count while their kernels are on the GPU,
    including the wait for the slowest rank. Copies between host and GPU are neither communication nor computation.

    Args:
        path: The trace.
        on_gpu: Whether the rank used a GPU.

    Raises:
        ValueError: The trace is not JSON, or has no step, or has no kernel of the GPU.
    """
    # A trace has a million events and few are needed: the others are dropped while it is parsed.
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            content = json.load(file, object_hook=_parse_event)
    except json.JSONDecodeError as error:
        raise ValueError(f"the profiler trace is not valid JSON: {error}") from error
    events = [event for event in content if isinstance(event, _Event)] if isinstance(content, list) else []
    steps = [event.when for event in events if event.kind == STEP]
    if not steps:
        raise ValueError("the profiler trace has no step")
    kernels = [event.when for event in events if event.kind == ""]
    collectives: dict[str, list[Interval]] = {}
    for event in events:
        if event.kind not in (STEP, ""):
            collectives.setdefault(event.kind, []).append(event.when)
    if on_gpu and not any(event.on_gpu for event in events):
        raise ValueError(
            "the profiler recorded no GPU kernel (CUPTI is missing, or another tool uses it): "
            "set KINETO_LOG_LEVEL=0 to see the reason"
        )
    window = min(start for start, _ in steps), max(end for _, end in steps)
    return Timeline(len(steps), window, collectives, kernels if on_gpu else None)


class _Event:
    """A step, a collective, or a compute kernel; ``kind`` is ``STEP``, the collective, or empty."""

    __slots__ = ("kind", "on_gpu", "when")

    def __init__(self, kind: str, raw: dict[str, Any]) -> None:
        start = float(raw["ts"]) / 1e6
        self.kind, self.when = kind, (start, start + float(raw.get("dur", 0)) / 1e6)
        self.on_gpu = raw["cat"] == "kernel"


def _parse_event(raw: dict[str, Any]) -> Any:
    """Parse one JSON object of a trace, innermost first; None for everything that is not needed."""
    if "traceEvents" in raw:
        return raw["traceEvents"]
    if raw.get("ph") != "X":
        return {"Collective name": raw["Collective name"]} if "Collective name" in raw else None
    category, name = raw.get("cat"), str(raw.get("name"))
    if category == "kernel":
        found = NCCL.search(name)
        return _Event(_kind(found[1] or "", raw.get("args")) if found else "", raw)
    if category == "user_annotation" and name.startswith(STEP):
        return _Event(STEP, raw)
    if category == "user_annotation" and name.startswith(GLOO):
        return _Event(_kind(name.removeprefix(GLOO), None), raw)
    return None


def _kind(name: str, arguments: dict[str, Any] | None) -> str:
    """Return a kind such as ``all_reduce`` for a name such as ``AllReduce``.

    For a generic kernel of NCCL it is the collective that torch requested, if the trace contains it.
    """
    requested = name if name != "Generic" else str((arguments or {}).get("Collective name", OTHER))
    plain = requested.replace("_", "").lower().removesuffix("base")
    return next((kind for kind in KINDS if kind.replace("_", "") == plain), requested.lower() or OTHER)
