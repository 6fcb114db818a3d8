"""Format of ``memory/node<k>.csv``: a node's memory, utilization and power over time."""

import csv
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from distexp.runs.number_ranges import find_problem
from distexp.runs.record import RunRecord
from distexp.runs.record_sections import Built
from distexp.system.files import open_file
from distexp.system.typed_values import cpu_peak_mib
from distexp.system.units import MIB

CPU = "cpu"
GPU = "gpu"


@dataclass(frozen=True)
class MemorySample:
    """One device at one time. A value that could not be read is None, never 0.

    Attributes:
        energy_j: Of a GPU its own counter, which starts at an arbitrary value. On the CPU, the run's part since the
            first sample.
        clock_reasons: Why the clock of a GPU is not higher, as bits of NVML's ``nvmlClocksEventReasons``.
        pcie_pct: Rate of a GPU's PCIe link, in percent of its maximum. It is read in some samples only.
        ecc_errors: Uncorrected memory errors of a GPU since the driver was loaded, in some samples only.
        compiler_mib: What compilers hold, for example while DeepSpeed compiles. It is not in ``used_mib``.
    """

    unix_time_s: float
    phase: str  # phase of the run; empty if unknown
    kind: str  # ``gpu`` or ``cpu``
    index: int
    used_mib: float | None  # On a GPU: what all its users hold. On the CPU: what the process tree holds.
    total_mib: float | None = None
    utilization_pct: float | None = None  # percent of the device, or of all cores that the node may use
    power_w: float | None = None
    job_mib: float | None = None  # this job's part of a GPU's memory, if NVML reports it
    energy_j: float | None = None
    source: str = ""  # How the memory was read. It marks the samples of a less exact method.
    compiler_mib: float | None = None
    other_mib: float | None = None  # other jobs' part of a GPU's memory, if NVML reports it
    sm_clock_mhz: float | None = None  # clock of a GPU
    clock_reasons: float | None = None
    pcie_pct: float | None = None
    ecc_errors: float | None = None


COLUMNS = tuple(column.name for column in fields(MemorySample))

OPTIONAL_NUMBERS = tuple(name for name in COLUMNS[COLUMNS.index("used_mib") :] if name != "source")
"""Columns with a number that may be unknown. Their cell is then empty."""


@dataclass
class MemoryTrace:
    """The samples of a file, and a note on each problem found in it."""

    samples: list[MemorySample]
    notes: list[str] = field(default_factory=list)


def group_by_device(samples: Iterable[MemorySample]) -> dict[tuple[str, int], list[MemorySample]]:
    """Return the samples of each device, by its kind and index."""
    devices: dict[tuple[str, int], list[MemorySample]] = {}
    for sample in samples:
        devices.setdefault((sample.kind, sample.index), []).append(sample)
    return devices


class MemoryTraceWriter:
    """Appends whole samples to a file. Each is on disk at once, so that a killed run keeps its trace."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666)
        self._torn = False
        self._write(",".join(COLUMNS) + "\n")

    def append(self, samples: Iterable[MemorySample]) -> None:
        """Append the samples of one time. Raise OSError if the disk takes none of them, or only a part."""
        rows = (",".join(_format_cell(getattr(sample, name)) for name in COLUMNS) for sample in samples)
        self._write("".join(f"{row}\n" for row in rows))

    def close(self) -> None:
        """Close the file. Everything is on disk already."""
        os.close(self._descriptor)

    def _write(self, text: str) -> None:
        # A full disk may have taken half a line. The next line must not be appended to that half.
        content = (b"\n" if self._torn else b"") + text.encode()
        written = os.write(self._descriptor, content)
        if written < len(content):
            self._torn = True
            raise OSError(f"the disk took {written} of {len(content)} bytes")
        self._torn = False


def _format_cell(value: str | float | None) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if isinstance(value, float) else str(value)


class WholeLines(NamedTuple):
    """The whole lines of a file, and a note if its last line was torn and is left out."""

    lines: list[str]
    notes: list[str]


def read_whole_lines(path: Path) -> WholeLines:
    """Read the lines of a file without a torn last one."""
    with open_file(path) as file:
        text = file.read().decode("utf-8-sig", errors="replace")
    lines = text.splitlines()
    if not lines or text.endswith("\n"):
        return WholeLines(lines, [])
    return WholeLines(lines[:-1], [f"{path}: the last line has no end (torn, or still being written) and is left out"])


def bad_lines_note(path: Path, bad: Sequence[int]) -> list[str]:
    """Return a note on the lines (numbers from 1) that were left out; empty if all were read."""
    if not bad:
        return []
    return [f"{path}: {len(bad)} line(s) are not samples and are left out, the first is line {bad[0]}"]


def is_memory_trace(header: str) -> bool:
    """Return whether the first line of a file is that of a memory trace."""
    return tuple(header.strip().split(",")) == COLUMNS


def read_memory_trace(path: Path) -> MemoryTrace:
    """Read a memory trace, complete or still being written. Raise OSError or ValueError if that is not possible."""
    lines, notes = read_whole_lines(path)
    if not lines or not is_memory_trace(lines[0]):
        raise ValueError(f"{path} is not a memory trace: expected a first line {','.join(COLUMNS)}")
    samples: list[MemorySample] = []
    bad: list[int] = []
    for number, cells in enumerate(csv.reader(lines[1:]), start=2):
        try:
            samples.append(_parse_sample(dict(zip(COLUMNS, cells, strict=True))))
        except ValueError:
            bad.append(number)
    return MemoryTrace(samples, notes + bad_lines_note(path, bad))


def _parse_sample(row: dict[str, str]) -> MemorySample:
    if row["kind"] not in (CPU, GPU):
        raise ValueError(f"kind={row['kind']!r} is not {CPU} or {GPU}")
    numbers = {name: float(row[name]) if row[name] else None for name in OPTIONAL_NUMBERS}
    time_s, index = float(row["unix_time_s"]), int(row["index"])
    for name, number in {**numbers, "unix_time_s": time_s, "index": index}.items():
        if number is not None and (problem := find_problem(f".{name}", number)):
            raise ValueError(f"{name}={number} {problem}")
    return MemorySample(time_s, row["phase"], row["kind"], index, source=row["source"], **numbers)


TENSORS = "train"
"""Phase of the entries with the tensors that a rank keeps. The other phases are those of a recorded step."""

KEPT_PARTS = ("parameters_mib", "gradients_mib", "optimizer_states_mib", "activations_mib")
"""Keys of the tensors that a rank keeps."""

PEAK_PARTS = (
    *(*KEPT_PARTS, "logits_mib"),
    *("communication_mib", "temporaries_mib", "other_mib"),
)
"""Keys whose sum is ``allocated_mib``. Activations contain the logits if ``logits_mib`` is None."""

Entry = Mapping[str, Any]


def tensor_entries(memory: Mapping[str, Any]) -> list[Entry]:
    """Return the entries with the tensors of each rank."""
    return [entry for entry in memory.get("parts") or () if entry.get("phase") == TENSORS]


def cpu_process_mib(record: RunRecord) -> float | None:
    """Return what the processes of a run on CPUs need in addition to tensors, on a node in MiB; None if unknown."""
    nodes, peak, parts = record.memory.get("cpu") or (), cpu_peak_mib(record.memory), tensor_entries(record.memory)
    if peak is None or not parts or record.config["cluster"]["device"] != "cpu":
        return None
    return peak - sum(float(entry.get(key) or 0.0) for entry in parts for key in KEPT_PARTS) / len(nodes)


def peak_entries(memory: Mapping[str, Any]) -> list[Entry]:
    """Return the entries with the peaks of a recorded step, one for each rank and phase."""
    entries = (entry for entry in memory.get("parts") or () if entry.get("phase") != TENSORS)
    return [entry for entry in entries if any(entry.get(name) for name in PEAK_PARTS)]


def highest_peak(memory: Mapping[str, Any]) -> Entry | None:
    """Return the entry of the phase and rank with the most allocated memory; None if no step was recorded."""
    return max(peak_entries(memory), key=lambda entry: float(entry.get("allocated_mib") or 0.0), default=None)


BYTES_PER_VALUE = 4.0
MOMENTS = {"adamw": 2, "sgd": 1}
"""Values in fp32 that an optimizer keeps for each parameter; the one of sgd is its momentum."""

STATE_VALUES = {**MOMENTS, "adamw8bit": 2 * (1 / 4 + 1 / 256)}
"""The same as sizes: with 8 bits, 256 values have a scale in fp32. Small tensors, which are few, have more."""

States = dict[str, float]
"""Bytes of ``parameters``, ``gradients`` and ``optimizer`` states for each parameter."""


def ideal_states_mib(record: RunRecord) -> float | None:
    """Return the model states on the device of one worker in MiB by arithmetic; None if unknown.

    It is that of the ZeRO paper (arXiv:1910.02054, section 5), without activations and buffers. With Adam a parameter
    costs 16 bytes. In fp32 these are 4 of weight, 4 of gradient and 8 of moments. Autocast keeps no other copy. With
    16-bit weights, ZeRO keeps a master copy in fp32: 2 of weight, 2 of gradient and 12 of states. The workers that
    share sharded states have equal parts. Nothing depends on the name of a strategy, so that custom ones are treated
    alike.
    """
    per_parameter = bytes_per_parameter(record)
    if per_parameter is None or record.built is None or not record.built.parameters:
        return None
    return per_parameter * record.built.parameters / MIB


def bytes_per_parameter(record: RunRecord) -> float | None:
    """Return the bytes on one worker's device for each parameter of the whole model.

    It is None if ``built`` does not show how the states are stored. A custom strategy may shard in another way.
    """
    built = record.built
    moments = STATE_VALUES.get(record.config["train"]["optimizer"])
    if built is None or moments is None or len(built.mesh) != 2:
        return None
    if built.tensor > 1 or built.pipeline > 1:  # Some weights are not cut, or the parts have different sizes.
        return None
    is_unknown = (built.param_dtype != "float32" and trained_share(built) == 1) or (
        built.mesh[1] > 1 and not built.sharded_units
    )
    if built.zero_stage is None and is_unknown:
        return None
    return sum(states_per_parameter(built, BYTES_PER_VALUE * moments).values())


def trained_share(built: Built) -> float:
    """Return the share of the parameters that is trained."""
    trained = built.trained_parameters
    return 1.0 if trained is None or not built.parameters else trained / built.parameters


def states_per_parameter(built: Built, moments: float) -> States:
    """Return the states of a worker: those of a ZeRO stage, if there is one, or with equal shares of all of them."""
    if built.zero_stage is not None:
        return _zero_states(built, built.zero_stage, moments)
    # All of them are sharded over the second axis of the mesh. Only frozen weights may have 16 bits.
    share = trained_share(built)
    in_fp32 = share if built.param_dtype == "bfloat16" else 1.0
    copies = in_fp32 * BYTES_PER_VALUE / 2 if built.compute_weights == "step" else 0.0
    weights = in_fp32 * BYTES_PER_VALUE + (1 - in_fp32) * BYTES_PER_VALUE / 2
    parts = {"parameters": weights + copies, "gradients": share * BYTES_PER_VALUE, "optimizer": share * moments}
    on_cpu = built.offload.split("+")
    return {name: 0.0 if name in on_cpu else size / built.mesh[1] for name, size in parts.items()}


def _zero_states(built: Built, stage: int, moments: float) -> States:
    shards, on_cpu = built.mesh[1], built.offload.split("+")
    half = built.param_dtype in ("bfloat16", "float16")
    value, states = (BYTES_PER_VALUE / 2, BYTES_PER_VALUE + moments) if half else (BYTES_PER_VALUE, moments)
    share = trained_share(built)
    parts = {
        "parameters": value / shards if stage >= 3 else value,
        "gradients": share * (value / shards if stage >= 2 else value),
        "optimizer": share * (states / shards if stage >= 1 else states),
    }
    if "optimizer" in on_cpu:
        parts["optimizer"] = 0.0
        parts["gradients"] = 0.0 if stage >= 2 else parts["gradients"]
    if "parameters" in on_cpu:
        parts["parameters"] = 0.0
    return parts
