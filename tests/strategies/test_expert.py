"""Expert parallelism gives the training of one worker, and everything else is refused before a worker starts.

The workers have different rows, whose tokens choose the experts unevenly. Updates are those of SGD, as in
``test_tensor.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from distexp.config import ConfigError
from distexp.plan.replay import PARTS, replay
from distexp.plan.trace.tracing import trace_step
from distexp.runs.record import RunRecord, RunSpec
from distexp.strategies.parallel.checks import EXPERT_TENSOR_TYPES, EXPERT_TYPES
from distexp.system.units import MIB
from tests.helpers.grid import read_lines, run_grid
from tests.helpers.runs import HELPERS, resolve_cell, run_distexp
from tests.helpers.zoo import (
    CAUSAL,
    check_outcomes,
    check_types,
    hugging_face,
    train_written,
    write_cells,
    write_config,
)

COMMON = ("train.optimizer=sgd", "train.momentum=0", "train.learning_rate=0.1", "train.gradient_clipping=0.3")
TWO, FOUR, WORKERS = "parallel.expert=2", "parallel.expert=4", "cluster.workers_per_node=4"
CELLS: dict[str, tuple[str, ...]] = {
    "ddp": ("strategy=ddp", TWO),
    "full_shard": ("sharding=full_shard", TWO),
    "ddp_2x2": ("strategy=ddp", TWO, WORKERS),
    "full_shard_2x2": ("sharding=full_shard", TWO, WORKERS),
    "shard_grad_op_2x2": ("sharding=shard_grad_op", TWO, WORKERS),
    "checkpointed_2x2": ("sharding=full_shard", "train.activation_checkpointing=true", TWO, WORKERS),
    "units_2x2": ("sharding=full_shard", "fsdp.blocks_per_unit=2", TWO, WORKERS),
    "selective_2x2": ("strategy=ddp", "train.activation_checkpointing=selective", TWO, WORKERS),
    "ddp_four": ("strategy=ddp", FOUR, WORKERS),
    "full_shard_four": ("sharding=full_shard", FOUR, WORKERS),
}
"""Those of two workers have two micro-batches in a step."""

KINDS = ("mixtral_router", "qwen3_moe_router", "olmoe")
WRAPPERS = {"strategy=ddp": "replicate", "sharding=shard_grad_op": "fully_shard(reshard_after_forward=False)"}


TENSOR = "parallel.tensor=2"
TENSOR_CELLS: dict[str, tuple[str, ...]] = {
    "tensor": ("strategy=ddp", TWO, TENSOR),
    "tensor_2x2": ("sharding=full_shard", TWO, TENSOR, WORKERS),
    "tensor_four": ("strategy=ddp", FOUR, TENSOR, WORKERS),
}
"""The first two send the tokens of a row to its own workers only, and the last one to those with other rows too."""

LOSSES: dict[str, Mapping[str, Any]] = {
    "chunked": {"train.loss": "chunked"},
    "targets": {"train.logits": "targets"},
}
FEW = {
    "olmoe": ("full_shard", "ddp_2x2", "checkpointed_2x2", "selective_2x2", "full_shard_four"),
    "qwen3_moe_router": ("ddp_2x2",),
    "mixtral_router": ("full_shard_four",),
    "idle": ("ddp_2x2", "full_shard_four"),
    **{"chunked": ("ddp_2x2",), "targets": ("full_shard",)},
}
ALL = {
    **dict.fromkeys((*KINDS, "idle"), ("full_shard", "ddp_2x2", "full_shard_four")),
    **{"olmoe": tuple(CELLS), "chunked": ("full_shard", "ddp_2x2"), "targets": ("full_shard", "ddp_2x2")},
}
FEW_OF_TENSOR = {"olmoe": ("tensor_2x2", "tensor_four"), "odd": ("tensor",), "qwen3_moe": ("tensor_2x2",)}
ALL_OF_TENSOR = {
    **dict.fromkeys(EXPERT_TENSOR_TYPES, ("tensor_2x2",)),
    **dict.fromkeys(("olmoe", "odd"), tuple(TENSOR_CELLS)),
}
HALVES = {"slow": (FEW, FEW_OF_TENSOR), "release": (ALL, ALL_OF_TENSOR)}
"""The cells of each model, and of those whose workers share matrices too."""

BY_HALF = pytest.mark.parametrize("half", [pytest.param(half, marks=getattr(pytest.mark, half)) for half in HALVES])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that trains all models of a half by one command, and returns their folder."""

    @cache
    def run(half: str) -> Path:
        root = tmp_path_factory.mktemp("expert")
        names: dict[str, Mapping[str, Any]] = {kind: {"model.name": str(write_config(root, kind))} for kind in KINDS}
        models = {**names, **{name: {**names["olmoe"], **values} for name, values in LOSSES.items()}}
        models["mixtral_router"] = {**names["mixtral_router"], "train.save_model": True}
        models["idle"] = {"model.name": str(write_idle_experts(root / "idle")), "model.init": "pretrained"}
        shared = {kind: {"model.name": str(write_config(root / "shared", kind))} for kind in EXPERT_TENSOR_TYPES}
        shared["odd"] = {**shared["olmoe"], "dataset.max_length": 23}  # so that all workers of a row send all tokens
        base = (*hugging_face(root / "base", "mixtral"), *COMMON)
        chosen, of_tensor = HALVES[half]
        write_cells(root, base, {name: models[name] for name in chosen}, CELLS, chosen.__getitem__)
        cut = {name: shared[name] for name in of_tensor}
        write_cells(root / "tensor", base, cut, TENSOR_CELLS, of_tensor.__getitem__)
        train_written(root)
        return root

    return run


@BY_HALF
def test_mixtures_of_experts_train_as_on_one_worker(
    half: str, runs: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, (chosen, _) = runs(half), HALVES[half]
    for name, cells in chosen.items():
        check_outcomes(folder, name, *cells, bound=2e-6)
    for cell in chosen["olmoe"]:
        options, record = CELLS[cell], RunRecord.read(next(folder.glob(f"olmoe-*/{cell}/record.json")))
        built, workers = record.built, 4 if WORKERS in options else 2
        assert built is not None
        wrapper = WRAPPERS.get(options[0], "fully_shard(reshard_after_forward=True)")
        assert built.wrapper == wrapper
        assert (built.expert, built.tensor, built.world_size) == (4 if FOUR in options else 2, 1, workers)
        assert built.mesh == ([workers, 1] if wrapper == "replicate" else [1, workers])
        assert record.metrics.expert_load is not None
        assert 1 / 4 < record.metrics.expert_load <= 1 / 2  # A token chooses two of four experts.
    for cell in chosen["idle"]:
        idle = RunRecord.read(next(folder.glob(f"idle-*/{cell}/record.json"))).metrics.expert_load
        assert idle is not None
        assert 1 / 2 <= idle < 1
    monkeypatch.syspath_prepend(HELPERS)  # of the data set
    for cell in ("full_shard_four",) if half == "slow" else ("ddp_2x2", "full_shard_2x2"):
        check_predicted_memory(next(folder.glob(f"olmoe-*/{cell}")))


@pytest.mark.slow
def test_the_whole_model_is_saved(runs: Callable[[str], Path]) -> None:
    from transformers import AutoModelForCausalLM

    single, sharded = (runs("slow") / f"mixtral_router-{cell}" / "model" for cell in ("1/single", "4/full_shard_four"))
    saved, info = AutoModelForCausalLM.from_pretrained(sharded, output_loading_info=True)
    assert not any(info.values())
    assert len(saved.model.layers[0].mlp.experts.gate_up_proj) == 4
    expected = AutoModelForCausalLM.from_pretrained(single).state_dict()
    for name, weight in saved.state_dict().items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-5)


def write_idle_experts(folder: Path) -> Path:
    """Write a model whose tokens choose the first or the second of four experts. So some workers get no token."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("olmoe", **{**CAUSAL["olmoe"], "num_experts_per_tok": 1})
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config)
    for layer in model.model.layers:
        router = layer.mlp.gate.weight.data
        router[1], router[2:] = -router[0], 0.0
    model.save_pretrained(folder)
    return folder


def check_predicted_memory(run: Path) -> None:
    """Check that the traced step of a run keeps the weights that its workers have kept."""
    measured = RunRecord.read(run / "record.json").memory["parts"][0]
    trace = trace_step(RunSpec.read(run).config, on_gpu=False)
    curve = replay([replace(event, device="gpu", stream="") for event in trace.events if event.block >= 0]).curve
    largest = {part: max(point.parts[part] for point in curve) / MIB for part in PARTS}
    # Blocks are multiples of 512 bytes.
    assert largest["parameters"] == pytest.approx(measured["parameters_mib"], rel=0.1)


@pytest.mark.release
def test_all_named_types_train_as_on_one_worker(tmp_path: Path) -> None:
    check_types(tmp_path, EXPERT_TYPES, {"ddp": CELLS["ddp"]}, *COMMON)


@BY_HALF
def test_experts_and_matrices_are_shared_as_on_one_worker(
    half: str, runs: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, (_, chosen) = runs(half) / "tensor", HALVES[half]
    monkeypatch.syspath_prepend(HELPERS)  # of the data set
    for kind, cells in chosen.items():
        check_outcomes(folder, kind, *cells)
    for cell in chosen["olmoe"]:
        built = RunRecord.read(next(folder.glob(f"olmoe-*/{cell}/record.json"))).built
        assert built is not None
        mesh = {"tensor": [1, 1], "tensor_2x2": [1, 2], "tensor_four": [2, 1]}[cell]
        assert (built.tensor, built.expert, built.mesh) == (2, 4 if cell == "tensor_four" else 2, mesh)
        if half == "release" or cell == "tensor_2x2":
            check_predicted_memory(next(folder.glob(f"olmoe-*/{cell}")))


@pytest.mark.slow
def test_a_checkpoint_is_resumed_with_another_degree(tmp_path: Path) -> None:
    base = ("dataset=synthetic", *hugging_face(tmp_path, "qwen3_moe"), "train.max_steps=4", "dataset.train_size=90")
    written = (*base, "train.checkpoint_every=2", "sharding=full_shard", TWO)
    script = HELPERS / "interrupted_runs.py"
    source = run_grid(script, tmp_path / "source", 4, {"same": written}) / "same"
    resumed = (*base, f"train.resume={source / 'checkpoints' / 'step-00000002'}", "train.checkpoint_every=null")
    others = {"four": ("strategy=ddp", FOUR), "one": ("sharding=full_shard", "parallel.expert=1")}
    folder = run_grid(script, tmp_path / "others", 4, {name: (*resumed, *cell) for name, cell in others.items()})
    expected = read_lines(source / "uninterrupted.jsonl")
    for path in (source, folder / "four", folder / "one"):
        found = read_lines(path / "metrics.jsonl")
        assert [line["step"] for line in found] == [1, 2, 3, 4]
        for ours, theirs in zip(found, expected, strict=True):
            assert [ours[key] for key in ("loss", "grad_norm")] == pytest.approx(
                [theirs[key] for key in ("loss", "grad_norm")], rel=1e-5
            )


@pytest.mark.slow
def test_the_gradients_are_those_of_one_worker(tmp_path: Path) -> None:
    model = ("dataset=synthetic", "cluster.device=cpu", *hugging_face(tmp_path, "mixtral_router"))
    done = run_distexp("verify", "--quick", *model, "strategy=fsdp", TWO, "cluster.workers_per_node=2", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal: fsdp full_shard trains as single does, on 2 workers" in done.stdout


BASE = ("dataset=synthetic", "strategy=fsdp", "cluster.device=cpu", "cluster.workers_per_node=4")
INSTEAD, BATCH = "parallel.expert=1", "train.global_batch_size=16"


@pytest.mark.parametrize(
    ("overrides", "message", "fixed"),
    [
        (("strategy=single",), "not supported by strategy=single", ("strategy=fsdp",)),
        (("strategy=deepspeed",), "strategy=deepspeed: choose strategy=fsdp or strategy=ddp", ("strategy=ddp",)),
        (("cluster.workers_per_node=3",), "divide the 3 workers", ("cluster.workers_per_node=2",)),
        (("cluster.nodes=3", "cluster.workers_per_node=1"), "=2, or", ("cluster.workers_per_node=2",)),
        (("parallel.expert=3", "cluster.workers_per_node=3"), "=4 of the model: use parallel.expert=1", (INSTEAD,)),
        (
            (TENSOR, "++model.options.output_router_logits=true"),
            "with parallel.tensor=2 does not support model.options.output_router_logits=true: use",
            ("++model.options.output_router_logits=false",),
        ),
        (("parallel.tensor=4",), "key_value_heads of the model=2: use parallel.tensor=2", (TENSOR,)),
        (("parallel.context=2",), "with parallel.context=2 is not", ("parallel.context=1",)),
        (("sharding=hybrid_shard",), "=hybrid_shard is not supported, because the experts", ("sharding=full_shard",)),
        (("sharding=no_shard",), "=no_shard is not supported, because the experts", ("sharding=shard_grad_op",)),
        (
            ("strategy=ddp", "ddp.static_graph=true"),
            "no effect with parallel.expert=2",
            ("ddp.static_graph=false",),
        ),
    ],
)
def test_what_is_not_supported_is_refused_with_what_to_type(
    overrides: tuple[str, ...], message: str, fixed: tuple[str, ...], tmp_path: Path
) -> None:
    base = (*BASE, *hugging_face(tmp_path, "mixtral"), TWO)
    with pytest.raises(ConfigError, match=re.escape(message)):
        resolve_cell(*base, *overrides)
    assert resolve_cell(*base, *overrides, *fixed)


TOGETHER = {
    "adapter=lora": ("adapter=lora: use adapter=none", "adapter=none"),
    "offload=true": ("offload=true: use offload=false", "offload=false"),
    "engine=hf_trainer": ("not supported by engine=hf_trainer: use engine=native, or parallel", "engine=native"),
    "train.compile=true": ("train.compile=blocks: use train.compile=false", "train.compile=false"),
    "train.micro_batch_size=auto": ("train.micro_batch_size=auto: use a number", "train.micro_batch_size=2"),
    "train.score_answers=true": ("train.score_answers=true: use", "train.score_answers=false"),
}
"""Settings that one command has, the message of each, and what to type."""


def test_all_settings_that_are_not_supported_are_refused_in_one_command(tmp_path: Path) -> None:
    overrides = (*BASE, *hugging_face(tmp_path, "mixtral"), TWO, "dataset=squad_sample", *TOGETHER, BATCH)
    with pytest.raises(ConfigError) as caught:
        resolve_cell(*overrides)
    errors = [error for error in caught.value.errors if error.startswith(TWO)]
    assert len(errors) == len(TOGETHER)
    for message, _ in TOGETHER.values():
        assert sum(message in error for error in errors) == 1, message
    assert resolve_cell(*overrides, *(fixed for _, fixed in TOGETHER.values()))


def test_a_dense_model_is_refused_before_a_worker_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model=gpt_tiny: use parallel.expert=1, or model=hf with one of"):
        resolve_cell(*BASE, "model=gpt_tiny", TWO)
    with pytest.raises(ConfigError, match=r"\(llama\): use parallel.expert=1, or one of the types .*mixtral"):
        resolve_cell(*BASE, *hugging_face(tmp_path, "llama"), TWO)
    with pytest.raises(ConfigError, match=r"\(granitemoe\), because no plan .* use parallel.tensor=1 .*one of mixtral"):
        resolve_cell(*BASE, *hugging_face(tmp_path, "granitemoe"), TWO, TENSOR)


def test_all_workers_have_their_own_rows(tmp_path: Path) -> None:
    config = resolve_cell(*BASE, *hugging_face(tmp_path, "olmoe"), FOUR, "kernels=fast", BATCH)
    assert (config.data_parallel, config.train.compiled, config.train.loss) == (4, "none", "full")


def test_the_plan_states_what_it_assumes_and_gives_no_verdict(tmp_path: Path) -> None:
    model = ("dataset=synthetic", "strategy=ddp", *hugging_face(tmp_path, "mixtral"), FOUR, WORKERS)
    done = run_distexp("plan", *model, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no verdict: predictions of parallel.expert assume that all experts get equally many tokens" in done.stdout
    assert "with an unknown error" in done.stdout
    assert "and larger" not in done.stdout
