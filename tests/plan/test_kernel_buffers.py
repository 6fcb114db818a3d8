"""Tests of the buffers of CUDA kernels. The sizes of the first test were recorded on an H200."""

from __future__ import annotations

import pytest
import torch

from distexp.hardware.facts import gpu_facts
from distexp.plan.trace.compiled import KernelBuffers
from distexp.plan.trace.recorder import GPU, StorageRecorder
from distexp.system.torch_internals.tensors import make_fake_mode
from distexp.system.units import MIB

H200 = KernelBuffers(132)


@pytest.mark.parametrize(
    ("columns", "expected"), [(1024, [16 * MIB, 32]), (3072, [48 * MIB, 96]), (4096, [64 * MIB, 128])]
)
def test_a_sum_of_columns_has_the_buffers_of_an_h200(columns: int, expected: list[int]) -> None:
    assert H200.of_column_sums(2048, columns) == expected


def test_more_rows_are_summed_by_more_blocks_up_to_what_the_gpu_has() -> None:
    assert H200.of_column_sums(8192, 1024)[0] == 64 * MIB
    assert H200.of_column_sums(8192, 4096)[0] == 132 * MIB


def test_short_columns_need_no_buffer() -> None:
    assert H200.of_column_sums(512, 1024) == []


def test_a_backward_pass_has_the_buffers_of_its_kernels() -> None:
    fake_mode = make_fake_mode()
    recorder = StorageRecorder(fake_mode, H200)
    with fake_mode, recorder.recording():
        weight = torch.empty(1024, 1024, device=GPU, requires_grad=True)
        bias = torch.empty(1024, device=GPU, requires_grad=True)
        loss = torch.nn.functional.linear(torch.empty(2048, 1024, device=GPU), weight, bias).softmax(-1).sum()
        recorder.phase = "backward"
        start = len(recorder.changes)
        torch.autograd.backward([loss])
    sizes = [change.block.size for change in recorder.changes[start:] if not change.is_free]
    assert sizes.count(16 * MIB) == 1  # of the sum for the bias
    assert sizes.count(8 * MIB) == 2  # the gradient of the softmax, and its buffer
    assert recorder.first_products.keys() == {"setup", "backward"}


def test_gpus_have_the_multiprocessors_of_their_model() -> None:
    names = "a100-80gb", "NVIDIA H200", "NVIDIA A10", "h20", None
    assert [gpu_facts(name).multiprocessors for name in names] == [108, 132, 72, 78, 132]
