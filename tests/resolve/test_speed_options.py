"""Which options of speed go together."""

from __future__ import annotations

import pytest

from distexp.config import ConfigError
from distexp.resolve.run_id import run_id
from tests.helpers.runs import resolve_cell

SINGLE = ("strategy=single", "cluster.workers_per_node=1", "cluster.device=cpu")
IMAGES = ("model=resnet_tiny", "dataset=tinyimagenet_sample")
STEPS, AUTO = "train.gradient_accumulation_steps=2", ("train.micro_batch_size=auto", "train.global_batch_size=16")
UNCHECKED = ("precision=bf16", "deepspeed.check_overflow=false")
ASYNC = "deepspeed.async_update=true"
BF16_STEP = ("precision=bf16", "train.compute_weights=step")


FURTHER_UNSUPPORTED = [  # cases of kinds that the test has anyway
    (("zero_stage=2", "train.compile=graphs"), r"compile=graphs is not supported by strategy=deepspeed"),
    (("zero_stage=3", "train.compile=true"), r"train\.compile=true does not work with zero_stage=3"),
    ((*SINGLE, "train.compile=model", "dataset.bucketing=true"), r"one length, but dataset\.bucketing=true"),
    (("zero_stage=1", *BF16_STEP), r"compute_weights=step is not supported by strategy=deepspeed"),
    (("strategy=ddp", "engine=hf_trainer", *BF16_STEP), r"compute_weights=step is not supported by engine="),
    (("strategy=fsdp", "train.fused_update=true"), r"fused_update=true is not supported by strategy=fsdp"),
    (
        ("strategy=ddp", "engine=hf_trainer", "train.fused_update=true"),
        r"fused_update=true is not supported by en",
    ),
    (("zero_stage=3", "precision=bf16", "deepspeed.check_overflow=false"), r"and zero_stage=3: leave it out"),
    (("zero_stage=2", ASYNC), r"async_update=true is for precision=bf16 with zero_stage=1,2, but .*=fp32"),
    (("zero_stage=3", "precision=bf16", ASYNC), r"async_update=true is for .* and zero_stage=3: leave it out"),
    (("zero_stage=2", *UNCHECKED, ASYNC, "engine=hf_trainer"), r"async_update=true is not supported by engine="),
]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        *(pytest.param(*case, marks=pytest.mark.release) for case in FURTHER_UNSUPPORTED),
        (("strategy=fsdp", "train.compile=model"), r"compile=model is not supported by strategy=fsdp: use .*=blocks"),
        (("zero_stage=3", "train.compile=blocks"), r"train\.compile=blocks does not work with zero_stage=3"),
        (("strategy=ddp", "engine=hf_trainer", "train.compile=model"), r"not supported by engine=hf_trainer"),
        ((*SINGLE, "train.compile=graphs"), r"compile=graphs needs a GPU, but this run is on cpu: use .*=model"),
        ((*SINGLE, "train.compile=model", "dataset.padding=longest"), r"one length, but dataset\.padding=longest"),
        (
            (
                *SINGLE,
                *("model=gpt_tiny", "train.compile=model", "dataset.packing=true", "dataset.padding=longest"),
            ),
            r"one length, but dataset\.padding=longest",
        ),
        ((*SINGLE, "train.compile=loop"), r"train\.compile=loop is not one of false, true, blocks, model, graphs"),
        (("strategy=ddp", "train.compile=model", "ddp.bucket_cap_mb=0.5"), r"bucket_cap_mb=0\.5 is too small"),
        ((*SINGLE, "train.compute_weights=step"), r"is for precision=bf16, but this run has precision=fp32"),
        (("strategy=fsdp", *BF16_STEP), r"compute_weights=step is not supported by strategy=fsdp"),
        ((*SINGLE, "train.fused_update=true"), r"fused_update=true needs a GPU, but this run is on cpu: leave it out"),
        (
            (*SINGLE[:2], "cluster=slurm", *IMAGES, "train.optimizer=sgd", "train.fused_update=true"),
            r"is for train\.optimizer=adamw, but this run has train\.optimizer=sgd",
        ),
        (
            (*SINGLE[:2], "cluster=slurm", "precision=fp16", "train.fused_update=true"),
            r"is for precision=fp32 and bf16, but this run has precision=fp16",
        ),
        (("strategy=ddp", *BF16_STEP, "ddp.find_unused_parameters=true"), r"gives every weight a gradient"),
        (
            ("strategy=ddp", "ddp.static_graph=true", STEPS),
            r"train\.gradient_accumulation_steps=2: leave ddp\.static_graph out",
        ),
        (
            ("strategy=ddp", "ddp.static_graph=true", *AUTO),
            r"as with train\.micro_batch_size=auto: leave ddp\.static_graph out",
        ),
        ((*SINGLE, "train.activation_budget=0.5"), r"is for compiled graphs, but train\.compile=false: use .*=blocks"),
        (
            (*SINGLE, "train.compile=true", "train.activation_budget=1.5"),
            r"activation_budget=1\.5 must be above 0 and below 1",
        ),
        (("zero_stage=2", "deepspeed.check_overflow=false"), r"for precision=bf16 with zero_stage=1,2, but .*=fp32"),
        (("zero_stage=2", "precision=bf16", ASYNC), r"needs deepspeed\.check_overflow=false, because the check"),
        (("zero_stage=2", *UNCHECKED, ASYNC, "offload=true"), r"async_update=true is not supported with offload=true"),
        (("strategy=ddp", "ddp.communication=fp8"), r"ddp\.communication=fp8 is not one of fp32, bf16"),
        (
            (*SINGLE, "train.channels_last=true"),
            r"channels_last=true is for image_classification, but model=bloom_tiny",
        ),
        (
            ("strategy=fsdp", *IMAGES, "train.channels_last=true"),
            r"channels_last=true is not supported by strategy=fsdp",
        ),
        (
            (*SINGLE, "dataset.cache=cpu"),
            r"dataset\.cache=cpu is not a key of dataset=squad_sample: leave it out",
        ),
        ((*SINGLE, *IMAGES, "dataset.cache=gpu"), r"cache=gpu needs a GPU, but this run is on cpu: choose .*=cpu"),
        ((*SINGLE, *IMAGES, "dataset.cache=disk"), r"dataset\.cache=disk is not one of none, cpu, gpu"),
    ],
)
def test_an_unsupported_option_is_refused_with_a_hint(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_cell(*overrides)


@pytest.mark.parametrize("strategy", ["single", "ddp"])
@pytest.mark.parametrize("scope", ["blocks", "model", "graphs"])
def test_supported_options_are_accepted(strategy: str, scope: str) -> None:
    device = "cluster=slurm" if scope == "graphs" else "cluster.device=cpu"  # Slurm: GPUs of another machine
    config = resolve_cell(
        f"strategy={strategy}", "cluster.workers_per_node=1", device, f"train.compile={scope}",
        *BF16_STEP,
    )  # fmt: skip
    assert config.train.compiled == scope


def test_another_launch_is_another_run() -> None:
    """The losses of compiled code and of bf16 copies differ in the last digits."""
    base = run_id(resolve_cell("strategy=ddp", "train.compile=true"))
    assert run_id(resolve_cell("strategy=ddp", "train.compile=blocks")) == base
    changes = ("train.compile=model", "ddp.communication=bf16", "ddp.gradient_as_bucket_view=false")
    others = [run_id(resolve_cell("strategy=ddp", "train.compile=true", change)) for change in changes]
    units = [run_id(resolve_cell("strategy=fsdp", f"fsdp.blocks_per_unit={size}")) for size in (1, 2, "auto")]
    assert len({base, *others, *units}) == 7


def test_only_a_cache_changes_the_run_of_images() -> None:
    """An enlarged image may differ in the last digit of a pixel."""
    base = run_id(resolve_cell(*SINGLE, *IMAGES))
    assert run_id(resolve_cell(*SINGLE, *IMAGES, "dataset.cache=none")) == base
    assert run_id(resolve_cell(*SINGLE, *IMAGES, "dataset.cache=cpu")) != base


def test_a_prediction_needs_the_size_of_the_micro_batch() -> None:
    searched = ("train.micro_batch_size=auto", "train.global_batch_size=8", "cluster=slurm")
    assert resolve_cell(*searched, "plan=warn").plan.name == "warn"
    with pytest.raises(
        ConfigError, match=r"needs a number of samples, but train\.micro_batch_size=auto: type a number"
    ):
        resolve_cell(*searched, "plan=check")
