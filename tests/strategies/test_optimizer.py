"""Optimizers under loss scaling, which skips steps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from distexp.strategies.optimizer import build_optimizer, parameter_groups
from tests.helpers.runs import resolve_cell


@pytest.fixture(autouse=True)
def _uninitialized_is_nan() -> Iterator[None]:
    """Fill uninitialized memory with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class HeadNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 4))


def test_biases_and_norms_with_two_axes_have_no_weight_decay() -> None:
    model = nn.Sequential(nn.Linear(4, 4), HeadNorm(), nn.LayerNorm(4), nn.Conv2d(1, 1, 1))
    model.register_parameter("up_proj_bias", nn.Parameter(torch.zeros(2, 4)))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, others = ([names[id(p)] for p in group["params"]] for group in parameter_groups(model, 0.1))
    assert decayed == ["0.weight", "3.weight"]
    assert others == ["up_proj_bias", "0.bias", "1.weight", "2.weight", "2.bias", "3.bias"]


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
