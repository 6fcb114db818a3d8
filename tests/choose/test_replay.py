"""Replay of searches on the records of exhaustive sweeps: the winner is near the best, for a part of the cost."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from benchmarks.choose import Measured, Noise, SweepCell, main, read_cells, replay
from benchmarks.choose_simulated import LIMITS_GB as SIMULATED_LIMITS_GB
from benchmarks.choose_simulated import LONG_ROWS, MODELS, SPACES, WITH_DEGREES, Model, Space, replays, summarize
from tests.helpers.runs import REPOSITORY

RESULTS = sorted((REPOSITORY / "docs" / "results").glob("choose_*.json"))
LIMITS_GB = (24.0, 40.0, 80.0)
REGRET, SHARE, COMPLETED = 0.05, 0.25, 0.95
"""Most of the speed to lose, most of the GPU time to need, and least share of trials without running out of memory."""

FEW_TRIALS = 6
"""Most trials of any search, also in a part of a sweep of 20 to 24 candidates."""

SHARE_OF_EQUAL, TRIALS_OF_EQUAL = {("gpt_neox_1b", 2): 0.3, ("OPT", 2): 0.4, ("GEMMA", 2): 0.4}, 7
"""Three to five strategies of these sweeps of 20 candidates are within 4 %. A search tries all, and repeats two."""

CPU_REGRET, CPU_SHARE = 0.1, 0.75
"""Equal runs on a busy CPU differ by more than 5 %. Its sweep has only six candidates, of which a search tries most."""


def grid(start_s: float = 4.0) -> SweepCell:
    """Return a sweep with a known best candidate: zero_stage=1 with micro-batch 16."""
    candidates = []
    for number, family in enumerate(("strategy=ddp", "sharding=full_shard", "zero_stage=1", "zero_stage=3")):
        for size in (1, 2, 4, 8, 16, 32, 64):
            step_s = (1.0 + 0.2 * number if number != 2 else 0.9) * (1 + 4 / size + size / 60)
            peak = 2_000.0 + 600.0 * size
            candidates.append(
                Measured(
                    [family, f"train.micro_batch_size={size}"], 2, "completed", step_s, 64 / step_s, peak, start_s,
                    peak * 1.01, step_s * (0.9 + 0.05 * number),
                )
            )  # fmt: skip
    return SweepCell("formula", 2, 20, candidates)


def test_a_search_finds_the_best_of_a_grid_for_less() -> None:
    found = replay(grid())
    assert found is not None
    assert found.regret < REGRET
    assert found.share < 0.5
    assert found.out_of_memory == 0


def test_a_memory_limit_is_kept() -> None:
    for limit in (4.2, 5.0, 9.0):
        found = replay(grid(), limit)
        assert found is not None
        assert found.regret < REGRET
        assert found.out_of_memory == 0
    assert replay(grid(), limit_gb=1.0) is None


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_searches_on_simulated_gpus_reach_the_targets_on_average(space: Space) -> None:
    cells = product(MODELS, SIMULATED_LIMITS_GB)
    found = summarize([each for cell in cells for each in replays(space, *cell, noise=0.02, repeats=10)])
    assert found.regret <= 0.01
    assert found.within >= 0.95
    assert found.share <= SHARE
    assert found.out_of_memory <= 1 - COMPLETED


@pytest.mark.parametrize("model", [MODELS[1], LONG_ROWS], ids=lambda model: model.name)
def test_searches_with_degrees_find_the_best_of_the_enlarged_space(model: Model) -> None:
    found = {limit: replays(WITH_DEGREES, model, limit, noise=0.02, repeats=10) for limit in LIMITS_GB}
    summary = summarize([each for of_limit in found.values() for each in of_limit])
    assert summary.within >= 0.95
    assert summary.share <= SHARE
    winners = [each.winner.overrides for each in found[40.0] if each.winner is not None]
    shares = [any(text.startswith("parallel.") for text in overrides) for overrides in winners]
    # A row of 16,384 tokens does not fit on one of these GPUs. Checkpointing would take longer.
    assert len(shares) == 10
    assert all(shares) if model is LONG_ROWS else not any(shares)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_searches_of_committed_sweeps_are_near_the_best(path: Path) -> None:
    on_gpus = "cpu" not in path.stem
    assert path.stat().st_size <= 300_000
    cells = read_cells(path)
    assert cells
    for cell in cells:
        for limit in LIMITS_GB if on_gpus else (None,):
            found = replay(cell, limit)
            if found is None:
                continue
            assert found.regret <= (REGRET if on_gpus else CPU_REGRET), (cell.name, cell.gpus, limit)
            # A part of a sweep makes the share too large: the search needs as many trials if more is measured.
            equal = (cell.name, cell.gpus) in SHARE_OF_EQUAL
            share = SHARE_OF_EQUAL.get((cell.name, cell.gpus), SHARE) if on_gpus else CPU_SHARE
            assert cell.planned is not None or found.share <= share, (cell.name, cell.gpus, limit)
            assert found.trials <= (TRIALS_OF_EQUAL if equal else FEW_TRIALS)
            assert found.out_of_memory <= (1 - COMPLETED) * found.trials, (cell.name, cell.gpus, limit)


def test_searches_of_measured_gpus_reach_the_targets_under_noise() -> None:
    complete = [cell for path in RESULTS for cell in read_cells(path) if cell.planned is None and not cell.on_cpus]
    found = [
        each
        for cell, limit, seed in product(complete, LIMITS_GB, range(5))
        if (each := replay(cell, limit, Noise(0.02, seed))) is not None
    ]
    summary = summarize(found)
    assert len(complete) >= 6
    assert summary.within >= 0.95
    assert summary.share <= SHARE
    assert summary.out_of_memory <= 1 - COMPLETED


def test_a_failing_dry_run_prints_its_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    with pytest.raises(SystemExit, match=r"formula, 1 workers: .* failed with code 2"):
        main(["sweep", str(out), "formula", "1", "5", "train.nonsense=1"])
    assert "train.nonsense is not a key" in capfd.readouterr().err
    assert not out.exists()
