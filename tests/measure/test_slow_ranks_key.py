"""Tests of ``measure.slow_ranks`` with real processes that train with gloo."""

from __future__ import annotations

from pathlib import Path

import pytest

from distexp.report.__main__ import main as report
from distexp.runs.record import RunRecord
from distexp.runs.run_dir import RANK_LOG, REPORT
from tests.helpers.runs import run_distexp

WORKERS = 2


def train(folder: Path, *overrides: str) -> tuple[RunRecord, str]:
    """Train with a rank that sleeps 20 ms in each step; return the record and what was printed."""
    done = run_distexp(
        "strategy=ddp",
        "engine._target_=tests.helpers.watch_probe.Probe",
        "model._target_=tests.helpers.slow_rank.build",
        "trusted_packages=[tests]",
        f"cluster.workers_per_node={WORKERS}",
        "train.gradient_accumulation_steps=1",
        "train.measure_after_step=1",
        "train.eval_batch_size=64",
        f"hydra.run.dir={folder}",
        *overrides,
    )
    assert done.returncode == 0, done.stderr
    return RunRecord.read(folder / "record.json"), done.stdout


def observed(folder: Path) -> list[str]:
    """Return what the probe of each rank printed."""
    logs = [RANK_LOG.path(folder, 0, rank).read_text().splitlines() for rank in range(WORKERS)]
    return [line for log in logs for line in log if line.startswith("replaced: ")]


@pytest.mark.slow
def test_without_the_watch_nothing_of_torch_is_replaced_and_no_rank_is_named(tmp_path: Path) -> None:
    """So many steps would name the slow rank."""
    record, printed = train(tmp_path / "run", "measure.slow_ranks=false", "train.max_steps=60")
    assert observed(tmp_path / "run") == ["replaced: [False], hooks: 0"] * WORKERS
    metrics = record.metrics
    assert (metrics.slow_rank_watch, metrics.stragglers) == ("off", None)
    assert [entry["own_ms"] for entry in metrics.step_times_by_rank or []] == [None] * WORKERS
    assert "slow rank" not in printed
    report([str(tmp_path / "run")])
    page = (tmp_path / "run" / REPORT / "results.md").read_text()
    assert "rank 1" not in page.lower()
    assert "slow rank" not in page


@pytest.mark.slow
def test_with_the_watch_each_step_after_the_first_is_watched(tmp_path: Path) -> None:
    record, _ = train(tmp_path / "run", "train.max_steps=6")
    assert observed(tmp_path / "run") == ["replaced: [False, True], hooks: 1"] * WORKERS
    metrics = record.metrics
    assert metrics.slow_rank_watch == "on"
    assert all(entry["own_ms"] is not None for entry in metrics.step_times_by_rank or [])
