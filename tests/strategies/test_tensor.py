"""Tensor parallelism gives the training of one worker.

Two workers share the layers; with four there are two such groups. Updates are those of SGD, because AdamW would turn
rounding of a tiny gradient into an update of full size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distexp.plan.replay import PARTS, replay
from distexp.plan.trace.tracing import trace_step
from distexp.runs.record import RunRecord, RunSpec
from distexp.strategies.parallel.checks import TENSOR_TYPES
from distexp.system.units import MIB
from tests.helpers.runs import HELPERS
from tests.helpers.zoo import VOCABULARY, check_outcomes, hugging_face, train_all, write_config

COMMON = ("train.optimizer=sgd", "train.momentum=0", "train.learning_rate=0.1", "train.gradient_clipping=0.3")
TWO, FOUR = "parallel.tensor=2", ("parallel.tensor=2", "cluster.workers_per_node=4")
CELLS: dict[str, tuple[str, ...]] = {
    "full_shard": ("sharding=full_shard", TWO),
    "ddp": ("strategy=ddp", TWO),
    "full_shard_2x2": ("sharding=full_shard", *FOUR),
    "shard_grad_op_2x2": ("sharding=shard_grad_op", *FOUR),
    "ddp_2x2": ("strategy=ddp", *FOUR),
    "checkpointed_2x2": ("sharding=full_shard", "train.activation_checkpointing=true", *FOUR),
    "units_2x2": ("sharding=full_shard", "fsdp.blocks_per_unit=2", *FOUR),
}
"""Each with accumulation: two micro-batches in a step of four workers, and four in one of two."""

WRAPPERS = {"ddp": "replicate", "shard_grad_op": "fully_shard(reshard_after_forward=False)"}
ODD = VOCABULARY + 1
SMALL: dict[str, Mapping[str, Any]] = {
    "plain": {},
    "odd_vocabulary": {"model.vocab_size": ODD},  # so that each worker has the whole embedding
    "odd_length": {"dataset.max_length": 23},  # so that each worker has all tokens
    "chunked": {"train.loss": "chunked"},
    "targets": {"train.logits": "targets"},
}
GPT_ONLY: dict[str, Mapping[str, Any]] = {
    "tied": {"model.tie_embeddings": True},
    "tied_odd": {"model.tie_embeddings": True, "model.vocab_size": ODD},
}


def cells_of(name: str) -> tuple[str, ...]:
    """Return the cells of a model: all, or those whose layers, groups and blocks differ from each other."""
    return tuple(CELLS) if name == "plain" else ("full_shard", "ddp_2x2", "checkpointed_2x2")


def train(folder: Path, base: tuple[str, ...], models: Mapping[str, Mapping[str, Any]], *cells: str) -> None:
    chosen = None if cells else cells_of
    train_all(folder, (*base, *COMMON), models, {cell: CELLS[cell] for cell in cells or CELLS}, chosen)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt_tiny", "bloom_tiny"])
def test_own_models_train_as_on_one_worker(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = {**SMALL, **(GPT_ONLY if model == "gpt_tiny" else {"sdpa": {"model.attention": "sdpa"}})}
    train(tmp_path, (f"model={model}", f"model.vocab_size={VOCABULARY}"), models)
    for name in models:
        check_outcomes(tmp_path, name, *cells_of(name))
    for cell, options in CELLS.items():
        built = RunRecord.read(next(tmp_path.glob(f"plain-*/{cell}/record.json"))).built
        assert built is not None
        replicas = 2 if FOUR[1] in options else 1
        name = cell.removesuffix("_2x2")
        assert built.wrapper == WRAPPERS.get(name, "fully_shard(reshard_after_forward=True)")
        assert (built.tensor, built.world_size) == (2, 2 * replicas)
        assert built.mesh == ([replicas, 1] if name == "ddp" else [1, replicas])
    monkeypatch.syspath_prepend(HELPERS)  # of the data set
    for cell in ("ddp", "full_shard_2x2", "shard_grad_op_2x2"):
        check_predicted_memory(next(tmp_path.glob(f"plain-*/{cell}")))


def check_predicted_memory(run: Path) -> None:
    """Check that the traced step of a run keeps what its workers have kept. Blocks are multiples of 512 bytes."""
    measured = RunRecord.read(run / "record.json").memory["parts"][0]
    trace = trace_step(RunSpec.read(run).config, on_gpu=False)
    curve = replay([replace(event, device="gpu", stream="") for event in trace.events if event.block >= 0]).curve
    largest = {part: max(point.parts[part] for point in curve) / MIB for part in PARTS}
    assert largest["parameters"] == pytest.approx(measured["parameters_mib"], rel=0.08)
    stored = measured["activations_mib"]  # with the probabilities, which are as wide as the vocabulary
    assert largest["activations"] < stored < largest["activations"] + largest["logits"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_models_of_transformers_train_as_on_one_worker(kind: str, tmp_path: Path) -> None:
    models = {name: values for name, values in SMALL.items() if name != "odd_vocabulary"}
    train(tmp_path, hugging_face(tmp_path, kind), models)
    for name in models:
        check_outcomes(tmp_path, name, *cells_of(name))


@pytest.mark.slow
def test_all_named_types_train_as_on_one_worker(tmp_path: Path) -> None:
    models = {kind: {"model.name": str(write_config(tmp_path, kind))} for kind in TENSOR_TYPES}
    train(tmp_path, hugging_face(tmp_path / "base", "llama"), models, "full_shard")
    for kind in TENSOR_TYPES:
        check_outcomes(tmp_path, kind, "full_shard")
