"""Reports of GPU memory when an allocation failed."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

from distexp.measure.memory import rank_memory, step_recording
from distexp.measure.memory.rank_memory import OutOfMemoryWatch, describe_blocks, report_of
from distexp.measure.memory.step_parts import Frame
from distexp.measure.memory.step_recording import UsedBlock
from distexp.strategies.optimizer import ModelTensors, read_model_tensors
from distexp.system.units import MIB
from distexp.worker.__main__ import describe_error

CPU = torch.device("cpu")
MODEL_LINE = Frame("/x/site-packages/transformers/models/bloom/modeling_bloom.py", 301, "forward")
LINEAR = Frame("/x/site-packages/torch/nn/modules/linear.py", 134, "forward")
GATHER = Frame("/x/site-packages/torch/distributed/fsdp/_fully_shard/_fsdp_param.py", 7, "alloc")


@pytest.fixture(autouse=True)
def _count_tensors_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_recording, "_on_gpu", iter)
    monkeypatch.setattr(rank_memory, "_watches", [])


def model_with_gradients() -> tuple[nn.Module, ModelTensors]:
    model = nn.Linear(8, 8, bias=False)
    model(torch.ones(2, 8)).sum().backward()
    return model, read_model_tensors(model, None)


def test_tensors_have_names_or_lines() -> None:
    model, tensors = model_with_gradients()
    weight, hidden = model.weight, torch.ones(3)
    assert isinstance(weight, nn.Parameter)
    assert weight.grad is not None
    outputs = {"logits": hidden}
    blocks = [
        UsedBlock(weight.data_ptr(), 40 * MIB), UsedBlock(weight.grad.data_ptr(), 30 * MIB),
        UsedBlock(outputs["logits"].data_ptr(), 20 * MIB), UsedBlock(1, 10 * MIB, (LINEAR, MODEL_LINE)),
        UsedBlock(2, 10 * MIB, (LINEAR, MODEL_LINE)), UsedBlock(3, 5 * MIB, (GATHER, MODEL_LINE)), UsedBlock(4, MIB),
    ]  # fmt: skip
    report = describe_blocks(blocks, tensors, [sys._getframe()])
    assert report["parts"] == {"parameters_mib": 40, "gradients_mib": 30, "rest_mib": 41, "communication_mib": 5}
    found = [(group["mib"], group["count"], group["part"], group["line"]) for group in report["largest"]]
    place = "modeling_bloom.py:301 in forward"
    assert found[:2] == [(40, 1, "parameters", "weight"), (30, 1, "gradients", "gradient of weight")]
    assert found[2][2:] == ("rest", found[2][3])
    assert "in test_tensors_have_names_or_lines" in found[2][3]
    assert found[3] == (10, 2, "rest", f"transformers/models/bloom/{place}")
    assert found[4][2] == "communication"
    assert found[5] == (1, 1, "rest", None), "nothing names it"
    assert "tests/measure/memory/test_oom.py" in report["line"]


def test_the_largest_tensors_come_first_and_not_all_are_listed() -> None:
    blocks = [UsedBlock(number, number * MIB) for number in range(1, 30)]
    report = describe_blocks(blocks, None, [])
    assert [group["mib"] for group in report["largest"]] == list(range(29, 21, -1))
    assert report["line"] is None


def segments(*sizes: int) -> list[dict[str, Any]]:
    blocks = [{"address": n, "size": size, "state": "active_allocated"} for n, size in enumerate(sizes)]
    return [{"device": 0, "blocks": [*blocks, {"address": 99, "size": 7, "state": "inactive"}]}]


def test_the_report_is_in_the_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments(3 * MIB, 2 * MIB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 5 * MIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 8 * MIB)
    watch = OutOfMemoryWatch(CPU)
    rank_memory._watches.append(watch)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 10.00 MiB.")
    assert report_of(error) is None, "nothing was observed"
    watch.observe(0, 10 * MIB, 16 * MIB, 4 * MIB)
    memory = describe_error(error, tmp_path, "train", 1).memory
    assert memory is not None
    numbers = [memory[f"{name}_mib"] for name in ("requested", "allocated", "reserved", "free", "total")]
    assert numbers == [10, 5, 8, 4, 16]
    assert memory["parts"] == {"unknown_mib": 5}, "there is no model yet"
    assert describe_error(ValueError("bad value"), tmp_path, "train", 1).memory is None


def test_a_report_that_fails_does_not_hide_the_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: 1 / 0)
    watch = OutOfMemoryWatch(CPU)
    watch.observe(0, 1, 1, 1)
    assert watch.report is None
    assert "ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.gpu
def test_a_real_allocation_that_fails_is_described() -> None:
    device = torch.device("cuda", 0)
    large = torch.zeros(256 * MIB, dtype=torch.uint8, device=device)
    OutOfMemoryWatch(device)
    total = torch.cuda.get_device_properties(device).total_memory
    with pytest.raises(torch.OutOfMemoryError) as raised:
        torch.empty(2 * total, dtype=torch.uint8, device=device)
    report = report_of(raised.value)
    assert report is not None
    assert report["requested_mib"] == pytest.approx(2 * total / MIB, rel=0.01)
    assert report["reserved_mib"] >= report["allocated_mib"] >= 256
    assert 0 < report["free_mib"] < report["total_mib"]
    assert (report["largest"][0]["mib"], large.numel()) == (256, 256 * MIB)
    assert "large in" in report["largest"][0]["line"]
    assert "in test_a_real_allocation_that_fails_is_described" in report["line"]
