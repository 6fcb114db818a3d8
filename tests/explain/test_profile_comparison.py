"""Comparison of two profiled runs, per sample."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distexp.explain.__main__ import PerSample, ProfileComparison, main
from distexp.explain.step_profile import StepProfile
from tests.helpers.profiled_records import COMPUTE_BOUND, GPU, LAUNCH_BOUND, profiled
from tests.helpers.records import write


def test_comparison_is_per_sample() -> None:
    """B has half of the samples: 4 per worker against 8, with two workers."""
    before = profiled(COMPUTE_BOUND, train__micro_batch_size=8, **GPU)
    after = profiled(LAUNCH_BOUND, train__micro_batch_size=4, **GPU)
    profiles = [StepProfile.of(run) for run in (before, after)]
    assert profiles[0] is not None
    assert profiles[1] is not None
    comparison = ProfileComparison(profiles[0], profiles[1])
    assert comparison.totals == PerSample(100 / 16, 100 / 8)
    assert comparison.per_sample("launch_idle") == PerSample(5 / 16, 55 / 8)
    sentence = comparison.sentence()
    assert sentence.startswith("B is 2.00 times slower than A: A needs 6.250 ms per sample, and B 12.500 ms.")
    changes = "GPU idle: slow launches +6.562 ms, matrix kernels -1.875 ms."
    assert sentence.endswith(f"Largest changes: {changes}")
    assert ProfileComparison(profiles[1], profiles[0]).sentence().startswith("B is 2.00 times faster than A")
    assert "equally fast" in ProfileComparison(profiles[0], profiles[0]).sentence()


@pytest.mark.parametrize(
    ("device", "error", "noise"),
    [
        ({"peak": None}, None, "±51%"),  # Two runs on a CPU: 40 % each.
        (GPU, {"relative": 0.1, "blocks": 10}, "±29%"),  # The quantile for 9 degrees of freedom is 2.26.
        (GPU, {"relative": 0.01, "blocks": 10}, None),
    ],
    ids=["CPU", "uneven steps", "even steps"],
)
def test_runs_that_are_equal_within_the_noise_are_not_ranked(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    device: dict[str, Any],
    error: dict[str, float] | None,
    noise: str | None,
) -> None:
    runs = [profiled({"matmul": length}, number=n, **device) for n, length in enumerate((100.0, 125.0))]
    for run in runs:
        run.metrics.speed_error = error
    folder = write(tmp_path, *runs)
    assert main([str(folder / "0"), str(folder / "1")]) == 0
    out = capsys.readouterr().out
    assert ("B is 1.25 times slower than A" in out) == (noise is None)
    if noise is not None:
        assert f"A and B are equal within the noise ({noise} of the higher speed)" in out.split("matrix kernels")[0], (
            "above the table"
        )
    assert main([str(folder / "0"), str(folder / "1"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["equal_within_noise"] == (noise is not None)


def test_disturbed_runs_are_not_ranked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [profiled({"matmul": length}, number=n, **GPU) for n, length in enumerate((100.0, 500.0))]
    runs[1].metrics.step_time_s = {"p50": 0.5}
    runs[1].metrics.train_steps_per_second = 1.0  # so the mean step takes 1 s
    folder = write(tmp_path, *runs)
    assert main([str(folder / "0"), str(folder / "1")]) == 0
    above, below = capsys.readouterr().out.split("matrix kernels", 1)
    assert "It is not decided which run is faster" in above
    assert "B was disturbed: its mean step took 2.0 times as long as its median step. Repeat this" in above
    assert "slower than" not in above + below


def test_waits_for_cores_and_other_global_batches_are_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [profiled({"matmul": 100.0}, number=n, peak=None, train__micro_batch_size=4 * (n + 1)) for n in range(2)]
    assert runs[1].metrics.step_breakdown
    runs[1].metrics.step_breakdown[0]["without_core_ms"] = 62.0
    folder = write(tmp_path, *runs)
    assert main([str(folder / "0"), str(folder / "1")]) == 0
    out = capsys.readouterr().out
    assert "A step has 8 samples in A and 16 in B, so these are different trainings." in out
    assert "B: For 62% of the step the ranks had to wait for a free CPU core." in out
    assert "A: For" not in out


def test_runs_with_one_global_batch_are_the_same_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Their measured steps have different means, because the last step of an epoch is partly padding."""
    runs = [profiled({"matmul": 100.0}, number=n, peak=None) for n in range(2)]
    for run, samples in zip(runs, (7.2, 8.0), strict=True):
        run.metrics.train_steps_per_second, run.metrics.train_samples_per_second = 10.0, 10.0 * samples
    folder = write(tmp_path, *runs)
    assert main([str(folder / "0"), str(folder / "1")]) == 0
    assert "different trainings" not in capsys.readouterr().out


def test_comparison_uses_the_steps_that_were_not_profiled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The profiler makes a step of B five times longer. But without it B is only twice as slow."""
    before, after = (profiled({"matmul": length}, number=n, peak=None) for n, length in enumerate((100.0, 1000.0)))
    before.metrics.step_time_s = {"p50": 0.1}
    after.metrics.step_time_s = {"p50": 0.2}
    folder = write(tmp_path, before, after)
    assert main([str(folder / "0"), str(folder / "1")]) == 0
    out = capsys.readouterr().out
    assert "B is 2.00 times slower than A" in out
    assert "\nB: The parts add up to 1,000.0 ms. The median of the steps that were not profiled is 200.0 ms." in out
    assert out.count("Without a GPU, operators of PyTorch count as kernels") == 1
    assert main([str(folder / "0"), str(folder / "1"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["median_ms_per_sample"]["b"] == pytest.approx(2 * found["median_ms_per_sample"]["a"])


def test_parts_that_change_in_the_other_direction_explain_nothing() -> None:
    """B is slower by the median of its other steps, but its profiled steps are faster."""
    runs = [profiled({"matmul": length}, peak=None) for length in (100.0, 50.0)]
    for run, median_s in zip(runs, (0.1, 0.2), strict=True):
        run.metrics.step_time_s = {"p50": median_s}
    a, b = (StepProfile.of(run) for run in runs)
    assert a is not None
    assert b is not None
    sentence = ProfileComparison(a, b).sentence()
    assert sentence.startswith("B is 2.00 times slower than A")
    assert "The profiled steps do not show this: they take" in sentence
    assert "Largest changes" not in sentence
