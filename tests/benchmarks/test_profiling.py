"""Tests of what profiling costs the other steps, with hand-made step times and a real pair of runs."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.commands import PACKAGES, Run
from benchmarks.explain import CHECKS, profiling_rows
from benchmarks.profiling import PAIRS, STEP_TIMES, StepTimes, compare_pairs, paired_runs
from tests.helpers.runs import run_distexp


def make_records(folder: Path, *, before: float, after: float) -> dict[str, dict[str, Any]]:
    """Return pairs of runs with steps of 100 ms and 1 % noise. A profile adds a fraction to the steps around it."""
    generator, records = random.Random(0), {}
    for pair in range(PAIRS):
        for kind, costs in (("plain", (0.0, 0.0)), ("profiled", (before, after))):
            name = f"single {pair} {kind}"
            (folder / name).mkdir(parents=True)
            means = [100 * (1 + costs[0])] * 32 + [200.0] * 5 + [100 * (1 + costs[1])] * 31
            steps = [mean * generator.gauss(1, 0.01) for mean in means]
            times = {"milliseconds": {"wall": steps, "cpu": [step / 2 for step in steps]}, "profile_starts": 32}
            (folder / name / STEP_TIMES).write_text(json.dumps(times))
            breakdown = [{"rank": 0}] if kind == "profiled" else None
            records[name] = {"directory": str(folder / name), "metrics": {"step_breakdown": breakdown}}
    return records


def test_steps_before_in_and_after_the_profile() -> None:
    """Of 12 steps, number 4 is the profiler's warm-up, 5 to 7 are profiled, and the profiler stops in number 8."""
    times = StepTimes({"wall": [float(step) for step in range(12)]}, 4)
    parts = [times.of(part, "wall", unmeasured=2) for part in ("before", "profiled", "after")]
    assert parts == [[2, 3], [5, 6, 7], [9, 10, 11]]


def test_pairs_are_compared_by_their_median_steps() -> None:
    plain = [[9.0, 10.0, 50.0]] * 10
    assert compare_pairs(plain, [[11.0, 11.0, 11.0]] * 10).median == pytest.approx(0.1)


def test_both_runs_of_a_pair_train_the_same_in_random_order() -> None:
    runs = list(paired_runs("single", ("model=bloom_tiny",), 1))
    pairs = [runs[start : start + 2] for start in range(0, 2 * PAIRS, 2)]
    for first, second in pairs:
        different = {override.partition("=")[0] for override in set(first.overrides) ^ set(second.overrides)}
        assert different == {"engine._target_", "train.profile_steps"}
    assert len({run.overrides for run in runs}) == len(runs), "a sweep leaves repeated cells out"
    assert min(Counter(first.name.split()[-1] for first, _ in pairs).values()) >= PAIRS // 4


def test_verdicts(tmp_path: Path) -> None:
    records = make_records(tmp_path, before=0.0, after=0.05)
    rows = list(profiling_rows(records, [Run(name, ()) for name in records]))
    assert [(name, good) for name, _, good in rows] == [
        *[("single: before", True)] * 2,
        *[("single: after", False)] * 2,
        *[("single: profiled", None)] * 2,
    ]
    assert rows[1][1].startswith("CPU time of a step ")
    assert f"{PAIRS} pairs" in rows[1][1]


def test_missing_runs_and_profiles_are_named(tmp_path: Path) -> None:
    records = make_records(tmp_path, before=0.0, after=0.0)
    records["single 1 profiled"]["metrics"]["step_breakdown"] = None
    (row,) = profiling_rows(records, [Run(name, ()) for name in records])
    assert row == ("single", f"{PAIRS} of {PAIRS} pairs, and 1 of them have no profile", None)
    del records["single 1 profiled"]
    (row,) = profiling_rows(records, [Run(name, ()) for name in records])
    assert row == ("single", f"{PAIRS - 1} of {PAIRS} pairs, and 0 of them have no profile", None)


def test_the_runs_of_one_worker_are_chosen_by_a_name() -> None:
    assert {run.workers for run in CHECKS["profiling"].runs if "single" in run.name} == {1}


@pytest.mark.slow
def test_a_real_run_is_profiled_in_its_middle(tmp_path: Path) -> None:
    run = next(run for run in CHECKS["profiling"].runs if run.name == "single 0 profiled")
    tiny = ("model=bloom_tiny", "dataset=squad_sample", "precision=fp32", "train.max_steps=20")
    names = {override.partition("=")[0] for override in tiny}
    kept = (override for override in run.overrides if override.partition("=")[0] not in names)
    done = run_distexp(*kept, *tiny, PACKAGES, f"hydra.run.dir={tmp_path / 'run'}")
    assert done.returncode == 0, done.stderr
    times = StepTimes(**json.loads((tmp_path / "run" / STEP_TIMES).read_text()))
    assert [len(steps) for steps in times.milliseconds.values()] == [20, 20]
    assert times.profile_starts == 8
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert record["metrics"]["step_breakdown"]
    assert record["metrics"]["communication"]["first_step"] == 9
