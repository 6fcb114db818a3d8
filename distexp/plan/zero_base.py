"""What the stages 1 to 3 of ZeRO have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from importlib.metadata import version
from typing import Any

from torch import Tensor, nn

from distexp.config import Config
from distexp.plan.zero_buffers import Buffers, read_zero
from distexp.strategies.optimizer import parameter_groups

CHECKED_VERSION = "0.19.8"
"""Version of DeepSpeed with which the models of ZeRO's memory were checked."""

DEFAULT_BUCKET = 500_000_000
"""DeepSpeed's default of reduce_bucket_size in elements."""


def version_note() -> str | None:
    """Return a note if the installed DeepSpeed is not the one with which ZeRO's memory was checked."""
    installed = version("deepspeed").partition("+")[0]
    if installed == CHECKED_VERSION:
        return None
    return f"DeepSpeed {installed} is installed: the memory of ZeRO was checked with {CHECKED_VERSION}, and may differ"


class ShardedOptimizer(ABC):
    """An optimizer that shards its states, and takes each gradient when autograd has accumulated it.

    Args:
        module: the model in the precision of the training, on the GPU.
        config: the configuration.
        settings: the ds_config of the run.
        buffers: allocates on the GPU and on the host.
    """

    def __init__(self, module: nn.Module, config: Config, settings: dict[str, Any], buffers: Buffers) -> None:
        self.buffers, self.offloads, self.is_last = buffers, config.offload.enabled, False
        self.world_size = config.cluster.world_size
        self.bucket_size = int(read_zero(settings, "reduce_bucket_size", DEFAULT_BUCKET))
        self.groups: list[list[nn.Parameter]] = [
            group["params"] for group in parameter_groups(module, config.train.weight_decay)
        ]
        self.params = [param for group in self.groups for param in group]
        self.dtype = self.params[0].dtype
        for param in self.params:
            param.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]

    @abstractmethod
    def _on_gradient(self, param: Tensor) -> None:
        """Take the gradient of a parameter."""

    @abstractmethod
    def after_backward(self) -> None:
        """Finish a micro-batch."""

    @abstractmethod
    def step(self) -> None:
        """Update the weights."""
