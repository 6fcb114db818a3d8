"""Peak, average and mode of memory logs: ``python -m distexp.memory FILE... [--gpu-only | --cpu-only]``.

Reads our own ``memory/node<k>.csv`` and the logs of nvidia-smi and psrecord, and prints the lines that the
workshops' analyze_memory prints. MB on the CPU is psrecord's: 2**20 bytes, as MiB on the GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from distexp.exceptions import run_until_pipe_closes
from distexp.measure.memory.foreign_logs import EXPECTED, read_any
from distexp.measure.memory.summary import Statistics
from distexp.runs.memory_trace import CPU, GPU, MemorySample, MemoryTrace

ALL_READ, SOME_READ, NONE_READ = 0, 1, 2


def main(words: Sequence[str] | None = None) -> int:
    """Prints the summary; 0 when every file was read, 1 when only some, 2 when none, or none of that kind."""
    options = _parse(words)
    wanted = [kind for kind in (GPU, CPU) if kind not in options.without]
    traces: dict[Path, MemoryTrace] = {}
    for path in options.files:
        trace = _read(path, wanted)
        if trace is not None:
            traces[path] = trace
    sections = [_gpu_lines(traces)] if GPU in wanted else []
    sections += [_cpu_lines(traces)] if CPU in wanted else []
    if not traces:
        return NONE_READ
    print("\n\n".join("\n".join(lines) for lines in sections if lines))
    return ALL_READ if len(traces) == len(options.files) else SOME_READ


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m distexp.memory",
        description="Peak, average and mode of memory logs.",
        epilog=f"A file: {EXPECTED.removeprefix('expected ')}.",
    )
    parser.add_argument("files", metavar="FILE", nargs="+", type=Path)
    only = parser.add_mutually_exclusive_group()
    only.add_argument(
        "--gpu-only", dest="without", action="store_const", const=CPU, default="", help="leave the CPU out"
    )
    only.add_argument(
        "--cpu-only", dest="without", action="store_const", const=GPU, default="", help="leave the GPUs out"
    )
    return parser.parse_args(words)


def _read(path: Path, wanted: Sequence[str]) -> MemoryTrace | None:
    """A file that has samples of a wanted kind; None, and a sentence on stderr, where it has not."""
    try:
        trace = read_any(path)
    except OSError as error:
        print(f"{path} cannot be read ({error.strerror}): {EXPECTED}", file=sys.stderr)
        return None
    except ValueError as error:
        print(error, file=sys.stderr)
        return None
    for note in trace.notes:
        print(note, file=sys.stderr)
    if not any(sample.kind in wanted and sample.used_mib is not None for sample in trace.samples):
        print(f"{path} has no {' or '.join(wanted)} memory in it: nothing to sum up", file=sys.stderr)
        return None
    return trace


def _gpu_lines(traces: Mapping[Path, MemoryTrace]) -> list[str]:
    lines = []
    for path, trace in traces.items():
        for index in sorted({sample.index for sample in trace.samples if sample.kind == GPU}):
            found = _statistics(trace.samples, GPU, index)
            if found is not None:
                lines.append(
                    f"[{path.stem} - GPU {index}] Peak = {found.peak:.0f} MiB, "
                    f"Avg = {found.average:.2f} MiB, Mode = {_modes(found)} MiB"
                )
    return ["GPU Memory Usage", *lines] if lines else []


def _cpu_lines(traces: Mapping[Path, MemoryTrace]) -> list[str]:
    found = {path.stem: _statistics(trace.samples, CPU, 0) for path, trace in traces.items()}
    blocks = {name: statistics for name, statistics in found.items() if statistics is not None}
    lines = []
    for name, statistics in blocks.items():
        lines += [f"[{name}]"] if len(blocks) > 1 else []
        lines += [
            f"   Peak =    {statistics.peak:.0f} MB",
            f"   Average = {statistics.average:.2f} MB",
            f"   Mode =    {_modes(statistics)} MB",
        ]
    return ["CPU Memory Usage", *lines] if lines else []


def _statistics(samples: Sequence[MemorySample], kind: str, index: int) -> Statistics | None:
    return Statistics.of(
        sample.used_mib
        for sample in samples
        if (sample.kind, sample.index) == (kind, index) and sample.used_mib is not None
    )


def _modes(statistics: Statistics) -> str:
    return ", ".join(map(str, statistics.modes))


if __name__ == "__main__":
    sys.exit(run_until_pipe_closes(main))
