"""Compare the clipping of ``deepspeed.async_update`` with DeepSpeed's: ``torchrun async_update.py FILE``.

Rank 0 writes what both give: the norms of the groups, and whether clipped gradients are equal.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from distexp.strategies.zero.ds_model import avoid_waits
from distexp.system.processes import end_at_once

SETTINGS = {
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": True, "check_grad_overflow": False},
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
}


def main() -> None:
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 30), nn.LayerNorm(30), nn.Linear(30, 4)).bfloat16()
    groups = [{"params": list(model[0].parameters())}, {"params": [*model[1].parameters(), *model[2].parameters()]}]
    engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups), config=SETTINGS)
    theirs = optimizer.get_grad_norm_direct, optimizer.unscale_and_clip_grads
    avoid_waits(optimizer)
    torch.manual_seed(torch.distributed.get_rank())  # The ranks have different gradients.
    engine.backward(engine(torch.randn(4, 40).bfloat16()).float().square().sum())
    found = {
        "norms": [compare_norms(optimizer, theirs[0], group) for group in range(2)],
        "clipped": [compare_clipping(optimizer, theirs[1], *case) for case in itertools.product(LIMITS, NORMS)],
        "empty": float(optimizer.get_grad_norm_direct([], [])),
    }
    if torch.distributed.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    torch.distributed.destroy_process_group()
    end_at_once(0)  # as a worker does: threads of gloo may abort an orderly exit


LIMITS = (0.0, 0.1, 1e6)
NORMS = (0.05, 3.0, float("inf"))


def compare_norms(optimizer: Any, theirs: Any, group: int) -> tuple[float, float, float]:
    """Return the norm of a group by DeepSpeed, by the replaced method, and that of this rank alone."""
    gradients = optimizer.averaged_gradients[group], optimizer.params_in_partition[group]
    own = torch.cat([gradient.flatten() for gradient in gradients[0]]).double().norm()
    return float(theirs(*gradients)), float(optimizer.get_grad_norm_direct(*gradients)), float(own)


def compare_clipping(optimizer: Any, theirs: Any, limit: float, norm: float) -> tuple[float, float, bool, bool]:
    """Return limit and norm, whether both methods give the same gradients, and whether they are those before."""
    optimizer.clip_grad = limit
    before = torch.linspace(-2, 2, 50)
    expected, found = before.clone(), before.clone()
    theirs([expected], torch.tensor(norm))
    optimizer.unscale_and_clip_grads([found], torch.tensor(norm))
    return limit, norm, equal(expected, found), equal(before, found)


def equal(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-6, atol=0, equal_nan=True)


if __name__ == "__main__":
    main()
