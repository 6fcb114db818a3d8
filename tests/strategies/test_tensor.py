"""Tensor parallelism gives the training of one worker.

Two workers share the layers; with four there are two such groups. Updates are those of SGD, because AdamW would turn
rounding of a tiny gradient into an update of full size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from distexp.plan.replay import PARTS, replay
from distexp.plan.trace.tracing import trace_step
from distexp.runs.record import RunRecord, RunSpec
from distexp.strategies.parallel.checks import TENSOR_TYPES
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
TWO, FOUR = "parallel.tensor=2", ("parallel.tensor=2", "cluster.workers_per_node=4")
CELLS: dict[str, tuple[str, ...]] = {
    "full_shard": ("sharding=full_shard", TWO),
    "ddp": ("strategy=ddp", TWO),
    "full_shard_2x2": ("sharding=full_shard", *FOUR),
    "shard_grad_op_2x2": ("sharding=shard_grad_op", *FOUR),
    "ddp_2x2": ("strategy=ddp", *FOUR),
    "checkpointed_2x2": ("sharding=full_shard", "train.activation_checkpointing=true", *FOUR),
    "units_2x2": ("sharding=full_shard", "fsdp.blocks_per_unit=2", *FOUR),
    "no_shard_2x2": ("sharding=no_shard", *FOUR),
    "hybrid_2x2x2": ("sharding=hybrid_shard", "fsdp.replicas=2", TWO, "cluster.workers_per_node=8"),
}
"""With accumulation: two micro-batches in a step of four workers, and four in one of two."""

WRAPPERS = {"ddp": "replicate", "shard_grad_op": "fully_shard(reshard_after_forward=False)"}
ODD = VOCABULARY + 1
SMALL: dict[str, Mapping[str, Any]] = {
    "plain": {},
    "odd_vocabulary": {"model.vocab_size": ODD},  # so that each worker has the whole embedding
    "odd_length": {"dataset.max_length": 23},  # so that each worker has all tokens
    "chunked": {"train.loss": "chunked"},
    "targets": {"train.logits": "targets"},
}
OWN: dict[str, Mapping[str, Mapping[str, Any]]] = {
    "gpt_tiny": {
        **SMALL,
        "few": {},
        "few_tied": {"model.tie_embeddings": True},
        "tied": {"model.tie_embeddings": True},
        "tied_odd": {"model.tie_embeddings": True, "model.vocab_size": ODD},
    },
    "bloom_tiny": {**SMALL, "sdpa": {"model.attention": "sdpa"}},
}
LORA: dict[str, Mapping[str, Any]] = {
    name: {
        **{"adapter.name": "lora", "adapter.targets": ["q_proj", "o_proj", "up_proj", "down_proj"]},
        **{"train.learning_rate": 2.0, "train.warmup_steps": 0, "train.save_model": True, "dataset.max_length": length},
    }
    for name, length in (("lora", 24), ("lora_odd", 23))
}
"""Layers that are cut by their outputs and by their inputs. A large rate lets B, which is 0 first, reach A."""
OTHERS = {
    kind: {name: values for name, values in SMALL.items() if name != "odd_vocabulary"} for kind in ("llama", "qwen3")
}


def cells_of(name: str) -> tuple[str, ...]:
    """Return the cells of a model: all, or those whose layers, groups and blocks differ from each other."""
    return tuple(CELLS) if name == "plain" else FEW.get(name, ("full_shard", "ddp_2x2", "checkpointed_2x2"))


FEW = {
    "few": ("full_shard", "ddp_2x2", "shard_grad_op_2x2", "checkpointed_2x2"),
    **{"few_tied": ("ddp_2x2",), "lora": ("full_shard", "ddp_2x2"), "lora_odd": ("full_shard",)},
}
"""Cells of the variants that are not left to a release. ``test_pipeline.py`` has one with replicas of shards."""

HALVES = Halves({**OWN, **OTHERS, "llama": {**OTHERS["llama"], **LORA}}, {"gpt_tiny": tuple(FEW), "llama": LORA})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Return a function that trains a variant with all others of its half, and returns the folder of its model."""

    def write(folder: Path, model: str, variants: Variants) -> None:
        own = (f"model={model}", f"model.vocab_size={VOCABULARY}")
        base = own if model in OWN else hugging_face(folder, model)
        write_cells(folder, (*base, *COMMON), variants, CELLS, cells_of)

    return HALVES.runs(tmp_path_factory.mktemp, write)


@pytest.mark.parametrize(("model", "names"), HALVES.cases(*OWN))
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
    """Check what the cells of a variant have built, and the memory that was predicted for them."""
    for cell in cells_of(variant):
        options = CELLS[cell]
        built = RunRecord.read(next(folder.glob(f"{variant}-*/{cell}/record.json"))).built
        assert built is not None
        groups = int(options[-1].rpartition("=")[2]) // 2 if len(options) > 2 else 1
        name = cell.partition("_2x2")[0]
        assert built.wrapper == WRAPPERS.get(name, "fully_shard(reshard_after_forward=True)")
        assert (built.tensor, built.world_size) == (2, 2 * groups)
        replicas = {"ddp": groups, "no_shard": groups, "hybrid": 2}.get(name, 1)
        assert built.mesh == [replicas, groups // replicas]
    predicted = ("ddp_2x2", "shard_grad_op_2x2")
    for cell in predicted if variant == "few" else ("ddp", "full_shard_2x2", "hybrid_2x2x2"):
        check_predicted_memory(next(folder.glob(f"{variant}-*/{cell}")))


def check_predicted_memory(run: Path) -> None:
    """Check that the traced step of a run keeps what its workers have kept. Blocks are multiples of 512 bytes."""
    measured = RunRecord.read(run / "record.json").memory["parts"][0]
    trace = trace_step(RunSpec.read(run).config, on_gpu=False)
    curve = replay([replace(event, device="gpu", stream="") for event in trace.events if event.block >= 0]).curve
    largest = {part: max(point.parts[part] for point in curve) / MIB for part in PARTS}
    assert largest["parameters"] == pytest.approx(measured["parameters_mib"], rel=0.08)
    stored = measured["activations_mib"]  # with the probabilities, which are as wide as the vocabulary
    assert largest["activations"] < stored < largest["activations"] + largest["logits"]


@pytest.mark.parametrize(("kind", "names"), HALVES.cases(*OTHERS))
def test_models_of_transformers_train_as_on_one_worker(
    kind: str, names: tuple[str, ...], runs: Callable[[str, str], Path]
) -> None:
    for name in names:
        check_outcomes(runs(kind, name), name, *cells_of(name))
    if "lora" in names:
        check_adapters(runs(kind, "lora"))


def check_adapters(folder: Path) -> None:
    """Check that the workers have trained and saved the adapters that one worker has."""
    saved: list[list[dict[str, Tensor]]] = []
    for name in LORA:
        saved.append([load_file(path) for path in sorted(folder.glob(f"{name}-*/*/model/adapter_model.safetensors"))])
        first, *others = saved[-1]
        assert len(others) == len(cells_of(name))
        assert all(tensor.any() for tensor in first.values())
        for other in others:
            torch.testing.assert_close(other, first, rtol=0, atol=1e-5)
    names = {key.split(".")[-3] for key in saved[0][0]}
    assert names == {"q_proj", "o_proj", "down_proj", "up_proj"}


@pytest.mark.release
def test_all_named_types_train_as_on_one_worker(tmp_path: Path) -> None:
    check_types(tmp_path, TENSOR_TYPES, {"full_shard": CELLS["full_shard"]}, *COMMON)
