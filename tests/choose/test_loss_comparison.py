"""Tests of the comparison of losses."""

from __future__ import annotations

from pathlib import Path

import pytest

from distexp.choose.candidate import Candidate, Trial
from distexp.choose.loss_check import dropout_overrides, read_losses
from distexp.statistics.same_training import compare_trials
from tests.helpers.runs import resolve_cell


@pytest.mark.parametrize(
    ("losses", "precision", "equal"),
    [
        ([3.0, 2.0], "fp32", True),
        ([3.0, 2.0 * (1 + 9e-6)], "fp32", True),
        ([3.0, 2.0 * (1 + 2e-5)], "fp32", False),
        ([3.0 * 1.003, 2.0 * 0.997], "bf16", True),
        ([3.0 * 1.003, 2.0 * 1.003], "bf16", False),  # each step is within the bound, but all have the same sign
        ([3.0 * 1.011, 2.0 * 0.989], "bf16", False),
        ([3.0, 2.0], "fp16", True),
        ([3.0, float("nan")], "fp32", False),
    ],
)
def test_losses_are_equal_within_the_bounds_of_the_precision(losses: list[float], precision: str, equal: bool) -> None:
    found = compare_trials(losses, [3.0, 2.0], precision)
    assert found is not None
    assert (found.steps, found.equal) == (2, equal)


def test_runs_with_other_numbers_of_steps_are_not_compared() -> None:
    assert compare_trials([1.0, 2.0], [1.0], "fp32") is None
    assert compare_trials([], [], "fp32") is None


def test_losses_of_a_run_are_read(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "loss": 2.25}\n{"step": 3, "lo')
    assert read_losses(tmp_path) == [2.5, 2.25]
    assert read_losses(tmp_path / "none") == []
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": null}\n{"step": 2, "loss": 2.25}\n')
    assert len(read_losses(tmp_path)) == 2


@pytest.mark.parametrize(
    ("configured", "measured", "compared_without"),
    [
        (None, 0.0, False),
        (None, 0.1, True),
        (None, None, True),  # no trial has read it
        (0.1, 0.0, True),  # functions may use a rate that is no module
        (0.0, None, False),
    ],
)
def test_only_a_model_with_dropout_is_compared_without_it(
    configured: float | None, measured: float | None, *, compared_without: bool
) -> None:
    config = resolve_cell("model=gpt_tiny", "dataset=synthetic")
    config.model.dropout = configured
    candidate = Candidate(("strategy=ddp",), ("strategy=ddp",), 1, config=config)
    candidate.trials = (Trial(5, "completed", dropout=measured),)
    assert dropout_overrides(candidate) == (("model.dropout=0",) if compared_without else ())


def test_an_adapter_is_compared_without_its_dropout() -> None:
    config = resolve_cell("model=gpt_tiny", "dataset=synthetic", "adapter=lora", "adapter.dropout=0.1")
    candidate = Candidate(("strategy=ddp",), ("strategy=ddp",), 1, config=config)
    candidate.trials = (Trial(5, "completed", dropout=0.1),)
    assert dropout_overrides(candidate) == ("adapter.dropout=0",)
