"""Tests of the trials of ``distexp choose`` on Slurm, with fake Slurm commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from distexp.choose.trials import SearchState
from distexp.exceptions import SweepFailedError
from distexp.launch import run_dirs
from distexp.launch.slurm.slurm_sweep import SlurmTrials
from distexp.runs.run_dir import CHOICE
from distexp.system.files import read_json
from tests.helpers.fake_slurm import calls, fake_slurm
from tests.helpers.searches import run_search

SEARCH = (
    "choose.space=['strategy=ddp,fsdp','sharding=full_shard','offload=false','train.micro_batch_size=4']",
    *("kernels=reference", "train.activation_checkpointing=false", "plan.gpu=a100-80gb"),
    *("cluster=slurm", "cluster.workers_per_node=2", "choose.budget_min=1"),
)


def test_a_batch_of_trials_is_one_array(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm forgets these jobs, so the trials fail, and the search ends with the first batch.

    They have waited for an hour, which costs no GPU time, because they never started.
    """
    wait = f"touch -d '1 hour ago' {tmp_path}/search/*/spec.json"
    monkeypatch.setenv("PATH", fake_slurm(tmp_path / "bin", sbatch=wait)["PATH"])
    with pytest.raises(SweepFailedError):
        run_search(tmp_path / "search", SlurmTrials(100, []), *SEARCH)
    assert len(calls(tmp_path / "bin", "sbatch")) == 1
    (script,) = (tmp_path / "search" / "slurm").glob("array*.sbatch")
    assert "--array=0-1" in script.read_text()
    stored = SearchState.open(tmp_path / "search", stored_command(tmp_path / "search"))
    assert [trial.status for trial in stored.trials] == ["failed", "failed"]
    assert stored.gpu_seconds == 0


def test_an_array_that_slurm_refused_is_submitted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse = f"test -e {tmp_path}/repaired || {{ echo 'sbatch: error: Invalid partition' >&2; exit 1; }}"
    monkeypatch.setenv("PATH", fake_slurm(tmp_path / "bin", sbatch=refuse)["PATH"])
    search = tmp_path / "search"
    for expected in ("invalid", "failed"):
        with pytest.raises(SweepFailedError):
            run_search(search, SlurmTrials(100, []), *SEARCH)
        found = SearchState.open(search, stored_command(search)).trials
        assert [trial.status for trial in found] == [expected] * 2
        (tmp_path / "repaired").touch()
    assert sorted(run_dirs.latest(search)) == [0, 1]


def stored_command(search: Path) -> list[str]:
    """Return the command that a search is about."""
    command: list[str] = read_json(search / CHOICE)["command"]
    return command
