"""Expert parallelism gives the training of one worker, and everything else is refused before a worker starts.

The workers have different rows, whose tokens choose the experts unevenly. Updates are those of SGD, as in
``test_tensor.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.zoo import hugging_face, outcomes, train_all, write_config

COMMON = ("train.optimizer=sgd", "train.momentum=0", "train.learning_rate=0.1", "train.gradient_clipping=0.3")
TWO, WORKERS = "parallel.expert=2", "cluster.workers_per_node=4"
CELLS: dict[str, tuple[str, ...]] = {
    "ddp": ("strategy=ddp", TWO),
    "full_shard": ("sharding=full_shard", TWO),
    "ddp_2x2": ("strategy=ddp", TWO, WORKERS),
    "full_shard_2x2": ("sharding=full_shard", TWO, WORKERS),
    "shard_grad_op_2x2": ("sharding=shard_grad_op", TWO, WORKERS),
    "checkpointed_2x2": ("sharding=full_shard", "train.activation_checkpointing=true", TWO, WORKERS),
    "four": ("sharding=full_shard", "parallel.expert=4", WORKERS),
    "ddp_four": ("strategy=ddp", "parallel.expert=4", WORKERS),
}
"""Those of two workers have two micro-batches in a step."""


def check(folder: Path, name: str, *cells: str) -> None:
    found = outcomes(folder, name)
    assert found.keys() == {*cells}
    print(name, found)
    for cell, outcome in found.items():
        assert isinstance(outcome, float), (name, cell, outcome)
        assert outcome < 1e-5, (name, cell)


@pytest.mark.slow
def test_training(tmp_path: Path) -> None:
    kinds = ("mixtral_router", "qwen3_moe_router", "olmoe")
    models: dict[str, Mapping[str, Any]] = {kind: {"model.name": str(write_config(tmp_path, kind))} for kind in kinds}
    train_all(tmp_path, (*hugging_face(tmp_path / "base", "mixtral"), *COMMON), models, CELLS)
    for kind in kinds:
        check(tmp_path, kind, *CELLS)
