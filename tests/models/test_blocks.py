"""Repeated blocks of models of distexp and of transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from distexp.config import ConfigError
from distexp.models import gpt, resnet, transforms
from distexp.models.transforms import find_units, transform_blocks
from distexp.plan.replay import replay
from distexp.plan.trace.tracing import trace_step
from distexp.runs.record import RunRecord, RunSpec
from distexp.system.units import MIB
from tests.helpers.runs import HELPERS, resolve_cell
from tests.helpers.zoo import VOCABULARY, hugging_face, outcomes, train_all


class Experts(nn.Module):
    """A block that contains repeated smaller modules."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(8))
        self.wide = nn.Linear(4, 400)


class Nested(nn.Module):
    """A model with two Experts blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.layers = nn.ModuleList(Experts() for _ in range(2))


def test_the_blocks_are_the_largest_repeated_modules() -> None:
    assert [name for name, _ in find_units(Nested())] == ["layers.0", "layers.1"]


def test_blocks_in_lists_of_lists_are_found() -> None:
    model = nn.ModuleDict({"stages": nn.ModuleList(nn.ModuleList(Experts() for _ in range(2)) for _ in range(2))})
    names = [f"stages.{stage}.{block}" for stage in range(2) for block in range(2)]
    assert [name for name, _ in find_units(model)] == names


def test_blocks_declared_by_transformers_take_precedence() -> None:
    model = Nested()
    model._no_split_modules = {"Linear"}  # type: ignore[assignment]
    assert len(find_units(model)) == 2 + 2 * 9
    model._no_split_modules = []  # type: ignore[assignment]
    assert len(find_units(model)) == 2


def test_blocks_of_other_hugging_face_models() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=20, n_embd=8, n_layer=3, n_head=2, n_positions=16)
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
    assert [name for name, _ in find_units(model)] == ["transformer.h.0", "transformer.h.1", "transformer.h.2"]
    model._no_split_modules = None
    assert [name for name, _ in find_units(model)] == ["transformer.h.0", "transformer.h.1", "transformer.h.2"]


def test_blocks_can_be_selected_by_class() -> None:
    model = gpt.build(resolve_cell("model=gpt_tiny").model, 300)
    assert [name for name, _ in find_units(model, "Block")] == ["blocks.0", "blocks.1"]
    named = [name for name, _ in find_units(model, "MLP, Embedding")]
    assert named == ["tokens", "positions", "blocks.0.mlp", "blocks.1.mlp"]


@pytest.mark.parametrize(
    ("wrap", "problem"),
    [
        ("BloomBlock", "no modules of class BloomBlock"),
        ("Block,Nope", "no modules of class Nope"),
        (",", "no class is given"),
    ],
)
def test_an_unknown_class_is_refused(wrap: str, problem: str) -> None:
    model = gpt.build(resolve_cell("model=gpt_tiny").model, 300)
    message = f"{problem}. Use auto, or some of Attention, Block"
    with pytest.raises(ConfigError, match=message):
        find_units(model, wrap)


def test_a_model_without_blocks_cannot_be_checkpointed() -> None:
    config = resolve_cell("model=gpt_tiny", "train.activation_checkpointing=true")
    message = (
        "train.activation_checkpointing=true needs a model with repeated blocks, which Linear lacks: "
        "set train.activation_checkpointing=false, or fsdp.wrap to class names of its modules"
    )
    with pytest.raises(ConfigError, match=message):
        transform_blocks(nn.Linear(2, 2), config)


def test_a_model_without_blocks_is_compiled_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda function, **_: compiled.append(function) or function)
    config = resolve_cell("model=gpt_tiny", "train.compile=true")
    flat, nested = nn.Linear(2, 2), Nested()
    expected = [flat.forward, *(layer.forward for layer in nested.layers)]
    transform_blocks(flat, config)
    transform_blocks(nested, config)
    assert compiled == expected


def test_each_kind_of_image_block_has_its_own_graph_of_fixed_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[list[Any]] = []

    def keep(graph: Any, inputs: list[Any]) -> Any:
        graphs.append(inputs)
        return graph.forward

    torch.compiler.reset()
    monkeypatch.setattr(transforms, "BACKEND", keep)
    changes = ("model.depths=[2,1,1,1]", "train.compile=blocks", "cluster.device=cpu")
    config = resolve_cell("model=resnet_tiny", "sharding=full_shard", *changes)
    model = resnet.build(config.model, num_classes=10)
    transform_blocks(model, config)
    for training, size in ((True, 4), (False, 4), (False, 2), (True, 4)):
        model.train(training)
        model(torch.rand(size, 3, 64, 64))
    # Both blocks of the first stage are equal. The others have other channels or strides.
    assert len(graphs) == 4 * len(("training", "evaluation", "a partial batch"))
    assert not any(isinstance(value, torch.SymInt) for inputs in graphs for value in inputs)


SELECTIVE = "train.activation_checkpointing=selective"
SMALL = ("train.optimizer=sgd", "train.momentum=0", "train.learning_rate=0.1", "train.gradient_clipping=0.3")
CELLS: dict[str, tuple[str, ...]] = {
    "plain": ("strategy=ddp",),
    "whole": ("strategy=ddp", "train.activation_checkpointing=true"),
    "ddp": ("strategy=ddp", SELECTIVE),
    "full_shard": ("sharding=full_shard", SELECTIVE),
    "tensor": ("strategy=ddp", "parallel.tensor=2", SELECTIVE),
    "context": ("sharding=full_shard", "parallel.context=2", SELECTIVE),
    "zero1": ("zero_stage=1", SELECTIVE),
    "zero2": ("zero_stage=2", SELECTIVE),
}


@pytest.mark.parametrize(
    "model", [pytest.param("gpt_tiny", marks=pytest.mark.slow), pytest.param("llama", marks=pytest.mark.release)]
)
def test_blocks_that_store_some_results_train_as_others(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = (f"model={model}", f"model.vocab_size={VOCABULARY}")
    base = own if model == "gpt_tiny" else hugging_face(tmp_path, model)
    train_all(tmp_path, (*base, *SMALL), {model: {}}, CELLS)
    found = outcomes(tmp_path, model)
    assert found.keys() == CELLS.keys()
    assert {cell: one for cell, one in found.items() if isinstance(one, str) or one > 1e-5} == {}
    records = {cell: RunRecord.read(tmp_path / f"{model}-2" / cell / "record.json") for cell in CELLS}
    stored = {cell: record.memory["parts"][0]["activations_mib"] for cell, record in records.items()}
    executed = {cell: record.metrics.executed_tflops_per_sample or 0.0 for cell, record in records.items()}
    assert stored["whole"] < stored["ddp"] < stored["plain"]
    assert executed["plain"] < executed["ddp"] < executed["whole"]
    assert stored["full_shard"] == stored["ddp"]
    monkeypatch.syspath_prepend(HELPERS)  # of the data set
    for cell in (
        "plain",
        "whole",
        "ddp",
        "full_shard",
        "tensor",
        "context",
    ):  # not in the backward pass, which recomputes
        trace = trace_step(RunSpec.read(tmp_path / f"{model}-2" / cell).config, on_gpu=False)
        curve = replay([replace(event, device="gpu", stream="") for event in trace.events if event.block >= 0]).curve
        forward = [point.parts for point in curve if point.phase == "forward"]
        parts = [max(each[part] for each in forward) / MIB for part in ("activations", "logits")]
        # The record counts the probabilities, which are as wide as the vocabulary, as activations.
        print(cell, parts, stored[cell])
        assert parts[0] < stored[cell] < sum(parts), cell


@pytest.mark.parametrize(
    ("overrides", "message", "fixed"),
    [
        (("train.compile=true",), "not supported by train.compile: use train.compile=false", ("train.compile=false",)),
        (("engine=hf_trainer",), "not supported by engine=hf_trainer: use engine=native", ("engine=native",)),
        (("model.attention=flex",), "use model.attention=sdpa", ("model.attention=sdpa",)),
        (("zero_stage=3",), "does not work with zero_stage=3", ("zero_stage=2",)),
        (("model.dropout=0.1",), "gives wrong gradients with model.dropout=0.1", ("model.dropout=0",)),
    ],
)
def test_what_cannot_store_some_results_is_refused(
    overrides: tuple[str, ...], message: str, fixed: tuple[str, ...]
) -> None:
    plan = ("command=plan", "plan.gpu=h100-80gb", "cluster.device=cuda")
    base = ("model=gpt_tiny", "dataset=synthetic", *plan, SELECTIVE)
    with pytest.raises(ConfigError, match=message):
        resolve_cell(*base, *overrides)
    assert resolve_cell(*base, *overrides, *fixed).train.activation_checkpointing == "selective"


def test_fast_kernels_do_not_compile_blocks_that_store_some_results() -> None:
    plan = ("command=plan", "plan.gpu=h100-80gb", "cluster.device=cuda")
    config = resolve_cell("model=gpt_tiny", "dataset=synthetic", *plan, "kernels=fast", SELECTIVE)
    assert (config.train.compiled, config.model.attention) == ("none", "sdpa")
