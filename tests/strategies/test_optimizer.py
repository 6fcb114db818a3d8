"""Optimizers under loss scaling, which skips steps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from distexp.strategies.optimizer import build_optimizer
from tests.helpers.runs import resolve_cell


@pytest.fixture(autouse=True)
def _uninitialized_is_nan() -> Iterator[None]:
    """Fill uninitialized memory with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_first_step_that_overflows_changes_nothing(optimizer: str) -> None:
    """Most first steps of fp16 overflow; the momentum must not start from them."""
    train = resolve_cell("model=resnet_tiny", f"train.optimizer={optimizer}").train
    weights = []
    for overflows in (True, False):
        model = nn.Linear(3, 2)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.5)
        chosen = build_optimizer(model, train, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for scale in ([torch.inf] if overflows else []) + [1.0, 2.0]:
            scaler.scale(model(torch.ones(1, 3)).sum() * scale).backward()  # type: ignore[no-untyped-call]
            scaler.unscale_(chosen)
            scaler.step(chosen)
            scaler.update()
            chosen.zero_grad()
        weights.append(model.weight.detach())
    skipped, whole = weights
    assert not whole.equal(torch.full((2, 3), 0.5))
    torch.testing.assert_close(skipped, whole)
