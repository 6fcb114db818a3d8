"""The DistributedModel of single, DDP and FSDP.

These strategies differ only in how they wrap the module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel.distributed import DistributedDataParallel

from distexp.config import Config
from distexp.data.base import Batch
from distexp.distributed.context import Context
from distexp.models.objective import loss_sum, partial_metrics
from distexp.runs.record import Built
from distexp.strategies.optimizer import build_optimizer, clip_gradients, keep_hyperparameters
from distexp.system.torch_internals import active_autocast_dtype

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Distribution:
    """How a module is distributed over the workers; the fields are those of Built."""

    wrapper: str
    mesh: list[int]
    sharded_units: int = 0
    offload: str = "none"
    compute_dtype: torch.dtype | None = None  # if the wrapper casts, instead of autocast


class TorchModel:
    """Forward pass, backward pass and optimizer step of a wrapped PyTorch module.

    Args:
        module: the wrapped module.
        config: the configuration of the run.
        context: this worker.
        sync_context: returns the context for one micro-batch's forward and backward pass. Its argument is
            ``last_micro``; gradients are reduced only if it is true.
        autocast: whether to run the module under autocast. FSDP casts with its own policy.
        distribution: returns how the module is distributed, read from the live module.
    """

    def __init__(
        self,
        module: nn.Module,
        config: Config,
        context: Context,
        *,
        sync_context: Callable[[bool], AbstractContextManager[Any]],
        autocast: bool,
        distribution: Callable[[], Distribution],
    ) -> None:
        self.module = module
        self.device = context.device
        self.strategy = config.strategy.name
        self.task = config.model.task
        self.world_size = context.world_size
        self.clipping = config.train.gradient_clipping
        self.sync_context = sync_context
        dtype = DTYPES[config.precision.name]
        self.autocast = torch.autocast(context.device.type, dtype, enabled=autocast and dtype != torch.float32)
        # The fused kernel runs on the GPU, but offloaded shards are on the CPU.
        fused = context.device.type == "cuda" and not config.offload.enabled
        self.optimizer = build_optimizer(module, config.train, fused=fused)
        self.scaler = torch.amp.GradScaler(context.device.type, enabled=config.precision.name == "fp16")
        self.distribution = distribution

    def forward_backward(self, batch: Batch, *, normalizer: Tensor, last_micro: bool) -> Tensor:
        """Run one micro-batch, accumulate its gradients, return its share of the metrics."""
        with self.sync_context(last_micro):
            with self.autocast:
                outputs = self.module(**batch.inputs)
            loss = loss_sum(self.task, outputs, batch) / normalizer
            metrics = partial_metrics(self.task, outputs, batch, loss, normalizer)
            del outputs  # Frees the logits, which are large and not needed in the backward pass.
            # Gradients are averaged over the ranks, but the normalizer requires their sum.
            self.scaler.scale(loss * self.world_size).backward()  # type: ignore[no-untyped-call]
        return metrics

    def step(self, learning_rate: float) -> Tensor:
        """Clip, update the weights, clear the gradients; return the norm before clipping."""
        self.scaler.unscale_(self.optimizer)
        norm = clip_gradients(self.module.parameters(), self.clipping)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return norm

    @torch.no_grad()
    def forward(self, batch: Batch) -> Any:
        """Return the outputs of the module in the precision of the training."""
        with self.autocast:
            return self.module(**batch.inputs)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter and buffer, unsharded, on this rank's device; a collective."""
        return unsharded_weights(self.module, self.device)

    @property
    def checkpoint_format(self) -> str:
        """Return "torch": any number of workers can load the checkpoint."""
        return "torch" + (" with a loss scale" if self.scaler.is_enabled() else "")

    def _state(self) -> dict[str, Any]:
        """Return model and optimizer state; the shards are DTensors."""
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.module, self.optimizer)
        scaler = {"scaler": self.scaler.state_dict()} if self.scaler.is_enabled() else {}
        return {"model": model, "optimizer": optimizer, **scaler}

    def save(self, folder: Path) -> None:
        """Write weights, optimizer state and loss scale with torch.distributed.checkpoint."""
        from torch.distributed.checkpoint.state_dict_saver import save

        save(self._state(), checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        """Read this rank's part of a checkpoint that any number of ranks wrote."""
        from torch.distributed.checkpoint.state_dict import set_state_dict
        from torch.distributed.checkpoint.state_dict_loader import load

        from distexp.system.restricted_loading import DataReader

        with keep_hyperparameters(self.optimizer.param_groups):
            state = self._state()
            load(state, storage_reader=DataReader(folder))
            set_state_dict(
                self.module, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
            )
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])

    def describe(self) -> Built:
        """Return what was built, read from the live objects."""
        autocast_dtype = active_autocast_dtype(self.autocast)
        return describe(self.module, self.optimizer, self.distribution(), autocast_dtype, strategy=self.strategy)


@torch.no_grad()
def unsharded_weights(module: nn.Module, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Yield name and full value of each parameter and buffer; a collective."""
    unwrapped = module.module if isinstance(module, DistributedDataParallel) else module
    for name, tensor in [*unwrapped.named_parameters(), *unwrapped.named_buffers()]:
        # Offloaded shards are on the CPU; they are gathered on the device of the process group.
        local = tensor.detach().to(device)
        yield name, local.full_tensor() if isinstance(local, DTensor) else local


def describe(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    distribution: Distribution,
    autocast_dtype: torch.dtype | None,
    *,
    strategy: str,
    engine: str = "native",
) -> Built:
    """Return what was built of a PyTorch module, read from the live objects.

    Args:
        module: the wrapped module.
        optimizer: the optimizer that does the arithmetic.
        distribution: how the module is distributed.
        autocast_dtype: dtype of autocast; None without autocast.
        strategy: name of the strategy, for the record.
        engine: name of the trainer, for the record.
    """
    parameters = list(module.parameters())
    return Built(
        strategy=strategy,
        engine=engine,
        wrapper=distribution.wrapper,
        world_size=dist.get_world_size(),
        mesh=distribution.mesh,
        sharded_units=distribution.sharded_units,
        zero_stage=None,
        offload=distribution.offload,
        param_dtype=dtype_name(parameters[0].dtype),
        compute_dtype=dtype_name(distribution.compute_dtype or autocast_dtype or parameters[0].dtype),
        optimizer=type(optimizer).__name__,
        parameters=sum(p.numel() for p in parameters),
    )


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, for example ``float32``."""
    return str(dtype).removeprefix("torch.")
