"""The memory that TorchModel keeps, and its checkpoints."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from distexp.data.base import Batch
from distexp.distributed.context import Context
from distexp.strategies.torch_model import Distribution, TorchModel
from tests.helpers.runs import resolve_cell


class RecordingModel(nn.Module):
    """A model that records whether its logits still exist when its gradients are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 4), nn.Linear(4, 11)
        self.logits_alive: list[bool] = []
        self.embedding.weight.register_hook(lambda _: self.logits_alive.append(self.logits() is not None))

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the logits, and keep a weak reference to them."""
        logits: Tensor = self.head(self.embedding(input_ids))
        self.logits = weakref.ref(logits)
        return logits


IDS = torch.arange(10).view(2, 5)
BATCH = Batch({"input_ids": IDS}, labels=IDS, num_samples=2, num_targets=8, num_tokens=10)


def make_torch_model(model: nn.Module, folder: Path, *overrides: str) -> TorchModel:
    """Return a model of one worker."""
    return TorchModel(
        model,
        resolve_cell("strategy=single", *overrides),
        Context(0, 1, 0, 1, 1, torch.device("cpu"), folder),
        sync_context=lambda last_micro: nullcontext(),
        autocast=True,
        distribution=lambda: Distribution(wrapper="none", mesh=[1, 1]),
    )


def test_logits_are_freed_before_the_backward_pass(tmp_path: Path) -> None:
    """With a large vocabulary they are the largest tensor."""
    model = RecordingModel()
    distributed = make_torch_model(model, tmp_path)
    loss, _ = distributed.forward_backward(BATCH, normalizer=torch.tensor(8), last_micro=True)
    assert loss > 0
    assert model.logits_alive == [False]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_weight_without_gradients_does_not_prevent_a_resume(optimizer: str, tmp_path: Path) -> None:
    def build() -> TorchModel:
        torch.manual_seed(0)
        model = RecordingModel()
        model.unused = nn.Linear(3, 3)
        return make_torch_model(model, tmp_path, f"train.optimizer={optimizer}")

    def train(model: TorchModel) -> float:
        loss, _ = model.forward_backward(BATCH, normalizer=torch.tensor(8), last_micro=True)
        model.step(0.1)
        return float(loss)

    first, second = build(), build()
    train(first)
    first.save(tmp_path / "checkpoint")
    second.load(tmp_path / "checkpoint")
    assert [train(first) for _ in range(3)] == [train(second) for _ in range(3)]
