"""Custom models that the trainer or a strategy treats in a special way."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from distexp.runs.record import RunRecord
from tests.helpers.runs import HELPERS, REPOSITORY, run_distexp

CUSTOM = (
    "model=resnet_tiny",
    "trusted_packages=[flat_model]",
    "dataset.train_size=32",
    "dataset.eval_size=8",
    "train.max_steps=2",
    "cluster.device=cpu",
)


def run_custom(*overrides: str, cwd: Path) -> tuple[RunRecord, subprocess.CompletedProcess[str]]:
    """Run a model of ``flat_model`` for two steps."""
    paths = {"PYTHONPATH": f"{HELPERS}:{REPOSITORY}"}
    done = run_distexp(*CUSTOM, *overrides, cwd=cwd, env=paths)
    (path,) = cwd.glob("multirun_outputs/distexp/*/0/record.json")
    return RunRecord.read(path), done


@pytest.mark.parametrize("sharding", ["full_shard", pytest.param("shard_grad_op", marks=pytest.mark.slow)])
def test_fsdp_shards_a_model_without_blocks_as_one_unit(sharding: str, tmp_path: Path) -> None:
    overrides = ("model._target_=flat_model.build", f"sharding={sharding}", "cluster.workers_per_node=2")
    record, done = run_custom(*overrides, cwd=tmp_path)
    assert record.status == "completed", done.stdout
    assert record.built is not None
    assert record.built.sharded_units == 1
    assert "FlatModel has no repeated blocks, so FSDP shards it as one unit" in " ".join(done.stdout.split())


def test_a_model_with_other_argument_names_is_refused(tmp_path: Path) -> None:
    record, done = run_custom("model._target_=flat_model.build_renamed", "strategy=single", cwd=tmp_path)
    assert done.returncode == 1
    assert record.error is not None
    assert "RenamedInputs.forward(pixels) cannot take the inputs of the dataset" in record.error.message
    assert "its arguments must be images" in record.error.message
    assert "Traceback" not in done.stdout


@pytest.mark.parametrize("strategy", ["strategy=fsdp", "strategy=single train.compute_weights=step"])
def test_a_buffer_that_does_not_fit_cast_weights_is_named(strategy: str, tmp_path: Path) -> None:
    bf16 = ("model._target_=flat_model.build_centered", "precision=bf16", "cluster.workers_per_node=1")
    record, done = run_custom(*bf16, *strategy.split(), cwd=tmp_path)
    assert done.returncode == 1
    assert record.error is not None
    assert "the weights are cast to bf16, but not the buffers of the model (mean)" in record.error.message
    assert "Traceback" not in done.stdout
