"""Context parallelism gives the training of one worker.

Two or four workers share the tokens of each row. The rows have different lengths and numbers of targets, so that some
slices are padding only. Updates are those of SGD, as in ``test_tensor.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from tests.helpers.zoo import (
    VOCABULARY,
    Halves,
    Variants,
    check_outcomes,
    check_types,
    hugging_face,
    write_cells,
)

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

BOTH = {
    "ddp_tensor": ("strategy=ddp", TWO, "parallel.tensor=2", WORKERS),
    "full_shard_tensor": ("sharding=full_shard", TWO, "parallel.tensor=2", WORKERS),
}
"""Workers that share tokens with some of the others, and matrices with the rest."""

FOUR = {"four": ("sharding=full_shard", "parallel.context=4", WORKERS), **BOTH}
SMALL: dict[str, Mapping[str, Any]] = {"plain": {}, "chunked": {"train.loss": "chunked"}}
MODELS: dict[str, dict[str, Mapping[str, Any]]] = {
    "gpt_tiny": {
        **SMALL,
        "few": {},
        "few_packed": {"model.attention": "sdpa", "dataset.packing": True},
        "sdpa": {"model.attention": "sdpa"},
        "tied": {"model.tie_embeddings": True},
        "packed": {"model.attention": "sdpa", "dataset.packing": True},
    },
    "bloom_tiny": {**SMALL, "packed": {"model.attention": "sdpa", "dataset.packing": True}},
}


OTHERS = ("llama", "mistral")
OTHER_VARIANTS: dict[str, Mapping[str, Any]] = {
    **SMALL,
    **{name: {"dataset.packing": True} for name in ("few_packed", "packed")},
}


def cells_of(name: str) -> tuple[str, ...]:
    """Return the cells of a model: all, or those whose slices, groups and shards differ from each other."""
    return (*CELLS, *FOUR) if name == "plain" else FEW.get(name, ("ddp", "hybrid_2x2", "checkpointed_2x2"))


FEW = {"few": ("ddp", "hybrid_2x2", "checkpointed_2x2", "four", "full_shard_tensor"), "few_packed": ("ddp",)}
"""Cells of the variants that are not left to a release."""


HALVES = Halves({**MODELS, **dict.fromkeys(OTHERS, OTHER_VARIANTS)}, {"gpt_tiny": tuple(FEW), "llama": ("few_packed",)})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Return a function that trains a variant with all others of its half, and returns the folder of its model."""

    def write(folder: Path, model: str, variants: Variants) -> None:
        if model in MODELS:
            base, cells = (f"model={model}", f"model.vocab_size={VOCABULARY}"), {**CELLS, **FOUR}
        else:
            base, cells = hugging_face(folder, model), CELLS
        write_cells(folder, (*base, *COMMON), variants, cells, cells_of)

    return HALVES.runs(tmp_path_factory.mktemp, write)


@pytest.mark.parametrize(("model", "names"), HALVES.cases(*MODELS))
def test_own_models_train_as_on_one_worker(
    model: str, names: tuple[str, ...], runs: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = runs(model, names[0])
    for name in names:
        check_outcomes(folder, name, *cells_of(name))
    for name in {"plain", "few"}.intersection(names):
        monkeypatch.syspath_prepend(HELPERS)  # of the data set
        check_built(folder, name)


def check_built(folder: Path, variant: str) -> None:
    """Check what the cells of a variant have built and measured, and the memory that was predicted for them."""
    for cell in cells_of(variant):
        options = {**CELLS, **FOUR}[cell]
        record = RunRecord.read(next(folder.glob(f"{variant}-*/{cell}/record.json")))
        alone = RunRecord.read(folder / f"{variant}-1" / "single" / "record.json")
        assert record.built is not None
        built = record.built
        assert (built.context, built.tensor) == (4 if cell == "four" else 2, 2 if cell in BOTH else 1)
        assert built.world_size == (4 if WORKERS in options else 2)
        if cell in BOTH:
            assert built.mesh == ([2, 1] if cell == "ddp_tensor" else [1, 2])
        assert record.metrics.padding_share == alone.metrics.padding_share
        assert record.metrics.model_tflops_per_sample == pytest.approx(alone.metrics.model_tflops_per_sample)
    for cell in ("four", "full_shard_tensor") if variant == "few" else ("ddp", "four", *BOTH):
        check_predicted_memory(next(folder.glob(f"{variant}-*/{cell}")))


def check_predicted_memory(run: Path) -> None:
    """Check that the traced step of a run keeps the activations that its workers have kept, a share of those of one."""
    measured = RunRecord.read(run / "record.json").memory["parts"][0]
    trace = trace_step(RunSpec.read(run).config, on_gpu=False)
    curve = replay([replace(event, device="gpu", stream="") for event in trace.events if event.block >= 0]).curve
    largest = {part: max(point.parts[part] for point in curve) / MIB for part in PARTS}
    stored = measured["activations_mib"]  # with the probabilities, which are as wide as the vocabulary
    assert largest["activations"] < stored < largest["activations"] + largest["logits"]


@pytest.mark.parametrize(("kind", "names"), HALVES.cases(*OTHERS))
def test_models_of_transformers_train_as_on_one_worker(
    kind: str, names: tuple[str, ...], runs: Callable[[str, str], Path]
) -> None:
    for name in names:
        check_outcomes(runs(kind, name), name, *(cell for cell in cells_of(name) if cell in CELLS))


@pytest.mark.release
def test_a_model_with_as_many_keys_as_queries_shares_tokens_and_matrices(tmp_path: Path) -> None:
    check_types(tmp_path, ["phi"], BOTH, *COMMON)


@pytest.mark.release
def test_all_named_types_train_as_on_one_worker(tmp_path: Path) -> None:
    check_types(tmp_path, CONTEXT_TYPES, {"ddp": CELLS["ddp"]}, *COMMON)
