"""The predicted memory of ZeRO, on sizes that can be computed by hand, and compared with records of GPUs."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from distexp.config import Config
from distexp.plan.replay import EMPTY_CACHE, StepTrace, replay
from distexp.plan.trace import zero12
from distexp.plan.trace.tracing import trace_step
from distexp.plan.trace.zero12 import (
    Slice,
    cut_into_slices,
    fullest_rank,
    partition_group,
    reduced_at_once,
    round_to_power_of_two,
)
from distexp.system.units import MIB
from tests.helpers.gpu_records import gpu_records
from tests.helpers.runs import resolve_cell


def test_a_group_is_cut_into_equal_shares() -> None:
    first, second = (partition_group([6, 2, 5], world_size=2, rank=rank) for rank in (0, 1))
    assert first.size == second.size == 8  # 13 elements and 3 of padding
    assert (first.owned, second.owned) == ((6, 2, 0), (0, 0, 5))
    assert partition_group([6, 5], world_size=4, rank=1).owned == (2, 2)


def test_the_fullest_rank_keeps_the_whole_gradient_of_a_parameter_that_is_cut() -> None:
    assert fullest_rank([[10, 2, 2, 2]], world_size=2) == 1  # 10 + 2 + 2 + 2, against 10
    assert cut_into_slices(6, 5, share=4) == [Slice(1, 2), Slice(2, 3)]


def test_the_earliest_rank_owns_a_part_of_the_last_parameter() -> None:
    sizes = [[8, 2, 6, 4], [1, 1]]
    assert [fullest_rank(sizes, world_size=2, earliest=earliest) for earliest in (False, True)] == [0, 1]
    assert fullest_rank([[2, 2, 2, 10]], world_size=4, earliest=True) == 1, (
        "it keeps a whole parameter of the middle too"
    )


def test_slices_of_one_rank_are_reduced_as_one() -> None:
    first, second, other = [Slice(0, 2)], [Slice(0, 3)], [Slice(1, 4)]
    assert reduced_at_once([first, second, other], bucket_size=9) == [[Slice(0, 5), Slice(1, 4)]]
    assert reduced_at_once([[Slice(0, 20), Slice(1, 20)]], bucket_size=9) == [[Slice(0, 20)], [Slice(1, 20)]]


def test_locked_host_memory_is_a_power_of_two() -> None:
    assert [round_to_power_of_two(size) for size in (0, 1, 4, 5)] == [0, 1, 4, 8]


TINY = (
    *("model=gpt_tiny", "model.vocab_size=64", "dataset=synthetic", "dataset.max_length=16", "precision=bf16"),
    *("train.micro_batch_size=2", "train.gradient_accumulation_steps=2"),
)


def traced(*overrides: str) -> StepTrace:
    return trace_step(resolve_cell(*TINY, *overrides))


def before_step(trace: StepTrace, device: str = "gpu") -> dict[str, int]:
    """Return the bytes in memory before the step, by part."""
    found: dict[str, int] = {}
    for event in trace.events:
        if event.phase == "setup" and event.device == device and event.block != -1:
            found[event.part] = found.get(event.part, 0) + event.bytes
    return found


def parameters(trace: StepTrace) -> int:
    return before_step(trace)["parameters"] // 2


def test_stage_2_has_16_bit_weights_and_a_share_of_fp32_states() -> None:
    trace = traced("zero_stage=2", "cluster.workers_per_node=2")
    held = before_step(trace)
    assert held["optimizer_states"] == pytest.approx(12 * parameters(trace) / 2, rel=0.001)
    assert "gradients" not in held
    assert {event.part for event in trace.events if event.phase == "backward"} >= {"gradients", "communication"}


def test_the_peak_is_that_of_the_rank_whose_gradients_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    untied = (
        *("zero_stage=2", "cluster.workers_per_node=2", "deepspeed.reduce_bucket_size=100000", "train.loss=chunked"),
        *("model.tie_embeddings=false", "model.vocab_size=1000", "model.hidden_size=256", "model.ff_dim=1024"),
        *("model.num_layers=3", "dataset.max_length=128", "train.loss_chunk_tokens=16", "train.micro_batch_size=32"),
        "train.gradient_accumulation_steps=1",
    )
    peak = replay(traced(*untied).events).peak_allocated
    monkeypatch.setattr(zero12, "fullest_rank", lambda *_, **__: 0)
    assert replay(traced(*untied).events).peak_allocated < peak - MIB


def test_the_free_segments_are_released_before_each_group_is_flattened() -> None:
    history = traced("zero_stage=2", "cluster.workers_per_node=2").history
    assert [event.phase for event in history if event.block == EMPTY_CACHE] == ["setup", "setup"]


def test_offloaded_states_are_on_the_host() -> None:
    trace = traced("zero_stage=2", "offload=true", "cluster.workers_per_node=1")
    on_host = before_step(trace, "host")
    assert "optimizer_states" not in before_step(trace)
    assert on_host["optimizer_states"] == pytest.approx(12 * parameters(trace), rel=0.001)
    assert on_host["gradients"] == pytest.approx((4 + 2) * parameters(trace), rel=0.001)  # fp32, and accumulated


def test_stage_3_gathers_parameters_for_their_use() -> None:
    trace = traced("zero_stage=3", "cluster.workers_per_node=2", "deepspeed.stage3_param_persistence_threshold=1")
    assert before_step(trace)["parameters"] == pytest.approx(2 * before_step(trace)["gradients"] / 2, rel=0.001)
    gathered = [event for event in trace.events if event.part == "communication" and event.phase == "forward"]
    assert any(event.bytes > 0 for event in gathered)
    assert any(event.bytes < 0 for event in gathered)


FROZEN = """
import torch
from distexp.models.gpt import build as build_gpt

def build(model, num_classes):
    gpt = build_gpt(model, num_classes)
    next(gpt.parameters()).requires_grad_(False)
    return gpt
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_stage_3_keeps_the_shares_of_frozen_parameters(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "frozen_gpt.py").write_text(FROZEN)
    monkeypatch.syspath_prepend(tmp_path)
    config = resolve_cell(*TINY, "zero_stage=3", f"cluster.workers_per_node={workers}")
    trained = before_step(trace_step(config))
    config.model._target_ = "frozen_gpt.build"
    frozen = before_step(trace_step(config))
    assert frozen["optimizer_states"] < trained["optimizer_states"]
    assert frozen["parameters"] == pytest.approx(trained["parameters"], rel=0.001)


def recorded(path: str) -> Config:
    """Return the configuration of a run of the workshop's exercises that resolves without a GPU."""
    record = gpu_records()[path]
    settings = record.config
    offload = str(settings["offload"]["enabled"]).lower()
    config = resolve_cell(
        *("model=bloom_560m", "model.init=random", "dataset=squad_sample", "dataset.max_length=512"),
        *("model.vocab_size=250880", "dataset.padding=max_length", "precision=bf16"),
        *(f"zero_stage={settings['deepspeed']['zero_stage']}", f"offload={offload}"),
        *("train.micro_batch_size=4", "train.gradient_accumulation_steps=4"),
        f"cluster.workers_per_node={settings['cluster']['workers_per_node']}",
    )
    config.precision.name = "fp16"  # refused on CPUs
    return config


@pytest.mark.parametrize(
    ("run", "limit"),
    [
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((0, 0.002), (5, 0.02))),
        *(pytest.param(*case, marks=pytest.mark.release) for case in ((1, 0.002), (2, 0.002), (3, 0.002), (4, 0.01))),
    ],
)
def test_the_peak_is_that_of_two_gpus(run: int, limit: float) -> None:
    path = f"deepspeed/two_gpu_stages/{run}"
    measured = gpu_records()[path].memory["torch"][0]
    trace = trace_step(recorded(path))
    found = replay(trace.events, trace.history, trace.evaluation)
    assert found.peak_allocated / MIB == pytest.approx(measured["peak_allocated_mib"], rel=limit)
    assert found.peak_reserved / MIB == pytest.approx(measured["peak_reserved_mib"], rel=0.005)


def test_another_deepspeed_than_the_checked_one_has_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    single, zero = ("strategy=single",), ("zero_stage=2", "cluster.workers_per_node=2")
    assert traced(*zero).notes == ()
    monkeypatch.setattr(zero12, "CHECKED_VERSION", "0.19.7")
    (note,) = traced(*zero).notes
    installed = version("deepspeed")
    assert note == f"DeepSpeed {installed} is installed: the memory of ZeRO was checked with 0.19.7, and may differ"
    assert traced(*single).notes == ()
