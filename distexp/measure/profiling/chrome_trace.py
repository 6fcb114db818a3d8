"""What a profiler's trace, in Chrome's JSON format, says of collectives and kernels.

The categories of its events (``kernel``, ``user_annotation``) tell kernels from the annotations that
lie over them on the GPU's time line, and NCCL's kernels bear the names of their collectives.
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
    """The steps, collectives and kernels of a rank.

    gloo's collectives count from the call until they are done, in their queue too, and under the names that gloo
    gives them (it carries out a reduce-scatter as an all-reduce). NCCL's count while their kernels are on the GPU,
    where they wait for the slowest rank; copies between host and GPU are neither communication nor computing.

    Raises:
        ValueError: the trace has no step, no JSON, or on a GPU no kernel.
    """
    # Of a million events few are wanted: only those are kept while it is read.
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            content = json.load(file, object_hook=_wanted)
    except json.JSONDecodeError as error:
        raise ValueError(f"the profiler's trace is no JSON: {error}") from error
    events = [event for event in content if isinstance(event, _Event)] if isinstance(content, list) else []
    steps = [event.when for event in events if event.kind == STEP]
    if not steps:
        raise ValueError("the profiler's trace has no step")
    kernels = [event.when for event in events if event.kind == ""]
    collectives: dict[str, list[Interval]] = {}
    for event in events:
        if event.kind not in (STEP, ""):
            collectives.setdefault(event.kind, []).append(event.when)
    if on_gpu and not any(event.on_gpu for event in events):
        raise ValueError(
            "the profiler saw no kernel on the GPU (CUPTI is missing, or something else uses it): "
            "the variable KINETO_LOG_LEVEL=0 has it say why"
        )
    window = min(begin for begin, _ in steps), max(end for _, end in steps)
    return Timeline(len(steps), window, collectives, kernels if on_gpu else None)


class _Event:
    """A step, a collective by its kind, or a kernel that computes, which has none."""

    __slots__ = ("kind", "on_gpu", "when")

    def __init__(self, kind: str, raw: dict[str, Any]) -> None:
        begin = float(raw["ts"]) / 1e6
        self.kind, self.when = kind, (begin, begin + float(raw.get("dur", 0)) / 1e6)
        self.on_gpu = raw["cat"] == "kernel"


def _wanted(raw: dict[str, Any]) -> Any:
    """Called for each object of the file, innermost first: the events that count, and what names them."""
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
    """``AllReduce`` -> ``all_reduce``; of NCCL's generic kernel what torch called it for, where that is known."""
    told = name if name != "Generic" else str((arguments or {}).get("Collective name", OTHER))
    plain = told.replace("_", "").lower().removesuffix("base")
    return next((kind for kind in KINDS if kind.replace("_", "") == plain), told.lower() or OTHER)
