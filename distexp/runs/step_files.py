"""Files of a run with the times of its steps: step model, profile summary, and step times of each rank."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from distexp.runs.run_dir import profile_summary_path, step_model_path, step_times_path
from distexp.system.files import read_or_none, replace_atomically
from distexp.system.typed_values import read_dataclass

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


# The parts of a training step, which add up to it.


PARTS = {
    "matmul": "matrix kernels",
    "other_kernels": "other kernels",
    "exposed_communication": "exposed communication",
    "waiting": "waiting for other ranks",
    "launch_idle": "GPU idle: slow launches",
    "data_wait": "data wait",
    "optimizer": "optimizer",
    "host": "host work",
}
"""Titles of the parts by name. ``metrics.step_breakdown`` has each one in milliseconds, as ``matmul_ms``."""

HIDDEN = "hidden_communication"
"""Communication at the same time as kernels. It is not part of the sum."""

# ``profile/summary.json``: lanes of one profiled step of each rank, for the report.


SUMMARY_SCHEMA = 1


def write_profile_summary(run_dir: Path, ranks: Sequence[dict[str, Any]], steps: int) -> None:
    """Write the lanes of all ranks.

    Args:
        run_dir: Directory of the run.
        ranks: For each rank ``rank``, ``step_ms`` and ``lanes``. Each lane has ``name`` and ``spans``: start and end
            in milliseconds since the start of the step, and a label. The file has the index of the label.
        steps: Number of profiled steps. The file has the lanes of the median one.
    """
    labels: dict[str, int] = {}
    numbered = [{**rank, "lanes": [_number_labels(lane, labels) for lane in rank["lanes"]]} for rank in ranks]
    path = profile_summary_path(run_dir)
    path.parent.mkdir(exist_ok=True)
    content = {"schema": SUMMARY_SCHEMA, "steps": steps, "ranks": numbered, "labels": list(labels)}
    with replace_atomically(path) as temporary:
        temporary.write_text(json.dumps(content, separators=(",", ":")))


def _number_labels(lane: dict[str, Any], labels: dict[str, int]) -> dict[str, Any]:
    """Return a lane with the index of each label, after adding new labels."""
    spans = [[begin, end, labels.setdefault(label, len(labels))] for begin, end, label in lane["spans"]]
    return {**lane, "spans": spans}


def read_profile_summary(run_dir: Path) -> dict[str, Any] | None:
    """Return the content of the file, or None if there is none that this version can read."""
    content = read_or_none(profile_summary_path(run_dir))
    return content if isinstance(content, dict) and content.get("schema") == SUMMARY_SCHEMA else None


# ``step_times/rank<k>.csv``: durations of a rank's ordinary steps, and whether each was watched for slow ranks.


COLUMNS = ("step", "microseconds", "watched")


@dataclass(frozen=True)
class StepTime:
    """Duration of an ordinary step.

    Attributes:
        step: Number among the measured steps, from 0.
        seconds: Duration.
        watched: Whether the rank measured in this step how long it waits for other ranks.
    """

    step: int
    seconds: float
    watched: bool


def write_step_times(run_dir: Path, rank: int, steps: Iterable[StepTime]) -> None:
    """Write the file of a rank."""
    path = step_times_path(run_dir, rank)
    path.parent.mkdir(exist_ok=True)
    with replace_atomically(path) as temporary, temporary.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows((step.step, round(1e6 * step.seconds), int(step.watched)) for step in steps)


def read_step_times(run_dir: Path, rank: int) -> list[StepTime]:
    """Read the file of a rank.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it has another format.
    """
    path = step_times_path(run_dir, rank)
    with path.open(newline="") as file:
        header, *rows = csv.reader(file)
    if tuple(header) != COLUMNS:
        raise ValueError(f"{path} has the columns {header}, and not {list(COLUMNS)}")
    return [StepTime(int(step), int(duration) / 1e6, watched == "1") for step, duration, watched in rows]
