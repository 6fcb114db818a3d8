"""Reads the logs that people already have, nvidia-smi's CSV and psrecord's text, as samples of a trace."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from distexp.runs.memory_trace import (
    CPU,
    GPU,
    MemorySample,
    MemoryTrace,
    bad_lines_note,
    is_memory_trace,
    read_memory_trace,
    read_whole_lines,
)

EXPECTED = (
    "expected a memory/node<k>.csv of distexp, a CSV of nvidia-smi (timestamp, index, name, "
    "memory.used [MiB], memory.total [MiB]) or a log of psrecord (# Elapsed time   CPU (%)   Real (MB)   "
    "Virtual (MB))"
)
_STAMP = re.compile(r"\d{4}/\d\d/\d\d \d\d:\d\d:\d\d(\.\d+)?")
_ABSENT = re.compile(r"\[.*\]|N/A", re.IGNORECASE)  # [N/A], [Not Supported], [Unknown Error]
_LEAST_TOTAL_MIB = 1024.0
_DEVICE_NAMES = ("uuid", "gpu_uuid", "pci.bus_id", "gpu_bus_id", "gpu_serial", "serial")


def read_any(path: Path) -> MemoryTrace:
    """Reads a file of any of the known formats; OSError, or ValueError that names path and expectation."""
    notes: list[str] = []
    lines = read_whole_lines(path, notes)
    filled = [line for line in lines if line.strip()]
    if not filled:
        raise ValueError(f"{path} is empty{' but for a torn line' if notes else ''}: {EXPECTED}")
    trace = read_memory_trace(path) if is_memory_trace(filled[0]) else _reader(filled)(path, lines, notes)
    if not trace.samples:
        raise ValueError(f"{path} has no samples: {EXPECTED}")
    return trace


def _reader(filled: Sequence[str]) -> Callable[[Path, Sequence[str], list[str]], MemoryTrace]:
    """The reader for a file, by its first lines."""
    first = filled[0].strip()
    if first.startswith("elapsed_time,"):
        return _read_psrecord_csv
    if (first.startswith("#") and "Real" in first) or _floats(first.split(), least=4):
        return _read_psrecord
    if "memory.used" in first or _STAMP.match(first):
        return _read_nvidia_smi
    return _read_nothing


def _read_nothing(path: Path, lines: Sequence[str], notes: list[str]) -> MemoryTrace:
    raise ValueError(f"{path} is of no known format: {EXPECTED}")


def _floats(cells: Sequence[str], least: int) -> list[float] | None:
    """The cells as numbers; None where one is none, or where they are too few."""
    try:
        numbers = [float(cell) for cell in cells]
    except ValueError:
        return None
    return numbers if len(numbers) >= least else None


def _read_psrecord(path: Path, lines: Sequence[str], notes: list[str]) -> MemoryTrace:
    """Elapsed time, CPU (%), real and virtual memory; what psrecord calls MB is 2**20 bytes."""
    rows = [(number, line.split()) for number, line in enumerate(lines, start=1)]
    rows = [(number, cells) for number, cells in rows if cells and not cells[0].startswith("#")]
    return _psrecord(path, rows, notes, real=2, least=4)


def _read_psrecord_csv(path: Path, lines: Sequence[str], notes: list[str]) -> MemoryTrace:
    names = lines[0].strip().split(",")
    rows = [(number, line.split(",")) for number, line in enumerate(lines[1:], start=2) if line.strip()]
    return _psrecord(path, rows, notes, real=names.index("mem_real"), least=len(names))


def _psrecord(
    path: Path, rows: Sequence[tuple[int, list[str]]], notes: list[str], *, real: int, least: int
) -> MemoryTrace:
    samples, bad = [], []
    for number, cells in rows:
        numbers = _floats(cells, least)
        if numbers is None:
            bad.append(number)
        else:
            samples.append(MemorySample(numbers[0], "", CPU, 0, numbers[real], source="psrecord"))
    return MemoryTrace(samples, notes + bad_lines_note(path, bad))


@dataclass(frozen=True)
class _Columns:
    """Where in nvidia-smi's lines the figures are; None where they are not."""

    width: int
    used: int
    index: int | None = None
    device: int | None = None
    time: int | None = None
    total: int | None = None
    utilization: int | None = None
    power: int | None = None


def _read_nvidia_smi(path: Path, lines: Sequence[str], notes: list[str]) -> MemoryTrace:
    rows = [
        (number, [cell.strip() for cell in cells])
        for number, cells in enumerate(csv.reader(lines, skipinitialspace=True), start=1)
        if cells
    ]
    if "memory.used" in lines[rows[0][0] - 1]:
        columns = _by_header(rows[0][1])
        rows = [row for row in rows if not any(cell.startswith("memory.used") for cell in row[1])]
    else:
        columns = _by_shape(path, [cells for _, cells in rows])
    if columns.index is None and columns.device is None:
        notes.append(f"{path}: there is no index column, all lines are taken as one GPU's")
    devices: dict[str, int] = {}
    samples, bad = [], []
    for number, cells in rows:
        sample = _gpu_sample(cells, columns, devices)
        if sample is None:
            bad.append(number)
        else:
            samples.append(sample)
    return MemoryTrace(samples, notes + bad_lines_note(path, bad))


def _by_header(cells: Sequence[str]) -> _Columns:
    """The columns by their names, which may have a unit behind them: ``memory.used [MiB]``."""
    place = {cell.split(" [")[0]: position for position, cell in enumerate(cells)}
    device = next((place[name] for name in _DEVICE_NAMES if name in place), None)
    return _Columns(
        width=len(cells),
        used=place["memory.used"],
        index=place.get("index"),
        device=device,
        time=place.get("timestamp"),
        total=place.get("memory.total"),
        utilization=place.get("utilization.gpu"),
        power=place.get("power.draw"),
    )


def _by_shape(path: Path, rows: Sequence[Sequence[str]]) -> _Columns:
    """The columns of a log without a header, where they leave no doubt; else ValueError.

    With units: timestamp, index, then any order in which ``memory.used`` is the first memory. Without:
    the workshops' own query, timestamp, index, name, memory.used, memory.total.
    """
    first = rows[0]
    figures = [place for place in range(2, len(first)) if _figure(first[place]) is not None]
    memory = [place for place in figures if first[place].endswith("MiB")]
    if len(first) > 2 and first[1].isdigit():
        if memory:
            percent = [place for place in figures if first[place].endswith("%")]
            watts = [place for place in figures if first[place].endswith(" W")]
            return _Columns(
                width=len(first),
                used=memory[0],
                index=1,
                time=0,
                utilization=percent[0] if percent else None,
                power=watts[0] if watts else None,
            )
        if figures == [3, 4] == list(range(3, len(first))) and _are_used_and_total(rows):
            return _Columns(width=5, used=3, index=1, time=0, total=4)
    raise ValueError(
        f"{path} has neither a header nor units, so that its columns cannot be told apart: give it a "
        "first line such as 'timestamp, index, name, memory.used [MiB], memory.total [MiB]'"
    )


def _are_used_and_total(rows: Sequence[Sequence[str]]) -> bool:
    """Whether the fifth cell is one and the same on each GPU, as large as its memory, and never exceeded."""
    totals: dict[str, float] = {}
    for row in rows:
        used, total = (_figure(cell) for cell in row[3:5]) if len(row) == 5 else (None, None)
        if used is None or total is None:
            continue
        if total != totals.setdefault(row[1], total) or not max(used, _LEAST_TOTAL_MIB) <= total:
            return False
    return True


def _figure(cell: str) -> float | None:
    """The number in a cell, without its unit; None where there is none."""
    matched = re.fullmatch(r"(-?\d+(?:\.\d+)?)(?: ?(?:MiB|%|W|C|MHz))?", cell)
    return float(matched[1]) if matched else None


def _gpu_sample(cells: Sequence[str], columns: _Columns, devices: dict[str, int]) -> MemorySample | None:
    """A line as a sample; None where it is none."""
    if len(cells) != columns.width:
        return None
    used = _figure(cells[columns.used])
    if used is None and not _ABSENT.fullmatch(cells[columns.used]):
        return None
    index = 0
    if columns.index is not None:
        if not cells[columns.index].isdigit():
            return None
        index = int(cells[columns.index])
    elif columns.device is not None:
        index = devices.setdefault(cells[columns.device], len(devices))

    def figure(place: int | None) -> float | None:
        return None if place is None else _figure(cells[place])

    return MemorySample(
        unix_time_s=_unix_time(cells[columns.time]) if columns.time is not None else 0.0,
        phase="",
        kind=GPU,
        index=index,
        used_mib=used,
        total_mib=figure(columns.total),
        utilization_pct=figure(columns.utilization),
        power_w=figure(columns.power),
        source="nvidia-smi",
    )


def _unix_time(stamp: str) -> float:
    """nvidia-smi writes local time; 0 where a stamp is not one, as no figure depends on it."""
    try:
        return datetime.strptime(stamp, "%Y/%m/%d %H:%M:%S.%f").timestamp()
    except ValueError:
        return 0.0
