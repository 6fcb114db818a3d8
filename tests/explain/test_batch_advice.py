"""Advice to use larger batches: only if they fit, and only named as another training if they are one."""

from __future__ import annotations

from typing import Any

import pytest

from distexp.explain.advice import larger_global_batches
from distexp.explain.explanation import explain
from distexp.explain.step_profile import StepProfile
from tests.helpers.profiled_records import COMMUNICATION_BOUND, GPU, LAUNCH_BOUND, explanation, profiled, with_memory


def test_a_larger_micro_batch_is_proposed_only_if_it_fits() -> None:
    """The GPU has 140 GB. 55 % of the step is idle, so a micro-batch three times as large would hide it: 4 times."""
    fast = {"kernels__name": "fast", "train__micro_batch_size": 2, **GPU}
    unknown = profiled(LAUNCH_BOUND, **fast)
    assert explanation(unknown).alternatives == []
    assert explanation(with_memory(unknown, 20_000)).alternatives == ["train.micro_batch_size=8"]
    assert explanation(with_memory(unknown, 40_000)).alternatives == ["train.micro_batch_size=4"]
    assert explanation(with_memory(unknown, 100_000)).alternatives == []
    assert explanation(with_memory(unknown, 100_000, constant_mib=92_000)).alternatives == ["train.micro_batch_size=8"]
    limited = with_memory(profiled(LAUNCH_BOUND, cluster__gpu_memory_limit_gb=24, **fast), 20_000)
    assert explanation(limited).alternatives == []
    assert explanation(with_memory(unknown, 32_100)).alternatives == ["train.micro_batch_size=4"], (
        "CUDA and NCCL need memory"
    )
    small = {"cluster__gpu_memory_limit_gb": 8, **fast, "train__micro_batch_size": 1}
    assert explanation(with_memory(profiled(LAUNCH_BOUND, **small), 1_800)).alternatives == ["train.micro_batch_size=2"]
    measured = with_memory(unknown, 30_000)
    measured.memory["parts"][0]["context_mib"] = 20_000.0
    assert explanation(measured).alternatives == ["train.micro_batch_size=4"]
    accumulated = with_memory(profiled(LAUNCH_BOUND, train__gradient_accumulation_steps=2, **fast), 20_000)
    assert explanation(accumulated).alternatives == ["train.micro_batch_size=4 train.gradient_accumulation_steps=1"]
    assert "2,000 kernels per micro-batch" in explanation(accumulated).sentence
    fixed = profiled(LAUNCH_BOUND, train__gradient_accumulation_steps=4, train__global_batch_size=16, **fast)
    assert explanation(with_memory(fixed, 20_000)).alternatives == ["train.micro_batch_size=8"]


def test_at_the_largest_micro_batch_of_a_training_a_larger_global_batch_is_proposed() -> None:
    """The accumulation cannot shrink, so the micro-batch grows only with the global batch."""
    for settings, proposed in (
        ({}, "train.micro_batch_size=8"),
        ({"train__gradient_accumulation_steps": 3}, "train.micro_batch_size=8"),
        ({"train__global_batch_size": 4}, "train.micro_batch_size=8 train.global_batch_size=16"),
    ):
        run = profiled(LAUNCH_BOUND, kernels__name="fast", train__micro_batch_size=2, **settings, **GPU)
        found = explain(with_memory(run, 20_000))
        assert found is not None
        assert found.alternatives == found.larger_batch == [proposed]
        assert found.to_json()["larger_global_batch"] == [proposed]
        full = explain(with_memory(run, 135_000))
        assert full is not None
        assert full.alternatives == [], "a larger micro-batch does not fit"


def test_an_alternative_lifts_the_limits_of_the_scale() -> None:
    """A limit lowers a larger value without an error, so the alternative alone would change nothing."""
    limits = {"scale__micro_batch_size": 2, "scale__gradient_accumulation_steps": 2}
    lifted = "scale.micro_batch_size=null scale.gradient_accumulation_steps=null"
    for settings, proposed, larger in (
        ({}, f"train.micro_batch_size=8 train.gradient_accumulation_steps=1 {lifted}", True),
        (
            {"train__global_batch_size": 16, "train__gradient_accumulation_steps": 4},
            f"train.micro_batch_size=8 train.global_batch_size=16 {lifted}",
            False,
        ),
    ):
        run = profiled(LAUNCH_BOUND, kernels__name="fast", train__micro_batch_size=2, **settings, **limits, **GPU)
        found = explain(with_memory(run, 20_000))
        assert found is not None
        assert found.alternatives == [proposed]
        assert found.larger_batch == ([proposed] if larger else [])


def test_more_accumulation_keeps_the_micro_batch_of_the_scale() -> None:
    """Without the limit of the scale, ddp/multi_gpu has a micro-batch of 512."""
    limits = {"scale__micro_batch_size": 4, "scale__gradient_accumulation_steps": 2}
    for settings, larger in (({}, "train.gradient_accumulation_steps=2"),
                             ({"train__global_batch_size": 8}, "train.global_batch_size=16")):  # fmt: skip
        run = profiled(COMMUNICATION_BOUND, train__micro_batch_size=4, **settings, **limits, **GPU)
        lifted = "scale.micro_batch_size=null scale.gradient_accumulation_steps=null"
        assert f"{larger} train.micro_batch_size=4 {lifted}" in explanation(run).alternatives


@pytest.mark.parametrize(
    ("settings", "steps", "largest"),
    [
        ({"dataset__train_size": 48}, None, "train.micro_batch_size=16"),
        ({"dataset__train_size": 20}, None, "train.micro_batch_size=8"),
        ({"dataset__train_size": 4}, None, None),
        ({"dataset___target_": "distexp.data.squad.load"}, 3, "train.micro_batch_size=8"),
        ({"dataset__packing": True}, 2, None),
    ],
)
def test_no_micro_batch_is_proposed_for_which_a_worker_lacks_samples(
    settings: dict[str, Any], steps: int | None, largest: str | None
) -> None:
    """Two workers share the samples."""
    run = with_memory(
        profiled({**LAUNCH_BOUND, "launch_idle": 1000.0}, train__micro_batch_size=4, **settings, **GPU), 1
    )
    run.metrics.steps_per_epoch = steps
    sizes = [text for text in explanation(run).alternatives if text.startswith("train.micro_batch_size")]
    assert sizes == ([largest] if largest else [])


def test_a_static_graph_has_no_accumulation() -> None:
    run = profiled(COMMUNICATION_BOUND, ddp__static_graph=True, **GPU)
    assert not any("accumulation" in text for text in explanation(run).alternatives)


@pytest.mark.parametrize("steps", [None, 1, 2])
def test_more_accumulation_needs_two_steps_in_an_epoch(steps: int | None) -> None:
    for settings, text in (({}, "train.gradient_accumulation_steps=2"), ({"train__global_batch_size": 8},
                                                                         "train.global_batch_size=16")):  # fmt: skip
        run = profiled(COMMUNICATION_BOUND, **settings, **GPU)
        run.metrics.steps_per_epoch = steps
        assert (text in explanation(run).alternatives) == (steps != 1)


@pytest.mark.parametrize(
    ("settings", "alternatives", "larger"),
    [
        ({}, ["ddp.communication=bf16", "train.gradient_accumulation_steps=2"], [1]),
        ({"train__global_batch_size": 8}, ["train.micro_batch_size=8", "train.global_batch_size=16"], [1]),
        ({"train__micro_batch_size": 2}, ["train.micro_batch_size=4", "kernels=fast"], [0]),
        ({"train__micro_batch_size": 2, "train__gradient_accumulation_steps": 2},
         ["train.micro_batch_size=4 train.gradient_accumulation_steps=1"], []),
    ],
)  # fmt: skip
def test_larger_global_batches_are_named(settings: dict[str, Any], alternatives: list[str], larger: list[int]) -> None:
    profile = StepProfile.of(profiled(LAUNCH_BOUND, **settings))
    assert profile is not None
    assert larger_global_batches(profile, alternatives) == [alternatives[position] for position in larger]
