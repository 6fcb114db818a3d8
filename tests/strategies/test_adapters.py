"""LoRA with every strategy: the same losses, resumed trainings, saved adapters that peft loads, and refusals."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

from distexp.checkpoints import folder as disk
from distexp.config import Config, ConfigError
from distexp.distributed.context import Context
from distexp.measure.flops import FlopCounter
from distexp.measure.memory.step_recording import storage_sizes
from distexp.plan.estimate import make_estimate
from distexp.plan.trace.tracing import trace_step
from distexp.resolve import section_checks
from distexp.resolve.run_id import run_id
from distexp.runs.record import RunRecord
from distexp.runs.step_files import Collective, Parameters, Segment, StepModel
from distexp.strategies.base import load_strategy
from distexp.strategies.communication import FSDPCommunication
from distexp.strategies.ddp import DDPCommunication
from distexp.system.units import MIB
from distexp.training.build import build_model, load_data, make_loaders
from distexp.training.loop import train_step
from tests.helpers import hand_written_loop
from tests.helpers.grid import Runs, read_lines, run_grid, run_once
from tests.helpers.runs import HELPERS, resolve_cell, run_distexp
from tests.models.test_hf import ARCHITECTURES, LLAMA, save_model
from tests.models.test_tasks import save as save_task_model

LORA = ("adapter=lora", "adapter.rank=4", "adapter.alpha=8")
LARGE_STEPS = ("train.learning_rate=0.02", "train.warmup_steps=0")
COMMON = (
    *(*LORA, *LARGE_STEPS, "train.max_steps=4", "train.checkpoint_every=2", "dataset.train_size=60"),
    *("train.measure_after_step=1", "dataset.eval_size=8", "cluster.cpus_per_worker=1"),
)
BYTE = ("model.tokenizer=byte", "dataset.max_length=64")
HF = ("model=hf", *BYTE, "model.name=FOLDER/llama", "train.save_model=true")
TIED = ("model=hf", *BYTE, "model.name=FOLDER/qwen2", "adapter.targets=[q_proj,down_proj]")
GPT = ("model=gpt_tiny", "train.activation_checkpointing=true", "train.loss=chunked")
BF16 = (*HF, "precision=bf16")
CLASSES = (
    *("model=hf", "model.task=sequence_classification", "model.tokenizer=byte", "model.init=pretrained"),
    *("model.name=FOLDER/bert", "dataset=synthetic", "dataset.max_length=24", "dataset.num_classes=5"),
    "train.save_model=true",
)
IMAGES = ("model=hf", "model.name=FOLDER/vit", "dataset=synthetic", "dataset.image_size=32", "dataset.num_classes=5")
REFERENCES = {"llama": HF, "tied": TIED, "gpt": GPT, "bf16": BF16, "classes": CLASSES, "image": IMAGES}
CELLS = {
    "llama_ddp": (*HF, "strategy=ddp"),
    "llama_full_shard": (*HF, "sharding=full_shard"),
    "llama_hybrid_shard": (*HF, "sharding=hybrid_shard", "fsdp.replicas=2"),
    "llama_zero1": (*HF, "zero_stage=1"),
    "llama_zero2_offload": (*HF, "zero_stage=2", "offload=true"),
    "llama_zero3": (*HF, "zero_stage=3"),
    "tied_full_shard": (*TIED, "sharding=full_shard", "train.logits=targets"),
    "gpt_shard_grad_op": (*GPT, "sharding=shard_grad_op", "fsdp.blocks_per_unit=2"),
    "gpt_zero3_offload": (*GPT, "zero_stage=3", "offload=true"),
    "bf16_ddp_step": (*BF16, "strategy=ddp", "train.compute_weights=step", "ddp.communication=bf16"),
    "bf16_zero3": (*BF16, "zero_stage=3"),
    "classes_ddp": (*CLASSES, "strategy=ddp"),
    "classes_full_shard": (*CLASSES, "sharding=full_shard"),
    "classes_zero3": (*CLASSES, "zero_stage=3"),
    "image_hybrid_shard": (*IMAGES, "sharding=hybrid_shard"),
    "image_zero2": (*IMAGES, "zero_stage=2"),
}
EXAMPLES = (
    *("llama", "gpt", "bf16", "classes", "image", "llama_full_shard", "llama_zero2_offload", "gpt_shard_grad_op"),
    *("bf16_ddp_step", "bf16_zero3", "classes_zero3", "image_hybrid_shard"),
)
"""Cells that differ most: each wrapper, what it casts and offloads, and a model with each kind of head."""


def cases(names: Iterable[str]) -> list[Any]:
    """Return the test parameters of cells; those that are no examples are left to a release."""
    return [pytest.param(name, marks=pytest.mark.slow if name in EXAMPLES else pytest.mark.release) for name in names]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with small pretrained models."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("llama", "qwen2"):
        save_model(folder / name, {**ARCHITECTURES[name], "vocab_size": 1024})
    for name in ("bert", "vit"):
        save_task_model(folder / name, name)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Runs:
    """Return a function that trains the cells of some workers, each one without and with an interruption."""

    def run(folder: Path, half: str, workers: int) -> None:
        single = {name: (*overrides, "strategy=single") for name, overrides in REFERENCES.items()}
        cells = single if workers == 1 else CELLS
        located = {
            name: tuple(text.replace("FOLDER", str(models)) for text in (*COMMON, *overrides))
            for name, overrides in cells.items()
            if (name in EXAMPLES) == (half == "examples")
        }
        run_grid(HELPERS / "interrupted_runs.py", folder, workers, located)

    return run_once(tmp_path_factory, run)


def folder_of(runs: Runs, name: str) -> Path:
    """Return the folder of a cell."""
    return runs("examples" if name in EXAMPLES else "others", 1 if name in REFERENCES else 2) / name


@pytest.mark.parametrize("name", cases(CELLS))
def test_losses_equal_those_of_single(name: str, runs: Runs) -> None:
    reference = name.partition("_")[0]
    # Two workers round the gradients of bf16 weights twice.
    tolerance = 2e-3 if reference == "bf16" else 1e-5
    expected, actual = (
        read_lines(folder / "uninterrupted.jsonl") for folder in (folder_of(runs, reference), folder_of(runs, name))
    )
    assert len(actual) == 4
    assert [step["loss"] for step in actual] == pytest.approx([step["loss"] for step in expected], rel=tolerance)
    if reference not in ("classes", "image"):  # whose labels are random
        assert actual[0]["loss"] - actual[-1]["loss"] > 0.02, "the adapters learn"
    built = RunRecord.read(folder_of(runs, name) / "record.json").built
    assert built is not None
    assert built.trained_parameters is not None
    assert 0 < built.trained_parameters < 0.2 * built.parameters
    if reference == "bf16":
        assert built.param_dtype == "bfloat16"


@pytest.mark.parametrize("name", cases([*REFERENCES, *CELLS]))
def test_a_resumed_training_equals_an_uninterrupted_one(name: str, runs: Runs) -> None:
    folder = folder_of(runs, name)
    expected, actual = (read_lines(folder / file) for file in ("uninterrupted.jsonl", "metrics.jsonl"))
    assert [step["step"] for step in actual] == list(range(1, 5))
    assert [step["loss"] for step in actual] == pytest.approx([step["loss"] for step in expected], rel=1e-6)
    events = read_lines(folder / "events.jsonl")
    assert [event["resumed_from_step"] for event in events if "resumed_from_step" in event] == [2]
    names = saved_names(disk.list_checkpoints(folder)[0] / "engine")
    assert names
    heads = {"classes": ("classifier", "pooler"), "image": ("classifier",)}.get(name.partition("_")[0], ())
    assert {part for name in names for part in ("lora_", *heads) if part in name} == {"lora_", *heads}
    assert all(any(part in name for part in ("lora_", *heads)) for name in names), "a checkpoint has no frozen weights"


def saved_names(folder: Path) -> list[str]:
    """Return the names of the weights in a checkpoint of torch or DeepSpeed."""
    if (folder / ".metadata").exists():
        found = FileSystemReader(folder).read_metadata().state_dict_metadata
        return [name for name in found if name.startswith("model.")]
    files = (folder / "state").glob("*model_states.pt")
    return [name for path in files for name in torch.load(path, weights_only=False)["module"]]


@pytest.mark.slow
def test_adapters_of_another_model_or_rank_are_refused(runs: Runs, models: Path, tmp_path: Path) -> None:
    """The weights differ in one value of the norm only."""
    base = AutoModelForCausalLM.from_pretrained(models / "llama", dtype=torch.float32)
    shutil.copytree(models / "llama", tmp_path / "other")
    base.model.norm.weight.data[0] = 2.0
    base.save_pretrained(tmp_path / "other")
    resumed = ("train.checkpoint_every=null", f"train.resume={folder_of(runs, 'llama')}")
    given = [text.replace("FOLDER/llama", str(tmp_path / "other")) for text in HF]
    same = [text.replace("FOLDER", str(models)) for text in HF]
    cells = {
        "other": (*COMMON, *given, "strategy=single", *resumed),
        "rank": (*COMMON, *same, "strategy=single", *resumed, "adapter.rank=2"),
        "full": (*(text for text in COMMON if "adapter" not in text), *same, "strategy=single", *resumed),
    }
    folder = run_grid(HELPERS / "interrupted_runs.py", tmp_path / "cells", 1, cells)
    refused = {name: (folder / name / "refused.txt").read_text() for name in cells}
    assert "it has adapters of other frozen weights" in refused["other"]
    assert "adapter.rank was 4 in the checkpoint and is 2 in this run" in refused["rank"]
    assert "checkpoint_format is torch, adapters only instead of torch" in refused["full"]


@pytest.mark.parametrize(
    "name", cases(["llama", "llama_full_shard", "llama_zero2_offload", "llama_zero3", "bf16_zero3"])
)
def test_peft_loads_a_saved_adapter_with_the_same_logits(name: str, runs: Runs, models: Path) -> None:
    """The weights of the checkpoint of ``single`` are those of a model that distexp builds."""
    saved = folder_of(runs, name) / "model"
    settings = json.loads((saved / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(models / "llama")
    weights = load_file(saved / "adapter_model.safetensors")
    assert all(weight.dtype == torch.float32 and "lora_" in key for key, weight in weights.items())
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(str(saved), dtype=torch.float32).eval()
    base = AutoModelForCausalLM.from_pretrained(models / "llama", dtype=torch.float32)
    wrapped = peft.PeftModel.from_pretrained(base, str(saved)).eval()
    tokens = torch.arange(12).view(1, 12)
    with torch.no_grad():
        expected = _trained_logits(saved, models, tokens)
        for model in (loaded, wrapped):
            torch.testing.assert_close(model(input_ids=tokens).logits, expected, rtol=1e-5, atol=1e-6)
        plain = AutoModelForCausalLM.from_pretrained(models / "llama", dtype=torch.float32).eval()
        assert (plain(input_ids=tokens).logits - expected).abs().max() > 0.01


@pytest.mark.parametrize("name", cases(["classes", "classes_full_shard", "classes_zero3"]))
def test_peft_loads_a_classifier_with_its_head(name: str, runs: Runs, models: Path, tmp_path: Path) -> None:
    """The loss of the evaluation set, by the saved adapter and head, on the frozen weights of the base."""
    folder = folder_of(runs, name)
    model = peft.AutoPeftModelForSequenceClassification.from_pretrained(str(folder / "model"), num_labels=5).eval()
    located = [text.replace("FOLDER", str(models)) for text in (*COMMON, *CLASSES)]
    config = resolve_cell("cluster.device=cpu", "strategy=single", *located)
    data = load_data(config, alone(tmp_path))
    batch = data.collate([data.evaluation[index] for index in range(8)])
    with torch.no_grad():
        loss = model(**batch.inputs, labels=batch.labels).loss.item()
    record = RunRecord.read(folder / "record.json")
    assert record.metrics is not None
    assert loss == pytest.approx(record.metrics.eval_loss, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_a_saved_classifier_has_the_names_of_its_classes(adapter: str, models: Path, tmp_path: Path) -> None:
    names, classes = ["bad", "good", "so-so"], ("model.task=sequence_classification", "model.init=pretrained")
    (tmp_path / "rows.csv").write_text("text,label\n" + "".join(f"some words,{names[row % 3]}\n" for row in range(40)))
    own = ("dataset=text", "dataset.path=rows.csv", "train.max_steps=1", "train.save_model=true", "hydra.run.dir=run")
    done = run_distexp(
        *("model=hf", f"model.name={models / 'bert'}", *BYTE, *classes, *own, f"adapter={adapter}"),
        *("strategy=single", "cluster.device=cpu", "cluster.workers_per_node=1"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    saved, numbers = tmp_path / "run" / "model", {name: number for number, name in enumerate(names)}
    if adapter == "none":
        config = AutoConfig.from_pretrained(saved)
    else:
        assert json.loads((saved / "class_names.json").read_text()) == names
        labels = {"id2label": dict(enumerate(names)), "label2id": numbers, "ignore_mismatched_sizes": True}
        config = peft.AutoPeftModelForSequenceClassification.from_pretrained(str(saved), **labels).config
    assert (config.id2label, config.label2id) == (dict(enumerate(names)), numbers)


def _trained_logits(saved: Path, models: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits of the base with each product of B and A added to its weight: the definition of LoRA."""
    model = AutoModelForCausalLM.from_pretrained(models / "llama", dtype=torch.float32).eval()
    weights = load_file(saved / "adapter_model.safetensors")
    layers = {key.split(".lora_")[0] for key in weights}
    assert len(layers) == 2 * LLAMA["num_hidden_layers"], "peft's choice for a Llama: queries and values"
    for name in layers:
        layer = model.get_submodule(name.removeprefix("base_model.model."))
        layer.weight += 8 / 4 * weights[f"{name}.lora_B.weight"] @ weights[f"{name}.lora_A.weight"]
    logits: torch.Tensor = model(input_ids=tokens).logits
    return logits


def test_the_native_loop_has_the_losses_of_a_hand_written_loop_with_peft(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build() -> nn.Module:
        base = AutoModelForCausalLM.from_pretrained(models / "llama", dtype=torch.float32)
        settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        wrapped: nn.Module = peft.get_peft_model(base, settings)
        return wrapped

    monkeypatch.setattr(hand_written_loop, "model_factory", lambda config, data: build)
    own_data = ("model", "dataset=", "dataset.max_length", "train.learning_rate")
    shared = (text for text in hand_written_loop.SMALL_GPT if not text.startswith(own_data))
    overrides = (
        "model=hf",
        f"model.name={models / 'llama'}",
        *BYTE,
        *shared,
        *LORA,
        *LARGE_STEPS,
        "train.gradient_accumulation_steps=1",
    )
    native, hand_written = hand_written_loop.build_loops(overrides, tmp_path, torch.device("cpu"))
    for _ in range(2):
        native.train_epoch()
        hand_written.train_epoch()
    assert len(native.losses) > hand_written_loop.STEPS
    assert native.losses == pytest.approx(hand_written.losses, rel=1e-6)
    assert native.losses[0] - native.losses[-1] > 0.01


TINY = ("model=gpt_tiny", "dataset=synthetic", "cluster.device=cpu", *LORA)
HIDDEN, LAYERS, INNER, VOCABULARY, RANK = 64, 2, 256, 1024, 4
"""Sizes of gpt_tiny, and the rank of LORA."""
TRAINED = LAYERS * RANK * (HIDDEN + 3 * HIDDEN + 2 * HIDDEN + 2 * (HIDDEN + INNER))


def alone(folder: Path) -> Context:
    return Context(0, 1, 0, 1, 1, torch.device("cpu"), folder)


def test_frozen_weights_have_no_products_for_gradients(tmp_path: Path) -> None:
    config = resolve_cell(*TINY, "strategy=single", "dataset.max_length=64")
    flops = FlopCounter(config, load_data(config, alone(tmp_path))).model_rates()
    matrices = LAYERS * (4 * HIDDEN**2 + 2 * HIDDEN * INNER) + HIDDEN * VOCABULARY
    # Nothing before the first layer is trained, so its input has no gradient.
    first = 2 * 3 * HIDDEN**2 + 2 * RANK * HIDDEN
    assert flops.token == pytest.approx(4 * matrices + 6 * TRAINED - first, rel=1e-9)
    assert flops.pair == pytest.approx(3 * LAYERS * 4 * HIDDEN, rel=1e-9)


@pytest.mark.parametrize(
    ("overrides", "shards", "bytes_of_weights"),
    [
        pytest.param(("strategy=single",), (1, 1), 4, marks=pytest.mark.release),
        (("strategy=single", "precision=bf16"), (1, 1), 2),
        pytest.param(("strategy=ddp", "cluster.workers_per_node=2"), (1, 1), 4, marks=pytest.mark.release),
        (("sharding=full_shard", "cluster.workers_per_node=2"), (2, 2), 4),
        (("zero_stage=2", "precision=bf16", "cluster.workers_per_node=2"), (1, 2), 2),
        pytest.param(
            ("zero_stage=3", "precision=bf16", "cluster.workers_per_node=2"), (2, 2), 2, marks=pytest.mark.release
        ),
    ],
)
def test_only_adapters_have_gradients_and_states_in_a_prediction(
    overrides: tuple[str, ...], shards: tuple[int, int], bytes_of_weights: int
) -> None:
    trace = trace_step(resolve_cell(*TINY, *overrides), on_gpu=False)
    frozen = trace.parameters - TRAINED
    assert trace.trained_share == pytest.approx(TRAINED / trace.parameters)
    before: Counter[str] = Counter()
    for event in trace.events:
        before[event.part] += event.bytes if event.phase == "setup" else 0
    in_16_bits = "zero_stage" in str(overrides)
    trained = 2 if in_16_bits else 4  # bytes
    expected = (bytes_of_weights * frozen + trained * TRAINED) / shards[0]
    assert before["parameters"] == pytest.approx(expected, rel=0.02)
    moments = 12 if in_16_bits else 8
    assert before["optimizer_states"] == pytest.approx(moments * TRAINED / shards[1], rel=0.02)


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.release), "bf16"])
def test_the_predicted_peak_is_that_of_the_allocator(precision: str, tmp_path: Path) -> None:
    config = resolve_cell(
        *(*TINY, "strategy=single", f"precision={precision}", "dataset.max_length=128", "model.seq_length=128")
    )
    predicted = make_estimate(config).peak_allocated_mib
    assert predicted == pytest.approx(allocated_peak(config, alone(tmp_path)) / MIB, rel=0.01)


def allocated_peak(config: Config, context: Context) -> int:
    """Return the peak of the bytes that torch allocates on the CPU in a step, with the states before it."""
    data = load_data(config, context)
    model: Any = load_strategy(config).setup(build_model(config, data, context), config, context)
    step = next(iter(make_loaders(config, data, context)[0].iter_steps(0)))

    def run() -> None:
        train_step(model, step)
        model.step(1e-3)

    run()
    states = [value for state in model.optimizer.state.values() for value in state.values()]
    batches = [tensor for batch in step.micro_batches for tensor in (*batch.inputs.values(), batch.labels)]
    kept = [*model.module.parameters(), *model.module.buffers(), *states, *batches]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    path = context.run_dir / "trace.json"
    profiler.export_chrome_trace(str(path))
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    events.sort(key=lambda event: event["ts"])
    totals = [event["args"]["Total Allocated"] for event in events]
    start = totals[0] - events[0]["args"]["Bytes"]
    return int(sum(storage_sizes(iter(kept)).values()) + max(totals) - start)


def test_a_forecast_gathers_all_weights_and_reduces_the_gradients_of_adapters() -> None:
    units = (Parameters("embedding", (500,), ()), Parameters("block", (1000, 8), (8,)))
    items = [Segment("forward", 0, 1.0), Segment("backward", 0, 1.0), Segment("optimizer", 0, 1.0)]
    model = StepModel(True, 1, 1, 1, 3.0, ((3.0,),), tuple(items), units)
    planned = [item for item in FSDPCommunication().plan(items, model, 1) if isinstance(item, Collective)]
    sizes = [(item.kind, item.bytes) for item in planned if item.phase != "optimizer"]
    gathers = [("all_gather", 4 * 500), ("all_gather", 4 * 1008)]
    assert sizes[:2] == gathers
    assert sorted(sizes[2:]) == sorted([*gathers, ("reduce_scatter", 4 * 8)])
    assert DDPCommunication().buckets(model) == [4 * 8]
    share = 8 / 1508
    assert FSDPCommunication(trained_share=share).bytes_per_parameter(1) == 2 * 4 + share * 4
    assert DDPCommunication(trained_share=share).bytes_per_parameter(3) == 2 * share * 4


def test_an_adapter_changes_the_id_of_a_run() -> None:
    plain = ("model=gpt_tiny", "cluster.device=cpu")
    cells = [(), ("adapter=lora",), ("adapter=lora", "adapter.rank=4"), ("adapter=lora", "adapter.targets=[inner]")]
    assert len({run_id(resolve_cell(*plain, *overrides)) for overrides in cells}) == len(cells)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("adapter.rank=4",), "adapter.rank=4 has no effect with adapter=none: add adapter=lora, or leave it out"),
        (
            ("adapter=lora", "engine=hf_trainer"),
            "adapter=lora is not supported by engine=hf_trainer: use engine=native",
        ),
        (("adapter=lora", "adapter.base_dtype=bf16"), "use precision=bf16 or adapter.base_dtype=fp32"),
        (
            ("adapter=lora", "adapter.rank=99999"),
            "adapter.rank=99999 is more than model.hidden_size=64: use at most 64",
        ),
        (("adapter=lora", "train.save_model=true"), "use model.init=pretrained, or train.save_model=false"),
        (("adapter=lora", "model=resnet_tiny", "dataset=tinyimagenet_sample"), "adapter.modules_to_save=[fc]"),
        (
            ("adapter=lora", "zero_stage=2", "precision=bf16", "adapter.base_dtype=fp32"),
            "use adapter.base_dtype=bf16, or zero_stage=0",
        ),
    ],
)
def test_what_adapters_exclude_is_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        resolve_cell("cluster.device=cpu", *overrides)


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(section_checks, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=re.escape("pip install 'distexp[adapters]'")):
        resolve_cell("cluster.device=cpu", "adapter=lora")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("targets=[q_proj,inner]", "GPT has no layer q_proj: use adapter.targets=[query_key_value,output,inner]"),
        ("targets=[attention_norm]", "names LayerNorm, which peft does not support: use linear layers, as adapter.t"),
        ("targets=[1]", "names Block, which peft does not support: use linear layers, as adapter.targets=[query"),
    ],
)
def test_adapters_that_fit_no_layer_are_refused(setting: str, message: str, tmp_path: Path) -> None:
    config = resolve_cell(*TINY, "strategy=single", f"adapter.{setting}")
    with pytest.raises(ConfigError, match=re.escape(message)):
        build_model(config, load_data(config, alone(tmp_path)), alone(tmp_path))


def test_an_image_model_gets_adapters_if_it_has_linear_layers(tmp_path: Path) -> None:
    config = resolve_cell(
        *("adapter=lora", "adapter.targets=[fc]", "model=resnet_tiny", "dataset=synthetic", "strategy=single"),
        "cluster.device=cpu",
    )
    model = build_model(config, load_data(config, alone(tmp_path)), alone(tmp_path)).model
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained == ["fc.lora_A.default.weight", "fc.lora_B.default.weight"]


def test_a_module_that_is_trained_whole_must_exist(tmp_path: Path) -> None:
    config = resolve_cell(*TINY, "strategy=single", "adapter.modules_to_save=[score]")
    message = "adapter.modules_to_save=['score']: GPT has no module score: use some of [tokens,positions,dropout,blocks"
    with pytest.raises(ConfigError, match=re.escape(message)):
        build_model(config, load_data(config, alone(tmp_path)), alone(tmp_path))


def test_a_tied_weight_is_not_trained_whole(tmp_path: Path) -> None:
    tied = (*TINY, "strategy=single", "model.tie_embeddings=true")
    config = resolve_cell(*tied, "adapter.modules_to_save=[tokens,norm]")
    message = r"tokens.weight and head.weight are one weight, .*: leave it out, or use (adapter.targets=\[.*,tokens\])"
    with pytest.raises(ConfigError, match=message) as caught:
        build_model(config, load_data(config, alone(tmp_path)), alone(tmp_path))
    found = re.search(message, str(caught.value))
    assert found is not None
    config = resolve_cell(*tied, found[1])
    model = build_model(config, load_data(config, alone(tmp_path)), alone(tmp_path)).model
    assert any(name.startswith("tokens.lora_") for name, _ in model.named_parameters())
