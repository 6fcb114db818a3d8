"""The command ``distexp memory FILE... [--gpu-only | --cpu-only]``: summarize nvidia-smi and psrecord logs.

The format is that of the workshop's analyze_memory. MB on the CPU is 2**20 bytes, as in psrecord, and equals MiB.
"""

import argparse
import csv
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path

from distexp.cli.main import CommandParser
from distexp.exceptions import print_error, print_text, printable, run_until_pipe_closes
from distexp.measure.memory.sampler import Statistics, round_half_up
from distexp.runs import memory_trace
from distexp.runs.memory_trace import CPU, GPU, MemorySample, MemoryTrace

ALL_READ, SOME_READ, NONE_READ = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the summary. Return 0 if all files were read, 1 if some, 2 if none has samples of the requested kind."""
    options = _parse(arguments)
    kinds = [kind for kind in (GPU, CPU) if kind != options.excluded]
    labels, traces = _labels(options.files), list[tuple[str, MemoryTrace]]()
    for path, label in labels.items():
        trace = _read(path, kinds)
        if trace is not None:
            traces.append((label, trace))
    sections = [_gpu_lines(traces)] if GPU in kinds else []
    sections += [_cpu_lines(traces)] if CPU in kinds else []
    if not traces:
        return NONE_READ
    print_text("\n\n".join("\n".join(lines) for lines in sections if lines))
    return ALL_READ if len(traces) == len(labels) else SOME_READ


def _labels(files: Sequence[Path]) -> dict[Path, str]:
    """Return the name of each log in the summary: the name of its file, or its path if several have that name."""
    counts = Counter(path.stem for path in dict.fromkeys(files))
    return {path: path.stem if counts[path.stem] == 1 else str(path) for path in files}


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser(
        prog="distexp memory",
        description="Summarize nvidia-smi and psrecord logs: print peak, average and mode of the memory.",
        epilog=f"FILE is one of: {EXPECTED.removeprefix('expected ')}.",
    )
    parser.add_argument("files", metavar="FILE", nargs="+", type=Path)
    only = parser.add_mutually_exclusive_group()
    for kind, excluded in (("gpu", CPU), ("cpu", GPU)):
        text = f"print {kind.upper()} memory only"
        only.add_argument(
            f"--{kind}-only", dest="excluded", action="store_const", const=excluded, default="", help=text
        )
    return parser.parse_args(arguments)


def _read(path: Path, kinds: Sequence[str]) -> MemoryTrace | None:
    """Return a log with samples of the requested kinds; else print a message to stderr and return None."""
    try:
        trace = read_memory_log(path)
    except OSError as error:
        print_error(f"{path} cannot be read ({error.strerror}): {EXPECTED}")
        return None
    except ValueError as error:
        print_error(error)
        return None
    for note in trace.notes:
        print(printable(note), file=sys.stderr)
    if not any(sample.kind in kinds and sample.used_mib is not None for sample in trace.samples):
        print_error(f"{path} has no samples of {' or '.join(kinds)} memory")
        return None
    return trace


def _gpu_lines(traces: Sequence[tuple[str, MemoryTrace]]) -> list[str]:
    lines = [
        f"[{label} - GPU {index}] Peak = {round_half_up(found.peak)} MiB, "
        f"Avg = {found.average:.2f} MiB, Mode = {', '.join(map(str, found.modes))} MiB"
        for label, index, found in _statistics(traces, GPU)
    ]
    return ["GPU Memory Usage", *lines] if lines else []


def _cpu_lines(traces: Sequence[tuple[str, MemoryTrace]]) -> list[str]:
    blocks = [(label, found) for label, index, found in _statistics(traces, CPU) if index == 0]
    lines = []
    for label, found in blocks:
        lines += [f"[{label}]"] if len(blocks) > 1 else []
        lines += [
            f"   Peak =    {round_half_up(found.peak)} MB",
            f"   Average = {found.average:.2f} MB",
            f"   Mode =    {', '.join(map(str, found.modes))} MB",
        ]
    return ["CPU Memory Usage", *lines] if lines else []


def _statistics(traces: Sequence[tuple[str, MemoryTrace]], kind: str) -> Iterator[tuple[str, int, Statistics]]:
    """Yield the label, the index and the memory of each device of a kind that has samples."""
    for label, trace in traces:
        samples = [sample for sample in trace.samples if sample.kind == kind]
        for index in sorted({sample.index for sample in samples}):
            used = (sample.used_mib for sample in samples if sample.index == index)
            if found := Statistics.of(mib for mib in used if mib is not None):
                yield label, index, found


# Readers of the logs of nvidia-smi (CSV) and psrecord (text or CSV); they return the samples of a memory trace.


EXPECTED = (
    "expected a memory/node<k>.csv of distexp, a CSV of nvidia-smi (timestamp, index, name, "
    "memory.used [MiB], memory.total [MiB]) or a log of psrecord (# Elapsed time   CPU (%)   Real (MB)   "
    "Virtual (MB))"
)
_STAMP = re.compile(r"\d{4}/\d\d/\d\d \d\d:\d\d:\d\d(\.\d+)?")
_ABSENT = re.compile(r"\[.*\]|N/A", re.IGNORECASE)  # [N/A], [Not Supported], [Unknown Error]
_MIN_TOTAL_MIB = 1024.0
_DEVICE_NAMES = ("uuid", "gpu_uuid", "pci.bus_id", "gpu_bus_id", "gpu_serial", "serial")


def read_memory_log(path: Path) -> MemoryTrace:
    """Read a memory trace of distexp, or a log of nvidia-smi or psrecord; raise ValueError for anything else."""
    lines, notes = memory_trace.read_whole_lines(path)
    filled = [line for line in lines if line.strip()]
    if not filled:
        raise ValueError(f"{path} is empty{' (except for an incomplete line)' if notes else ''}: {EXPECTED}")
    first = filled[0].strip()
    if memory_trace.is_memory_trace(filled[0]):
        trace = memory_trace.read_memory_trace(path)
    elif first.startswith("elapsed_time,") or re.match("#.*Real", first) or _floats(first.split(), minimum=4):
        trace = _read_psrecord(path, lines, notes)
    elif "memory.used" in first or _STAMP.match(first):
        trace = _read_nvidia_smi(path, lines, notes)
    else:
        raise ValueError(f"{path} has an unknown format: {EXPECTED}")
    if not trace.samples:
        raise ValueError(f"{path} has no samples: {EXPECTED}")
    return trace


def _floats(cells: Sequence[str], minimum: int) -> list[float] | None:
    """Return the cells as numbers, or None if one is not a number or there are too few."""
    try:
        return [float(cell) for cell in cells] if len(cells) >= minimum else None
    except ValueError:
        return None


def _read_psrecord(path: Path, lines: Sequence[str], notes: list[str]) -> MemoryTrace:
    """Read a CSV, or a log of elapsed time, CPU (%), real and virtual memory; MB in psrecord is 2**20 bytes."""
    names = lines[0].strip().split(",")
    if names[0] == "elapsed_time":
        real, minimum = names.index("mem_real"), len(names)
        rows = [(number, line.split(",")) for number, line in enumerate(lines[1:], start=2) if line.strip()]
    else:
        real, minimum = 2, 4
        rows = [(number, line.split()) for number, line in enumerate(lines, start=1)]
        rows = [(number, cells) for number, cells in rows if cells and not cells[0].startswith("#")]
    numbers = {number: _floats(cells, minimum) for number, cells in rows}
    sample = partial(MemorySample, phase="", kind=CPU, index=0, source="psrecord")
    samples = {n: sample(row[0], used_mib=row[real]) if row else None for n, row in numbers.items()}
    return _make_trace(path, samples, notes)


def _make_trace(path: Path, lines: Mapping[int, MemorySample | None], notes: list[str]) -> MemoryTrace:
    """Return the samples of some lines by their numbers, with a note on the lines that have none."""
    bad = [number for number, sample in lines.items() if sample is None]
    samples = [sample for sample in lines.values() if sample is not None]
    return MemoryTrace(samples, notes + memory_trace.bad_lines_note(path, bad))


def _read_nvidia_smi(path: Path, lines: Sequence[str], notes: list[str]) -> MemoryTrace:
    rows = [
        (number, [cell.strip() for cell in cells])
        for number, cells in enumerate(csv.reader(lines, skipinitialspace=True), start=1)
        if cells
    ]
    width = len(rows[0][1])
    if "memory.used" in lines[rows[0][0] - 1]:  # a header, whose names may end with a unit: ``memory.used [MiB]``
        columns = {cell.split(" [")[0]: position for position, cell in enumerate(rows[0][1])}
        rows = [row for row in rows if not any(cell.startswith("memory.used") for cell in row[1])]
    else:
        columns = _columns_by_format(path, [cells for _, cells in rows])
    if not any(name in columns for name in ("index", *_DEVICE_NAMES)):
        notes.append(f"{path}: no index column: all lines count as one GPU")
    devices: dict[str, int] = {}
    samples = {n: _gpu_sample(cells, columns, devices) if len(cells) == width else None for n, cells in rows}
    return _make_trace(path, samples, notes)


def _columns_by_format(path: Path, rows: Sequence[Sequence[str]]) -> dict[str, int]:
    """Return the positions of the columns of a log without a header, or raise ValueError if they are ambiguous.

    - With units: timestamp and index, then any columns; the first one in MiB is ``memory.used``.
    - Without units: the query of the workshop: timestamp, index, name, memory.used, memory.total.
    """
    first = rows[0]
    numbers = [position for position in range(2, len(first)) if _number(first[position]) is not None]
    memory = [position for position in numbers if first[position].endswith("MiB")]
    if len(first) > 2 and first[1].isdigit():
        if memory:
            columns = {"timestamp": 0, "index": 1, "memory.used": memory[0]}
            for name, unit in (("utilization.gpu", "%"), ("power.draw", " W")):
                if found := [position for position in numbers if first[position].endswith(unit)]:
                    columns[name] = found[0]
            return columns
        if numbers == [3, 4] == list(range(3, len(first))) and _are_used_and_total(rows):
            return {"timestamp": 0, "index": 1, "memory.used": 3, "memory.total": 4}
    raise ValueError(
        f"{path} has neither a header nor units, so its columns are ambiguous: add a "
        "first line such as 'timestamp, index, name, memory.used [MiB], memory.total [MiB]'"
    )


def _are_used_and_total(rows: Sequence[Sequence[str]]) -> bool:
    """Return whether the fifth column is the total memory: constant per GPU, plausible and never exceeded."""
    numbers = [(row[1], _number(row[3]), _number(row[4])) for row in rows if len(row) == 5]
    known = [(index, used, total) for index, used, total in numbers if used is not None and total is not None]
    totals = {index: total for index, _, total in known}
    return all(total == totals[index] and max(used, _MIN_TOTAL_MIB) <= total for index, used, total in known)


def _number(cell: str) -> float | None:
    """Return the number in a cell without its unit, or None if it has no number."""
    matched = re.fullmatch(r"(-?\d+(?:\.\d+)?)(?: ?(?:MiB|%|W|C|MHz))?", cell)
    return float(matched[1]) if matched else None


def _gpu_sample(cells: Sequence[str], columns: Mapping[str, int], devices: dict[str, int]) -> MemorySample | None:
    """Return the sample in a line, or None if the line is not a sample."""
    used = cells[columns["memory.used"]]
    if _number(used) is None and not _ABSENT.fullmatch(used):
        return None
    index = 0
    device = next((cells[columns[name]] for name in _DEVICE_NAMES if name in columns), None)
    if "index" in columns:
        if not cells[columns["index"]].isdigit():
            return None
        index = int(cells[columns["index"]])
    elif device is not None:
        index = devices.setdefault(device, len(devices))
    values = {name: _number(cells[position]) for name, position in columns.items()}
    return MemorySample(
        unix_time_s=_unix_time(cells[columns["timestamp"]]) if "timestamp" in columns else 0.0,
        phase="",
        kind=GPU,
        index=index,
        used_mib=values["memory.used"],
        total_mib=values.get("memory.total"),
        utilization_pct=values.get("utilization.gpu"),
        power_w=values.get("power.draw"),
        source="nvidia-smi",
    )


def _unix_time(stamp: str) -> float:
    """Return the unix time of a timestamp in local time; 0 if it is invalid, because no result depends on it."""
    try:
        return datetime.strptime(stamp, "%Y/%m/%d %H:%M:%S.%f").timestamp()
    except ValueError:
        return 0.0


if __name__ == "__main__":
    sys.exit(run_until_pipe_closes(main))
