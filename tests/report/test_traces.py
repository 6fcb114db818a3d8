"""Tests of the traces of runs: thinning, peaks and phases."""

from __future__ import annotations

from pathlib import Path

from distexp.report.traces import MAX_POINTS, MemoryTrace, PhaseInterval, read_memory
from distexp.runs.memory_trace import COLUMNS
from tests.helpers.records import record
from tests.helpers.report_sweeps import write_traces


def test_thinned_curves_keep_the_peaks_of_the_gpu_that_uses_most(tmp_path: Path) -> None:
    run = record(0, cluster__nodes=2, peak=1000.0)
    write_traces(tmp_path, run, samples=3000)
    curves = read_memory(tmp_path / "memory").curves
    assert [(curve.node, curve.kind) for curve in curves] == [(0, "gpu"), (0, "cpu"), (1, "gpu"), (1, "cpu")]
    for curve in curves:
        assert len(curve.points) <= MAX_POINTS + 4, "at most one more for each phase"
        seconds = [second for second, _ in curve.points]
        assert seconds == sorted(seconds)
        assert seconds[0] == 0
    assert max(mib for _, mib in curves[0].points) == 1000.0


def test_a_thinned_peak_stays_in_its_phase(tmp_path: Path) -> None:
    """The profiler starts between two samples of one interval, and needs more memory than the training."""
    (tmp_path / "memory").mkdir()
    lines = [",".join(COLUMNS)]
    for n in range(1000):
        phase, mib = ("train", 5000.0) if n < 602 else ("profile", 9000.0)
        lines.append(f"{1000 + n / 10:.1f},{phase},gpu,0,{mib},143771,90,500,,,,,,,,,")
    (tmp_path / "memory" / "node0.csv").write_text("\n".join(lines) + "\n")
    trace = read_memory(tmp_path / "memory")
    assert len(trace.curves[0].points) < 1000
    assert {mib for second, mib in trace.curves[0].points if second < trace.phases[1].begin_s} == {5000.0}


def test_short_curves_are_not_thinned(tmp_path: Path) -> None:
    write_traces(tmp_path, record(0, peak=1000.0), samples=60)
    curves = read_memory(tmp_path / "memory").curves
    assert {len(curve.points) for curve in curves} == {60}


def test_a_phase_ends_when_the_next_begins(tmp_path: Path) -> None:
    write_traces(tmp_path, record(0, peak=1000.0), samples=60)
    phases = read_memory(tmp_path / "memory").phases
    assert phases == (
        PhaseInterval("setup", 0.0, 6.0),
        PhaseInterval("warmup", 6.0, 8.0),
        PhaseInterval("train", 8.0, 26.0),
        PhaseInterval("eval", 26.0, 29.5),
    )


def test_missing_and_unreadable_traces_are_empty(tmp_path: Path) -> None:
    assert read_memory(tmp_path / "memory") == MemoryTrace()
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "node0.csv").write_bytes(b"\x00\xff")
    (tmp_path / "memory" / "nodes.csv").write_text("other")
    assert read_memory(tmp_path / "memory") == MemoryTrace()
