"""Tests of the trials of ``distexp choose`` on Slurm, with fake Slurm commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from distexp.exceptions import SweepFailedError
from distexp.launch.slurm.choose import SlurmTrials
from tests.helpers.fake_slurm import calls, fake_slurm
from tests.helpers.searches import run_search

SPACE = "choose.space=['strategy=ddp,fsdp','sharding=full_shard','offload=false','train.micro_batch_size=4']"


def test_a_batch_of_trials_is_one_array(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm forgets these jobs, so the trials fail, and the search ends with the first batch."""
    monkeypatch.setenv("PATH", fake_slurm(tmp_path / "bin")["PATH"])
    fixed = ("kernels=reference", "train.activation_checkpointing=false", "plan.gpu=a100-80gb")
    cluster = ("cluster=slurm", "cluster.workers_per_node=2", "choose.budget_min=1")
    with pytest.raises(SweepFailedError):
        run_search(tmp_path / "search", SlurmTrials(100, []), SPACE, *fixed, *cluster)
    assert len(calls(tmp_path / "bin", "sbatch")) == 1
    (script,) = (tmp_path / "search" / "slurm").glob("array*.sbatch")
    assert "--array=0-1" in script.read_text()
