"""Tests of the evidence of slow GPUs, from a fake NVML to the record."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distexp.launch.outcome import finalize_run, start_attempt
from distexp.measure.memory.gpu_reader import RARE_STRIDE, Conditions, ConditionsReader
from distexp.measure.stragglers import read_gpu_evidence
from distexp.runs.memory_trace import GPU, MemorySample
from distexp.runs.metrics import Metrics
from distexp.runs.record import RunRecord
from distexp.runs.run_dir import EVENTS, memory_trace_path
from distexp.runs.texts import describe_straggler
from tests.helpers.runs import make_spec
from tests.measure.energy.traces import START, write_events, write_trace

SECONDS = range(10)
"""The training lasts from 1 s to 4 s and from 6 s to 8 s."""


def samples(index: int, **values: Any) -> list[MemorySample]:
    """Return a sample a second; a value may be a function of the time."""

    def at(time_s: float) -> dict[str, Any]:
        return {name: value(time_s) if callable(value) else value for name, value in values.items()}

    return [MemorySample(START + t, "", GPU, index, 1.0, **at(t)) for t in SECONDS]


def evidence(folder: Path, *gpus: dict[str, Any], first_index: int = 0) -> list[tuple[list[str], list[str]]]:
    """Return problems and differences of GPUs of one node."""
    events = write_events(folder / EVENTS)
    devices = [samples(first_index + position, **values) for position, values in enumerate(gpus)]
    found = read_gpu_evidence([write_trace(folder / "node0.csv", *devices)], events, len(gpus))
    return [(found[rank].problems, found[rank].differences) for rank in range(len(gpus))]


GOOD = {"sm_clock_mhz": 1755.0, "clock_reasons": 0x04, "pcie_pct": 100.0, "ecc_errors": 2.0, "other_mib": 0.0}


def test_equal_gpus_have_no_evidence(tmp_path: Path) -> None:
    """All are at their power limit, and one had memory errors before the run."""
    assert evidence(tmp_path, GOOD, GOOD, {**GOOD, "ecc_errors": 7.0}) == [([], [])] * 3


@pytest.mark.parametrize(
    ("values", "problems", "differences"),
    [
        ({"clock_reasons": lambda t: 0x44 if t == 2 else 0x04},
         ["the hardware reduces its clocks because it is too hot, in 20% of the samples"], []),
        ({"clock_reasons": 0x4C},
         ["the hardware reduces its clocks because it is too hot, in 100% of the samples"], []),
        ({"clock_reasons": 0x0C},
         ["the hardware reduces its clocks (power or temperature), in 100% of the samples"], []),
        ({"clock_reasons": lambda t: 0x44 if t == 9 else 0x04}, [], []),
        ({"sm_clock_mhz": 1200.0}, [], ["its SM clock is 1,200 MHz, that of the others 1,755 MHz"]),
        ({"ecc_errors": lambda t: 2.0 if t < 3 else 5.0},
         ["it had 3 uncorrected memory errors during the training"], []),
        ({"pcie_pct": lambda t: 50.0 if t % 2 else 25.0}, [],
         ["its PCIe link has 50% of its maximum rate, that of the others 100%"]),
        ({"pcie_pct": lambda t: 100.0 if t == 3 else 12.5}, [], []),
        ({"other_mib": lambda t: 3000.0 if t == 7 else 0.0}, ["other processes held 3,000 MiB of it"], []),
        ({"other_mib": 100.0, "sm_clock_mhz": 1730.0}, [], []),
    ],
    ids=["hot", "hardware, too hot", "hardware alone", "hot after the training", "clock", "memory errors", "PCIe",
         "PCIe saves power", "process", "little"],
)  # fmt: skip
def test_evidence_of_one_gpu(
    values: dict[str, Any], problems: list[str], differences: list[str], tmp_path: Path
) -> None:
    assert evidence(tmp_path, GOOD, GOOD | values, GOOD) == [([], []), (problems, differences), ([], [])]


def test_a_slow_pcie_link_of_all_gpus_is_no_difference(tmp_path: Path) -> None:
    half = {**GOOD, "pcie_pct": 50.0}
    assert evidence(tmp_path, half, half) == [([], [])] * 2
    assert evidence(tmp_path, half) == [([], [])]


def test_the_power_limit_is_evidence_if_the_others_do_not_reach_it(tmp_path: Path) -> None:
    free = {**GOOD, "clock_reasons": 0x00}
    text = "its power limit reduces its clocks in 100% of the samples, in 0% on the others"
    assert evidence(tmp_path, GOOD, free, free)[0] == ([], [text])


def test_ranks_of_several_nodes_in_the_order_of_the_gpus(tmp_path: Path) -> None:
    """CUDA_VISIBLE_DEVICES=3,1 makes GPU 3 the first of the node."""
    events = write_events(tmp_path / EVENTS)
    paths = [write_trace(tmp_path / f"node{node}.csv", samples(3, **GOOD), samples(1, **GOOD)) for node in (0, 1)]
    found = read_gpu_evidence([*paths, tmp_path / "missing.csv"], events, 2)
    assert {rank: gpu.index for rank, gpu in found.items()} == {0: 3, 1: 1, 2: 3, 3: 1}


@pytest.mark.parametrize("stragglers", [None, [], [{"rank": 1, "gpu": None, "host": "b", "slower_by_pct": 12.0,
                                                    "evidence": "its own time is long"}]])  # fmt: skip
def test_the_record_has_the_evidence(stragglers: list[dict[str, Any]] | None, tmp_path: Path) -> None:
    """GPU 1 has a lower clock, which alone is no straggler. GPU 2 is too hot."""
    spec = make_spec("strategy=ddp", "cluster.device=cpu", "cluster.workers_per_node=3")
    spec.config.cluster.device = "cuda"
    start_attempt(spec, tmp_path)
    write_events(tmp_path / EVENTS)
    hot = {**GOOD, "clock_reasons": 0x24}
    devices = [samples(index, **values) for index, values in enumerate([GOOD, {**GOOD, "sm_clock_mhz": 900.0}, hot])]
    write_trace(memory_trace_path(tmp_path, 0), *devices)
    spec.run.hosts = ["a"]
    RunRecord("completed", spec.run, asdict(spec.config), metrics=Metrics(stragglers=stragglers)).write_result(tmp_path)
    found = finalize_run(spec, tmp_path, {0: 0}, 0.0).metrics.stragglers
    assert found is not None
    texts = [describe_straggler(entry) for entry in found]
    expected = (
        "Rank 2 (GPU 2 of a) has a problem: the driver reduces its clocks because it is too hot, in 100% of the samples"
    )
    assert texts[-1] == expected
    assert texts[:-1] == ([] if not stragglers else [
        "Rank 1 (GPU 1 of b) is 12% slower: its own time is long; "
        "its SM clock is 900 MHz, that of the others 1,755 MHz"
    ])  # fmt: skip


class FakeNvml(SimpleNamespace):
    """An NVML that lacks the newer name of the clock reasons and has no ECC."""

    NVML_CLOCK_SM = 1
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0
    calls = 0

    def nvmlDeviceGetClockInfo(self, handle: int, clock: int) -> int:  # noqa: N802
        return 1000 * handle + clock

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:  # noqa: N802
        return 0x24

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:  # noqa: N802
        self.calls += 1
        raise RuntimeError("Not Supported")


def test_conditions_of_a_gpu() -> None:
    nvml = FakeNvml(
        nvmlDeviceGetCurrPcieLinkGeneration=lambda _: 4, nvmlDeviceGetMaxPcieLinkGeneration=lambda _: 5,
        nvmlDeviceGetCurrPcieLinkWidth=lambda _: 8, nvmlDeviceGetMaxPcieLinkWidth=lambda _: 16,
    )  # fmt: skip
    reader = ConditionsReader(nvml, 1)
    read = [reader.read() for _ in range(RARE_STRIDE + 1)]
    assert read[0] == read[-1] == Conditions(1001, 0x24, 25, None)
    assert read[1:-1] == [Conditions(1001, 0x24, None, None)] * (RARE_STRIDE - 1)
    assert nvml.calls == 1, "a refused value is not requested again"
    assert ConditionsReader(object(), 1).read() == Conditions()
