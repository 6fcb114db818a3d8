"""Context parallelism gives the training of one worker.

Two or four workers share the tokens of each row. The rows have different lengths and numbers of targets, so that some
slices are padding only. Updates are those of SGD, as in ``test_tensor.py``.
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
from distexp.strategies.parallel.checks import CONTEXT_TYPES
from distexp.system.units import MIB
from tests.helpers.runs import HELPERS
from tests.helpers.zoo import VOCABULARY, check_outcomes, hugging_face, train_all, write_config

COMMON = ("train.optimizer=sgd", "train.momentum=0", "train.learning_rate=0.1", "train.gradient_clipping=0.3")
TWO, WORKERS = "parallel.context=2", "cluster.workers_per_node=4"
CELLS: dict[str, tuple[str, ...]] = {
    "ddp": ("strategy=ddp", TWO),
    "full_shard": ("sharding=full_shard", TWO),
    "ddp_2x2": ("strategy=ddp", TWO, WORKERS),
    "shard_grad_op_2x2": ("sharding=shard_grad_op", TWO, WORKERS),
    "hybrid_2x2": ("sharding=hybrid_shard", "fsdp.replicas=2", TWO, WORKERS),
    "checkpointed_2x2": ("sharding=full_shard", "train.activation_checkpointing=true", TWO, WORKERS),
}
"""Each with accumulation: two micro-batches in a step of four workers, and four in one of two."""

FOUR = {"four": ("sharding=full_shard", "parallel.context=4", WORKERS)}
SMALL: dict[str, Mapping[str, Any]] = {"plain": {}, "chunked": {"train.loss": "chunked"}}
MODELS: dict[str, dict[str, Mapping[str, Any]]] = {
    "gpt_tiny": {
        **SMALL,
        "sdpa": {"model.attention": "sdpa"},
        "tied": {"model.tie_embeddings": True},
        "packed": {"model.attention": "sdpa", "dataset.packing": True},
    },
    "bloom_tiny": {**SMALL, "packed": {"model.attention": "sdpa", "dataset.packing": True}},
}


def cells_of(name: str) -> tuple[str, ...]:
    """Return the cells of a model: all, or those whose slices, groups and shards differ from each other."""
    return (*CELLS, *FOUR) if name == "plain" else ("ddp", "hybrid_2x2", "checkpointed_2x2")


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_own_models_train_as_on_one_worker(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = {**CELLS, **FOUR}
    train_all(tmp_path, (f"model={model}", f"model.vocab_size={VOCABULARY}", *COMMON), MODELS[model], cells, cells_of)
    for name in MODELS[model]:
        check_outcomes(tmp_path, name, *cells_of(name))
    for cell, options in cells.items():
        record = RunRecord.read(next(tmp_path.glob(f"plain-*/{cell}/record.json")))
        alone = RunRecord.read(tmp_path / "plain-1" / "single" / "record.json")
        assert record.built is not None
        assert (record.built.context, record.built.tensor) == (4 if cell == "four" else 2, 1)
        assert record.built.world_size == (4 if WORKERS in options else 2)
        assert record.metrics.padding_share == alone.metrics.padding_share
        assert record.metrics.model_tflops_per_sample == pytest.approx(alone.metrics.model_tflops_per_sample)
    monkeypatch.syspath_prepend(HELPERS)  # of the data set
    for cell in ("ddp", "four"):
        check_predicted_memory(next(tmp_path.glob(f"plain-*/{cell}")))


def check_predicted_memory(run: Path) -> None:
    """Check that the traced step of a run keeps the activations that its workers have kept, a share of those of one."""
    measured = RunRecord.read(run / "record.json").memory["parts"][0]
    trace = trace_step(RunSpec.read(run).config, on_gpu=False)
    curve = replay([replace(event, device="gpu", stream="") for event in trace.events if event.block >= 0]).curve
    largest = {part: max(point.parts[part] for point in curve) / MIB for part in PARTS}
    stored = measured["activations_mib"]  # with the probabilities, which are as wide as the vocabulary
    assert largest["activations"] < stored < largest["activations"] + largest["logits"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_models_of_transformers_train_as_on_one_worker(kind: str, tmp_path: Path) -> None:
    models = {**SMALL, "packed": {"dataset.packing": True}}
    train_all(tmp_path, (*hugging_face(tmp_path, kind), *COMMON), models, CELLS, cells_of)
    for name in models:
        check_outcomes(tmp_path, name, *(cell for cell in cells_of(name) if cell in CELLS))


@pytest.mark.slow
def test_all_named_types_train_as_on_one_worker(tmp_path: Path) -> None:
    models = {kind: {"model.name": str(write_config(tmp_path, kind))} for kind in CONTEXT_TYPES}
    base = (*hugging_face(tmp_path / "base", "llama"), *COMMON)
    train_all(tmp_path, base, models, {"ddp": CELLS["ddp"]})
    for kind in CONTEXT_TYPES:
        check_outcomes(tmp_path, kind, "ddp")
