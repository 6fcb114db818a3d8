"""The command ``distexp memory FILE... [--gpu-only | --cpu-only]``: summarize nvidia-smi and psrecord logs.

The format is that of the workshop's analyze_memory. MB on the CPU is 2**20 bytes, as in psrecord, and equals MiB.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from distexp.exceptions import run_until_pipe_closes
from distexp.measure.memory.monitoring_logs import EXPECTED, read_memory_log
from distexp.measure.memory.sampler import Statistics
from distexp.runs.memory_trace import CPU, GPU, MemoryTrace

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
    print("\n\n".join("\n".join(lines) for lines in sections if lines))
    return ALL_READ if len(traces) == len(labels) else SOME_READ


def _labels(files: Sequence[Path]) -> dict[Path, str]:
    """Return the name of each log in the summary: the name of its file, or its path if several have that name."""
    counts = Counter(path.stem for path in dict.fromkeys(files))
    return {path: path.stem if counts[path.stem] == 1 else str(path) for path in files}


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
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
        print(f"distexp: {path} cannot be read ({error.strerror}): {EXPECTED}", file=sys.stderr)
        return None
    except ValueError as error:
        print(f"distexp: {error}", file=sys.stderr)
        return None
    for note in trace.notes:
        print(note, file=sys.stderr)
    if not any(sample.kind in kinds and sample.used_mib is not None for sample in trace.samples):
        print(f"distexp: {path} has no samples of {' or '.join(kinds)} memory", file=sys.stderr)
        return None
    return trace


def _gpu_lines(traces: Sequence[tuple[str, MemoryTrace]]) -> list[str]:
    lines = [
        f"[{label} - GPU {index}] Peak = {found.peak:.0f} MiB, "
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
            f"   Peak =    {found.peak:.0f} MB",
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


if __name__ == "__main__":
    sys.exit(run_until_pipe_closes(main))
