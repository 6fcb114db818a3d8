"""Tests of the ranges of numbers: a file with a number that no run has is foreign, and its number is named."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from distexp.runs.memory_trace import COLUMNS, read_memory_trace
from distexp.runs.metrics import Metrics
from distexp.runs.number_ranges import find_problem, range_errors, without_impossible
from distexp.runs.step_files import read_step_model
from tests.helpers.forecasts import profiled_record, write_profiled


@pytest.mark.parametrize(
    ("key", "number"),
    [
        ("metrics.eval_runtime", 0),
        ("metrics.step_breakdown.waiting_ms", 0),
        ("metrics.step_breakdown.step_ms", 1e-5),
        ("built.parameters", 10**12),
        ("metrics.communication.share", 1.0),
        ("utilization.cpu.average_pct", 104.0),
    ],
)
def test_numbers_of_real_runs_are_possible(key: str, number: float) -> None:
    assert find_problem(key, number) == ""


def test_each_loss_may_be_negative() -> None:
    """A custom model may add a reward or an entropy to its loss."""
    losses = [spec.name for spec in fields(Metrics) if "loss" in spec.name]
    assert "train_router_loss" in losses
    assert list(range_errors(dict.fromkeys(losses, -0.5), "metrics")) == []


def test_a_list_of_which_a_number_is_impossible_is_empty() -> None:
    """Tables format each number of such a list."""
    kept = without_impossible({"metrics": {"eval_accuracies": [0.5, 1.5], "step_breakdown": [{"host_ms": -1.0}]}})
    assert kept["metrics"] == {"eval_accuracies": [], "step_breakdown": None}


@pytest.mark.parametrize(
    ("key", "number", "problem"),
    [
        ("utilization.cpu.phases.train", 1e17, "is too large"),
        ("utilization.cpu.average_pct", 300.0, "is too large"),
        ("memory.cpu.phases.train", 1e17, "is too large"),
        ("metrics.communication.by_collective.all_reduce", 5e-324, "is too short for a time"),
        ("metrics.step_breakdown.step_ms", 5e-324, "is too short for a time"),
        ("metrics.eval_runtime", 1e11, "is too large"),
        ("metrics.train_samples_per_second", 1e30, "is too large"),
        ("metrics.eval_accuracies", 1.5, "is too large"),
        ("built.mesh", 0, "is too small"),
        ("memory.gpu.peak_mib", float("nan"), "is not finite"),
    ],
)
def test_an_impossible_number_has_a_reason(key: str, number: float, problem: str) -> None:
    assert find_problem(key, number) == problem


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("workers", 0),
        ("workers", 4),
        ("micro_batches", -1),
        ("step_s", -0.1),
        ("step_s", 5e-324),
        ("step_s", float("nan")),
        ("step_s_by_rank", [[-1.0]]),
        ("items.0.host_s", -0.03),
        ("items.0.host_s", 1e6),
        ("items.0.phase", "sideways"),
        ("items.0.micro_batch", 7),
        ("items.0.launches", -3),
        ("items.2.ranks", 64),
        ("items.2.bytes", -1),
        ("items.2.transfer_s", "x"),
        ("items", None),
        ("schema", 1),
    ],
)
def test_an_impossible_step_model_is_named_with_its_value(
    key: str, value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from distexp.forecast.__main__ import main

    sweep = write_profiled(tmp_path / "sweep", profiled_record())
    path = sweep / "0" / "profile" / "step_model.json"
    content = json.loads(path.read_text())
    *parents, last = [int(part) if part.isdigit() else part for part in key.split(".")]
    changed = content
    for part in parents:
        changed = changed[part]
    changed[last] = value
    path.write_text(json.dumps(content))
    assert main([str(sweep), "cluster.nodes=1"]) == 2
    error = capsys.readouterr().err
    assert f"{path} " in error
    assert last in error
    assert "has no profile" not in error
    assert "profile the run again" in error


def test_a_missing_step_model_is_none(tmp_path: Path) -> None:
    assert read_step_model(tmp_path) is None


@pytest.mark.parametrize("column", ["used_mib", "unix_time_s", "utilization_pct"])
@pytest.mark.parametrize("value", ["nan", "inf", "-5", "1e300"])
def test_a_sample_with_an_impossible_number_is_left_out(column: str, value: str, tmp_path: Path) -> None:
    good = {"unix_time_s": "1.0", "phase": "train", "kind": "cpu", "index": "0", "used_mib": "5.0"}
    rows = [good, {**good, column: value}]
    lines = [",".join(COLUMNS), *(",".join(row.get(name, "") for name in COLUMNS) for row in rows)]
    (tmp_path / "node0.csv").write_text("".join(f"{line}\n" for line in lines))
    trace = read_memory_trace(tmp_path / "node0.csv")
    assert [sample.used_mib for sample in trace.samples] == [5.0]
    assert "1 line(s) are not samples" in trace.notes[0]
