"""Tests of the errors that mean that memory is full."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from distexp.runs.texts import out_of_memory_status


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.OutOfMemoryError("x"), "oom_gpu"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), "oom_gpu"),
        (RuntimeError("CUDA error: out of memory"), "oom_gpu"),
        (RuntimeError("NCCL error: unhandled cuda error, Cuda failure 2 'out of memory'"), "oom_gpu"),
        (RuntimeError("backend='inductor' raised: CUDA out of memory. Tried to allocate 2.00 GiB"), "oom_gpu"),
        (MemoryError(), "oom_host"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), "oom_host"),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), "oom_host"),
        (OSError(12, "Cannot allocate memory"), "oom_host"),
        (RuntimeError("Caught MemoryError in DataLoader worker process 0."), "oom_host"),
        (RuntimeError("Connection closed by peer"), None),
    ],
)
def test_errors_that_mean_that_memory_is_full_are_recognized(error: Exception, status: str | None) -> None:
    assert out_of_memory_status(type(error).__name__, str(error)) == status


def test_an_array_that_is_too_large_is_host_memory() -> None:
    with pytest.raises(MemoryError) as raised:
        np.empty(2**60, dtype=np.uint8)
    assert out_of_memory_status(type(raised.value).__name__, str(raised.value)) == "oom_host"
