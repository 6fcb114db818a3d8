"""Context parallelism gives the training of one worker, and everything else is refused before a worker starts.

Two or four workers share the tokens of each row. The rows have different lengths and numbers of targets, so that some
slices are padding only. Updates are those of SGD, as in ``test_tensor.py``.
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
from distexp.strategies.parallel.checks import CONTEXT_TYPES
from distexp.system.units import MIB
from tests.helpers.runs import HELPERS, resolve_cell
from tests.helpers.zoo import VOCABULARY, hugging_face, outcomes, train_all, write_config

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


def check(folder: Path, name: str, *cells: str) -> None:
    found = outcomes(folder, name)
    assert found.keys() == {*cells}
    for cell, outcome in found.items():
        assert isinstance(outcome, float), (name, cell, outcome)
        assert outcome < 1e-5, (name, cell)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_own_models_train_as_on_one_worker(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = {**CELLS, **FOUR}
    train_all(tmp_path, (f"model={model}", f"model.vocab_size={VOCABULARY}", *COMMON), MODELS[model], cells, cells_of)
    for name in MODELS[model]:
        check(tmp_path, name, *cells_of(name))
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
        check(tmp_path, name, *(cell for cell in cells_of(name) if cell in CELLS))


@pytest.mark.slow
def test_all_named_types_train_as_on_one_worker(tmp_path: Path) -> None:
    models = {kind: {"model.name": str(write_config(tmp_path, kind))} for kind in CONTEXT_TYPES}
    base = (*hugging_face(tmp_path / "base", "llama"), *COMMON)
    train_all(tmp_path, base, models, {"ddp": CELLS["ddp"]})
    for kind in CONTEXT_TYPES:
        check(tmp_path, kind, "ddp")


BASE = ("model=gpt_tiny", "dataset=synthetic", "strategy=fsdp", "cluster.device=cpu", "cluster.workers_per_node=2")
INSTEAD, BATCH = "parallel.context=1", "train.global_batch_size=8"


@pytest.mark.parametrize(
    ("overrides", "message", "fixed"),
    [
        (("strategy=single",), "not supported by strategy=single", ("strategy=fsdp",)),
        (("strategy=deepspeed",), "strategy=deepspeed: choose strategy=fsdp or strategy=ddp", ("strategy=ddp",)),
        (("cluster.workers_per_node=3",), "the workers of a node", ("cluster.workers_per_node=4",)),
        (
            ("parallel.tensor=2", "cluster.workers_per_node=4"),
            "use parallel.context=1, or parallel.tensor=1 parallel.context=4",
            ("parallel.tensor=1", "parallel.context=4"),
        ),
        (("adapter=lora",), "adapter=lora: use adapter=none", ("adapter=none",)),
        (("offload=true",), "offload=true: use offload=false", ("offload=false",)),
        (("engine=hf_trainer",), "engine=hf_trainer: use engine=native", ("engine=native",)),
        (("train.compile=true",), "train.compile=blocks: use train.compile=false", ("train.compile=false",)),
        (("model.dropout=0.1",), "model.dropout=0.1: use model.dropout=0", ("model.dropout=0",)),
        (("train.micro_batch_size=auto", BATCH), "=auto: use a number", ("train.micro_batch_size=2",)),
        (("train.logits=targets",), "=targets: use train.logits=all", ("train.logits=all",)),
        (("dataset.max_length=33",), "max_length=33: use dataset.max_length=32", ("dataset.max_length=32",)),
        (("model.attention=flex",), "=flex of model=gpt_tiny: use model.attention=sdpa", ("model.attention=sdpa",)),
        (
            ("model=bloom_tiny", "model.attention=eager"),
            "=eager of model=bloom_tiny: use model.attention=sdpa",
            ("model.attention=auto",),
        ),
        (("parallel.context=4", "cluster.workers_per_node=4", "model.num_heads=2"), "num_heads=2: use", (TWO,)),
        (("model=resnet_tiny", "dataset=tinyimagenet_sample"), "which has no attention to share", (INSTEAD,)),
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
        resolve_cell(*hub, TWO, WORKERS, *overrides)

    with pytest.raises(ConfigError, match=r"\(mamba\), because no training .* use parallel.context=1"):
        resolve("mamba")
    with pytest.raises(ConfigError, match=r"num_key_value_heads of the model=2: use parallel\.context=2"):
        resolve("llama", "parallel.context=4")
    with pytest.raises(ConfigError, match=r"model\.attention=eager of model=.*: use model\.attention=sdpa"):
        resolve("qwen2", "model.attention=eager")
    resolve("mistral")


@pytest.mark.parametrize("command", ["choose", "forecast"])
def test_commands_without_a_model_of_the_collectives_refuse(command: str) -> None:
    with pytest.raises(ConfigError, match=f"not supported by distexp {command}"):
        resolve_cell(*BASE, TWO, f"command={command}")


def test_fast_kernels_keep_what_shared_rows_support() -> None:
    train_config = resolve_cell(*BASE, TWO, "kernels=fast").train
    assert (train_config.compiled, train_config.loss, train_config.logits) == ("none", "full", "all")
