"""The memory of DeepSpeed without partitions (stage 0), on fake tensors.

With fp16 it is ``FP16_UnfusedOptimizer``: torch's AdamW is not one of DeepSpeed's fused optimizers. It keeps fp32
copies of the parameters. With bf16, distexp uses autocast over fp32 weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from distexp.config import Config
from distexp.plan.zero_buffers import Buffers
from distexp.runs.model_states import MOMENTS

ALLREDUCE_ELEMENTS = 500_000_000
"""Elements of the buffers in which gradients are reduced (``MEMORY_OPT_ALLREDUCE_SIZE``)."""


class ZeroStage0:
    """Gradients and optimizer states of one rank.

    Args:
        module: the model on the GPU.
        config: the configuration.
        settings: the ds_config of the run.
        buffers: allocates on the GPU.
    """

    def __init__(self, module: nn.Module, config: Config, settings: dict[str, Any], buffers: Buffers) -> None:
        self.buffers, self.is_last, self.reduces = buffers, False, config.cluster.world_size > 1
        self.params = [param for param in module.parameters() if param.requires_grad]
        self.dtype = self.params[0].dtype
        self.states = [self._like(param) for param in self.params for _ in range(MOMENTS[config.train.optimizer])]
        if self.dtype != torch.float32:
            self.states += [self._like(param) for param in self.params]

    def _like(self, param: nn.Parameter, part: str = "optimizer_states") -> Tensor:
        return self.buffers.on_gpu(param.numel(), torch.float32, part)

    @torch.no_grad()
    def after_backward(self) -> None:
        """Reduce the gradients after the last micro-batch (``buffered_allreduce_fallback``)."""
        if not (self.is_last and self.reduces):
            return
        bucket = 0
        for param in self.params:
            bucket += param.numel()
            if bucket > ALLREDUCE_ELEMENTS:
                self._reduce(bucket)
                bucket = 0
        self._reduce(bucket)

    def _reduce(self, elements: int) -> None:
        if elements:
            flat = self.buffers.on_gpu(elements, self.dtype, "communication")
            del flat

    @torch.no_grad()
    def step(self) -> None:
        """Update the weights with gradients in fp32."""
        if self.dtype != torch.float32:
            gradients = [self._like(param, "gradients") for param in self.params]
            del gradients
        for param in self.params:
            param.grad = None
