"""``profile/step_model.json``: the median profiled step of rank 0 as a list of items for a simulation.

The items are in the order in which the CPU launches them. A step has two clocks: that of the CPU, and that of the
device. Times are in seconds and include the overhead of the profiler.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from distexp.runs.files import replace_atomically
from distexp.runs.json_files import read_or_none
from distexp.runs.run_dir import step_model_path
from distexp.runs.typed_values import read_dataclass

SCHEMA = 2

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
PHASES = (FORWARD, BACKWARD, OPTIMIZER)

NEXT = "next"
"""The next segment waits for a collective."""


@dataclass(frozen=True)
class Segment:
    """Computation between two collectives: the CPU launches it, and the device executes it.

    The device ends at ``max(free + device_s, launched + tail_s)``. ``free`` is the end of the earlier work of the
    device, and ``launched`` is the start of the segment on the CPU. Without a GPU only ``host_s`` counts.

    Attributes:
        phase: forward, backward or optimizer.
        micro_batch: Number of the micro-batch, from 0. That of the optimizer is the last one.
        host_s: Time of the CPU, without waiting for the device or for collectives.
        device_s: Time of the kernels and copies.
        tail_s: Time from the start of the segment on the CPU to its end, on a device that was idle before.
        tail_half_s: The same if the CPU took half of the time.
        launches: Number of kernels and copies.
        waits: Whether the CPU then waits for the device.
    """

    phase: str
    micro_batch: int
    host_s: float
    device_s: float = 0.0
    tail_s: float = 0.0
    tail_half_s: float = 0.0
    launches: int = 0
    waits: bool = False


@dataclass(frozen=True)
class Collective:
    """A collective that the CPU launches between two segments.

    Attributes:
        kind: all_reduce, all_gather, reduce_scatter, reduce, broadcast, ...
        bytes: Size as in nccl-tests: the buffer of an all-reduce, the full tensor of an all-gather or reduce-scatter.
            None: the trace does not contain it.
        ranks: Size of its process group.
        axis: ``all`` workers, or the ``shard`` or ``replicate`` axis of the mesh.
        phase: As of a segment.
        micro_batch: As of a segment.
        host_s: Time of the CPU since the last item, up to the launch.
        transfer_s: Measured duration without waiting for other ranks. None: not executed, because the run had one
            worker.
        awaited: ``next``: the next segment waits for it. ``optimizer``: the optimizer waits for it.
        ahead: Number of later collectives of this kind and phase that are launched before the segment that waits.
        segments_ahead: Number of further segments before the one that waits.
        after_compute: Whether it needs the results of the earlier segments.
    """

    kind: str
    bytes: int | None
    ranks: int
    axis: str
    phase: str
    micro_batch: int
    host_s: float = 0.0
    transfer_s: float | None = None
    awaited: str = NEXT
    ahead: int = 0
    segments_ahead: int = 0
    after_compute: bool = True


Item = Segment | Collective


@dataclass(frozen=True)
class Parameters:
    """Parameters that one unit of FSDP, or one block, contains; in the order of the forward pass."""

    name: str
    elements: tuple[int, ...]


@dataclass(frozen=True)
class StepModel:
    """The median profiled step of rank 0.

    Attributes:
        on_gpu: Whether the worker used a GPU.
        workers: Number of workers.
        nodes: Number of nodes.
        micro_batches: Micro-batches of a step. The items have at most three of them: the first, one other, the last.
        step_s: Duration of the profiled step.
        step_s_by_rank: Durations of all profiled steps of each rank.
        items: Segments and collectives, in the order of their launches.
        units: Parameters of the model. Empty: unknown.
        bucket_elements: Elements of the buckets of DDP, in the order of their reduction. Empty: no DDP.
        group_elements: Elements of each parameter in each group of the optimizer, not divided over workers.
        modules: Positions, in the parameters of all units, of those that each module itself has. In the order of the
            model.
    """

    on_gpu: bool
    workers: int
    nodes: int
    micro_batches: int
    step_s: float
    step_s_by_rank: tuple[tuple[float, ...], ...]
    items: tuple[Item, ...]
    units: tuple[Parameters, ...] = ()
    bucket_elements: tuple[int, ...] = ()
    group_elements: tuple[tuple[int, ...], ...] = ()
    modules: tuple[tuple[int, ...], ...] = ()


def write_step_model(run_dir: Path, model: StepModel) -> None:
    """Write the file; each item has its type under ``type``."""
    items = [{"type": type(item).__name__.lower(), **_rounded(asdict(item))} for item in model.items]
    content = {"schema": SCHEMA, **asdict(model), "items": items}
    path = step_model_path(run_dir)
    path.parent.mkdir(exist_ok=True)
    with replace_atomically(path) as temporary:
        temporary.write_text(json.dumps(content, separators=(",", ":")))


def _rounded(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return an item with times rounded to nanoseconds."""
    return {key: round(value, 9) if isinstance(value, float) else value for key, value in entry.items()}


def read_step_model(run_dir: Path) -> StepModel | None:
    """Return the content of the file, or None if there is none that this version can read."""
    path = step_model_path(run_dir)
    return read_dataclass(StepModel, path) if read_or_none(path, "schema") == SCHEMA else None
