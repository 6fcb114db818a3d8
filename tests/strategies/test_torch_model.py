"""The memory that TorchModel keeps."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from pathlib import Path

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


def test_logits_are_freed_before_the_backward_pass(tmp_path: Path) -> None:
    """With a large vocabulary they are the largest tensor."""
    config = resolve_cell("strategy=single")
    context = Context(
        rank=0, world_size=1, local_rank=0, workers_per_node=1, nodes=1, device=torch.device("cpu"), run_dir=tmp_path
    )
    model = RecordingModel()
    distributed = TorchModel(
        model,
        config,
        context,
        sync_context=lambda last_micro: nullcontext(),
        autocast=True,
        distribution=lambda: Distribution(wrapper="none", mesh=[1, 1]),
    )
    ids = torch.arange(10).view(2, 5)
    batch = Batch({"input_ids": ids}, labels=ids, num_samples=2, num_targets=8, num_tokens=10)
    loss, _ = distributed.forward_backward(batch, normalizer=torch.tensor(8), last_micro=True)
    assert loss > 0
    assert model.logits_alive == [False]
