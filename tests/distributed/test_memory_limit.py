"""A limit of torch's memory on a GPU."""

from __future__ import annotations

import pytest
import torch

from distexp.config import Config, ConfigError
from distexp.distributed.process_group import allowed_bytes, limit_memory, usable_bytes
from distexp.strategies.traits import Traits
from distexp.system.units import GIB


def test_memory_of_others_counts() -> None:
    assert allowed_bytes(24, used=GIB, total=80 * GIB) == 23 * GIB


@pytest.mark.parametrize(
    ("limit", "message"), [(96, "more than this GPU has"), (0.5, "CUDA, NCCL and other programs need")]
)
def test_a_limit_that_cannot_hold_is_refused(limit: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        allowed_bytes(limit, used=GIB, total=80 * GIB)


@pytest.mark.gpu
def test_torch_runs_out_of_memory_at_the_limit() -> None:
    device = torch.device("cuda", 0)
    try:
        limit_memory(device, 4, Traits().total_overhead_mib(Config()))
        assert 2 * GIB < usable_bytes(device) < 3 * GIB
        torch.empty(2 * GIB, dtype=torch.uint8, device=device)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(4 * GIB, dtype=torch.uint8, device=device)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
