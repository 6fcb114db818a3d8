"""Test of the strategies whose collectives do nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from distexp.runs.record import RunRecord
from distexp.runs.run_dir import RECORD
from tests.helpers.runs import REPOSITORY, run_distexp

SHORT = ("model=bloom_tiny", "train.max_steps=3", "cluster.device=cpu", "cluster.workers_per_node=2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "name"), [("ddp", "SilentDDP"), pytest.param("fsdp", "SilentFSDP", marks=pytest.mark.release)]
)
def test_workers_train_without_exchanging_gradients(strategy: str, name: str, tmp_path: Path) -> None:
    losses = []
    for target in (f"distexp.strategies.{strategy}.{strategy.upper()}", f"benchmarks.without_collectives.{name}"):
        folder = tmp_path / target
        arguments = (f"strategy={strategy}", f"strategy._target_={target}", "trusted_packages=[benchmarks]")
        done = run_distexp(*SHORT, *arguments, f"hydra.run.dir={folder}", env={"PYTHONPATH": str(REPOSITORY)})
        assert done.returncode == 0, done.stdout + done.stderr
        losses.append(RunRecord.read(folder / RECORD).metrics.train_losses)
    assert losses[0] != losses[1], "the first run exchanges gradients, the second one does not"
