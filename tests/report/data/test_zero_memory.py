"""The arithmetic of model states, against the figures of the ZeRO paper."""

from __future__ import annotations

import pytest

from distexp.report.data.metrics import METRICS_BY_NAME
from distexp.report.data.zero_memory import bytes_per_parameter
from distexp.runs.record import Built, RunInfo, RunRecord


def record(strategy: str, mesh: list[int], stage: int | None = None, **more: str) -> RunRecord:
    built = Built(
        strategy=strategy,
        engine="native",
        wrapper="",
        world_size=mesh[0] * mesh[1],
        mesh=mesh,
        sharded_units=0,
        zero_stage=stage,
        offload=more.get("offload", "none"),
        param_dtype=more.get("dtype", "float32"),
        compute_dtype="bfloat16",
        optimizer="AdamW",
        parameters=1000,
    )
    config = {"train": {"optimizer": more.get("optimizer", "adamw")}}
    return RunRecord("completed", RunInfo("0", "n", 0, []), config, built=built)


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_bf16_stages_are_those_of_the_paper(workers: int) -> None:
    stages = [bytes_per_parameter(record("deepspeed", [1, workers], stage, dtype="bfloat16")) for stage in (1, 2, 3)]
    assert stages == pytest.approx([4 + 12 / workers, 2 + 14 / workers, 16 / workers])
    assert bytes_per_parameter(record("deepspeed", [workers, 1], 0)) == 16


def test_plain_and_sharded() -> None:
    assert bytes_per_parameter(record("single", [1, 1])) == 16
    assert bytes_per_parameter(record("ddp", [4, 1])) == 16
    assert bytes_per_parameter(record("fsdp", [1, 4])) == 4
    assert bytes_per_parameter(record("fsdp", [2, 2])) == 8
    assert bytes_per_parameter(record("ddp", [4, 1], optimizer="sgd")) == 12


def test_what_is_offloaded_is_not_on_the_device() -> None:
    assert bytes_per_parameter(record("fsdp", [1, 4], offload="parameters+gradients+optimizer")) == 0
    assert bytes_per_parameter(record("deepspeed", [1, 2], 2, dtype="bfloat16", offload="optimizer")) == 2
    assert bytes_per_parameter(record("deepspeed", [1, 2], 1, dtype="bfloat16", offload="optimizer")) == 4
    both = record("deepspeed", [1, 2], 3, dtype="bfloat16", offload="optimizer+parameters")
    assert bytes_per_parameter(both) == 0


def test_a_peak_between_two_samples_is_torchs() -> None:
    run = record("single", [1, 1])
    run.memory["gpu"] = [{"node": 0, "index": 0, "peak_mib": 10_523.0, "average_mib": 1.0, "mode_mib": 1.0}]
    run.memory["torch"] = [{"rank": 0, "peak_reserved_mib": 141_462.0}]
    assert METRICS_BY_NAME["gpu_peak_mib"].read(run) == 141_462.0
    run.memory["torch"] = [{"rank": 0, "peak_reserved_mib": 8_000.0}]
    assert METRICS_BY_NAME["gpu_peak_mib"].read(run) == 10_523.0
