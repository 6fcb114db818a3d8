"""Files of a run about its steps: step model, profile summary, times of each rank, searched micro-batch size."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from distexp.exceptions import first_line
from distexp.runs.metrics import HIDDEN, PARTS
from distexp.runs.number_ranges import range_errors
from distexp.runs.record import RunRecord
from distexp.runs.run_dir import MICRO_BATCH, PROFILE_SUMMARY, STEP_MODEL, step_times_path
from distexp.system import files, typed_values

SCHEMA = 2

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
PHASES = (FORWARD, BACKWARD, OPTIMIZER)

REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")
GATHERS = ("all_gather", "broadcast")

NEXT = "next"
"""The next segment waits for a collective."""

GROUP, COPIES = "group", "copies"
"""Axes of the workers that share a model (section ``parallel``), and of those with the same part of it."""


@dataclass(frozen=True)
class Segment:
    """Computation between two collectives: the CPU launches it, and the device executes it.

    The device ends at ``max(free + device_s, launched + tail_s)``. ``free`` is the end of the earlier work of the
    device, and ``launched`` is the start of the segment on the CPU. Without a GPU only ``host_s`` counts.
    """

    phase: str  # forward, backward or optimizer
    micro_batch: int  # Number of the micro-batch, from 0. That of the optimizer is the last one.
    host_s: float  # time of the CPU, without waiting for the device or for collectives
    device_s: float = 0.0  # time of the kernels and copies
    tail_s: float = 0.0  # time from the start of the segment on the CPU to its end, on a device that was idle before
    tail_half_s: float = 0.0  # the same if the CPU took half of the time
    launches: int = 0  # number of kernels and copies
    waits: bool = False  # whether the CPU then waits for the device


@dataclass(frozen=True)
class Collective:
    """A collective that the CPU launches between two segments.

    Attributes:
        bytes: Size as in nccl-tests: the buffer of an all-reduce, the full tensor of an all-gather or reduce-scatter.
            None: the trace does not contain it.
        transfer_s: Measured duration without waiting for other ranks. None: not executed, because the run had one
            worker.
    """

    kind: str  # all_reduce, all_gather, reduce_scatter, reduce, broadcast, ...
    bytes: int | None
    ranks: int  # size of its process group
    axis: str  # ``all`` workers, the ``shard`` or ``replicate`` axis of the mesh, GROUP, or COPIES
    phase: str  # as of a segment
    micro_batch: int  # as of a segment
    host_s: float = 0.0  # time of the CPU since the last item, up to the launch
    transfer_s: float | None = None
    awaited: str = NEXT  # ``next``: the next segment waits for it. ``optimizer``: the optimizer waits for it.
    ahead: int = 0  # number of later collectives of this kind and phase that are launched before the segment that waits
    segments_ahead: int = 0  # number of further segments before the one that waits
    after_compute: bool = True  # whether it needs the results of the earlier segments


Item = Segment | Collective


@dataclass(frozen=True)
class Parameters:
    """Parameters that one unit of FSDP, or one block, contains; in the order of the forward pass."""

    name: str
    elements: tuple[int, ...]
    trained: tuple[int, ...] | None = None  # those that have gradients; None: all

    @property
    def reduced(self) -> tuple[int, ...]:
        """Return the elements of the parameters that have gradients."""
        return self.elements if self.trained is None else self.trained


@dataclass(frozen=True)
class StepModel:
    """The median profiled step of rank 0.

    Attributes:
        bucket_elements: Elements of the buckets of DDP, in the order of their reduction. Empty: no DDP.
        group_elements: Elements of each parameter in each group of the optimizer, not divided over workers.
        modules: Positions, in the parameters of all units, of those that each module itself has. In the order of the
            model.
    """

    on_gpu: bool  # whether the worker used a GPU
    workers: int
    nodes: int
    micro_batches: int  # Micro-batches of a step. The items have at most three of them: the first, one other, the last.
    step_s: float  # duration of the profiled step
    step_s_by_rank: tuple[tuple[float, ...], ...]  # durations of all profiled steps of each rank
    items: tuple[Item, ...]  # segments and collectives, in the order of their launches
    units: tuple[Parameters, ...] = ()  # Parameters of the model. Empty: unknown.
    bucket_elements: tuple[int, ...] = ()
    group_elements: tuple[tuple[int, ...], ...] = ()
    modules: tuple[tuple[int, ...], ...] = ()


def write_step_model(run_dir: Path, model: StepModel) -> None:
    """Write the file; each item has its type under ``type``."""

    def rounded(entry: dict[str, Any]) -> dict[str, Any]:  # to nanoseconds
        return {key: round(value, 9) if isinstance(value, float) else value for key, value in entry.items()}

    items = [{"type": type(item).__name__.lower(), **rounded(asdict(item))} for item in model.items]
    _write_compact(run_dir / STEP_MODEL, {"schema": SCHEMA, **asdict(model), "items": items})


def _write_compact(path: Path, content: Any) -> None:
    """Write a JSON file without spaces, because it may be large."""
    path.parent.mkdir(exist_ok=True)
    with files.replace_atomically(path) as temporary:
        temporary.write_text(json.dumps(content, separators=(",", ":")))


def read_step_model(run_dir: Path) -> StepModel | None:
    """Return the content of the file; None if there is none.

    Raise ValueError with the file and the reason if this version cannot read it, or if a number in it is impossible.
    """
    path = run_dir / STEP_MODEL
    try:
        content = files.read_json(path)
        if not isinstance(content, dict) or content.get("schema") != SCHEMA:
            raise ValueError(f"it is not of schema {SCHEMA}")
        model = typed_values.parse_dataclass(StepModel, content)
        errors = [*range_errors(content, "step"), *_model_errors(model)]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} cannot be read: {first_line(error)}") from None
    if errors:
        raise ValueError(f"{path} is not a step model of distexp: {errors[0].removeprefix('step.')}")
    return model


LONGEST_ITEM = 10.0
"""Longest part of a step, in steps. More than one, because a kernel may end in a later step than its launch."""


def _model_errors(model: StepModel) -> Iterator[str]:
    """Yield the values that no step has."""
    counts = {"workers": model.workers, "nodes": model.nodes, "micro_batches": model.micro_batches}
    yield from (f"{name}={count} must be at least 1" for name, count in counts.items() if count < 1)
    if model.step_s <= 0:
        yield f"step_s={model.step_s:g} must be above 0"
    if model.nodes > 1 and model.workers % model.nodes:
        yield f"workers={model.workers} cannot be divided over nodes={model.nodes}"
    for position, item in enumerate(model.items):
        place = f"items[{position}]"
        times = (
            ("host_s", "device_s", "tail_s", "tail_half_s") if isinstance(item, Segment) else ("host_s", "transfer_s")
        )
        for name in times:
            if (getattr(item, name) or 0.0) > LONGEST_ITEM * model.step_s:
                yield f"{place}.{name}={getattr(item, name):g} is much longer than the step, step_s={model.step_s:g}"
        if item.phase not in PHASES:
            yield f"{place}.phase={item.phase} is not one of {', '.join(PHASES)}"
        if item.micro_batch >= model.micro_batches:
            yield f"{place}.micro_batch={item.micro_batch} is not one of {model.micro_batches}"
        if isinstance(item, Collective) and not 1 <= item.ranks <= model.workers:
            yield f"{place}.ranks={item.ranks} must be from 1 to workers={model.workers}"


@dataclass(frozen=True)
class RankStep:
    """The median profiled step of a rank; times are in milliseconds."""

    rank: int
    step_ms: float
    profiled_ms: float  # with the overhead of the profiler
    parts: Mapping[str, float | None]  # by name of PARTS, and HIDDEN; None: not measured
    launches: float | None
    cpu_busy_ms: float | None = None  # in the profiled step; None: no GPU
    without_core_ms: float | None = None  # inside the parts; None: a GPU, or unknown

    def time_ms(self, name: str) -> float:
        """Return the time of a part; 0 if it was not measured."""
        return self.parts[name] or 0.0

    @property
    def own_ms(self) -> float:
        """Return the time without waiting for other ranks."""
        return self.step_ms - self.time_ms("waiting")

    @property
    def cpu_busy_share(self) -> float | None:
        """Return the fraction of the profiled step in which the CPU does not wait for the GPU; None if unknown."""
        return None if self.cpu_busy_ms is None else self.cpu_busy_ms / self.profiled_ms


def read_ranks(record: RunRecord) -> tuple[RankStep, ...]:
    """Return the median profiled step of each rank; empty if the run was not profiled."""
    found = []
    for entry in record.metrics.step_breakdown or ():
        if isinstance(entry, dict) and (rank := typed_values.number_of(entry, "rank")) is not None:
            parts = {name: typed_values.number_of(entry, f"{name}_ms") for name in (*PARTS, HIDDEN)}
            others = (typed_values.number_of(entry, name) for name in ("launches", "cpu_busy_ms", "without_core_ms"))
            if step := typed_values.number_of(entry, "step_ms"):
                found.append(
                    RankStep(int(rank), step, typed_values.number_of(entry, "profiled_step_ms") or step, parts, *others)
                )
    return tuple(found)


SUMMARY_SCHEMA = 1


def write_profile_summary(run_dir: Path, ranks: Sequence[dict[str, Any]], steps: int) -> None:
    """Write the lanes of the median step of ``steps`` profiled ones, of all ranks.

    Each rank has ``rank``, ``step_ms`` and ``lanes``. A lane has ``name`` and ``spans``: start and end in milliseconds
    since the start of the step, and a label. The file has the index of the label.
    """
    labels: dict[str, int] = {}

    def number_labels(lane: dict[str, Any]) -> dict[str, Any]:
        spans = [[begin, end, labels.setdefault(label, len(labels))] for begin, end, label in lane["spans"]]
        return {**lane, "spans": spans}

    numbered = [{**rank, "lanes": list(map(number_labels, rank["lanes"]))} for rank in ranks]
    content = {"schema": SUMMARY_SCHEMA, "steps": steps, "ranks": numbered, "labels": list(labels)}
    _write_compact(run_dir / PROFILE_SUMMARY, content)


def read_profile_summary(run_dir: Path) -> dict[str, Any] | None:
    """Return the content of the file, or None if there is none that this version can read."""
    content = files.read_or_none(run_dir / PROFILE_SUMMARY)
    return content if isinstance(content, dict) and content.get("schema") == SUMMARY_SCHEMA else None


COLUMNS = ("step", "microseconds", "watched")


@dataclass(frozen=True)
class StepTime:
    """Duration of an ordinary step."""

    step: int  # number among the measured steps, from 0
    seconds: float
    watched: bool  # whether the rank measured in this step how long it waits for other ranks


def write_step_times(run_dir: Path, rank: int, steps: Iterable[StepTime]) -> None:
    """Write the file of a rank."""
    path = step_times_path(run_dir, rank)
    path.parent.mkdir(exist_ok=True)
    with files.replace_atomically(path) as temporary, temporary.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows((step.step, round(1e6 * step.seconds), int(step.watched)) for step in steps)


def read_step_times(run_dir: Path, rank: int) -> list[StepTime]:
    """Read the file of a rank. Raise OSError if it cannot be read, or ValueError if it has another format."""
    path = step_times_path(run_dir, rank)
    with path.open(newline="") as file:
        header, *rows = csv.reader(file)
    if tuple(header) != COLUMNS:
        raise ValueError(f"{path} has the columns {header}, and not {list(COLUMNS)}")
    return [StepTime(int(step), int(duration) / 1e6, watched == "1") for step, duration, watched in rows]


FITS, OUT_OF_MEMORY, TOO_LARGE = "fits", "oom", "too_large"
"""Outcomes of a candidate. ``too_large``: it ran, and left too little memory."""


@dataclass(frozen=True)
class TriedSize:
    """A micro-batch size that the search tried, over all ranks."""

    micro_batch_size: int
    outcome: str
    samples_per_second: float | None = None  # of a whole step, over all ranks
    peak_mib: float | None = None  # of the rank with the most
    base_mib: float | None = None  # before the forward pass of the last micro-batch, of the rank with the most
    usable_mib: float | None = None  # of the rank with the least


@dataclass(frozen=True)
class MicroBatchSearch:
    """The search of ``train.micro_batch_size=auto``, and what it chose.

    Rank 0 writes it before the training starts. So the record contains the search even if the run fails.
    """

    chosen: int | None  # None: no size fits
    candidates: list[TriedSize] = field(default_factory=list)
    seconds: float = 0.0
    stored_in: str | None = None  # file of an earlier search that gave this result
    skipped: int | None = None  # smallest size that was not tried because it needs too much memory
    complete: bool = True  # False: the time limit ended the search

    @property
    def untried(self) -> bool:
        """Return whether the chosen size was not tried, because the time limit ended the search."""
        return self.chosen is not None and all(tried.micro_batch_size != self.chosen for tried in self.candidates)

    def write(self, path: Path) -> None:
        """Write the search as JSON, atomically."""
        files.write_json(path, asdict(self))

    @classmethod
    def read(cls, path: Path) -> MicroBatchSearch | None:
        """Read a search; None if the file is missing or damaged."""
        return typed_values.read_dataclass(cls, path)


def describe_search(search: MicroBatchSearch) -> str:
    """Return the line for the terminal: ``micro-batch: 32 (of 1, 2, 4, 8, 16, 32; 64 ran out of memory)``."""
    return f"micro-batch: {search.chosen} ({'; '.join(_remarks(search))})"


def _remarks(search: MicroBatchSearch) -> Iterator[str]:
    yield f"of {_sizes(search, FITS)}"
    if sizes := _sizes(search, TOO_LARGE):
        yield f"{sizes} left too little memory"
    if sizes := _sizes(search, OUT_OF_MEMORY):
        yield f"{sizes} ran out of memory"
    if search.skipped is not None:
        yield f"{search.skipped} would not fit"
    if not search.complete:
        yield "chosen by its memory, because the time was over" if search.untried else "then the time was over"
    yield f"from {search.stored_in}" if search.stored_in else f"{search.seconds:.0f} s"


def _sizes(search: MicroBatchSearch, outcome: str) -> str:
    """Return the sizes with an outcome, as in ``1, 2, 4``; empty if there are none."""
    sizes = sorted(tried.micro_batch_size for tried in search.candidates if tried.outcome == outcome)
    return ", ".join(map(str, sizes))


def add_search(record: RunRecord, run_dir: Path) -> None:
    """Add the search of a run to its record: the candidates, and the sizes that were chosen."""
    search = MicroBatchSearch.read(run_dir / MICRO_BATCH)
    if search is None:
        return
    record.metrics.micro_batch_search = asdict(search)
    if search.chosen is not None and isinstance(record.config["train"]["micro_batch_size"], str):
        train, cluster = record.config["train"], record.config["cluster"]
        workers = cluster["nodes"] * cluster["workers_per_node"]
        train["micro_batch_size"] = search.chosen
        train["gradient_accumulation_steps"] = train["global_batch_size"] // (workers * search.chosen)
