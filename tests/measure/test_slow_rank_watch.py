"""Tests of the time that steps wait, with collectives that take a known time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distexp.distributed.context import Context
from distexp.measure import slow_rank_watch
from distexp.measure.slow_rank_watch import MAX_STEPS, SlowRankWatch
from distexp.system.torch_internals.tensors import queue_backward_callback

ONE = Context(0, 1, 0, 1, 1, torch.device("cpu"), Path())
TWO = replace(ONE, world_size=2)


class Clock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.now = self.delay_s = 0.0

    def perf_counter(self) -> float:
        """Return the time in seconds."""
        return self.now

    def advance(self, seconds: float) -> None:
        """Move the clock forward."""
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(slow_rank_watch, "time", clock)
    monkeypatch.setattr(slow_rank_watch.SchedulerDelay, "read_s", lambda _: clock.delay_s)
    return clock


@pytest.fixture
def _process_group(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make a group of this process alone, whose collectives take 3 s of the clock."""
    original = dist.Work.wait

    def wait(work: dist.Work, *arguments: object) -> bool:
        clock.now += 3
        return bool(original(work, *arguments))

    monkeypatch.setattr(dist.Work, "wait", wait)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_process_group")
def test_waits_of_measured_steps_only(clock: Clock) -> None:
    watch = SlowRankWatch(TWO)
    watch.start_step(measured=False)
    dist.all_reduce(torch.ones(1))  # warm-up
    watch.end_step(measured=False)
    watch.start_step(measured=True)
    dist.all_reduce(torch.ones(1))
    clock.now += 100  # computation
    dist.all_reduce(torch.ones(1))
    watch.end_step(measured=True)
    watch.start_step(measured=True)
    dist.all_reduce(torch.ones(1))
    watch.start_step(measured=True)  # an evaluation
    dist.all_reduce(torch.ones(1))
    watch.end_step(measured=True)
    dist.all_reduce(torch.ones(1))  # profiled
    watch.end_step(measured=False)
    assert watch.waits_s() == {0: 6, 1: 3}


@pytest.mark.usefixtures("_process_group")
@pytest.mark.parametrize(("last_micro", "expected_s"), [(True, 5), (False, 0)])
def test_the_reducer_of_ddp_waits_after_the_last_gradient(clock: Clock, last_micro: bool, expected_s: float) -> None:
    """The 7 s of the first layer are no wait; the 5 s of the reducer are."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].weight.register_hook(lambda _: clock.advance(7))
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(lambda: queue_backward_callback(lambda: clock.advance(5)), at_last_bucket)
    watch = SlowRankWatch(TWO)
    watch.follow(wrapped)
    watch.start_step(measured=True)
    with nullcontext() if last_micro else wrapped.no_sync():
        wrapped(torch.ones(1, 2)).sum().backward()
    assert clock.now == 7 + expected_s
    watch.end_step(measured=True)
    assert watch.waits_s() == {0: expected_s}


def at_last_bucket(call: Any, bucket: Any) -> Any:
    """Call a function and leave the gradients as they are."""
    call()
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


at_last_bucket.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}  # type: ignore[attr-defined]


@pytest.mark.usefixtures("_process_group")
def test_time_without_a_core_counts_as_waiting_once(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step has 4 s without a core outside of its collective, and 2 s inside of it."""
    wait = dist.Work.wait

    def wait_without_a_core(work: dist.Work, *arguments: object) -> bool:
        clock.delay_s += 2
        return bool(wait(work, *arguments))

    monkeypatch.setattr(dist.Work, "wait", wait_without_a_core)
    watch = SlowRankWatch(TWO)
    watch.start_step(measured=True)
    clock.delay_s += 4
    dist.all_reduce(torch.ones(1))
    watch.end_step(measured=True)
    assert watch.waits_s() == {0: 3 + 4}
    assert (watch.without_core_s(0), watch.without_core_s(1)) == (4, 0)


@pytest.mark.usefixtures("_process_group")
def test_one_worker_is_not_watched_and_nothing_stays_replaced() -> None:
    before = dist.Work.wait
    alone, watch = SlowRankWatch(ONE), SlowRankWatch(TWO)
    alone.start_step(measured=True)
    assert dist.Work.wait is before
    watch.start_step(measured=True)
    assert dist.Work.wait is not before
    watch.end_step(measured=True)
    replaced = dist.Work.wait
    watch.start_step(measured=True)
    assert dist.Work.wait is replaced, "it stays replaced between watched steps, because to replace it takes time"
    watch.end_step(measured=True)
    watch.start_step(measured=False)
    assert dist.Work.wait is before
    dist.all_reduce(torch.ones(1))
    alone.end_step(measured=True)
    alone.start_step(measured=True)
    assert (alone.waits_s(), watch.waits_s()) == ({}, {0: 0, 1: 0})


def test_a_long_training_keeps_the_latest_steps(clock: Clock) -> None:
    watch = SlowRankWatch(TWO)
    watch.start_step(measured=True)
    for _ in range(MAX_STEPS + 10):
        watch.end_step(measured=True)
        watch.start_step(measured=True)
    assert list(watch.waits_s()) == list(range(10, MAX_STEPS + 10))


class FakeStream:
    """A stream of a GPU whose waits take a known time."""

    device_s = 0.0  # time on the computation stream, as far as the GPU has planned it
    passed_s = 0.0  # time up to which the GPU has worked

    def __init__(self, wait_s: float = 0.0) -> None:
        self.wait_s = wait_s

    def wait_event(self, event: object) -> None:
        """Wait for an event."""
        FakeStream.device_s += self.wait_s

    def wait_stream(self, stream: object) -> None:
        """Wait for another stream, as torch does."""
        self.wait_event(None)

    def synchronize(self) -> None:
        """Let the host wait."""
        FakeStream.device_s += 2


class FakeEvent:
    """A CUDA event on the computation stream."""

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: FakeStream) -> None:
        """Record the planned time."""
        self.time_s = stream.device_s

    def query(self) -> bool:
        """Return whether the GPU has passed the event."""
        return self.time_s <= FakeStream.passed_s

    def elapsed_time(self, end: FakeEvent) -> float:
        """Return milliseconds; torch refuses events that the GPU has not passed."""
        assert end.query()
        return 1000 * (end.time_s - self.time_s)


@pytest.fixture
def compute(monkeypatch: pytest.MonkeyPatch) -> FakeStream:
    stream = FakeStream(wait_s=3)
    monkeypatch.setattr(FakeStream, "device_s", 0.0)
    monkeypatch.setattr(FakeStream, "passed_s", 0.0)
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    return stream


def test_gpu_waits_of_the_computation_are_read_when_the_gpu_has_passed_them(compute: FakeStream) -> None:
    """Of the first 32 measured steps every second one is watched, then one of eight."""
    original = FakeStream.wait_event
    watch = SlowRankWatch(replace(TWO, device=torch.device("cuda", 0)))
    watch.start_step(measured=True)
    watched = []
    for step in range(50):
        watched += [step] if FakeStream.wait_event is not original else []
        compute.wait_stream(None)  # 3 s
        FakeStream(wait_s=100).wait_event(None)  # the stream of the collectives
        FakeStream().synchronize()  # 2 s
        watch.end_step(measured=True)
        watch.start_step(measured=step < 49)
        assert watch._waits_s == {}, "the GPU is behind"
    FakeStream.passed_s = FakeStream.device_s
    expected = [*range(0, 32, 2), 32, 40, 48]
    assert watched == expected
    assert watch.waits_s() == dict.fromkeys(expected, 5)


@pytest.mark.usefixtures("_process_group")
def test_synchronous_collectives_of_the_computation_wait_and_all_work_afterwards(
    compute: FakeStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gather(group: dist.ProcessGroup) -> None:
        FakeStream.device_s += 7

    monkeypatch.setattr(dist.ProcessGroup, "gather", gather)
    before = dict(vars(dist.ProcessGroup)), dict(vars(dist.Work))
    watch = SlowRankWatch(replace(TWO, device=torch.device("cuda", 0)))
    watch.start_step(measured=True)
    dist.group.WORLD.gather()  # type: ignore[union-attr]
    watch.end_step(measured=True)
    dist.all_reduce(torch.ones(1))
    dist.barrier()
    FakeStream.passed_s = FakeStream.device_s
    assert watch.waits_s() == {0: 7}
    assert (dict(vars(dist.ProcessGroup)), dict(vars(dist.Work))) == before
