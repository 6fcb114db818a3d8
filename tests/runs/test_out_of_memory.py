"""Tests of the errors that mean that memory is full."""

from __future__ import annotations

import resource

import numpy as np
import pytest
import torch

from distexp.exceptions import ConfigError
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
        (ImportError("libtorch_cpu.so: failed to map segment from shared object: Cannot allocate memory"), "oom_host"),
        (OSError(12, "Cannot allocate memory"), "oom_host"),
        (RuntimeError("Caught MemoryError in DataLoader worker process 0."), "oom_host"),
        (ConfigError("mine.Engine: the constructor raised MemoryError (mine/engine.py:3): correct it"), "oom_host"),
        (Exception("Cannot allocate memory (os error 12)"), "oom_host"),
        (RuntimeError("Connection closed by peer"), None),
        (ImportError("libgomp.so.1: cannot allocate memory in static TLS block"), None),
        (ValueError("the word 'out of memory' is not in the vocabulary"), None),
        (ValueError("CUDA out of memory. Tried to allocate 2.00 GiB is not a number"), None),
        (KeyError("MemoryError"), None),
        (ConfigError("mine.Engine: the constructor raised KeyError: 'out of memory' (mine/engine.py:3)"), None),
    ],
)
def test_errors_that_mean_that_memory_is_full_are_recognized(error: Exception, status: str | None) -> None:
    assert out_of_memory_status(type(error).__name__, str(error)) == status


@pytest.mark.parametrize("limited", [None, resource.RLIMIT_AS, resource.RLIMIT_DATA])
def test_a_library_that_cannot_be_mapped_is_host_memory_only_below_a_limit(
    limited: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library on a file system that is mounted with noexec has the same text."""
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (10**9 if kind == limited else resource.RLIM_INFINITY, -1))
    text = "libtorch_cpu.so: failed to map segment from shared object"
    for name in ("OSError", "ImportError"):
        assert out_of_memory_status(name, text) == (None if limited is None else "oom_host")


def test_an_array_that_is_too_large_is_host_memory() -> None:
    with pytest.raises(MemoryError) as raised:
        np.empty(2**60, dtype=np.uint8)
    assert out_of_memory_status(type(raised.value).__name__, str(raised.value)) == "oom_host"
