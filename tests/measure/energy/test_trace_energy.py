"""Tests of the energy of a run, with hand-written traces whose energy is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from distexp.measure.run_energy import TraceEnergy, measure_energy
from tests.measure.energy.traces import cpu_samples, gpu_samples, write_events, write_trace

SECONDS = range(-1, 10)
TRAINING_S = 1.75 + 2


@pytest.fixture
def events(tmp_path: Path) -> Path:
    return write_events(tmp_path / "events.jsonl")


def test_training_energy_from_power(tmp_path: Path, events: Path) -> None:
    """Power grows by 10 W per second and is linear between samples, also at the limits of a phase."""
    path = write_trace(tmp_path / "node0.csv", gpu_samples([t / 2 for t in range(20)], power=lambda t: 10 * t))
    expected = 5 * (4**2 - 2.25**2) + 5 * (8**2 - 6**2)
    found = measure_energy([path], events)
    assert found.gpu is None, "there is no counter"
    assert found.gpu_training == pytest.approx(expected, rel=0.003)
    assert found.gpu_by_power == pytest.approx(5 * 9.5**2)


def test_the_counter_wins_and_the_power_is_a_check(tmp_path: Path, events: Path) -> None:
    samples = gpu_samples(SECONDS, power=lambda _: 98.0, energy=lambda t: 1000 + 100.0 * t)
    found = measure_energy([write_trace(tmp_path / "node0.csv", samples)], events)
    assert found.gpu_training == pytest.approx(100 * TRAINING_S)
    assert (found.gpu, found.gpu_by_power) == (pytest.approx(1000), pytest.approx(980))


def test_gpus_and_nodes_add_up_once(tmp_path: Path, events: Path) -> None:
    """Three GPUs on two nodes with 100, 200 and 300 W; each node has its CPUs."""
    paths = [
        write_trace(
            tmp_path / f"node{node}.csv",
            *(gpu_samples(SECONDS, energy=lambda t, w=watts: w * t, index=index) for index, watts in enumerate(gpus)),
            cpu_samples(SECONDS, lambda t: 10 * t),
        )
        for node, gpus in enumerate([[100, 200], [300]])
    ]  # fmt: skip
    found = measure_energy(paths, events)
    assert (found.gpu, found.gpu_training) == (pytest.approx(6000), pytest.approx(600 * TRAINING_S))
    assert (found.cpu, found.cpu_training) == (pytest.approx(200), pytest.approx(20 * TRAINING_S))
    first = measure_energy(paths[:1], events)
    assert first.gpu == pytest.approx(3000)


def test_twice_the_steps_use_twice_the_energy(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "node0.csv", gpu_samples(range(50), energy=lambda t: 250 * t))
    once, twice = (
        measure_energy([path], write_events(tmp_path / "events.jsonl", [(0, "setup"), (5.3, "train"), (end, "eval")]))
        for end in (20.3, 35.3)
    )
    assert once.gpu_training == pytest.approx(250 * 15)
    assert twice.gpu_training == pytest.approx(2 * 250 * 15)


def test_idle_power_is_that_before_the_first_phase(tmp_path: Path, events: Path) -> None:
    """The first sample still has the end of an earlier program, because NVML averages over a second."""
    powers = {-3.0: 300.0, -2.0: 75.0, -1.0: 71.0, 0.0: 120.0, 1.0: 400.0, 2.0: 60.0}
    samples = gpu_samples(list(powers), power=powers.__getitem__)
    assert measure_energy([write_trace(tmp_path / "node0.csv", samples)], events).idle_w == 71


def test_unknown_energy_is_none(tmp_path: Path, events: Path) -> None:
    halves = [t / 2 for t in range(9)]
    torn = write_trace(tmp_path / "node0.csv", gpu_samples(halves, power=lambda _: 100.0))  # ends at 4 s
    silent = write_trace(tmp_path / "node1.csv", gpu_samples(SECONDS), cpu_samples(SECONDS, lambda _: None))
    no_gpu = write_trace(tmp_path / "node2.csv", cpu_samples(SECONDS, lambda t: t))
    reset = write_trace(tmp_path / "node3.csv", gpu_samples(SECONDS, energy=lambda t: t % 5))
    good = write_trace(tmp_path / "node4.csv", gpu_samples(SECONDS, energy=lambda t: t))
    assert measure_energy([torn], events).gpu_training is None
    assert measure_energy([silent], events) == TraceEnergy()
    assert measure_energy([no_gpu], events).gpu is None
    assert measure_energy([reset], events).gpu is None, "the driver was restarted"
    assert measure_energy([good, silent], events).gpu is None, "a sum without a node would be too small"
    assert measure_energy([good, no_gpu], events).gpu is None
    assert measure_energy([good, tmp_path / "missing.csv"], events) == TraceEnergy()
    assert measure_energy([], events) == TraceEnergy()


def test_a_phase_after_the_last_sample_has_no_energy(tmp_path: Path) -> None:
    """The samples end at 9 s. The phase has no end, because the run was killed."""
    path = write_trace(tmp_path / "node0.csv", gpu_samples(SECONDS, energy=lambda t: 300 * t))
    for start_s, expected in ((9.6, None), (9, None), (8, 300)):
        events = write_events(tmp_path / "events.jsonl", [(0, "setup"), (start_s, "train")])
        assert measure_energy([path], events).gpu_training == expected
