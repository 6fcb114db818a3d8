"""What the group ``resolution`` chooses."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from distexp.config import ConfigError
from distexp.config.fields import flatten
from distexp.config.keys import speed_references
from distexp.console.run_summary import describe_kernels
from distexp.data.tinyimagenet_sample import write_images
from distexp.resolve import kernels
from distexp.resolve.run_id import run_id
from distexp.strategies.ddp import DDP
from tests.helpers.runs import resolve_cell

CPU, GPU = "cluster.device=cpu", "cluster=slurm"  # Slurm: GPUs of another machine
ONE = "cluster.workers_per_node=1"
BF16 = "precision=bf16"


def changed(*overrides: str) -> dict[str, Any]:
    """Return the keys of the group that do not have the values of ``kernels=reference``."""
    values = dict(flatten(asdict(resolve_cell(ONE, *overrides))))
    assert all(values[key] is not None for key in speed_references()), "a key is still open"
    return {key: values[key] for key, reference in speed_references().items() if values[key] != reference}


FUSED = {"train.fused_update": True}
WHOLE = {"train.compile": "model", "train.logits": "targets", **FUSED}
BLOCKS = {"train.compile": "blocks", "train.logits": "targets"}
UNCHECKED = {"deepspeed.check_overflow": False}


RESNET = {"train.compile": "model", "train.channels_last": True}
IMAGES = {"train.compile": "blocks", "dataset.cache": "gpu"}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("strategy=single", GPU), WHOLE),
        (("strategy=single", GPU, BF16), {**WHOLE, "train.compute_weights": "step"}),
        (("strategy=ddp", GPU, BF16), {**WHOLE, "train.compute_weights": "step", "ddp.bucket_cap_mb": 250.0}),
        (("strategy=ddp", GPU, BF16, "ddp.find_unused_parameters=true"), {**WHOLE, "ddp.bucket_cap_mb": 250.0}),
        (("strategy=ddp", GPU, BF16, "engine=hf_trainer", "cluster.workers_per_node=2"), BLOCKS),
        (("strategy=ddp", GPU, "dataset.padding=longest"), {**BLOCKS, **FUSED}),
        (
            ("model=gpt_tiny", "strategy=ddp", GPU, "dataset.padding=longest", "dataset.packing=true"),
            {**BLOCKS, **FUSED},
        ),
        (("sharding=hybrid_shard", GPU, BF16), {**BLOCKS, "fsdp.blocks_per_unit": "auto"}),
        (("strategy=fsdp", GPU, "engine=hf_trainer", "cluster.workers_per_node=2"), BLOCKS),
        (("zero_stage=2", GPU, BF16), {**BLOCKS, **UNCHECKED, "deepspeed.async_update": True}),
        (("zero_stage=2", GPU, BF16, "deepspeed.check_overflow=true"), BLOCKS),
        (("zero_stage=2", GPU, BF16, "deepspeed.async_update=false"), {**BLOCKS, **UNCHECKED}),
        (("zero_stage=1", GPU, BF16, "offload=true"), {**BLOCKS, **UNCHECKED}),
        (("zero_stage=2", GPU, BF16, "engine=hf_trainer"), {**BLOCKS, **UNCHECKED}),
        (("zero_stage=2", GPU), BLOCKS),
        (("zero_stage=3", GPU), {"train.logits": "targets"}),
        (("strategy=ddp", CPU), {"train.logits": "targets"}),
        (("strategy=single", CPU, BF16), {"train.logits": "targets", "train.compute_weights": "step"}),
        (("model=resnet_tiny", "strategy=single", GPU), {**RESNET, "dataset.cache": "gpu"}),
        (("model=resnet_tiny", "sharding=full_shard", GPU), {**IMAGES, "fsdp.blocks_per_unit": "auto"}),
        (("model=resnet_tiny", "strategy=single", GPU, "dataset=synthetic"), RESNET),
        (("model=resnet_tiny", "strategy=single", CPU), {}),
    ],
)
def test_fast_chooses_for_strategy_trainer_and_device(overrides: tuple[str, ...], expected: dict[str, Any]) -> None:
    assert changed("kernels=fast", *overrides) == expected


@pytest.mark.parametrize("options", ["strategy=single", "sharding=hybrid_shard", "zero_stage=1", "model=resnet_tiny"])
def test_nothing_is_chosen_without_the_group(options: str) -> None:
    assert changed(options, GPU, BF16) == {}
    assert resolve_cell(options, GPU, BF16, ONE).model.attention == "auto"


def test_fast_names_what_is_faster_than_selective_recomputation() -> None:
    selective = ("kernels=fast", "strategy=single", GPU, ONE, "train.activation_checkpointing=selective")
    note = resolve_cell(*selective).kernels.compile_note
    proposed = note.partition("selective")[2].partition(": ")[2].removesuffix(" is faster").split()
    assert resolve_cell(*selective, *proposed).train.compile == "model"
    assert resolve_cell(*selective, "train.compile=false").kernels.compile_note == ""
    assert resolve_cell(*selective, CPU).kernels.compile_note == "", "nothing is compiled on a CPU"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((GPU, "model=bloom_560m"), "flex"),
        ((GPU, "model=bloom_560m", "model.dropout=0.1"), "sdpa"),
        ((GPU, "model=bloom_560m", "model.attention=eager"), "eager"),
        ((GPU, "model=bloom_tiny", "model.hidden_size=32"), "sdpa"),  # its heads are too narrow for flex attention
        ((GPU, "model=hf", "model.name=someone/a-model"), "auto"),
        ((GPU, "model=resnet_tiny"), "auto"),
        ((CPU, "model=bloom_560m"), "auto"),
    ],
)
def test_fast_chooses_an_attention_that_the_model_supports(overrides: tuple[str, ...], expected: str) -> None:
    assert resolve_cell("kernels=fast", "strategy=single", ONE, *overrides).model.attention == expected


def test_fast_keeps_images_on_the_gpu_if_they_are_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_images(tmp_path / "images", train=40, val=20)
    folder = ("model=resnet_tiny", "dataset=tinyimagenet", f"dataset.root={tmp_path / 'images'}")
    needed = 60 * 3 * 32 * 32

    def cache(*overrides: str, on_gpu: int, on_cpu: int = 10**12) -> str | None:
        monkeypatch.setattr(kernels, "MAX_GPU_BYTES", on_gpu)
        monkeypatch.setattr(kernels, "MAX_CPU_BYTES", on_cpu)
        return resolve_cell("kernels=fast", "strategy=single", ONE, GPU, *folder, *overrides).dataset.cache

    assert cache(on_gpu=needed) == "gpu"
    assert cache("dataset.image_size=224", on_gpu=needed) == "gpu", "images are stored at their own size"
    assert cache(on_gpu=needed - 1) == "cpu"
    assert cache("dataset.train_size=20", "dataset.eval_size=10", on_gpu=needed // 2) == "gpu"
    assert cache("dataset.image_size=16", on_gpu=needed // 4) == "gpu"
    assert cache(on_gpu=needed - 1, on_cpu=needed - 1) == "none"
    assert cache("dataset.cache=none", on_gpu=needed) == "none"


def test_fast_chooses_an_attention_for_packed_rows_on_a_cpu() -> None:
    packed = ("dataset.packing=true", "strategy=single", CPU)
    assert resolve_cell("kernels=fast", *packed).model.attention == "sdpa"
    assert resolve_cell("kernels=fast", *packed, "model=gpt_tiny").model.attention == "sdpa"
    with pytest.raises(ConfigError, match=r"dataset.packing=true is not supported by model=bloom_tiny"):
        resolve_cell(*packed)


def test_a_key_that_the_user_sets_wins() -> None:
    given = ("train.compile=false", "train.logits=all", "train.compute_weights=autocast", "train.fused_update=false")
    given = (*given, "ddp.bucket_cap_mb=25")
    assert changed("kernels=fast", "strategy=ddp", GPU, BF16, *given) == {"train.loss": "chunked"}
    assert changed("kernels=fast", "strategy=ddp", GPU, BF16, *given, "train.loss=full") == {}
    assert changed("kernels=reference", "strategy=ddp", GPU, "train.compile=graphs") == {"train.compile": "graphs"}


def test_unknown_keys_and_values_of_a_strategy_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"train.compil": "model", "train.learning_rate": 1.0, "train.compile": "all"}
    monkeypatch.setattr(DDP, "fast_values", lambda self, config: values)
    with pytest.raises(ConfigError) as raised:
        resolve_cell("kernels=fast", "strategy=ddp", GPU)
    start = "strategy._target_=distexp.strategies.ddp.DDP: fast_values() returned "
    assert [error.removeprefix(start).split(":")[0] for error in raised.value.errors] == [
        "train.compil, which is not a key of kernels=fast",
        "train.learning_rate, which is not a key of kernels=fast",
        "train.compile=all, which is not one of false, true, blocks, model, graphs",
    ]


def test_the_run_id_is_that_of_the_chosen_options() -> None:
    chosen = ("train.compile=model", "train.logits=targets", "train.fused_update=true", "model.attention=flex")
    assert run_id(resolve_cell("kernels=fast", "strategy=single", ONE, GPU)) == run_id(
        resolve_cell("strategy=single", ONE, GPU, *chosen)
    )


def test_the_choice_is_described() -> None:
    def text(*overrides: str) -> str:
        return describe_kernels(asdict(resolve_cell("strategy=single", ONE, *overrides)))

    assert text("kernels=fast", GPU) == (
        "fast (train.logits=targets, train.compile=model, train.fused_update=true, model.attention=flex)"
    )
    assert text(CPU, "train.compile=true") == "train.compile=true"
    assert text(CPU) == ""
