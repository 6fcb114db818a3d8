"""Tests of summary and phases with hand-written traces."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from distexp.measure.memory.sampler import Statistics, join_phases, summarize
from distexp.runs.events import PhaseEvent, PhaseTail, phase_at, phase_intervals, read_phase_events
from distexp.runs.memory_trace import COLUMNS, MemorySample, MemoryTraceWriter, read_memory_trace
from distexp.system.typed_values import cpu_peak_mib


def write_event(path: Path, time_s: float, phase: str) -> None:
    with path.open("a") as file:
        file.write(json.dumps({"unix_time_s": time_s, "phase": phase}) + "\n")


def gpu(time_s: float, used: float, power: float | None = None, energy: float | None = None) -> MemorySample:
    return MemorySample(time_s, "", "gpu", 0, used, power_w=power, energy_j=energy, source="nvml")


def write(path: Path, samples: list[MemorySample]) -> Path:
    file = MemoryTraceWriter(path)
    file.append(samples)
    file.close()
    return path


def test_trace_file_format(tmp_path: Path) -> None:
    path = write(tmp_path / "node0.csv", [gpu(1.5, 2.0)])
    assert path.read_text() == (
        "unix_time_s,phase,kind,index,used_mib,total_mib,utilization_pct,power_w,job_mib,energy_j,source,"
        "compiler_mib,other_mib,sm_clock_mhz,clock_reasons,pcie_pct,ecc_errors\n"
        "1.500,,gpu,0,2.000,,,,,,nvml,,,,,,\n"
    )
    assert read_memory_trace(path).samples == [gpu(1.5, 2.0)]


def test_the_node_of_a_trace_is_in_its_name(tmp_path: Path) -> None:
    path = tmp_path / "node3.csv"
    path.write_text(f"{','.join(COLUMNS)}\n1.0,train,cpu,0,5.5,100,12.5,,,,,,,,,,\n")
    assert read_memory_trace(path).samples == [MemorySample(1.0, "train", "cpu", 0, 5.5, 100.0, 12.5)]
    assert summarize([path]).memory["cpu"][0]["node"] == 3


def test_statistics_as_the_workshop_defines_them() -> None:
    found = Statistics.of([2145.2, 2144.6, 2177.4, 2177.0, 3892.0, 100.0])
    assert found is not None
    assert (found.peak, found.modes) == (3892.0, (2145, 2177))
    assert found.average == pytest.approx(2106.03, abs=0.01)
    assert Statistics.of([]) is None


def test_average_and_mode_of_the_training_leave_out_the_long_setup(tmp_path: Path) -> None:
    """A run that waits with 1,177 MiB for most of its time trains with 50,000 MiB."""
    phases = [("setup", 0, 1177.0)] * 20 + [("warmup", 1, 49_000.0), ("train", 2, 50_000.0), ("train", 3, 50_000.0)]
    samples = [
        replace(gpu(time_s, used), phase=phase, unix_time_s=float(time_s)) for phase, time_s, used in phases
    ] + [replace(gpu(4, 9000.0), phase="eval")]  # fmt: skip
    (entry,) = summarize([write(tmp_path / "node0.csv", samples)]).memory["gpu"]
    assert entry["mode_mib"] == 1177
    assert entry["training_mode_mib"] == 50_000
    assert entry["training_average_mib"] == pytest.approx(149_000 / 3)
    (before,) = summarize([write(tmp_path / "node1.csv", samples[:20])]).memory["gpu"]
    assert before["training_mode_mib"] is None


def test_record_contains_the_smallest_of_tied_modes(tmp_path: Path) -> None:
    path = write(tmp_path / "node0.csv", [gpu(t, used) for t, used in enumerate([7.0, 5.0, 7.0, 5.0, 6.0])])
    (entry,) = summarize([path]).memory["gpu"]
    assert entry["mode_mib"] == 5


def test_profiling_is_excluded_from_totals(tmp_path: Path) -> None:
    """The profiler keeps its GPU memory until the process ends."""
    events = tmp_path / "events.jsonl"
    for time_s, phase in ((0, "train"), (2, "profile"), (4, "eval")):
        write_event(events, time_s, phase)
    used = [5.0, 7.0, 9.0, 9.0, 8.0]
    samples = [replace(gpu(t, mib), kind=kind, utilization_pct=10 * mib) for t, mib in enumerate(used)
               for kind in ("gpu", "cpu")]  # fmt: skip
    found = summarize([write(tmp_path / "node0.csv", samples)], events)
    assert found.memory["gpu"][0]["peak_mib"] == 7
    assert found.memory["cpu"][0]["peak_mib"] == 8
    assert found.memory["gpu"][0]["phases"] == {"train": 7, "profile": 9, "eval": 8}
    assert found.utilization["gpu"][0]["average_pct"] == pytest.approx(200 / 3)


def test_the_end_of_the_processes_is_excluded_from_cpu_memory(tmp_path: Path) -> None:
    """Memory that the processes shared may then count several times."""
    events = tmp_path / "events.jsonl"
    for time_s, phase in ((0, "train"), (2, "eval"), (3, "done")):
        write_event(events, time_s, phase)
    samples = [
        replace(gpu(t, mib), kind=kind) for t, mib in enumerate([5.0, 6.0, 7.0, 11.0]) for kind in ("gpu", "cpu")
    ]
    found = summarize([write(tmp_path / "node0.csv", samples)], events).memory
    (cpu,) = found["cpu"]
    assert [cpu[name] for name in ("peak_mib", "average_mib", "mode_mib")] == [7, 6, 5]
    assert cpu["phases"] == {"train": 6, "eval": 7, "done": 11}
    assert found["gpu"][0]["peak_mib"] == 11
    assert cpu_peak_mib(found) == 7
    assert cpu_peak_mib({"cpu": [{"peak_mib": 6.0, "phases": {"train": 6.0, "done": 11.0}}, {"peak_mib": 5.0}]}) == 6
    assert cpu_peak_mib({"cpu": []}) is None


def test_a_run_that_ends_before_its_first_sample_of_a_phase_has_the_memory_of_its_start(tmp_path: Path) -> None:
    write_event(events := tmp_path / "events.jsonl", 3, "warmup")
    used = [300.0, 400.0, None]
    samples = [replace(gpu(t, mib or 0.0), kind="cpu", used_mib=mib) for t, mib in enumerate(used, start=1)]
    (entry,) = summarize([write(tmp_path / "node0.csv", samples)], events).memory["cpu"]
    assert (entry["peak_mib"], entry["phases"]) == (400.0, {})
    samples.append(replace(samples[0], unix_time_s=4, used_mib=350.0))
    (entry,) = summarize([write(tmp_path / "node0.csv", samples)], events).memory["cpu"]
    assert entry["peak_mib"] == 350.0, "memory that starting processes share may count several times"


def test_the_search_for_a_micro_batch_is_excluded_from_totals(tmp_path: Path) -> None:
    """It tries sizes that are not chosen."""
    events = tmp_path / "events.jsonl"
    for time_s, phase in ((0, "search"), (2, "train")):
        write_event(events, time_s, phase)
    samples = [replace(gpu(t, mib), utilization_pct=mib) for t, mib in enumerate([90.0, 80.0, 30.0, 40.0])]
    found = summarize([write(tmp_path / "node0.csv", samples)], events)
    assert found.memory["gpu"][0]["peak_mib"] == 40
    assert found.memory["gpu"][0]["phases"] == {"search": 90, "train": 40}
    assert found.utilization["gpu"][0]["average_pct"] == 35


def test_phases_by_time(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    write_event(events, 10, "setup")
    write_event(events, 20, "train")
    with events.open("a") as file:
        file.write('{"unix_time_s": 25, "epoch": 1}\n')
        file.write('{"unix_time_s": 30, "pha')  # torn
    phase_events = read_phase_events(events)
    assert phase_events == [PhaseEvent(10, "setup"), PhaseEvent(20, "train")]
    assert [phase_at(phase_events, t) for t in (9, 10, 19.9, 20, 99)] == ["", "setup", "setup", "train", "train"]
    early = MemorySample(5, "written", "cpu", 0, 1.0)
    assert [s.phase for s in join_phases([early, gpu(21, 1.0)], phase_events)] == ["written", "train"]
    assert phase_intervals(phase_events, {"setup"}) == [(10, 20)]


def test_phase_tail_follows_and_restarts(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    tail = PhaseTail(events)
    assert tail.at(100) == ""
    write_event(events, 10, "setup")
    assert tail.at(100) == "setup"
    with events.open("a") as file:
        file.write('{"unix_time_s": 20, ')
    assert tail.at(100) == "setup"
    with events.open("a") as file:
        file.write('"phase": "train"}\n')
    assert tail.at(100) == "train"
    assert tail.at(15) == "setup"
    events.unlink()
    write_event(events, 50, "warmup")
    assert tail.at(100) == "warmup"
    assert tail.at(15) == ""
