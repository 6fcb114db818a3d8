"""``memory/node<k>.csv``: a node's memory, utilisation and power over time."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

CPU = "cpu"
GPU = "gpu"


@dataclass(frozen=True)
class Sample:
    """One device at one time; what could not be read is None, never 0.

    ``used_mib`` of a GPU is what all its users hold, ``job_mib`` this job's part where NVML tells. On
    the CPU it is the process tree's. ``utilization_pct`` is in percent of the device, or of all the cores
    that the node may use. ``energy_j`` is the GPU's own counter, from an arbitrary start. ``source`` says
    how the memory was read, so that a poorer way does not pass for the usual one.
    """

    unix_time_s: float
    phase: str  # empty where it is not known
    kind: str  # gpu, cpu
    index: int
    used_mib: float | None
    total_mib: float | None = None
    utilization_pct: float | None = None
    power_w: float | None = None
    job_mib: float | None = None
    energy_j: float | None = None
    source: str = ""


COLUMNS = tuple(column.name for column in fields(Sample))
REQUIRED = COLUMNS[: COLUMNS.index("job_mib")]
_TEXTS = frozenset({"phase", "kind", "source"})


@dataclass
class Trace:
    """What a file held, and a sentence for each thing in it that is not as it should be."""

    samples: list[Sample]
    notes: list[str] = field(default_factory=list)


class TraceFile:
    """A trace that is written: whole samples, each on disk at once, so that a killed run leaves its own."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        self._torn = False
        self._write(",".join(COLUMNS) + "\n")

    def append(self, samples: Iterable[Sample]) -> None:
        """Adds the samples of one time; OSError where the disk takes them not, or not whole."""
        self._write("".join(_row(sample) for sample in samples))

    def close(self) -> None:
        """Closes the file; everything is written already."""
        os.close(self._descriptor)

    def _write(self, text: str) -> None:
        # A full disk may have taken half a line; what comes after it must not be glued to that half.
        content = (b"\n" if self._torn else b"") + text.encode()
        written = os.write(self._descriptor, content)
        if written < len(content):
            self._torn = True
            raise OSError(f"the disk took {written} of {len(content)} bytes")
        self._torn = False


def _row(sample: Sample) -> str:
    return ",".join(_cell(getattr(sample, name)) for name in COLUMNS) + "\n"


def _cell(value: str | float | None) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def read_lines(path: Path, notes: list[str]) -> list[str]:
    """A log's lines; one without its end, as a running or killed writer leaves it, is left out and told."""
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    lines = text.splitlines()
    if lines and not text.endswith("\n"):
        lines.pop()
        notes.append(f"{path}: the last line has no end (torn, or still being written) and is left out")
    return lines


def bad_lines_note(path: Path, bad: Sequence[int]) -> list[str]:
    """A note on lines, counted from 1, that were passed over; none where there were none."""
    if not bad:
        return []
    return [f"{path}: {len(bad)} line(s) are not samples and are left out, the first is line {bad[0]}"]


def is_trace(header: str) -> bool:
    """Whether a file's first line is that of a trace."""
    return tuple(header.strip().split(","))[: len(REQUIRED)] == REQUIRED


def read_trace(path: Path) -> Trace:
    """Reads a trace, also one that is being written; OSError, or ValueError where it is none."""
    notes: list[str] = []
    lines = read_lines(path, notes)
    if not lines or not is_trace(lines[0]):
        raise ValueError(f"{path} is not a memory trace: expected a first line {','.join(REQUIRED)},...")
    names = lines[0].strip().split(",")
    samples: list[Sample] = []
    bad: list[int] = []
    for number, cells in enumerate(csv.reader(lines[1:]), start=2):
        try:
            samples.append(_sample(dict(zip(names, cells, strict=True))))
        except ValueError:
            bad.append(number)
    return Trace(samples, notes + bad_lines_note(path, bad))


def _sample(row: dict[str, str]) -> Sample:
    if row["kind"] not in (CPU, GPU):
        raise ValueError(f"kind={row['kind']!r} is not {CPU} or {GPU}")
    numbers = {
        name: float(row[name]) if row.get(name) else None
        for name in COLUMNS[COLUMNS.index("used_mib") :]
        if name not in _TEXTS
    }
    return Sample(
        unix_time_s=float(row["unix_time_s"]),
        phase=row["phase"],
        kind=row["kind"],
        index=int(row["index"]),
        source=row.get("source", ""),
        **numbers,
    )
