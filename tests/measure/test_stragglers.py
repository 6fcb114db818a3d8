"""Tests of the comparison of ranks, with hand-written times and with a real straggler."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from distexp.measure.stragglers import RankTimes, find_stragglers, include_cpu_work, step_times
from distexp.runs.record import RunRecord
from distexp.runs.texts import describe_straggler
from tests.helpers.runs import run_distexp
from tests.helpers.slow_rank import SLOW_RANK

QUANTILES = {"p50": 0.1, "p90": 0.12, "max": 0.2}


def rank_times(rank: int, own_s: Sequence[float], data_wait_s: float = 0.0) -> RankTimes:
    return RankTimes(rank, QUANTILES, own_s, data_wait_s=[data_wait_s] * len(own_s), host=f"host{rank}")


def cpu_times(rank: int, own_s: Sequence[float], without_core_s: float = 0.0) -> RankTimes:
    without_core = [without_core_s] * len(own_s)
    return replace(rank_times(rank, own_s), without_core_s=without_core, on_cpu=True, includes_cpu_work=True)


def noisy(mean_s: float, seed: int, *, noise_s: float = 0.01, steps: int = 40) -> list[float]:
    """Return own times with the noise of a GPU."""
    generator = random.Random(seed)
    return [mean_s + generator.gauss(0, noise_s) for _ in range(steps)]


def loaded(ranks: int, seed: int, *, steps: int = 115, mean_s: float = 0.03) -> list[list[float]]:
    """Return own times of ranks on CPUs that have much else to do.

    A rank is up to 4 % slower than another one all the time, and 10 to 40 % slower in at most a third of the steps. The
    noise is larger than in runs on two cores with a load of 6, and one of 20 steps is an outlier with a heavy tail.
    """
    generator = random.Random(seed)
    found = []
    for _ in range(ranks):
        constant, burst = generator.gauss(0, 0.02), generator.uniform(0.1, 0.4)
        start, length = generator.randrange(steps), generator.randrange(steps // 3)
        times = [mean_s * (1 + constant) * math.exp(generator.gauss(0, 0.15)) for _ in range(steps)]
        times = [time + mean_s * generator.paretovariate(1.3) * (generator.random() < 0.05) for time in times]
        found.append([time * (1 + burst * (start <= n < start + length)) for n, time in enumerate(times)])
    return found


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("seed", range(20))
def test_on_loaded_cpus_a_straggler_of_20_ms_is_named_and_a_disturbed_rank_is_not(seed: int, ranks: int) -> None:
    own = loaded(ranks, seed)
    assert find_stragglers([cpu_times(rank, seconds) for rank, seconds in enumerate(own)]) == []
    own[1] = [time + 0.02 for time in own[1]]
    found = find_stragglers([cpu_times(rank, seconds) for rank, seconds in enumerate(own)])
    assert found is not None
    assert [(entry["rank"], entry["host"]) for entry in found] == [(1, "host1")]
    assert found[0]["slower_by_pct"] == pytest.approx(65, abs=25)
    assert "oversubscribed" not in found[0]["evidence"]


def test_oversubscribed_cores_are_named_as_the_cause() -> None:
    ranks = [cpu_times(0, [0.05] * 30), cpu_times(1, [0.09] * 30, without_core_s=0.005)]
    found = find_stragglers(ranks)
    assert found is not None
    assert found[0]["evidence"] == (
        "its own time is 90.0 ms a step, that of the others 50.0 ms; cores are oversubscribed: it also waits 5.0 ms a "
        "step for a core, so other programs may be the cause"
    )


@pytest.mark.parametrize("seed", range(20))
def test_a_straggler_of_20_ms_is_named_and_no_other_rank(seed: int) -> None:
    own = [noisy(0.07 if rank == 1 else 0.05, 10 * seed + rank) for rank in range(4)]
    found = find_stragglers([rank_times(rank, seconds) for rank, seconds in enumerate(own)])
    assert found is not None
    assert [(entry["rank"], entry["host"]) for entry in found] == [(1, "host1")]
    assert found[0]["slower_by_pct"] == pytest.approx(40, abs=20)


@pytest.mark.parametrize("seed", range(20))
def test_equal_ranks_have_no_straggler(seed: int) -> None:
    ranks = [rank_times(rank, noisy(0.05, 10 * seed + rank, noise_s=0.005)) for rank in range(4)]
    assert find_stragglers(ranks) == []


def test_a_small_or_rare_difference_is_no_straggler() -> None:
    usual = rank_times(0, [0.1] * 20)
    assert find_stragglers([usual, rank_times(1, [0.104] * 20)]) == [], "4 percent"
    assert find_stragglers([usual, rank_times(1, [0.1] * 14 + [0.5] * 6)]) == [], "six slow steps"
    first_half = [0.2] * 20 + [0.1] * 18 + [0.2] * 2
    assert find_stragglers([rank_times(0, [0.1] * 40), rank_times(1, first_half)]) == [], "slow in the first half"
    assert find_stragglers([cpu_times(0, [0.1] * 40), cpu_times(1, [0.108] * 40)]) == [], "8 percent on a CPU"
    assert find_stragglers([rank_times(0, [0.004] * 20), rank_times(1, [0.0045] * 20)]) == [], "half a millisecond"


def test_waiting_for_data_is_named_as_the_cause() -> None:
    found = find_stragglers([rank_times(0, [0.05] * 9), rank_times(1, [0.09] * 9, data_wait_s=0.04)])
    assert found is not None
    assert found[0]["evidence"] == (
        "its own time is at least 90.0 ms a step, that of the others at least 50.0 ms (without the work of the CPUs: "
        "measure it with train.profile_steps=3); it waits 40.0 ms for its data, the others 0.0 ms"
    )


def test_too_few_steps_or_one_rank_cannot_be_compared() -> None:
    assert find_stragglers([rank_times(0, [0.05] * 7), rank_times(1, [0.5] * 7)]) is None
    assert find_stragglers([rank_times(0, [0.05] * 20)]) is None
    assert find_stragglers([cpu_times(0, [0.05] * 29), cpu_times(1, [0.5] * 29)]) is None


def test_step_times_of_each_rank() -> None:
    compared = replace(rank_times(0, [0.02, 0.03, 0.05]), watched_p50_s=0.11, unwatched_p50_s=0.1)
    quantiles = {"p50_s": 0.1, "p90_s": 0.12, "max_s": 0.2}
    assert step_times([compared, rank_times(1, [])]) == [
        {"rank": 0, **quantiles, "watched_p50_s": 0.11, "unwatched_p50_s": 0.1, "own_ms": pytest.approx(30)},
        {"rank": 1, **quantiles, "watched_p50_s": None, "unwatched_p50_s": None, "own_ms": None},
    ]


def on_gpu(rank: int, own_s: float, *, step_s: float = 0.15, steps: int = 20) -> RankTimes:
    """Return the times of a rank whose GPU does not wait for ``own_s`` of each step."""
    return replace(rank_times(rank, [own_s] * steps), durations_s=[step_s] * steps)


def test_without_a_profile_the_percentage_is_an_upper_bound() -> None:
    """The GPU of rank 1 does not wait for 56.7 ms, but its CPU may work longer."""
    found = find_stragglers([on_gpu(0, 0.1428), on_gpu(1, 0.0567)])
    assert found is not None
    assert [describe_straggler(entry) for entry in found] == [
        "Rank 0 (host0) is up to 152% slower: its own time is at least 142.8 ms a step, that of the others at least "
        "56.7 ms (without the work of the CPUs: measure it with train.profile_steps=3)"
    ]


@pytest.mark.parametrize(
    ("busy_ms", "expected"),
    [
        ((223.0, 165.0), "Rank 0 (host0) is 35% slower: its own time is 148.7 ms a step, that of the others 110.0 ms"),
        ((100.0, 45.0), "Rank 0 (host0) is 152% slower: its own time is 142.8 ms a step, that of the others 56.7 ms"),
        ((223.0, 220.0), None),
        ((230.0, 300.0), None),
    ],
    ids=["CPU of rank 1 busier than its GPU", "GPUs busier", "as busy", "never longer than the step"],
)
def test_the_own_time_is_at_least_the_work_of_the_cpu(busy_ms: tuple[float, float], expected: str | None) -> None:
    """A step takes 150 ms, and 225 ms with the profiler. So 223 ms of work are 148.7 ms of a step, and 165 are 110."""
    ranks = [on_gpu(0, 0.1428), on_gpu(1, 0.0567)]
    entries = [{"step_ms": 225.0, "cpu_busy_ms": busy} for busy in busy_ms]
    found = find_stragglers([include_cpu_work(*pair) for pair in zip(ranks, entries, strict=True)])
    assert found is not None
    assert [describe_straggler(entry) for entry in found] == ([expected] if expected else [])


def test_a_profile_without_a_gpu_changes_no_own_time() -> None:
    times = cpu_times(0, [0.05] * 30)
    assert include_cpu_work(times, {"step_ms": 60.0, "cpu_busy_ms": None}) is times


@pytest.mark.slow
@pytest.mark.parametrize(
    "cells",
    [
        [["strategy=fsdp"], ["strategy=ddp", "engine=hf_trainer"]],
        pytest.param([["strategy=ddp"], ["zero_stage=2"]], marks=pytest.mark.release),
    ],
    ids=["fsdp and the trainer", "ddp and deepspeed"],
)
def test_an_injected_straggler_is_named(cells: list[list[str]], tmp_path: Path) -> None:
    """One of two real processes sleeps 20 ms in each step."""
    done = run_distexp(
        "--multirun",
        f"sweep.cells={json.dumps(cells, separators=(',', ':'))}",
        "model._target_=tests.helpers.slow_rank.build",
        "trusted_packages=[tests]",
        "cluster.workers_per_node=2",
        "train.max_steps=120",
        "train.gradient_accumulation_steps=1",
        "train.eval_batch_size=64",
        f"hydra.sweep.dir={tmp_path / 'sweep'}",
    )
    assert done.returncode == 0, done.stderr
    for number in range(len(cells)):
        metrics = RunRecord.read(tmp_path / "sweep" / str(number) / "record.json").metrics
        assert metrics.stragglers is not None
        assert [entry["rank"] for entry in metrics.stragglers] == [SLOW_RANK], metrics.step_times_by_rank
        assert metrics.step_times_by_rank is not None
        own_ms = [entry["own_ms"] for entry in metrics.step_times_by_rank]
        assert own_ms[SLOW_RANK] > 1000 * 0.02
    assert done.stdout.count("slow ranks") == len(cells)


def test_ranks_without_own_time_can_be_compared() -> None:
    """Rank 0 only waits, so no percentage is known."""
    found = find_stragglers([rank_times(0, [0.0] * 9), rank_times(1, [0.0] * 9), rank_times(2, [0.01] * 9)])
    assert found is not None
    assert [(entry["rank"], entry["slower_by_pct"]) for entry in found] == [(2, None)]


def test_ranks_that_take_turns_at_being_ahead_are_not_slow() -> None:
    """Two GPUs in launch-bound steps of 8 ms differ by 2.4 ms. A CPU has no such queue."""
    assert find_stragglers([rank_times(0, [0.0078] * 20), rank_times(1, [0.0054] * 20)]) == []
    found = find_stragglers([cpu_times(0, [0.0078] * 40), cpu_times(1, [0.0054] * 40)])
    assert found is not None
    assert [entry["rank"] for entry in found] == [0]
