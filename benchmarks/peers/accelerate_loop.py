"""The training loop of accelerate's documentation, with its options for compilation, DDP, FSDP2 and DeepSpeed."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin, TorchDynamoPlugin

from benchmarks.peers.common import PaddedSamples, StepRecorder, build_bloom, measure, start_worker
from benchmarks.peers.settings import CLIPPING, LEARNING_RATE, WEIGHT_DECAY, Settings


def plugins(settings: Settings) -> dict[str, Any]:
    """Return the plugins of the Accelerator."""
    sharded = settings.strategy == "fsdp"
    chosen: dict[str, Any] = {}
    if settings.compile:
        # Hooks of FSDP break the graph of a whole model.
        chosen["dynamo_plugin"] = TorchDynamoPlugin(backend="inductor", use_regional_compilation=sharded)
    if sharded:
        chosen["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=True,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["BloomBlock"],
        )
    if settings.strategy == "zero2":
        chosen["deepspeed_plugin"] = DeepSpeedPlugin(
            zero_stage=2, gradient_accumulation_steps=settings.accumulation, gradient_clipping=CLIPPING
        )
    return chosen


def train(settings: Settings) -> dict[str, object]:
    """Train and return the result."""
    device = start_worker(settings, join=False)
    accelerator = Accelerator(
        cpu=settings.device == "cpu",
        mixed_precision="no" if settings.precision == "fp32" else settings.precision,
        gradient_accumulation_steps=settings.accumulation,
        **plugins(settings),
    )
    model: Any = build_bloom(settings, device)
    samples = PaddedSamples(settings)
    loader: Any = samples.loader(settings, device, sharded=False)
    optimizer: Any = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=device.type == "cuda"
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    recorder = StepRecorder(settings, device)
    recorder.start()
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), CLIPPING)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            recorder.end_step(loss)
    return recorder.result(padding_share=samples.padding_share)


if __name__ == "__main__":
    measure(train)
