"""Hand-computed schedules of the simulation. Times are in seconds."""

from __future__ import annotations

import pytest

from distexp.forecast.simulate import Scales, dependencies, scaled_tail, simulate
from distexp.runs.step_files import BACKWARD, FORWARD, OPTIMIZER, Collective, Item, Segment


def segment(phase: str, device: float, host: float, micro_batch: int = 0) -> Segment:
    """Return a segment of one kernel, which the CPU launches at its end."""
    return Segment(phase, micro_batch, host, device, host + device, host / 2 + device, 1)


def reduction(ready_host: float = 0.0, awaited: str = OPTIMIZER, micro_batch: int = 0) -> Collective:
    return Collective("all_reduce", 4, 2, "all", BACKWARD, micro_batch, ready_host, awaited=awaited)


def gather(phase: str = FORWARD, ahead: int = 0) -> Collective:
    return Collective("all_gather", 4, 2, "shard", phase, 0, ahead=ahead, after_compute=False)


def run(items: list[Item], *durations: float, on_gpu: bool = True) -> tuple[float, float, float, float]:
    """Return step, computation, exposed communication and waiting for the CPU; durations are of the collectives."""
    times = iter(durations)
    seconds = [next(times) if isinstance(item, Collective) else 0.0 for item in items]
    step = simulate(items, seconds, on_gpu=on_gpu)
    return step.step_s, step.compute_s, step.exposed_s, step.launch_s


def test_a_step_of_slow_launches_takes_as_long_as_the_cpu() -> None:
    items: list[Item] = [segment(FORWARD, 1, 3), segment(BACKWARD, 2, 4), segment(OPTIMIZER, 1, 1)]
    assert run(items) == pytest.approx((8, 4, 0, 4))


def test_a_step_of_long_kernels_takes_as_long_as_the_device() -> None:
    items: list[Item] = [segment(FORWARD, 3, 1), segment(BACKWARD, 6, 1), segment(OPTIMIZER, 1, 1)]
    assert run(items) == pytest.approx((10, 10, 0, 0))


def test_a_cpu_that_waits_for_the_device_cannot_run_ahead() -> None:
    waiting = Segment(OPTIMIZER, 0, 1, 1, 2, 1.5, 1, waits=True)
    items: list[Item] = [segment(FORWARD, 3, 1), segment(BACKWARD, 6, 1), waiting]
    assert run(items) == pytest.approx((11, 10, 0, 1))  # the first launch of each step takes 1 s


def test_a_collective_during_the_backward_pass_is_hidden() -> None:
    items: list[Item] = [segment(BACKWARD, 5, 1), reduction(), segment(BACKWARD, 5, 1), segment(OPTIMIZER, 2, 1)]
    assert run(items, 4) == pytest.approx((12, 12, 0, 0))


def two_buckets() -> list[Item]:
    """Return a backward pass that reduces two buckets, each after 5 s, and an optimizer of 2 s."""
    half: list[Item] = [segment(BACKWARD, 5, 1), reduction()]
    return [*half, *half, segment(OPTIMIZER, 2, 1)]


def test_the_last_bucket_is_exposed() -> None:
    # 5 compute; 5 compute next to the first reduction, which ends at 9; the last one from 10 to 13; 2 optimizer
    assert run(two_buckets(), 4, 3) == pytest.approx((15, 12, 3, 0))


def test_collectives_run_one_after_the_other() -> None:
    # the first reduction ends at 5 + 8 = 13, so the last one ends at 16
    assert run(two_buckets(), 8, 3) == pytest.approx((18, 12, 6, 0))


def test_a_reduction_without_overlap_stops_the_backward_pass() -> None:
    """ZeRO-2 without ``overlap_comm``: each micro-batch reduces, and the next kernel waits."""
    items: list[Item] = []
    for micro_batch in range(2):
        items += [segment(BACKWARD, 5, 1, micro_batch), reduction(awaited="next", micro_batch=micro_batch)]
    items += [segment(OPTIMIZER, 2, 1, 1), Collective("all_gather", 4, 2, "all", OPTIMIZER, 1)]
    # 5 + 4 + 5 + 4 + 2 + the gather of the new weights, which the end of the step awaits
    assert run(items, 4, 4, 3) == pytest.approx((23, 12, 11, 0))


def test_a_gather_is_exposed_without_and_hidden_with_a_cpu_that_runs_ahead() -> None:
    ahead: list[Item] = [gather(), segment(FORWARD, 5, 0.5), gather(), segment(FORWARD, 5, 0.5)]
    # the gathers need no result: in the steady state they run while the step before computes
    assert run(ahead, 2, 2) == pytest.approx((10, 10, 0, 0))
    slow: list[Item] = [gather(), segment(FORWARD, 1, 5), gather(), segment(FORWARD, 1, 5)]
    assert run(slow, 2, 2)[0] == pytest.approx(10)  # the CPU takes longer than gather and kernel


def test_a_prefetched_gather_is_awaited_by_the_unit_after_the_next() -> None:
    items: list[Item] = [
        gather(BACKWARD, ahead=1),
        gather(BACKWARD, ahead=1),
        segment(BACKWARD, 3, 0.1),
        gather(BACKWARD, ahead=1),
        segment(BACKWARD, 3, 0.1),
        segment(OPTIMIZER, 1, 0.1),
    ]
    assert dependencies(items) == {2: [0], 4: [1, 3]}  # the last unit has no later gather


def test_an_exposed_gather_delays_the_kernels_after_it() -> None:
    wait = Segment(OPTIMIZER, 0, 0, waits=True)
    items: list[Item] = [gather(), segment(FORWARD, 3, 0), gather(), segment(FORWARD, 3, 0), wait]
    # 0-4 gather, 4-8 gather next to 4-7 forward, 8-11 forward
    assert run(items, 4, 4) == pytest.approx((11, 6, 5, 0))


def test_without_a_gpu_the_cpu_computes_and_waits() -> None:
    items: list[Item] = [
        segment(BACKWARD, 0, 5),
        reduction(),
        segment(BACKWARD, 0, 5),
        reduction(),
        segment(OPTIMIZER, 0, 2),
    ]
    assert run(items, 4, 3, on_gpu=False) == pytest.approx((15, 12, 3, 0))


def test_the_tail_follows_the_speed_of_the_cpu() -> None:
    item = Segment(FORWARD, 0, host_s=4, device_s=3, tail_s=5, tail_half_s=3.5)
    assert scaled_tail(item, Scales(0, 1)) == 3
    assert scaled_tail(item, Scales(0.25, 1)) == pytest.approx(3.25)
    assert scaled_tail(item, Scales(0.75, 1)) == pytest.approx(4.25)
    assert scaled_tail(item, Scales(1, 2)) == pytest.approx(7)  # relative to the device, half of the time
    assert scaled_tail(item, Scales(2, 1)) == pytest.approx(9)
