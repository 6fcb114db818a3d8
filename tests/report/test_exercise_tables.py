"""Tests of the tables of exercises, at any width."""

from __future__ import annotations

import pytest

from distexp.runs.record import RunRecord
from tests.helpers.printed_tables import printed, unwrapped
from tests.helpers.records import invalid, record


def scaling_exercise(exercise: str, *sizes: int) -> list[RunRecord]:
    """Return the records of an exercise; the last run is invalid."""
    runs = [record(n, cluster__workers_per_node=n, strategy="fsdp", speed=1234.5 * n, peak=23456.0) for n in sizes[:-1]]
    runs.append(invalid(sizes[-1], f"cluster.workers_per_node={sizes[-1]} is too many", strategy="fsdp"))
    runs[-1].config["cluster"]["workers_per_node"] = sizes[-1]
    for one in runs:
        one.config["exercise"] = exercise
    return runs


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize(
    ("exercise", "words"),
    {
        "fsdp/custom_multi_gpu": ("Total", "Samples/s", "(Callback)", "Utilization", "Runtime", "4,938.0", "24.60"),
        "ddp/multi_gpu": ("Throughput", "Scaling", "(img/s)", "invalid", "23,456", "(baseline)", "22,458.63"),
        "deepspeed/multi_gpu_weak_scaling": ("Samples/sec", "Average", "GPUs", "23,456"),
        "fsdp/custom_weak_scaling": ("Utilization", "Efficiency", "Runtime"),
    }.items(),
)
def test_exercise_tables_break_no_word_and_drop_no_column(exercise: str, words: tuple[str, ...], width: int) -> None:
    _, _, table = printed(scaling_exercise(exercise, 1, 2, 4, 8), width).partition(f"({exercise})")
    assert max(map(len, table.splitlines())) <= width
    assert set(words) <= set(table.split())
    assert unwrapped(table).count("[1] cluster.workers_per_node=8 is too many") == 1


@pytest.mark.parametrize("width", [40, 60, 80])
def test_columns_that_a_quiz_asks_for_are_never_hidden(width: int) -> None:
    runs = scaling_exercise("ddp/multi_gpu", 1, 2, 4, 8)
    for run in runs[:-1]:
        run.metrics.communication = {"share": 0.25}
        run.metrics.eval_accuracies = [0.5]
    text, _, _ = printed(runs, width).partition("(ddp/multi_gpu)")
    table, _, hidden = text.partition("Hidden columns")
    for title in ("workers", "loss", "samples/s", "nication %", "speedup"):
        assert title in table, title
    assert "time s" in (hidden or table), "a short table continues below"
    assert max(map(len, table.splitlines())) <= width


def test_the_first_gpu_of_a_run_may_be_any_of_the_machine() -> None:
    """As with CUDA_VISIBLE_DEVICES=2,3."""
    (run,) = scaling_exercise("ddp/multi_gpu", 1, 8)[:1]
    run.memory["gpu"] = [
        {**run.memory["gpu"][0], "index": index, "peak_mib": peak} for index, peak in ((2, 11_111.0), (3, 9_999.0))
    ]
    _, _, table = printed([run], 120).partition("(ddp/multi_gpu)")
    assert "11,111" in table
    assert "9,999" not in table


def test_the_speed_of_a_disturbed_run_is_left_out_of_its_exercise() -> None:
    runs = [scaling_exercise("ddp/multi_gpu", 1, 8)[0] for _ in range(2)]
    for number, (run, speed) in enumerate(zip(runs, (100.0, 500.0), strict=True)):
        run.run.number, run.config["train"]["seed"] = number, number
        run.metrics.train_samples_per_second = speed
    runs[1].metrics.step_time_s, runs[1].metrics.train_steps_per_second = {"p50": 0.1}, 5.0
    _, _, table = printed(runs, 120).partition("(ddp/multi_gpu)")
    assert " 100.0" in table
    assert "300.0" not in table
