"""Tests of the verdicts of ``benchmarks/explain.py``, with hand-made records."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.explain import CHECKS, Run, energy_rows, main, parts_rows, silent_rows, straggler_rows
from distexp.runs.metrics import PARTS


def record(**metrics: Any) -> dict[str, Any]:
    return {"metrics": metrics}


def test_parts_must_add_up_to_the_median_step() -> None:
    parts = {f"{name}_ms": 10.0 for name in PARTS}
    ranks = [{**parts, "rank": 0}, {**parts, "rank": 1, "host_ms": None}]
    median = {"p50": 0.010 * len(PARTS)}
    records = {
        "exact": record(step_time_s=median, step_breakdown=ranks[:1], explanation=None),
        "off": record(step_time_s=median, step_breakdown=ranks, explanation={"sentence": "Why."}),
    }
    rows = list(parts_rows(records, [Run("exact", ()), Run("off", ())]))
    assert rows == [("exact", "step 90.0 ms, sum +0.0%: ", True), ("off", "step 90.0 ms, sum -11.1%: Why.", False)]


def test_exposed_communication_is_compared_with_the_time_that_is_gained_without_it() -> None:
    ranks = [{"step_ms": 100.0, "exposed_communication_ms": 8.0, "waiting_ms": 2.0}]
    records = {
        "a": record(step_time_s={"p50": 0.1}, step_breakdown=ranks),
        "a silent": record(step_time_s={"p50": 0.088}, step_breakdown=ranks),
    }
    (row,) = silent_rows(records, [Run("a", ()), Run("a silent", ())])
    assert row == ("a", "exposed and waiting 10.0 %, gained without collectives 12.0 %", True)


def test_named_ranks_are_compared_with_the_slow_one() -> None:
    records = {"0 ddp slow": record(stragglers=[{"rank": 1}]), "1 ddp clean": record(stragglers=[{"rank": 0}])}
    rows = straggler_rows(records, [Run("0 ddp slow", (), 2, "[1]"), Run("1 ddp clean", (), 2, "[]")])
    assert [good for *_, good in rows] == [True, False]


def test_twice_the_steps_need_twice_the_energy() -> None:
    runs = [Run(name, ()) for name in ("1000 steps", "2000 steps")]
    energy = {"gpu_j": 100.0, "gpu_j_by_power": 99.0, "gpu_j_training": 90.0}
    records = {
        "1000 steps": record(energy=energy),
        "2000 steps": record(energy={**energy, "gpu_j_training": 190.0}),
    }
    rows = list(energy_rows(records, runs))
    assert [good for *_, good in rows] == [True, True, False]


def test_there_are_20_slow_and_5_clean_runs() -> None:
    expected = [run.expected for run in CHECKS["stragglers"].runs]
    assert (expected.count("[1]"), expected.count("[]")) == (20, 5)


def test_unknown_check_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--checks", "speed"])
    assert "--checks: speed is unknown: use parts, collectives" in capsys.readouterr().err
