"""Tests of what the profiler does if one rank fails, with hand-written traces and without other processes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from distexp.config import TrainConfig
from distexp.distributed.context import Context
from distexp.measure.profiling import profiler as step_analysis
from distexp.measure.profiling.intervals import WARMUP_STEPS, ProfileWindow
from distexp.measure.profiling.phases import CoreWaits
from distexp.measure.profiling.profiler import DETACH, ProfileResult, StepProfiler
from distexp.measure.profiling.step_segments import RankSummary
from distexp.measure.watcher import PROFILE, Step
from distexp.runs.run_dir import PROFILE_SUMMARY
from tests.helpers.gpu_traces import event

EVENTS = [
    *(event("user_annotation", f"ProfilerStep#{number}", 10 * number, 10 * number + 10) for number in range(3)),
    *(event("user_annotation", "gloo:all_reduce", begin, begin + 3) for begin in (2, 12, 22)),
]


class RecordedTrace:
    """A profiler that exports given events, or fails."""

    def __init__(self, events: Any) -> None:
        self.events = events

    def export_chrome_trace(self, path: str) -> None:
        if isinstance(self.events, Exception):
            raise self.events
        Path(path).write_text(json.dumps({"traceEvents": self.events}))


Exchange = Callable[[Any], list[Any]]


def finish(folder: Path, monkeypatch: pytest.MonkeyPatch, events: Any, exchange: Exchange) -> ProfileResult:
    """Return the result of rank 0. ``exchange`` returns the values of all ranks for its value."""
    monkeypatch.setattr(step_analysis, "gather_to_all", exchange)
    found = StepProfiler(Context(0, 1, 0, 1, 1, torch.device("cpu"), folder), TrainConfig(profile_steps=3))
    found.window, found._finished = ProfileWindow(0, 3), True
    found._profile = RecordedTrace(events)  # type: ignore[assignment]
    result = found.finish()
    assert result is not None
    return result


@pytest.mark.parametrize(("cuda_graphs", "expected"), [(False, "1"), (True, None)])
def test_the_profiler_detaches_cupti_except_with_cuda_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda_graphs: bool, expected: str | None
) -> None:
    monkeypatch.setenv(DETACH, "")  # so that the value of this test is removed after it
    monkeypatch.delenv(DETACH)
    train = TrainConfig(profile_steps=1, compile="graphs" if cuda_graphs else None)
    profiler = StepProfiler(Context(0, 1, 0, 1, 1, torch.device("cpu"), tmp_path), train, lambda _: ProfileWindow(0, 1))
    profiler.start(0)
    profiler.start_steps(PROFILE)
    assert os.environ.get(DETACH) == expected
    for _ in range(WARMUP_STEPS + 1):
        profiler.after_step(Step(1, measured=False, next_measured=False))
    assert not profiler.running


def test_the_parts_are_those_of_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CoreWaits, "milliseconds", lambda _, position: 40.0 + position)
    result = finish(tmp_path, monkeypatch, EVENTS, lambda value: [value])
    assert result.breakdown is not None
    assert result.breakdown[0]["exposed_communication_ms"] == pytest.approx(3, abs=1e-3)
    assert result.breakdown[0]["cpu_busy_ms"] is None, "on a CPU"
    assert result.breakdown[0]["without_core_ms"] == 41.0, "of the median step"
    assert (tmp_path / PROFILE_SUMMARY).exists()


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        (RuntimeError("out of events"), "RuntimeError: out of events"),
        (AssertionError("not traced"), "AssertionError: not traced"),
        ([{**EVENTS[0], "ts": None}], "TypeError: "),
        ([{key: value for key, value in EVENTS[0].items() if key != "ts"}], "KeyError: 'ts'"),
    ],
)
def test_an_error_of_a_rank_reaches_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: Any, reason: str
) -> None:
    """A rank that raised before the collective would leave the others in it."""
    sent = []

    def exchange(value: Any) -> list[Any]:
        sent.append(value)
        return [value]

    result = finish(tmp_path, monkeypatch, events, exchange)
    assert result.breakdown is None
    assert result.communication["note"].startswith(reason)
    assert sent == [result.communication["note"]]


def test_ranks_with_different_numbers_of_steps_have_no_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def add_rank(value: Any) -> list[Any]:
        is_summary = isinstance(value, RankSummary)
        return [value, RankSummary(value.shares, value.step_s[:2], value.collectives) if is_summary else value]

    result = finish(tmp_path, monkeypatch, EVENTS, add_rank)
    assert result.breakdown is None
    assert result.communication["share"] is not None
    assert "the ranks have different numbers of profiled steps" in capfd.readouterr().err


def test_a_full_disk_does_not_end_a_finished_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(step_analysis, "write_profile_summary", fail)
    assert finish(tmp_path, monkeypatch, EVENTS, lambda value: [value]).breakdown is not None
    assert "note: the report has no timeline of this run" in capfd.readouterr().err
