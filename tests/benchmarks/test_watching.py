"""Tests of the cost of watching for slow ranks, with synthetic steps and a real run."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.commands import PACKAGES
from benchmarks.explain import CHECKS, Run, watching_rows
from benchmarks.watching import RandomPairs, estimate_shift, pair_differences, read_differences
from distexp.runs.record import RunRecord
from distexp.runs.step_files import StepTime, read_step_times, write_step_times
from tests.helpers.runs import run_distexp


def steps(*times: tuple[int, float, bool]) -> dict[int, StepTime]:
    return {step: StepTime(step, seconds, watched) for step, seconds, watched in times}


def simulated(cost: float, *, pairs: int = 300, seed: int = 0) -> list[StepTime]:
    """Return steps of 0.1 s with 10 % noise, outliers and a drift of 50 %, of which the watched ones take longer."""
    generator, is_watched = random.Random(seed), RandomPairs(seed)
    found = []
    for step in range(2 * pairs):
        seconds = 0.1 * (1 + 0.25 * step / pairs) * generator.gauss(1, 0.1) * (3 if generator.random() < 0.03 else 1)
        found.append(StepTime(step, seconds + 0.1 * cost * is_watched(step), is_watched(step)))
    return found


def test_one_step_of_each_pair_is_watched_in_random_order() -> None:
    watched = [RandomPairs(1)(step) for step in range(400)]
    firsts = watched[::2]
    assert watched[1::2] == [not first for first in firsts]
    assert 70 < sum(firsts) < 130
    assert sum(a != b for a, b in pairwise(firsts)) > 50, "no blocks"
    assert watched == [RandomPairs(1)(step) for step in range(400)], "the same on all ranks"
    assert watched != [RandomPairs(2)(step) for step in range(400)]


def test_differences_of_complete_pairs_relative_to_the_unwatched_step() -> None:
    """Means over the ranks: 0.11, 0.10 | 0.10, 0.13 | 0.20 without its partner. The median unwatched step is 0.10 s."""
    first = steps((0, 0.12, True), (1, 0.11, False), (2, 0.10, False), (3, 0.13, True), (5, 0.2, True), (7, 0.3, True))
    second = steps((0, 0.10, True), (1, 0.09, False), (2, 0.10, False), (3, 0.13, True), (5, 0.2, True))
    assert pair_differences([first, second]) == pytest.approx([0.1, 0.3])


def test_shift_of_hand_computed_differences() -> None:
    """The means of 1 to 10 have the median 5.5. Wilcoxon's table has 8 for ten differences and 5 %.

    So the interval starts at the ninth of the means, which are 1, 1.5, 2, 2, 2.5, 2.5, 3, 3, 3, 3.5.
    """
    found = estimate_shift(list(range(1, 11)))
    assert (found.median, found.low, found.high) == (5.5, 3, 8)
    with pytest.raises(ValueError, match="9 pairs of steps are too few"):
        estimate_shift([0.0] * 9)


@pytest.mark.parametrize("cost", [0.0, 0.05])
def test_the_interval_contains_the_cost_of_simulated_runs(cost: float) -> None:
    """Of 20 intervals at 95 %, one is expected without it."""
    hits = 0
    for seed in range(20):
        run = {step.step: step for step in simulated(cost, seed=seed)}
        found = estimate_shift(pair_differences([run]))
        hits += found.low <= cost * 0.1 / 0.125 <= found.high
        assert found.high - found.low < 0.06
    assert hits >= 17


def test_verdict_of_a_check(tmp_path: Path) -> None:
    """A cost of 20 % is above the bound of 1 %. With 10 % noise, a cost of 0 is not decided."""
    costs = {"free": 0.0, "dear": 0.2}
    for name, cost in costs.items():
        (tmp_path / name).mkdir()
        for rank in range(2):
            write_step_times(tmp_path / name, rank, simulated(cost, pairs=100))
    records = {name: {"directory": str(tmp_path / name), "metrics": {"step_time_s": {"p50": 0.1}}} for name in costs}
    rows = list(watching_rows(records, [Run(name, (), 2) for name in costs]))
    assert [good for *_, good in rows] == [None, False]
    assert "step 100.0 ms, watched" in rows[0][1]
    assert "100 pairs" in rows[0][1]


def test_all_runs_of_the_check_watch_in_pairs() -> None:
    runs = CHECKS["watching"].runs
    assert [run.name for run in runs] == ["ddp", "fsdp", "zero2"]
    assert all("engine._target_=benchmarks.watching.PairedWatching" in run.overrides for run in runs)


@pytest.mark.slow
def test_a_real_run_has_watched_and_unwatched_ordinary_steps(tmp_path: Path) -> None:
    """Epochs of 16 steps, 3 of them unmeasured. Measured steps 0 and 13 follow something other than a measured step."""
    done = run_distexp(
        "strategy=ddp",
        "engine._target_=benchmarks.watching.PairedWatching",
        PACKAGES,
        "cluster.workers_per_node=2",
        "dataset.train_size=256",
        "dataset.eval_size=16",
        "train.micro_batch_size=8",
        "train.gradient_accumulation_steps=1",
        "train.measure_after_step=3",
        "train.max_steps=32",
        f"hydra.run.dir={tmp_path / 'run'}",
    )
    assert done.returncode == 0, done.stderr
    ordinary = [step for step in range(29) if step not in (0, 13)]
    for rank in range(2):
        found = read_step_times(tmp_path / "run", rank)
        assert [step.step for step in found] == ordinary
        assert [step.watched for step in found] == [RandomPairs(42)(step) for step in ordinary]
    entries = RunRecord.read(tmp_path / "run" / "record.json").metrics.step_times_by_rank
    assert entries is not None
    assert all(entry["watched_p50_s"] > 0 and entry["unwatched_p50_s"] > 0 for entry in entries)
    assert len(read_differences(tmp_path / "run", 2)) == 12
