"""Tests of energy and cost in the record, from the traces to the panel."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from distexp.config.sections import ClusterConfig
from distexp.console.run_summary import energy_lines
from distexp.launch.outcome import finalize_run, start_attempt
from distexp.measure.run_energy import TraceEnergy, energy_entry
from distexp.resolve.run_id import run_id
from distexp.runs.record import Metrics, RunRecord, RunSpec
from distexp.runs.run_dir import EVENTS, memory_trace_path
from tests.helpers.runs import make_spec, resolve_cell
from tests.measure.energy.traces import cpu_samples, gpu_samples, write_events, write_trace

SECONDS = range(-1, 10)
CPU_RUN = ("strategy=ddp", "cluster.device=cpu", "cluster.workers_per_node=2")
COST = ("cluster.gco2_per_kwh=400", "cluster.price_per_gpu_hour=2.5")


def gpu_spec(*overrides: str) -> RunSpec:
    """Return the spec of a run on two GPUs, also on a machine without any."""
    spec = make_spec(*CPU_RUN, *overrides)
    spec.config.cluster.device = "cuda"
    return spec


def finish(spec: RunSpec, directory: Path, watts: float, *, samples: int = 75, code: int = 0) -> RunRecord:
    """Write what a run on two GPUs leaves, with an hour of duration, and finalize it."""
    start_attempt(spec, directory)
    write_events(directory / EVENTS)
    with (directory / EVENTS).open("a") as file:
        file.write(json.dumps({"unix_time_s": 8, "measured_samples": samples}) + "\n")
        file.write(json.dumps({"unix_time_s": 8, "measured_tokens": 10 * samples}) + "\n")
    gpus = [
        gpu_samples(SECONDS, power=lambda _: 0.99 * watts, energy=lambda t: watts * t, index=index) for index in (0, 1)
    ]
    write_trace(memory_trace_path(directory, 0), *gpus, cpu_samples(SECONDS, lambda t: 20 * t))
    if code == 0:
        spec.run.duration_s = 3600.0
        RunRecord("completed", spec.run, asdict(spec.config), metrics=Metrics(train_loss=1.5)).write_result(directory)
    return finalize_run(spec, directory, {0: code}, time.time() - 3600)


def test_the_record_has_energy_and_cost(tmp_path: Path) -> None:
    """Two GPUs with 100 W each, over 10 s; 3.75 s of them are training."""
    record = finish(gpu_spec(*COST), tmp_path, watts=100)
    kwh = (2000 + 200) / 3.6e6
    assert record.metrics.energy == {
        "gpu_j": pytest.approx(2000),
        "gpu_j_by_power": pytest.approx(1980),
        "power_difference_pct": pytest.approx(-1),
        "cpu_j": pytest.approx(200),
        "gpu_j_training": pytest.approx(750),
        "cpu_j_training": pytest.approx(75),
        "idle_w": pytest.approx(198),
        "j_per_sample": pytest.approx(10),
        "j_per_token": pytest.approx(1),
        "kwh": pytest.approx(kwh),
        "gpu_hours": 2,
        "co2e_g": pytest.approx(400 * kwh),
        "price": 5,
    }
    assert RunRecord.read(tmp_path / "record.json") == record


def test_each_attempt_has_its_own_energy(tmp_path: Path) -> None:
    spec = gpu_spec()
    first = finish(spec, tmp_path, watts=100, code=1)
    second = finish(spec, tmp_path, watts=300)
    assert first.metrics.energy is not None
    assert second.metrics.energy is not None
    assert (first.status, first.metrics.energy["gpu_j"]) == ("failed", pytest.approx(2000))
    assert first.metrics.energy["gpu_hours"] == pytest.approx(2, rel=0.01)
    assert (second.status, second.metrics.energy["gpu_j"]) == ("completed", pytest.approx(6000))
    assert (second.metrics.energy["co2e_g"], second.metrics.energy["price"]) == (None, None)


def test_a_run_on_cpus_has_the_energy_of_its_cpus_only(tmp_path: Path) -> None:
    spec = make_spec(*CPU_RUN, *COST)
    record = finish(spec, tmp_path, watts=100)
    assert record.metrics.energy is not None
    assert record.metrics.energy["j_per_sample"] == pytest.approx(1)
    assert (record.metrics.energy["gpu_hours"], record.metrics.energy["price"]) == (None, None)


def test_without_measurement_only_the_gpu_hours_are_known(tmp_path: Path) -> None:
    record = finish(gpu_spec("measure.enabled=false", *COST), tmp_path, watts=100)
    assert record.metrics.energy is not None
    known = {name: value for name, value in record.metrics.energy.items() if value is not None}
    assert known == {"gpu_hours": 2, "price": 5}
    (tmp_path / "cpu").mkdir()
    on_cpu = finish(make_spec(*CPU_RUN, "measure.enabled=false"), tmp_path / "cpu", watts=100)
    assert on_cpu.metrics.energy is None


def test_the_energy_of_the_cpus_is_not_that_of_a_run_on_gpus() -> None:
    energy, found = TraceEnergy(cpu=3.6e6), {}
    for device in ("cuda", "cpu"):
        cluster = ClusterConfig(device=device, gco2_per_kwh=400.0)
        entry = energy_entry(energy, cluster, duration_s=3600, samples=10, tokens=None)
        assert entry is not None
        found[device] = (entry["cpu_j"], entry["kwh"], entry["co2e_g"])
    assert found == {"cuda": (3.6e6, None, None), "cpu": (3.6e6, 1, 400)}


def test_cost_does_not_change_the_training() -> None:
    assert run_id(resolve_cell(*CPU_RUN, *COST)) == run_id(resolve_cell(*CPU_RUN))


def test_the_panel_shows_what_was_measured() -> None:
    energy = {"gpu_j": 12_345.0, "gpu_j_training": 11_000.0, "cpu_j": None, "j_per_sample": 1.234, "idle_w": 141.0}
    assert dict(energy_lines({**energy, "gpu_hours": 0.5, "price": 1.25, "co2e_g": None})) == {
        "energy": "GPUs 12.3 kJ (11.0 kJ training), 1.23 J per sample, GPUs idle at 141 W",
        "cost": "0.500 GPU-hours, price 1.25",
    }
    assert dict(energy_lines({})) == {}
    small = {"cpu_j": 12.6, "j_per_sample": 12_300.0, "kwh": 0.0000035}
    assert dict(energy_lines(small)) == {"energy": "CPUs 0.0126 kJ, 12,300 J per sample, 0.00350 Wh"}
    assert dict(energy_lines({"kwh": 0.25})) == {"energy": "0.250 kWh"}
