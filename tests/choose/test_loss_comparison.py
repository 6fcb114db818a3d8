"""Tests of the comparison of losses."""

from __future__ import annotations

from pathlib import Path

import pytest

from distexp.choose.loss_comparison import compare_losses, read_losses


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
    found = compare_losses(losses, [3.0, 2.0], precision)
    assert found is not None
    assert (found.steps, found.equal) == (2, equal)


def test_runs_with_other_numbers_of_steps_are_not_compared() -> None:
    assert compare_losses([1.0, 2.0], [1.0], "fp32") is None
    assert compare_losses([], [], "fp32") is None


def test_losses_of_a_run_are_read(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "loss": 2.25}\n{"step": 3, "lo')
    assert read_losses(tmp_path) == [2.5, 2.25]
    assert read_losses(tmp_path / "none") == []
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": null}\n{"step": 2, "loss": 2.25}\n')
    assert len(read_losses(tmp_path)) == 2
