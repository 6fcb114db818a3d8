"""Tensor parallelism gives the training of one worker, and everything else is refused before a worker starts.

Two workers share the layers; with four there are two such groups. Updates are those of SGD, because AdamW would turn
rounding of a tiny gradient into an update of full size.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distexp.config import ConfigError
from distexp.plan.replay import PARTS, replay
from distexp.plan.trace.tracing import trace_step
from distexp.runs.record import RunRecord, RunSpec
from distexp.strategies.parallel.checks import TENSOR_TYPES
from distexp.system.units import MIB
from tests.helpers.runs import HELPERS, resolve_cell
from tests.helpers.zoo import VOCABULARY, hugging_face, outcomes, train_all, write_config

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


def check(folder: Path, name: str, *cells: str) -> None:
    found = outcomes(folder, name)
    assert found.keys() == {*(cells or cells_of(name))}
    for cell, outcome in found.items():
        assert isinstance(outcome, float), (name, cell, outcome)
        assert outcome < 1e-5, (name, cell)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt_tiny", "bloom_tiny"])
def test_own_models_train_as_on_one_worker(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = {**SMALL, **(GPT_ONLY if model == "gpt_tiny" else {"sdpa": {"model.attention": "sdpa"}})}
    train(tmp_path, (f"model={model}", f"model.vocab_size={VOCABULARY}"), models)
    for name in models:
        check(tmp_path, name)
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
        check(tmp_path, name)


@pytest.mark.slow
def test_all_named_types_train_as_on_one_worker(tmp_path: Path) -> None:
    models = {kind: {"model.name": str(write_config(tmp_path, kind))} for kind in TENSOR_TYPES}
    train(tmp_path, hugging_face(tmp_path / "base", "llama"), models, "full_shard")
    for kind in TENSOR_TYPES:
        check(tmp_path, kind, "full_shard")


BASE = ("model=gpt_tiny", "dataset=synthetic", "strategy=fsdp", "cluster.device=cpu", "cluster.workers_per_node=2")
INSTEAD, BATCH = "parallel.tensor=1", "train.global_batch_size=8"


@pytest.mark.parametrize(
    ("overrides", "message", "fixed"),
    [
        (("strategy=single",), "not supported by strategy=single", ("strategy=fsdp",)),
        (("strategy=deepspeed",), "strategy=deepspeed: choose strategy=fsdp or strategy=ddp", ("strategy=ddp",)),
        (("cluster.workers_per_node=3",), "the workers of a node", ("cluster.workers_per_node=4",)),
        (("cluster.nodes=2", "cluster.workers_per_node=1"), "a node", ("cluster.workers_per_node=2",)),
        (("sharding=hybrid_shard",), "sharding=hybrid_shard needs a mesh of three", ("sharding=full_shard",)),
        (("sharding=no_shard",), "sharding=no_shard needs a mesh of three", ("sharding=shard_grad_op",)),
        (("strategy=ddp", "ddp.static_graph=true"), "ddp.static_graph=True has no", ("ddp.static_graph=false",)),
        (("strategy=ddp", "ddp.communication=bf16"), "=bf16 has no effect", ("ddp.communication=fp32",)),
        (("adapter=lora",), "adapter=lora: use adapter=none", ("adapter=none",)),
        (("offload=true",), "offload=true: use offload=false", ("offload=false",)),
        (("engine=hf_trainer",), "engine=hf_trainer: use engine=native", ("engine=native",)),
        (("train.compile=true",), "train.compile=blocks: use train.compile=false", ("train.compile=false",)),
        (("model.dropout=0.1",), "model.dropout=0.1: use model.dropout=0", ("model.dropout=0",)),
        (("train.micro_batch_size=auto", BATCH), "=auto: use a number", ("train.micro_batch_size=2",)),
        (("scaling=weak_model", "model.tie_embeddings=true"), "use scaling=fixed", ("scaling=fixed",)),
        (("parallel.tensor=4", "cluster.workers_per_node=4", "model.num_heads=2"), "num_heads=2: use", (TWO,)),
        (("model=resnet_tiny",), "model=resnet_tiny, which has no attention to share", (INSTEAD,)),
    ],
)
def test_what_is_not_supported_is_refused_with_what_to_type(
    overrides: tuple[str, ...], message: str, fixed: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        resolve_cell(*BASE, TWO, *overrides)
    assert resolve_cell(*BASE, TWO, *overrides, *fixed)


def test_models_of_transformers_are_checked_before_a_worker_starts(tmp_path: Path) -> None:
    def resolve(kind: str, *overrides: str) -> None:
        hub = ("cluster.device=cpu", "dataset=synthetic", "strategy=fsdp", *hugging_face(tmp_path / kind, kind))
        resolve_cell(*hub, *overrides)

    with pytest.raises(ConfigError, match=r"\(gpt2\), because no plan .* use parallel.tensor=1"):
        resolve("gpt2", TWO, "cluster.workers_per_node=2")
    with pytest.raises(ConfigError, match=r"num_key_value_heads of the model=2: use parallel\.tensor=2"):
        resolve("llama", "parallel.tensor=4", "cluster.workers_per_node=4")
    resolve("mistral", *FOUR)


@pytest.mark.parametrize("command", ["choose", "forecast"])
def test_commands_without_a_model_of_the_collectives_refuse(command: str) -> None:
    with pytest.raises(ConfigError, match=f"not supported by distexp {command}"):
        resolve_cell(*BASE, TWO, f"command={command}")


def test_the_global_batch_counts_workers_with_their_own_rows() -> None:
    config = resolve_cell(*BASE, *FOUR, "train.global_batch_size=32", "train.micro_batch_size=2")
    assert (config.data_parallel, config.train.gradient_accumulation_steps) == (2, 8)


def test_fast_kernels_keep_what_shared_layers_support() -> None:
    train_config = resolve_cell(*BASE, TWO, "kernels=fast").train
    assert (train_config.compiled, train_config.loss, train_config.logits) == ("none", "full", "targets")
