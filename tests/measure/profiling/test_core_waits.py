"""Time without a core in the profiled steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from distexp.measure import slow_rank_watch
from distexp.measure.profiling.phases import CoreWaits


def measure(monkeypatch: pytest.MonkeyPatch, readings: list[float]) -> CoreWaits:
    """Return the waits of steps, from the time of the scheduler at the start and the end of each."""
    remaining = iter(readings)
    monkeypatch.setattr(slow_rank_watch.SchedulerDelay, "read_s", lambda _: next(remaining))
    waits = CoreWaits(enabled=True)
    for _ in readings[::2]:
        waits.start_step()
        waits.end_step()
    return waits


def test_the_time_between_two_steps_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = measure(monkeypatch, [1.0, 1.5, 7.0, 7.25])
    assert [waits.milliseconds(step) for step in range(3)] == [500.0, 250.0, None]


def test_it_is_unknown_on_a_gpu_and_if_the_kernel_does_not_count_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(slow_rank_watch.SchedulerDelay, "_read_ns", lambda _: int("none"))
    for enabled in (True, True, False):
        waits = CoreWaits(enabled=enabled)
        waits.start_step()
        waits.end_step()
        assert waits.milliseconds(0) is None
    assert capsys.readouterr().out.count("has no times") <= 1, "printed once in a process"
