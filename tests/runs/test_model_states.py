"""Tests of the memory of model states, against the ZeRO paper."""

from __future__ import annotations

import math

import pytest

from distexp.report.data.metrics import METRICS_BY_NAME
from distexp.runs.memory_trace import bytes_per_parameter, ideal_states_mib
from distexp.runs.record import RunRecord
from distexp.runs.record_sections import Built, RunInfo


def record(strategy: str, mesh: list[int], stage: int | None = None, units: int = 0, **more: str) -> RunRecord:
    built = Built(
        strategy=strategy,
        engine="native",
        wrapper="",
        world_size=math.prod(mesh),
        mesh=mesh,
        sharded_units=units,
        zero_stage=stage,
        offload=more.get("offload", "none"),
        param_dtype=more.get("dtype", "float32"),
        compute_dtype="bfloat16",
        optimizer="AdamW",
        parameters=1000,
        compute_weights=more.get("weights"),
    )
    config = {"train": {"optimizer": more.get("optimizer", "adamw")}}
    return RunRecord("completed", RunInfo("0", "n", 0, []), config, built=built)


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_bf16_stages_match_the_paper(workers: int) -> None:
    stages = [bytes_per_parameter(record("deepspeed", [1, workers], stage, dtype="bfloat16")) for stage in (1, 2, 3)]
    assert stages == pytest.approx([4 + 12 / workers, 2 + 14 / workers, 16 / workers])
    assert bytes_per_parameter(record("deepspeed", [workers, 1], 0, dtype="bfloat16")) == 16


def test_replicated_and_sharded_states() -> None:
    assert bytes_per_parameter(record("single", [1, 1])) == 16
    assert bytes_per_parameter(record("ddp", [4, 1])) == 16
    assert bytes_per_parameter(record("fsdp", [1, 4], units=6)) == 4
    assert bytes_per_parameter(record("fsdp", [2, 2], units=6)) == 8
    assert bytes_per_parameter(record("ddp", [4, 1], optimizer="sgd")) == 12
    assert bytes_per_parameter(record("ddp", [4, 1], weights="step")) == 18, "a bf16 copy of each parameter"


def test_offloaded_states_are_not_on_the_device() -> None:
    assert bytes_per_parameter(record("fsdp", [1, 4], units=6, offload="parameters+gradients+optimizer")) == 0
    assert bytes_per_parameter(record("deepspeed", [1, 2], 2, dtype="bfloat16", offload="optimizer")) == 2
    assert bytes_per_parameter(record("deepspeed", [1, 2], 1, dtype="bfloat16", offload="optimizer")) == 4
    both = record("deepspeed", [1, 2], 3, dtype="bfloat16", offload="optimizer+parameters")
    assert bytes_per_parameter(both) == 0


def test_a_custom_strategy_is_computed_from_what_was_built() -> None:
    assert bytes_per_parameter(record("mine", [4, 1])) == 16
    assert bytes_per_parameter(record("mine", [1, 4], units=6)) == 4
    assert bytes_per_parameter(record("mine", [1, 4], units=6, offload="optimizer")) == 2
    assert bytes_per_parameter(record("mine", [1, 4], 2, dtype="bfloat16")) == 2 + 14 / 4


def test_a_custom_strategy_with_unknown_sharding_has_no_value() -> None:
    unknown = [
        record("mine", [1, 4]),  # sharded, but not in units: maybe by tensor parallelism
        record("mine", [4]),
        record("mine", [1, 2, 2], units=6),
        record("mine", [4, 1], dtype="bfloat16"),  # with or without a master copy
        record("mine", [4, 1], optimizer="lion"),
    ]
    for missing in unknown:
        missing.memory["torch"] = [{"rank": 0, "states_mib": 1.0}]
        assert ideal_states_mib(missing) is None
        assert METRICS_BY_NAME["model_states_ideal_mib"].read(missing) is None


def test_a_peak_between_two_samples_is_taken_from_torch() -> None:
    run = record("single", [1, 1])
    run.memory["gpu"] = [{"node": 0, "index": 0, "peak_mib": 10_523.0, "average_mib": 1.0, "mode_mib": 1.0}]
    run.memory["torch"] = [{"rank": 0, "peak_reserved_mib": 141_462.0}]
    assert METRICS_BY_NAME["gpu_peak_mib"].read(run) == 141_462.0
    run.memory["torch"] = [{"rank": 0, "peak_reserved_mib": 8_000.0}]
    assert METRICS_BY_NAME["gpu_peak_mib"].read(run) == 10_523.0
