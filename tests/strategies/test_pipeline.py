"""Pipeline parallelism gives the training of one worker, and everything else is refused before a worker starts.

Two or four workers have different blocks. The micro-batches of a step have different numbers of targets. Updates are
those of SGD, as in ``test_tensor.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from distexp.config import ConfigError
from distexp.plan.replay import PARTS, replay
from distexp.plan.trace.tracing import trace_step
from distexp.runs.record import RunRecord, RunSpec
from distexp.strategies.parallel.checks import PIPELINE_TYPES, cut_evenly
from distexp.system.units import MIB
from tests.helpers.runs import HELPERS, resolve_cell
from tests.helpers.zoo import (
    VOCABULARY,
    Halves,
    Variants,
    check_outcomes,
    check_types,
    hugging_face,
    train_written,
    write_cells,
    write_config,
)

COMMON = ("train.optimizer=sgd", "train.momentum=0", "train.learning_rate=0.1", "train.gradient_clipping=0.3")


def cell(schedule: str, workers: int = 2, groups: int = 1, strategy: str = "strategy=ddp") -> tuple[str, ...]:
    """Return the overrides of a cell. A step has four micro-batches, of one group or of all."""
    return (
        *(strategy, f"parallel.pipeline={workers}", f"parallel.schedule={schedule}"),
        *(f"cluster.workers_per_node={workers * groups}", f"train.gradient_accumulation_steps={4 // groups}"),
    )


CELLS: dict[str, tuple[str, ...]] = {
    "gpipe": cell("gpipe"),
    "1f1b": cell("1f1b"),
    "interleaved": cell("interleaved"),
    "zero_bubble": cell("zero_bubble"),
    "1f1b_2x2": cell("1f1b", groups=2),
    "zero_bubble_2x2": cell("zero_bubble", groups=2),
    "four": cell("1f1b", 4),
    "gpipe_four": cell("gpipe", 4),
    "full_shard_2x2": cell("1f1b", groups=2, strategy="sharding=full_shard"),
    "shard_grad_op_2x2": cell("gpipe", groups=2, strategy="sharding=shard_grad_op"),
    "hybrid_2x2": (*cell("1f1b", groups=2, strategy="sharding=hybrid_shard"), "fsdp.replicas=2"),
    "tensor_2x2": (*cell("1f1b"), "parallel.tensor=2", "cluster.workers_per_node=4"),
}
WRAPPERS = {
    "full_shard_2x2": "fully_shard(reshard_after_forward=True)",
    "shard_grad_op_2x2": "fully_shard(reshard_after_forward=False)",
    "hybrid_2x2": "fully_shard(reshard_after_forward=True)",
    "tensor_2x2": "replicate",
}
MODELS: dict[str, dict[str, Mapping[str, Any]]] = {
    "gpt_tiny": {
        "plain": {},
        "tied": {"model.tie_embeddings": True},
        "unclipped": {"train.gradient_clipping": None},
        "sdpa": {"model.attention": "sdpa"},
        "packed": {"model.attention": "sdpa", "dataset.packing": True},
        "checkpointed": {"train.activation_checkpointing": True},
        "bf16": {"precision.name": "bf16"},
        "muon": {"train.optimizer": "muon"},
        "few": {},
        "few_checkpointed": {"train.activation_checkpointing": True},
    },
    "bloom_tiny": {"plain": {}, "sdpa": {"model.attention": "sdpa"}},
}


def cells_of(name: str) -> tuple[str, ...]:
    """Return the cells of a model: all, or some in which the workers have one stage or two, and a group or two."""
    if name in FEW:
        return FEW[name]
    if name in ("plain", "tied"):
        return tuple(CELLS)
    if name in ("checkpointed", "muon"):
        return ("interleaved", "1f1b_2x2", "four", "full_shard_2x2", "tensor_2x2")
    return ("1f1b", "interleaved", "zero_bubble_2x2")


FEW = {
    "few": ("gpipe", "interleaved", "zero_bubble_2x2", "four", "hybrid_2x2"),
    "few_checkpointed": ("interleaved", "full_shard_2x2"),
}
"""Cells of the variants that are not left to a release. The types of transformers have most of the others."""

TYPES = {"llama": ("1f1b", "full_shard_2x2", "tensor_2x2"), "gemma3_text": ("shard_grad_op_2x2",)}
"""Types of transformers, and the cells of each."""

HALVES = Halves(MODELS, {"gpt_tiny": tuple(FEW)})


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Return a function that trains a variant with all others of its half, and returns the folder of its model."""

    def write(folder: Path, model: str, variants: Variants) -> None:
        base = (f"model={model}", f"model.vocab_size={VOCABULARY}", "model.num_layers=5", *COMMON)
        write_cells(folder, base, variants, CELLS, cells_of)

    return HALVES.runs(tmp_path_factory.mktemp, write)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the runs of models of transformers, and of those that are resumed."""
    root = tmp_path_factory.mktemp("pipeline")
    types = {kind: {"model.name": str(write_config(root, kind))} for kind in TYPES}
    base = (*hugging_face(root / "base", "llama"), *COMMON)
    write_cells(root / "types", base, types, {name: CELLS[name] for name in ("1f1b", *WRAPPERS)}, TYPES.__getitem__)
    write_resumed(root / "resumed")
    train_written(root)
    return root


@pytest.mark.parametrize(("model", "names"), HALVES.cases(*MODELS))
def test_own_models_train_as_on_one_worker(
    model: str, names: tuple[str, ...], variants: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = variants(model, names[0])
    for name in names:
        check_outcomes(folder, name, *cells_of(name))
    for name in {"plain", "few"}.intersection(names):
        monkeypatch.syspath_prepend(HELPERS)  # of the data set
        check_built(folder, name)


def check_built(folder: Path, variant: str) -> None:
    """Check what the cells of a variant have built, and the memory that was predicted for them."""
    alone = RunRecord.read(folder / f"{variant}-1" / "single" / "record.json")
    for each in cells_of(variant):
        options = CELLS[each]
        record = RunRecord.read(next(folder.glob(f"{variant}-*/{each}/record.json")))
        assert record.built is not None
        assert alone.built is not None
        workers = 4 if "four" in each else 2
        built = record.built
        assert (built.pipeline, f"parallel.schedule={built.schedule}" in options) == (workers, True)
        assert (built.wrapper, built.tensor) == (WRAPPERS.get(each, "pipeline"), 2 if each == "tensor_2x2" else 1)
        groups = options.count("train.gradient_accumulation_steps=2") + 1
        assert built.mesh == ([1, groups] if "shard" in each else [groups, 1])
        assert built.stages is not None
        assert sum(built.stages) == 5
        assert len(built.stages) == workers * (2 if each.startswith(("interleaved", "zero")) else 1)
        assert built.parameters == alone.built.parameters
        assert record.metrics.padding_share == alone.metrics.padding_share
    for each in ("gpipe", "hybrid_2x2") if variant == "few" else ("gpipe", "1f1b", *WRAPPERS):
        check_predicted_memory(next(folder.glob(f"{variant}-*/{each}")))


def check_predicted_memory(run: Path) -> None:
    """Check that the traced step keeps the activations of all micro-batches that wait for their backward pass.

    The worker with the highest peak is the one with the output head.
    """
    measured = RunRecord.read(run / "record.json").memory["parts"][-1]
    trace = trace_step(RunSpec.read(run).config, on_gpu=False)
    curve = replay([replace(event, device="gpu", stream="") for event in trace.events if event.block >= 0]).curve
    largest = {part: max(point.parts[part] for point in curve) / MIB for part in PARTS}
    assert largest["parameters"] == pytest.approx(measured["parameters_mib"], rel=0.08)
    stored = measured["activations_mib"]  # with the probabilities, which are as wide as the vocabulary
    assert largest["activations"] < stored < largest["activations"] + largest["logits"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", TYPES)
def test_models_of_transformers_train_as_on_one_worker(kind: str, runs: Path) -> None:
    check_outcomes(runs / "types", kind, *TYPES[kind])


@pytest.mark.release
def test_all_named_types_train_as_on_one_worker(tmp_path: Path) -> None:
    check_types(tmp_path, PIPELINE_TYPES, {"1f1b": CELLS["1f1b"]}, *COMMON)


RESUMED = {
    "b_of_stages": ("a-2/1f1b", "full_shard_2x2"),
    "c_of_one": ("a-1/single", "1f1b"),
    "d_of_shards": ("a-4/full_shard_2x2", "1f1b"),
    "e_of_tensor": ("a-4/tensor_2x2", "full_shard_2x2"),
    "f_of_hybrid": ("a-8/hybrid_2x2x2", "1f1b"),
}
"""The run whose checkpoint is resumed, by one worker and in a cell with other stages."""

RESUMED_CELLS = {
    **{name: CELLS[name] for name in ("1f1b", "zero_bubble", "full_shard_2x2", "tensor_2x2")},
    "hybrid_2x2x2": ("sharding=hybrid_shard", "fsdp.replicas=2", "parallel.tensor=2", "cluster.workers_per_node=8"),
}


def resumed_cells(name: str) -> tuple[str, ...]:
    """Return the cells of a run: all, or the one that resumes."""
    return tuple(RESUMED_CELLS) if name == "a" else (RESUMED[name][1],)


def write_resumed(folder: Path) -> None:
    """Write runs that resume a checkpoint of others. Two of the workers share a weight."""
    adamw = ("train.optimizer=adamw", "train.eps=1e-4", "train.gradient_clipping=0.3")
    base = (*hugging_face(folder, "qwen2"), *adamw)  # Rows of a GPT are in the order of the workers of a tensor.
    path = folder / "configs" / "qwen2" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": 5}))
    written = {"train.checkpoint_every": 2, "train.save_model": True}
    resumed = {name: {"train.resume": str(folder / run / "checkpoints")} for name, (run, _) in RESUMED.items()}
    write_cells(folder, base, {"a": written, **resumed}, RESUMED_CELLS, resumed_cells)


@pytest.mark.slow
def test_checkpoints_and_saved_models_are_those_of_the_whole_model(runs: Path) -> None:
    folder = runs / "resumed"
    for name in ("a", *RESUMED):
        check_outcomes(folder, name, *resumed_cells(name))
        for each in resumed_cells(name):
            assert RunRecord.read(next(folder.glob(f"{name}-*/{each}/record.json"))).status == "completed"
    for name in RESUMED:
        logs = "".join(log.read_text() for log in folder.glob(f"{name}-*/rank_0.log"))
        assert logs.count("resuming from step 2 of ") == 1 + len(resumed_cells(name))
    first, *others = (load_file(path) for path in sorted(folder.glob("a-*/*/model/model.safetensors")))
    assert len(others) == len(RESUMED_CELLS)
    for other in others:
        assert other.keys() == first.keys()
        assert all(torch.allclose(other[name], first[name], rtol=0, atol=1e-5) for name in first)


BASE = (
    *("model=gpt_tiny", "dataset=synthetic", "strategy=ddp", "cluster.device=cpu", "cluster.workers_per_node=2"),
    "train.gradient_accumulation_steps=4",
)
TWO, INSTEAD = "parallel.pipeline=2", "parallel.pipeline=1"


@pytest.mark.parametrize(
    ("overrides", "message", "fixed"),
    [
        (("strategy=single",), "not supported by strategy=single", ("strategy=ddp",)),
        (("strategy=deepspeed",), "not supported by strategy=deepspeed", ("strategy=ddp",)),
        (
            ("strategy=fsdp", "parallel.schedule=zero_bubble", "model.num_layers=4"),
            "schedule=zero_bubble is not supported by strategy=fsdp, because FSDP would gather the other stage of a "
            "worker too: use parallel.schedule=1f1b, or strategy=ddp",
            ("parallel.schedule=1f1b",),
        ),
        (
            ("strategy=fsdp", "sharding=hybrid_shard", "cluster.nodes=2", "cluster.workers_per_node=1"),
            "sharding=hybrid_shard, with 2 replicas for nodes, must divide the 1 groups of parallel.pipeline=2: use",
            ("fsdp.replicas=1",),
        ),
        (("strategy=fsdp", "fsdp.wrap=none"), "=none is not supported by parallel.pipeline=2", ("fsdp.wrap=auto",)),
        (("cluster.workers_per_node=3",), "the 3 workers of the run: use", ("cluster.workers_per_node=4",)),
        (
            ("parallel.tensor=2", "cluster.workers_per_node=6"),
            "have groups of 4 workers, which must divide the 6 workers of the run: use cluster.workers_per_node=8",
            ("cluster.workers_per_node=8",),
        ),
        (("parallel.context=2", "cluster.workers_per_node=4"), "parallel.context=2 with", ("parallel.context=1",)),
        (("parallel.expert=2",), "parallel.expert=2 with parallel.pipeline=2 is not", ("parallel.expert=1",)),
        (("parallel.pipeline=1", "parallel.schedule=gpipe"), "order of the micro-batches in a pipeline", (TWO,)),
        (("train.gradient_accumulation_steps=1",), "needs at least 2 micro-batches", ("parallel.schedule=gpipe",)),
        (
            ("parallel.schedule=interleaved", "train.gradient_accumulation_steps=5", "model.num_layers=4"),
            "needs a multiple of 2 micro-batches in a step, but train.gradient_accumulation_steps=5: use",
            ("train.gradient_accumulation_steps=6",),
        ),
        (("parallel.schedule=zero_bubble",), "has 4 stages of at least one block", ("parallel.schedule=1f1b",)),
        (("parallel.pipeline=4", "cluster.workers_per_node=4"), "model.num_layers=2: use parallel.pipeline=2", (TWO,)),
        (
            ("parallel.schedule=zero_bubble", "model.num_layers=4", "train.activation_checkpointing=true"),
            "activation_checkpointing=true: use parallel.schedule=1f1b",
            ("parallel.schedule=1f1b",),
        ),
        (("model=resnet_tiny", "dataset=tinyimagenet_sample"), "which is not cut into stages", (INSTEAD,)),
    ],
)
def test_what_is_not_supported_is_refused_with_what_to_type(
    overrides: tuple[str, ...], message: str, fixed: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        resolve_cell(*BASE, TWO, *overrides)
    assert resolve_cell(*BASE, TWO, *overrides, *fixed)


TOGETHER = {
    "adapter=lora": ("adapter=lora: use adapter=none", "adapter=none"),
    "engine=hf_trainer": ("engine=hf_trainer: use engine=native", "engine=native"),
    "train.compile=true": ("train.compile=blocks: use train.compile=false", "train.compile=false"),
    "model.dropout=0.1": ("model.dropout=0.1: use model.dropout=0", "model.dropout=0"),
    "train.logits=targets": ("=targets: use train.logits=all", "train.logits=all"),
    "train.loss=chunked": ("=chunked: use train.loss=full", "train.loss=full"),
    "precision=fp16": ("precision=fp16: use precision=bf16", "precision=bf16"),
    "dataset.padding=longest": ("padding=longest: use dataset.padding=max_length", "dataset.padding=max_length"),
    "ddp.communication=bf16": ("ddp.communication=bf16 has no effect", "ddp.communication=fp32"),
}
"""Settings that one command has, the message of each, and what to type."""


def test_all_settings_that_are_not_supported_are_refused_in_one_command() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_cell(*BASE, TWO, *TOGETHER)
    errors = [error for error in caught.value.errors if "parallel.pipeline=2" in error]
    assert len(errors) == len(TOGETHER)
    for message, _ in TOGETHER.values():
        assert sum(message in error for error in errors) == 1, message
    assert resolve_cell(*BASE, TWO, *TOGETHER, *(fixed for _, fixed in TOGETHER.values()))


def test_models_of_transformers_are_checked_before_a_worker_starts(tmp_path: Path) -> None:
    def resolve(kind: str, *overrides: str) -> None:
        hub = ("dataset=synthetic", "strategy=ddp", "cluster.device=cpu", *hugging_face(tmp_path / kind, kind))
        resolve_cell(*hub, "cluster.workers_per_node=4", "train.gradient_accumulation_steps=4", *overrides)

    with pytest.raises(ConfigError, match=r"\(mamba\), because no training .* use parallel.pipeline=1"):
        resolve("mamba", TWO)
    with pytest.raises(ConfigError, match=r"num_hidden_layers of the model=2: use parallel\.pipeline=2"):
        resolve("llama", "parallel.pipeline=4")
    resolve("mistral", TWO)


@pytest.mark.parametrize(
    ("first", "blocks", "last", "stages", "cut"),
    [
        (0, [5] * 6, 0, 3, [2, 2, 2]),
        (10, [5] * 6, 12, 3, [1, 4, 1]),  # embedding and output head are as large as two blocks
        (0, [5] * 5, 1, 2, [3, 2]),
        (100, [1, 1], 100, 2, [1, 1]),
    ],
)
def test_stages_have_numbers_of_parameters_as_equal_as_possible(
    first: int, blocks: list[int], last: int, stages: int, cut: list[int]
) -> None:
    found = cut_evenly(first, blocks, last, stages)
    assert [len(each) for each in found] == cut
    assert [number for each in found for number in each] == [*range(len(blocks))]


def test_fast_kernels_keep_what_stages_support() -> None:
    train_config = resolve_cell(*BASE, TWO, "kernels=fast").train
    assert (train_config.compiled, train_config.loss, train_config.logits) == ("none", "full", "all")
