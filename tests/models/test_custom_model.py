"""Custom models that the trainer or a strategy treats in a special way."""

from __future__ import annotations

import json

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
CENTERED = ("model._target_=flat_model.build_centered", "precision=bf16", "cluster.workers_per_node=1")
CELLS = {
    "full_shard": ("model._target_=flat_model.build", "sharding=full_shard", "cluster.workers_per_node=2"),
    "shard_grad_op": ("model._target_=flat_model.build", "sharding=shard_grad_op", "cluster.workers_per_node=2"),
    "renamed": ("model._target_=flat_model.build_renamed", "strategy=single"),
    "frozen": ("model._target_=flat_model.build_frozen", "strategy=single"),
    "centered_fsdp": (*CENTERED, "strategy=fsdp"),
    "centered_step": (*CENTERED, "strategy=single", "train.compute_weights=step"),
}
"""Models of ``flat_model``, each with what the test of it needs."""


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, RunRecord], str]:
    """Run all cells for two steps in one sweep; return their records by name, and the output."""
    folder = tmp_path_factory.mktemp("custom")
    cells = f"sweep.cells={json.dumps([*CELLS.values()])}"
    paths = {"PYTHONPATH": f"{HELPERS}:{REPOSITORY}"}
    done = run_distexp("--multirun", *CUSTOM, cells, "hydra.sweep.dir=out", cwd=folder, env=paths)
    assert done.returncode == 1, done.stdout + done.stderr
    records = [RunRecord.read(folder / "out" / str(number) / "record.json") for number in range(len(CELLS))]
    return dict(zip(CELLS, records, strict=True)), " ".join(done.stdout.split())


@pytest.mark.parametrize("cell", ["full_shard", "shard_grad_op"])
def test_fsdp_shards_a_model_without_blocks_as_one_unit(cell: str, sweep: tuple[dict[str, RunRecord], str]) -> None:
    record = sweep[0][cell]
    assert record.status == "completed"
    assert record.built is not None
    assert record.built.sharded_units == 1
    assert "FlatModel has no repeated blocks, so FSDP shards it as one unit" in sweep[1]


def test_a_model_with_other_argument_names_is_refused(sweep: tuple[dict[str, RunRecord], str]) -> None:
    error = sweep[0]["renamed"].error
    assert error is not None
    assert "RenamedInputs.forward(pixels) cannot take the inputs of the dataset" in error.message
    assert "its arguments must be images" in error.message
    assert "Traceback" not in sweep[1]


def test_a_model_without_a_weight_to_train_is_refused(sweep: tuple[dict[str, RunRecord], str]) -> None:
    error = sweep[0]["frozen"].error
    assert error is not None
    assert "FlatModel of model=resnet_tiny has no weight to train: set requires_grad=True for" in error.message


@pytest.mark.parametrize("cell", ["centered_fsdp", "centered_step"])
def test_a_buffer_that_does_not_fit_cast_weights_is_named(cell: str, sweep: tuple[dict[str, RunRecord], str]) -> None:
    error = sweep[0][cell].error
    assert error is not None
    assert "the weights are cast to bf16, but not the buffers of the model (mean)" in error.message
    assert "Traceback" not in sweep[1]
