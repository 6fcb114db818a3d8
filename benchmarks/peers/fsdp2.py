"""FSDP2 as in torchtitan: each block is compiled and sharded, and MixedPrecisionPolicy casts the weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy

from benchmarks.peers.common import DTYPES, PaddedSamples, StepRecorder, build_bloom, measure, start_worker, to_device
from benchmarks.peers.settings import CLIPPING, LEARNING_RATE, WEIGHT_DECAY, Settings


def shard(model: Any, settings: Settings) -> None:
    """Compile and shard the blocks, then shard the rest with the tied embedding."""
    mesh = init_device_mesh(settings.device, (settings.workers,))
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[settings.precision], reduce_dtype=torch.float32)
    for block in model.transformer.h:
        if settings.compile:
            block.compile()
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss of a batch."""
    return cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


def train(settings: Settings) -> dict[str, object]:
    """Train and return the result."""
    device = start_worker(settings)
    model: Any = build_bloom(settings, device)
    shard(model, settings)
    compute_loss = torch.compile(next_token_loss) if settings.compile else next_token_loss
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=device.type == "cuda"
    )
    samples = PaddedSamples(settings)
    loader = samples.loader(settings, device, sharded=True)
    recorder = StepRecorder(settings, device)
    recorder.start()
    for number, host_batch in enumerate(loader, start=1):
        ends_step = number % settings.accumulation == 0
        model.set_requires_gradient_sync(ends_step)
        batch = to_device(host_batch, device)
        labels = batch.pop("labels")
        loss: Any = compute_loss(model(**batch).logits, labels)
        (loss / settings.accumulation).backward()
        if ends_step:
            nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)
            optimizer.step()
            optimizer.zero_grad()
            recorder.end_step(loss)
    return recorder.result(padding_share=samples.padding_share)


if __name__ == "__main__":
    measure(train)
