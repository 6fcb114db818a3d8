"""Recomputed blocks change no statistics of batch norms."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from distexp.models import resnet, transforms
from tests.helpers.runs import resolve_cell

pytestmark = pytest.mark.slow

MODEL = ("model=resnet_tiny", "dataset=tinyimagenet_sample", "strategy=single", "cluster.device=cpu")


def trained(*overrides: str) -> dict[str, Tensor]:
    """Return the weights and buffers after five steps, and the loss of an evaluation."""
    torch.compiler.reset()
    torch.manual_seed(0)
    config = resolve_cell(*MODEL, *overrides)
    model = resnet.build(config.model, 10)
    transforms.transform_blocks(model, config)
    model.double().float()  # replaces the buffers, as a strategy that initializes the model on its device
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(5):
        images, labels = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(step)), torch.arange(8)
        functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        return {**model.state_dict(), "loss": functional.cross_entropy(model(images), labels)}


@pytest.mark.parametrize("compiled", ["false", "blocks", "model"])
def test_batch_norms_count_each_batch_once(compiled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transforms, "BACKEND", "aot_eager")
    expected = trained()
    found = trained("train.activation_checkpointing=true", f"train.compile={compiled}")
    assert {int(value) for name, value in found.items() if name.endswith("num_batches_tracked")} == {5}
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=name)
