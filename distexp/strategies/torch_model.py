"""The engine of everything that is plain torch: single, DDP and FSDP differ in how they wrap the model."""

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
from distexp.strategies.optimizer import build_optimizer, clip_gradients, own_hyperparameters

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Distribution:
    """How a model is spread over the workers; the fields are those of Built."""

    wrapper: str
    mesh: list[int]
    sharded_units: int = 0
    offload: str = "none"
    compute_dtype: torch.dtype | None = None  # where the wrapper casts, and not autocast


class TorchModel:
    """Forward, backward and step of a wrapped model.

    Args:
        wrapped: the model as the loop calls it.
        synchronising: ``synchronising(last_micro)`` is the context of one micro-batch's forward and
            backward pass, in which gradients are reduced only when ``last_micro``.
        autocast: whether arithmetic is cast here; FSDP casts by its own policy.
        distribution: how the model is distributed, read off the live model.
    """

    def __init__(
        self,
        wrapped: nn.Module,
        config: Config,
        context: Context,
        *,
        synchronising: Callable[[bool], AbstractContextManager[Any]],
        autocast: bool,
        distribution: Callable[[], Distribution],
    ) -> None:
        self.model = wrapped
        self.device = context.device
        self.strategy = config.strategy.name
        self.task = config.model.task
        self.world_size = context.world_size
        self.clipping = config.train.gradient_clipping
        self.synchronising = synchronising
        on_gpu = context.device.type == "cuda"
        self.autocast = torch.autocast(
            context.device.type,
            DTYPES[config.precision.name],
            enabled=autocast and config.precision.name != "fp32",
        )
        # Offloaded shards are on the CPU, where the fused kernel of another device cannot reach them.
        self.optimizer = build_optimizer(wrapped, config.train, fused=on_gpu and not config.offload.enabled)
        self.scaler = torch.amp.GradScaler(context.device.type, enabled=config.precision.name == "fp16")
        self.distribution = distribution

    def forward_backward(self, batch: Batch, *, normalizer: Tensor, last_micro: bool) -> Tensor:
        """Adds a micro-batch's gradients; this rank's shares of the step's mean loss and accuracy."""
        with self.synchronising(last_micro):
            with self.autocast:
                outputs = self.model(**batch.inputs)
            loss = loss_sum(self.task, outputs, batch) / normalizer
            told = partial_metrics(self.task, outputs, batch, loss, normalizer)
            del outputs  # a large vocabulary's logits, which the backward pass can do without
            # Gradients are averaged over the ranks; their sum is wanted.
            self.scaler.scale(loss * self.world_size).backward()  # type: ignore[no-untyped-call]
        return told

    def step(self, learning_rate: float) -> Tensor:
        """Clips, updates and clears; the gradient norm before clipping."""
        self.scaler.unscale_(self.optimizer)
        norm = clip_gradients(self.model.parameters(), self.clipping)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return norm

    @torch.no_grad()
    def forward(self, batch: Batch) -> Any:
        """The model's outputs in the precision of the training."""
        with self.autocast:
            return self.model(**batch.inputs)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter and buffer, whole, on this rank's device, one at a time; a collective."""
        return whole_weights(self.model, self.device)

    @property
    def checkpoint_format(self) -> str:
        """DCP's, which any number of workers reads; a loss scale is there only with fp16."""
        return "torch" + (" with a loss scale" if self.scaler.is_enabled() else "")

    def _state(self) -> dict[str, Any]:
        """Everything that steps change, by the bare model's names, shards as DTensors."""
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        scaler = {"scaler": self.scaler.state_dict()} if self.scaler.is_enabled() else {}
        return {"model": model, "optimizer": optimizer, **scaler}

    def save(self, folder: Path) -> None:
        """Writes weights, optimizer and loss scale by torch.distributed.checkpoint."""
        from torch.distributed.checkpoint.state_dict_saver import save

        save(self._state(), checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        """Reads each rank's part of what any number of ranks wrote."""
        from torch.distributed.checkpoint.state_dict import set_state_dict
        from torch.distributed.checkpoint.state_dict_loader import load

        with own_hyperparameters(self.optimizer.param_groups):
            state = self._state()
            load(state, checkpoint_id=folder)
            set_state_dict(
                self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
            )
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])

    def describe(self) -> Built:
        """What was really built."""
        cast_to = self.autocast.fast_dtype if self.autocast._enabled else None
        return describe(self.model, self.optimizer, self.distribution(), cast_to, strategy=self.strategy)


@torch.no_grad()
def whole_weights(model: nn.Module, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer of a model of plain torch, as ``EvaluableModel.weights`` gives them."""
    bare = model.module if isinstance(model, DistributedDataParallel) else model
    for name, tensor in [*bare.named_parameters(), *bare.named_buffers()]:
        # An offloaded shard is gathered where the others' shards arrive.
        here = tensor.detach().to(device)
        yield name, here.full_tensor() if isinstance(here, DTensor) else here


def describe(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    distribution: Distribution,
    autocast: torch.dtype | None,
    *,
    strategy: str,
    engine: str = "native",
) -> Built:
    """What can be seen of a model of plain torch, and of what autocast makes of it."""
    parameters = list(model.parameters())
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
        compute_dtype=dtype_name(distribution.compute_dtype or autocast or parameters[0].dtype),
        optimizer=type(optimizer).__name__,
        parameters=sum(p.numel() for p in parameters),
    )


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for torch.float32."""
    return str(dtype).removeprefix("torch.")
