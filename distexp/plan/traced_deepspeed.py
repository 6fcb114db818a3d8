"""DeepSpeed for fake tensors: the model in DeepSpeed's precision, with the buffers of its ZeRO stage.

DeepSpeed itself reads values and needs its compiled operators, so it cannot run on fake tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from distexp.config import Config
from distexp.data.base import Batch
from distexp.distributed.context import Context
from distexp.models.blueprint import Blueprint
from distexp.models.objective import loss_sum, partial_metrics
from distexp.plan.recorder import StorageRecorder
from distexp.plan.zero3 import ZeroThree
from distexp.plan.zero3_partitions import Partitions
from distexp.plan.zero12 import ZeroOneTwo
from distexp.plan.zero_buffers import Buffers
from distexp.plan.zero_stage0 import ZeroStage0
from distexp.strategies.ds_buckets import fit_buckets
from distexp.strategies.ds_config import effective_config, uses_autocast
from distexp.strategies.ds_initialization import cast_weights, in_16_bits
from distexp.strategies.torch_model import DTYPES


class TracedDeepSpeed:
    """The forward pass, backward pass and update of ``DeepSpeedModel``, on fake tensors.

    Args:
        blueprint: the model without values.
        config: the configuration.
        context: rank 0, and the device that the recorder counts as the GPU.
        recorder: records what is allocated.
    """

    def __init__(self, blueprint: Blueprint, config: Config, context: Context, recorder: StorageRecorder) -> None:
        self.module = blueprint.model
        self.task, self.world_size = config.model.task, config.cluster.world_size
        self.cast_to = DTYPES[config.precision.name] if in_16_bits(config) else None
        partitions = Partitions(config) if config.deepspeed.zero_stage == 3 else None
        initialize_weights(blueprint, self.cast_to or torch.float32, partitions)
        self.autocast = torch.autocast("cpu", torch.bfloat16, enabled=uses_autocast(config))
        buffers = Buffers.of(config, context.device, recorder.assign, recorder.empty_cache)
        self.zero = build_zero(self.module, config, buffers, partitions)
        if self.cast_to is not None:
            restore_masters(self.module, context.device)
        recorder.assign("parameters", [*self.module.parameters(), *self.module.buffers()])

    def forward_backward(self, batch: Batch, *, normalizer: Tensor, last_micro: bool) -> Tensor:
        """Run one micro-batch, as ``DeepSpeedModel.forward_backward`` does."""
        self.zero.is_last = last_micro
        outputs = self.forward(batch)
        loss = loss_sum(self.task, outputs, batch) / normalizer
        metrics = partial_metrics(self.task, outputs, batch, loss, normalizer)
        del outputs
        (loss * self.world_size).backward()  # type: ignore[no-untyped-call]
        self.zero.after_backward()
        return metrics

    def forward(self, batch: Batch) -> Any:
        """Return the outputs of the module."""
        with self.autocast:
            return self.module(**(batch.inputs if self.cast_to is None else batch.cast_inputs(self.cast_to)))

    def step(self, learning_rate: float) -> None:
        """Update the weights."""
        self.zero.step()


def build_zero(
    module: nn.Module, config: Config, buffers: Buffers, partitions: Partitions | None
) -> ZeroStage0 | ZeroOneTwo | ZeroThree:
    """Return the gradients and states of the stage of a configuration."""
    settings: dict[str, Any] = effective_config(config, config.cluster.world_size)
    sizes = [parameter.numel() for parameter in module.parameters()]
    fit_buckets(settings, sum(sizes), max(sizes))
    stage = settings["zero_optimization"]["stage"]
    if stage == 0:
        return ZeroStage0(module, config, settings, buffers)
    if partitions is None:
        return ZeroOneTwo(module, config, settings, buffers)
    return ZeroThree(module, config, settings, buffers, partitions)


@torch.no_grad()
def initialize_weights(blueprint: Blueprint, dtype: torch.dtype, partitions: Partitions | None) -> None:
    """Materialize, convert and partition each module in turn, as ``ds_initialization.initialize_weights`` does."""
    for module in reversed(list(blueprint.model.modules())):
        blueprint.materialize(module, recurse=False)
        cast_weights(module, dtype)
        if partitions is not None:
            partitions.add(module.parameters(recurse=False))


@torch.no_grad()
def restore_masters(module: nn.Module, device: torch.device) -> None:
    """Allocate as ``ds_initialization.restore_masters``: a weight in fp32, while the one before is there."""
    value = None
    for parameter in module.parameters():
        value = torch.empty(parameter.shape, dtype=torch.float32, device=device)
    del value
