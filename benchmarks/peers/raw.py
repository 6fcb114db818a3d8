"""A training loop of plain PyTorch: autocast, fused AdamW, ``torch.compile`` of the whole model, DDP."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.common import (
    DTYPES,
    PaddedSamples,
    StepRecorder,
    build_bloom,
    measure,
    model_config,
    start_worker,
    to_device,
)
from benchmarks.peers.settings import CLIPPING, LEARNING_RATE, WEIGHT_DECAY, Settings


class BloomLoss(nn.Module):
    """BLOOM with the loss of transformers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Tensor) -> Tensor:
        """Return the mean loss of a batch."""
        loss: Tensor = self.model(**batch).loss
        return loss


class GPTLoss(nn.Module):
    """The GPT of distexp with its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of a batch."""
        logits = self.model(input_ids, attention_mask)
        return cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


def build(settings: Settings, device: torch.device, vocabulary: int) -> nn.Module:
    """Build the model and its loss on the device."""
    config = model_config(settings)
    if config._target_.startswith("distexp.models.bloom."):
        return BloomLoss(build_bloom(settings, device))
    from distexp.models import gpt

    with device:
        return GPTLoss(gpt.build(config, vocabulary))


def train(settings: Settings) -> dict[str, object]:
    """Train and return the result."""
    device = start_worker(settings)
    samples = PaddedSamples(settings)
    loader = samples.loader(settings, device, sharded=True)
    model: Any = build(settings, device, samples.vocabulary)
    if settings.workers > 1:
        device_ids = [device] if device.type == "cuda" else None
        model = DistributedDataParallel(model, device_ids, gradient_as_bucket_view=True)
    unsynchronized = model.no_sync if settings.workers > 1 else nullcontext
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=device.type == "cuda"
    )
    scaler = torch.amp.GradScaler(device.type, enabled=settings.precision == "fp16")
    compute_loss = torch.compile(model) if settings.compile else model
    autocast = torch.autocast(device.type, DTYPES[settings.precision], enabled=settings.precision != "fp32")
    recorder = StepRecorder(settings, device)
    recorder.start()
    for number, batch in enumerate(loader, start=1):
        ends_step = number % settings.accumulation == 0
        with nullcontext() if ends_step else unsynchronized():
            with autocast:
                loss = compute_loss(**to_device(batch, device))
            scaler.scale(loss / settings.accumulation).backward()
        if ends_step:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            recorder.end_step(loss)
    return recorder.result(padding_share=samples.padding_share)


if __name__ == "__main__":
    measure(train)
