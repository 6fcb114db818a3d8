"""Overrides that are proposed against each bottleneck."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from distexp.config import ConfigError
from distexp.explain.explanation import explain
from distexp.strategies.traits import ProfiledStep, Traits
from tests.helpers.profiled_records import (
    COMMUNICATION_BOUND,
    COMPUTE_BOUND,
    DATA_BOUND,
    GPU,
    LAUNCH_BOUND,
    explanation,
    profiled,
    with_memory,
)


@pytest.mark.parametrize(
    ("settings", "proposed"),
    [
        ({}, ["kernels=fast"]),
        ({"kernels__name": "fast"}, []),
        ({"kernels__name": "fast", "train__compile": "model"}, ["train.compile=graphs"]),
        ({"train__compile": "blocks"}, []),
        ({"parallel__tensor": 2}, []),  # Workers that share layers compile nothing.
        ({"parallel__expert": 2}, []),
        ({"strategy": "deepspeed", "deepspeed__zero_stage": 3}, []),
        ({"strategy": "deepspeed", "deepspeed__zero_stage": 2}, ["kernels=fast"]),
    ],
)
def test_kernels_are_proposed_only_where_they_launch_less(settings: dict[str, Any], proposed: list[str]) -> None:
    assert explanation(profiled(LAUNCH_BOUND, **settings, **GPU)).alternatives == proposed


@pytest.mark.parametrize(
    ("settings", "proposed"),
    [
        ({}, ["ddp.communication=bf16", "train.gradient_accumulation_steps=2"]),
        ({"ddp__communication": "bf16"}, ["train.gradient_accumulation_steps=2"]),
        ({"train__global_batch_size": 64}, ["ddp.communication=bf16", "train.global_batch_size=128"]),
        ({"strategy": "fsdp"}, ["sharding=shard_grad_op", "train.micro_batch_size=8"]),
        ({"strategy": "fsdp", "fsdp__sharding": "shard_grad_op"}, ["train.micro_batch_size=8"]),
        ({"strategy": "deepspeed", "deepspeed__zero_stage": 3}, ["zero_stage=2", "train.micro_batch_size=8"]),
        (
            {"strategy": "deepspeed", "deepspeed__zero_stage": 3, "deepspeed__config_file": "ds.json"},
            ["train.micro_batch_size=8"],
        ),
    ],
)
def test_each_strategy_has_its_advice_against_communication(settings: dict[str, Any], proposed: list[str]) -> None:
    run = with_memory(profiled(COMMUNICATION_BOUND, **settings, **GPU), 20_000)
    assert explanation(run).alternatives == proposed
    full = with_memory(run, 128_000)
    full.built.parameters = 10**9  # type: ignore[union-attr]
    memory = ("sharding", "zero_stage", "train.micro_batch_size")
    assert explanation(full).alternatives == [text for text in proposed if not text.startswith(memory)]


@pytest.mark.parametrize(("gathers", "is_proposed"), [(0.3, True), (0.05, False)])
def test_fewer_gathers_are_proposed_only_if_gathers_take_time(gathers: float, is_proposed: bool) -> None:
    run = with_memory(profiled(COMMUNICATION_BOUND, strategy="fsdp", **GPU), 20_000)
    run.metrics.communication = {"by_collective": {"all_gather": gathers, "reduce_scatter": 0.5}}
    assert ("sharding=shard_grad_op" in explanation(run).alternatives) == is_proposed


@pytest.mark.parametrize(
    ("cores", "limit", "hosts", "nodes", "proposed"),
    [
        (None, None, [], 1, None),
        (8, None, [], 1, None),
        (64, None, [], 1, 8),
        (64, 9.5, [], 1, None),
        (64, 14.0, [], 1, 6),
        (16, None, ["a", "b"], 2, 7),
        (16, None, ["a"], 2, None),
    ],
    ids=["unknown", "few", "many", "limit", "higher limit", "two machines", "simulated nodes"],
)
def test_advice_for_data_needs_free_cores(
    cores: int | None, limit: float | None, hosts: list[str], nodes: int, proposed: int | None
) -> None:
    run = profiled(DATA_BOUND, dataset__num_workers=4, cluster__nodes=nodes, **GPU)
    assert run.environment is not None
    run.environment.cpu_count, run.environment.cpu_limit = cores, limit
    expected = [f"dataset.num_workers={proposed}"] if proposed else []
    run.run.hosts = hosts
    assert explanation(run).alternatives == expected
    run.run.hosts, run.run.attempts = [], [{"hosts": hosts}]  # during a run
    assert explanation(run).alternatives == expected


@pytest.mark.parametrize(
    ("dataset", "proposed"),
    [
        ({"cache": "none"}, True),
        ({"cache": "gpu"}, False),
        ({"root": "/missing"}, False),
        ({"train_size": 10**8, "eval_size": 1}, False),
    ],
    ids=["small", "is kept", "unknown", "300 GB"],
)
def test_decoded_images_are_kept_only_if_they_fit(dataset: dict[str, Any], proposed: bool) -> None:
    settings = {f"dataset__{name}": value for name, value in {"keys": ["cache"], **dataset}.items()}
    assert explanation(profiled(DATA_BOUND, **settings, **GPU)).alternatives == ["dataset.cache=cpu"] * proposed


@pytest.mark.parametrize(
    ("settings", "proposed"),
    [
        ({}, ["kernels=fast"]),  # against the launch idle, which has 5 %
        ({"precision__name": "fp32"}, ["precision=bf16", "kernels=fast"]),
        ({"precision__name": "fp32", "peak": None}, []),
    ],
)
def test_a_compute_bound_run_should_use_bf16_on_gpus_that_have_it(
    settings: dict[str, Any], proposed: list[str]
) -> None:
    device = {} if "peak" in settings else GPU
    assert explanation(profiled(COMPUTE_BOUND, **settings, **device)).alternatives == proposed


class TextAdvice(Traits):
    """A strategy whose advice is no Advice."""

    def advice(self, bottleneck: str, step: ProfiledStep) -> Iterator[Any]:
        """Yield only the overrides."""
        yield "strategy.options.bucket_mb=25"


def test_advice_of_another_class_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"advice\(\) of the strategy returned a str instead of a .*Advice: return one"
    ):
        explain(profiled(COMMUNICATION_BOUND, **GPU), TextAdvice())


def test_no_alternative_is_proposed_twice() -> None:
    """kernels=fast is against the many other kernels, and against the launch idle."""
    run = profiled({"matmul": 50.0, "other_kernels": 40.0, "launch_idle": 9.0, "host": 1.0}, **GPU)
    assert explanation(run).alternatives == ["kernels=fast"]


@pytest.mark.parametrize(("optimizer", "is_proposed"), [("adamw", True), ("sgd", False)])
def test_deepspeed_has_an_optimizer_for_cpus_only_for_adamw(optimizer: str, is_proposed: bool) -> None:
    settings = {"strategy": "deepspeed", "offload__enabled": True, "deepspeed__cpu_optimizer": "torch"}
    run = profiled({"matmul": 50.0, "optimizer": 50.0}, **settings, train__optimizer=optimizer, **GPU)
    assert ("deepspeed.cpu_optimizer=deepspeed" in explanation(run).alternatives) == is_proposed


ASYNC = "deepspeed.async_update=true"
FAST_ZERO = {"strategy": "deepspeed", "kernels__name": "fast", "train__compile": "blocks"}
UNCHECKED = {"deepspeed__check_overflow": False}


@pytest.mark.parametrize("part", ["data_wait", "optimizer", "launch_idle"])
@pytest.mark.parametrize(
    ("settings", "proposed"),
    [
        (UNCHECKED, [ASYNC]),
        ({"deepspeed__check_overflow": True}, [f"deepspeed.check_overflow=false {ASYNC}"]),
        ({"deepspeed__zero_stage": 1, **UNCHECKED}, [ASYNC]),
        ({"deepspeed__zero_stage": 3}, []),
        ({**UNCHECKED, "deepspeed__async_update": True}, []),
        ({**UNCHECKED, "offload__enabled": True}, []),
        ({"precision__name": "fp16"}, []),
        ({**UNCHECKED, "engine__name": "hf_trainer"}, []),
        ({"strategy": "ddp"}, []),
    ],
)
def test_an_update_without_waits_is_proposed_where_it_is_possible(
    settings: dict[str, Any], proposed: list[str], part: str
) -> None:
    run = profiled({"matmul": 90.0, part: 10.0}, **FAST_ZERO | settings, **GPU)
    run.metrics.steps_per_epoch = 1  # No accumulation is proposed.
    found = [text for text in explanation(run).alternatives if "async" in text]
    assert found == proposed
    compiles_less = explanation(profiled({"matmul": 60.0, "launch_idle": 40.0}, strategy="deepspeed", **GPU))
    assert compiles_less.alternatives == ["kernels=fast"], "it includes the update"


@pytest.mark.parametrize(("settings", "advice"), [(GPU, ["train.log_every=10"]), ({"peak": None}, [])])
def test_fewer_log_lines_are_proposed_on_gpus_only(settings: dict[str, Any], advice: list[str]) -> None:
    """A line makes the CPU wait for the GPU. On a CPU, runs with 1 and 10 steps a line had the same host work."""
    run = profiled({"matmul": 50.0, "host": 50.0}, train__log_every=1, **settings)
    assert explanation(run).alternatives == advice


@pytest.mark.parametrize(
    ("activations_mib", "settings", "advice"),
    [
        (10.0, {}, ["train.micro_batch_size=8"]),
        (
            10.0,
            {"train__gradient_accumulation_steps": 2},
            ["train.micro_batch_size=8 train.gradient_accumulation_steps=1"],
        ),
        (60.0, {}, []),
        (None, {}, []),
    ],
    ids=["little memory", "the same training", "much memory", "unknown memory"],
)
def test_a_cpu_that_is_busy_with_python_should_train_larger_micro_batches(
    activations_mib: float | None, settings: dict[str, Any], advice: list[str]
) -> None:
    """Two workers with 1,000 MiB together: twice the micro-batch may need 100 MiB more, or 50 MiB for a worker."""
    run = profiled({"matmul": 50.0, "host": 50.0}, peak=None, train__micro_batch_size=4, **settings)
    run.memory["cpu"] = [{"node": 0, "peak_mib": 1000.0}]
    run.memory["parts"] = [{"rank": 0, "activations_mib": activations_mib}]
    assert explanation(run).alternatives == advice
    assert run.metrics.step_breakdown
    run.metrics.step_breakdown[0]["without_core_ms"] = 20.0
    assert explanation(run).alternatives == advice
    run.metrics.step_breakdown[0]["without_core_ms"] = 30.0
    assert explanation(run).alternatives == [], "other programs had the cores for most of the host work"
