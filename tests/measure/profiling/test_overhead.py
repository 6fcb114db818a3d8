"""Removal of the profiler's overhead from the parts of a step."""

from __future__ import annotations

import pytest

from distexp.measure.profiling.breakdown import have_other_sizes, remove_overhead
from distexp.runs.metrics import PARTS
from distexp.runs.number_ranges import range_errors


def entry(**times: float | None) -> dict[str, float | None]:
    parts = {f"{name}_ms": times.get(name, 0.0) for name in PARTS}
    idle = {"optimizer_idle_ms": times.get("optimizer_idle", 0.0)}
    return {"rank": 0, "step_ms": sum(time or 0.0 for time in parts.values()), **parts, **idle}


def total(found: dict[str, float]) -> float:
    return sum(found[f"{name}_ms"] or 0.0 for name in PARTS)


def test_launches_and_waiting_are_shorter_without_the_profiler() -> None:
    """A step takes 60 ms, and 100 ms with the profiler. 40 of the 50 ms that the CPU decides are the profiler's."""
    found = remove_overhead(entry(matmul=50.0, launch_idle=30.0, waiting=15.0, host=5.0), 0.060)
    assert [found[f"{name}_ms"] for name in ("matmul", "launch_idle", "waiting", "host")] == pytest.approx(
        [50, 6, 3, 1]
    )
    assert found["step_ms"] == total(found) == pytest.approx(60)
    assert found["profiled_step_ms"] == 100


@pytest.mark.parametrize("launch_idle", [30.0, None])
def test_times_below_a_nanosecond_are_rounding_errors(launch_idle: float | None) -> None:
    profiled = entry(matmul=50.0, launch_idle=launch_idle, host=4e-8, waiting=2e-10)
    found = remove_overhead(profiled, profiled["step_ms"] / 1000)
    assert (found["host_ms"], found["waiting_ms"]) == (0.0, 0.0)
    assert list(range_errors(found, "metrics.step_breakdown")) == []


def test_idle_time_in_the_optimizer_is_shorter_without_the_profiler() -> None:
    """Two thirds of what the CPU decides are the profiler's. 10 ms of the optimizer are kernels."""
    found = remove_overhead(entry(matmul=60.0, launch_idle=10.0, optimizer=30.0, optimizer_idle=20.0), 0.080)
    assert [found[name] for name in ("launch_idle_ms", "optimizer_ms", "optimizer_idle_ms")] == pytest.approx(
        [10 / 3, 10 + 20 / 3, 20 / 3]
    )
    assert found["step_ms"] == total(found) == pytest.approx(80)


def test_kernels_are_as_long_as_without_the_profiler() -> None:
    found = remove_overhead(entry(matmul=90.0, launch_idle=10.0), 0.060)
    assert (found["matmul_ms"], found["launch_idle_ms"], found["step_ms"]) == (90, 0, 90)
    assert remove_overhead(entry(matmul=90.0), 0.060)["step_ms"] == 90


@pytest.mark.parametrize(
    ("median_s", "measured_wait_s", "launch_idle", "data_wait"),
    [
        (0.095, 0.0, 5, 10),
        (0.090, 0.0, 0, 10),
        (0.085, 0.0, 0, 5),
        (0.085, 0.008, 0, 8),
        (0.085, 0.020, 0, 10),
        (0.060, 0.0, 0, 0),
    ],
)
def test_data_wait_loses_what_is_left_but_not_the_measured_wait(
    median_s: float, measured_wait_s: float, launch_idle: float, data_wait: float
) -> None:
    profiled = entry(matmul=80.0, launch_idle=10.0, data_wait=10.0)
    found = remove_overhead(profiled, median_s, data_wait_s=measured_wait_s)
    assert (found["launch_idle_ms"], found["data_wait_ms"]) == pytest.approx((launch_idle, data_wait), abs=1e-9)
    assert found["step_ms"] == pytest.approx(total(found)) == pytest.approx(80 + launch_idle + data_wait)


def test_nothing_is_removed_from_a_step_that_is_faster_than_the_median() -> None:
    found = remove_overhead(entry(matmul=70.0, launch_idle=30.0), 0.120)
    assert found["step_ms"] == total(found) == 100


@pytest.mark.parametrize("median_s", [0.060, 0.120])
@pytest.mark.parametrize("sizes_differ", [False, True])
def test_the_parts_add_up_to_the_median_step_on_a_cpu(median_s: float, sizes_differ: bool) -> None:
    """The profiled step takes 100 ms. Its parts keep their shares."""
    profiled = entry(matmul=70.0, host=30.0, launch_idle=None) | {
        "hidden_communication_ms": 10.0,
        "without_core_ms": 20.0,
    }
    found = remove_overhead(profiled, median_s, sizes_differ=sizes_differ)
    assert found["step_ms"] == pytest.approx(total(found)) == pytest.approx(1000 * median_s)
    assert found["matmul_ms"] == pytest.approx(700 * median_s)
    assert found["hidden_communication_ms"] == pytest.approx(100 * median_s)
    assert found["without_core_ms"] == pytest.approx(200 * median_s)
    assert (found["profiled_step_ms"], found["launch_idle_ms"], found["includes_overhead"]) == (100, None, True)


@pytest.mark.parametrize(
    ("sizes", "differ"),
    [
        ([], False),
        ([(8, 8192)] * 3, False),
        ([(8, 0), (8, 0)], False),
        ([(8, 4100), (8, 4200)], False),
        ([(8, 4100), (8, 4400)], True),
        ([(8, 8192), (8, 4096), (8, 8192)], True),
    ],
)
def test_steps_are_compared_by_the_sizes_of_their_batches(sizes: list[tuple[int, ...]], differ: bool) -> None:
    """Rows, and tokens in the layers and in the logits; images have rows only."""
    assert have_other_sizes(sizes) == differ


def test_nothing_is_removed_if_the_steps_have_different_work() -> None:
    found = remove_overhead(entry(matmul=50.0, launch_idle=50.0), 0.060, sizes_differ=True)
    assert (found["step_ms"], found["launch_idle_ms"], found["includes_overhead"]) == (100, 50, True)
