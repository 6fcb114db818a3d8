"""Tests of the prediction before runs start, with estimates that follow a formula."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from distexp.config import Config, ConfigError
from distexp.launch import memory_check
from distexp.launch.memory_check import predict_before_start, predict_runs
from distexp.launch.outcome import finalize_run
from distexp.launch.run_dirs import AssignedRun, GitState, make_run_info, write_invalid
from distexp.plan.estimate import Estimate, arithmetic_estimate
from distexp.plan.planner import Outcome
from distexp.resolve.run_id import run_id
from distexp.runs.predictions import read_curve, read_prediction
from distexp.runs.record import RunRecord, RunSpec
from distexp.runs.run_dir import RECORD
from tests.helpers.planning import FormulaPlanner, composed, linear_estimate
from tests.helpers.runs import make_spec, resolve_cell

SLURM = ("cluster=slurm", "dataset=squad", "strategy=single")
"""Runs on GPUs, which this machine need not have."""


def test_cell_that_cannot_fit_is_invalid(capsys: pytest.CaptureFixture[str]) -> None:
    cells = (("train.micro_batch_size=100",), ("train.micro_batch_size=10",))
    with composed([*SLURM, "plan=check", "plan.gpu=a100-80gb"], *cells) as (found, make):
        predict_runs(found, make, FormulaPlanner())
    large, small = found
    assert (large.config, large.id) == (None, "invalid")
    assert large.decided is not None
    (error,) = large.errors
    assert error.startswith(
        "plan=check: the run needs 102.1 GiB (peak of 101.6 GiB in phase backward), and the GPU has 79"
    )
    assert "use train.logits=targets (needs 53.2 GiB), or run it anyway with plan=warn" in error
    assert small.config is not None
    assert small.predicted is not None
    assert (small.predicted.verdict, small.predicted.peak_allocated_mib) == ("fits", 14_000)
    assert capsys.readouterr().err == "distexp: searching for what fits\n"


def test_the_search_for_a_change_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prediction takes 7 s of this clock, and one is made at a time. Four end before 30 s."""
    seconds, planner = [0.0], FormulaPlanner()
    estimate = planner.estimate

    def take_time(configs: Sequence[Config]) -> list[Outcome]:
        seconds[0] += 7.0
        return estimate(configs)

    shared = ["cluster=slurm", "cluster.nodes=2", "strategy=ddp", "dataset=squad", "train.micro_batch_size=8"]
    shared += ["plan=check", "plan.gpu_memory_gb=3"]
    with composed(shared) as (cells, make):
        monkeypatch.setattr(planner, "estimate", lambda configs, *_: take_time(configs))
        monkeypatch.setattr(memory_check, "monotonic", lambda: seconds[0])
        monkeypatch.setattr(memory_check, "parallel_processes", lambda: 1)
        with pytest.raises(ConfigError, match=r"and 4 were not predicted: run distexp plan, which predicts all, or "):
            predict_runs(cells, make, planner)
    assert planner.count == 1 + 4


def test_single_run_that_cannot_fit_is_an_error() -> None:
    shared = [*SLURM, "plan=check", "plan.gpu_memory_gb=3"]
    with composed(shared) as (cells, make), pytest.raises(ConfigError, match="use more GPUs, or GPUs with more memory"):
        predict_runs(cells, make, FormulaPlanner())


def test_a_change_names_what_it_replaces_in_the_command() -> None:
    shared = ["cluster=slurm", "cluster.workers_per_node=8", "strategy=ddp", "dataset=squad", "plan=check"]
    shared += ["train.micro_batch_size=1", "plan.gpu_memory_gb=3"]
    replaces = r"use sharding=full_shard in place of strategy=ddp \(needs 2\.0 GiB\), or run it anyway"
    with composed(shared) as (cells, make), pytest.raises(ConfigError, match=replaces):
        predict_runs(cells, make, FormulaPlanner())


def test_model_states_that_exceed_the_memory_are_enough(capsys: pytest.CaptureFixture[str]) -> None:
    planner = FormulaPlanner(lambda config: Estimate(parts={"parameters": 90_000.0}))
    shared = [*SLURM, "plan=check", "plan.gpu=a100-80gb"]
    with composed(shared) as (cells, make), pytest.raises(ConfigError, match=r"the model states need 87\.9 GiB"):
        predict_runs(cells, make, planner)


@pytest.mark.parametrize(
    ("slow", "hint"), [(Estimate(parts={"parameters": 90_000.0}), "use more GPUs"), (None, "a prediction takes 500 s")]
)
def test_no_changes_are_predicted_if_that_is_slow_or_useless(slow: Estimate | None, hint: str) -> None:
    planner = FormulaPlanner(lambda config: slow or replace(linear_estimate(config), seconds=500.0))
    shared = [*SLURM, "plan=check", "plan.gpu=a100-80gb", "train.micro_batch_size=100"]
    with composed(shared) as (cells, make), pytest.raises(ConfigError, match=hint):
        predict_runs(cells, make, planner)
    assert planner.count == 1


def test_warning_is_printed_for_cached_predictions_only(capsys: pytest.CaptureFixture[str]) -> None:
    shared = [*SLURM, "plan.gpu=a100-80gb", "train.micro_batch_size=100"]
    for known in (True, False):
        planner = FormulaPlanner(known=known)
        with composed(shared) as (cells, make):
            predict_runs(cells, make, planner)
        assert (cells[0].config is not None, planner.count) == (True, 0)
        assert ("warning: the run needs 102.1 GiB" in capsys.readouterr().err) == known
        assert (cells[0].predicted is not None) == known


def test_unknown_gpu_and_failed_predictions_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    for planner, text in (
        (FormulaPlanner(), "the memory of its GPU is unknown: set plan.gpu=a100-80gb or plan.gpu_memory_gb=80"),
        (FormulaPlanner(lambda config: "it broke"), "its memory is not predicted: it broke"),
    ):
        with composed([*SLURM, "plan=check"]) as (cells, make):
            predict_runs(cells, make, planner)
        assert text in capsys.readouterr().err
        assert cells[0].config is not None


def test_run_that_is_not_traced_starts_with_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    planner = FormulaPlanner(lambda config: arithmetic_estimate(config, "it took longer than plan.timeout_s=900", 1000))
    with composed([*SLURM, "plan=check", "plan.gpu=a100-80gb"]) as (cells, make):
        predict_runs(cells, make, planner)
    assert cells[0].config is not None
    assert "warning: it is not checked: not traced: it took longer than plan.timeout_s=900" in capsys.readouterr().err


def test_nothing_is_predicted_if_it_is_off() -> None:
    with composed(("plan=off", *SLURM)) as (cells, make):
        predict_runs(cells, make, FormulaPlanner(known=True))
    assert (cells[0].predicted, cells[0].errors) == (None, [])


@pytest.mark.parametrize(
    ("mode", "cached", "predicts"),
    [("off", True, False), ("warn", False, False), ("warn", True, True), ("check", False, True)],
)
def test_planner_is_imported_only_for_what_it_may_predict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, *, cached: bool, predicts: bool
) -> None:
    monkeypatch.setenv("DISTEXP_CACHE", str(tmp_path))
    if cached:
        (tmp_path / "plan").mkdir()
    called = []
    monkeypatch.setattr(memory_check, "predict_runs", lambda *cells: called.append(cells))
    with composed([*SLURM, f"plan={mode}"]) as (cells, make):
        predict_before_start(cells, make)
    assert bool(called) == predicts


def test_run_without_a_home_directory_is_not_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = ConfigError("this user has no home directory")
    monkeypatch.setattr("distexp.launch.memory_check.cache_dir", Mock(side_effect=refused))
    with composed(["cluster.device=cpu"]) as (cells, make):
        assert predict_before_start(cells, make) is None


def test_prediction_is_no_part_of_the_run_id() -> None:
    default = run_id(resolve_cell("cluster.device=cpu"))
    for changed in ("plan=check", "plan=off", "plan.gpu=a100-80gb"):
        assert run_id(resolve_cell("cluster.device=cpu", changed)) == default


def test_record_has_the_prediction_of_its_run(tmp_path: Path) -> None:
    with composed([*SLURM, "plan=check", "plan.gpu=a100-80gb"]) as (cells, make):
        predict_runs(cells, make, FormulaPlanner())
    spec = make_spec("cluster.device=cpu", "measure.enabled=false")
    cells[0].write_prediction(tmp_path)
    finalize_run(RunSpec(spec.config, spec.run), tmp_path, {0: 1}, time.time(), "stopped")
    record = RunRecord.read(tmp_path / RECORD)
    assert record.predicted == cells[0].predicted
    assert read_curve(tmp_path)["phase"] == ["forward", "backward"]
    replace(cells[0], predicted=None).write_prediction(tmp_path)  # of a later attempt, which has none
    assert (read_prediction(tmp_path), read_curve(tmp_path)) == (None, {})


def test_record_of_an_invalid_cell_has_its_prediction(tmp_path: Path) -> None:
    shared = (*SLURM, "plan=check", "plan.gpu=a100-80gb", "train.micro_batch_size=100")
    with composed(shared, ["train.seed=1"], ["train.seed=2"]) as (cells, make):
        predict_runs(cells, make, FormulaPlanner())
        info = make_run_info(cells[0], 0, GitState())
        write_invalid(AssignedRun(cells[0], info, tmp_path, cells[0].composed))
    record = RunRecord.read(tmp_path / RECORD)
    assert (record.status, record.predicted) == ("invalid", cells[0].predicted)
    assert record.predicted is not None
    assert record.predicted.verdict == "does_not_fit"
    assert read_prediction(tmp_path) == record.predicted
