"""The model that the strategy ``deepspeed`` builds, around a deepspeed.DeepSpeedEngine."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import MethodType
from typing import Any

import deepspeed
import torch
from deepspeed import comm
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor
from torch.serialization import safe_globals

from distexp.config import Config
from distexp.data.base import Batch
from distexp.distributed.context import Context
from distexp.models.blueprint import Blueprint
from distexp.models.objective import loss_sum, partial_metrics
from distexp.models.transforms import training_entropy
from distexp.runs.record_sections import Built
from distexp.strategies.optimizer import keep_hyperparameters
from distexp.strategies.torch_model import DTYPES, check_equal_use
from distexp.strategies.zero import ds_initialization
from distexp.system.torch_internals.tensors import find_leaves

TAG = "state"
"""The tag of DeepSpeed's checkpoints: the name of their subfolder."""


DEEPSPEED = "DeepSpeed does not support that: use sharding=full_shard, or"
"""Start of the hint if the workers use different parameters."""


class DeepSpeedModel:
    """The DistributedModel of a deepspeed.DeepSpeedEngine."""

    def __init__(self, blueprint: Blueprint, config: Config, context: Context, settings: dict[str, Any]) -> None:
        self.config, self.context = config, context
        self.task, self.world_size, self.is_first_step = config.model.task, context.world_size, True
        self.entropy = training_entropy(config)
        self.only_trained = config.adapter.freezes_model  # in checkpoints and exported weights
        ds_initialization.initialize_weights(blueprint, config, settings)
        self.module, *_ = deepspeed.initialize(
            model=blueprint.model,
            optimizer=ds_initialization.build_optimizer_for(blueprint.model, config, context),
            config=settings,
            dist_init_required=False,
        )
        if config.deepspeed.async_update:
            avoid_waits(self.module.optimizer)
        ds_initialization.repair_16_bits(self.module)
        if ds_initialization.in_16_bits(config):
            ds_initialization.restore_masters(self.module, blueprint)

    def forward_backward(self, batch: Batch, *, normalizer: Tensor, last_micro: bool) -> Tensor:
        """Run one micro-batch, accumulate its gradients, return its share of the metrics."""
        with equal_calls(self.module) if self.is_first_step else nullcontext():
            outputs = self.module(**self._inputs(batch))
        loss = loss_sum(self.task, outputs, batch, self.entropy) / normalizer
        metrics = partial_metrics(self.task, outputs, batch, loss, normalizer)
        del outputs  # Frees the logits, which are large and not needed in the backward pass.
        if self.is_first_step:
            self._check_gradients(loss)
        # The normalizer includes the accumulation steps. DeepSpeed averages over the ranks.
        self.module.backward(loss * self.world_size, scale_wrt_gas=False)
        if not last_micro:
            self.module.step()  # DeepSpeed counts micro-batches by the calls of step().
        return metrics

    def _check_gradients(self, loss: Tensor) -> None:
        """Check that each parameter gets a gradient on all workers or on none; a collective."""
        reached, parameters = find_leaves(loss), self.module.module.named_parameters()
        check_equal_use([name for name, weight in parameters if id(weight) in reached], DEEPSPEED)

    def step(self, learning_rate: float) -> Tensor:
        """Clip, update the weights, clear the gradients; return the norm before clipping."""
        self.is_first_step = False
        for group in self.module.optimizer.param_groups:
            group["lr"] = learning_rate
        is_plain = ds_initialization.keeps_plain_gradients(self.config)
        norm = ds_initialization.unpartitioned_norm(self.module) if is_plain else None
        self.module.step()
        norm = self.module.get_global_grad_norm() if norm is None else norm
        return torch.as_tensor(norm, device=self.context.device)

    def forward(self, batch: Batch) -> Any:
        """Return the outputs of the module in the precision of the training."""
        with torch.no_grad():
            return self.module(**self._inputs(batch))

    def _inputs(self, batch: Batch) -> dict[str, Tensor]:
        """Return the inputs of the module, with images in the type of the weights."""
        is_cast = ds_initialization.in_16_bits(self.config)
        return batch.cast_inputs(DTYPES[self.config.precision.name]) if is_cast else batch.inputs

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter (its fp32 master, if any) and buffer; a collective."""
        return ds_initialization.unpartitioned_weights(self.module, only_trained=self.only_trained)

    @property
    def checkpoint_format(self) -> str:
        """Return the format, which depends on stage, precision and number of workers."""
        stage, precision = self.module.zero_optimization_stage(), self.config.precision.name
        adapters = ", adapters only" if self.only_trained else ""
        return f"deepspeed, zero_stage={stage}, {precision}, {self.world_size} workers{adapters}"

    def save(self, folder: Path) -> None:
        """Write a checkpoint with DeepSpeed's ``save_checkpoint``."""
        self.module.save_checkpoint(
            str(folder), tag=TAG, save_latest=False, exclude_frozen_parameters=self.only_trained
        )

    def load(self, folder: Path) -> None:
        """Read weights and fp32 masters with DeepSpeed's ``load_checkpoint``."""
        optimizer = self.module.optimizer
        clipping = getattr(optimizer, "clip_grad", None)
        # DeepSpeed takes the path as a pattern, in which [1] also matches the folder of another run.
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            with safe_globals(ds_initialization.checkpoint_classes()), keep_hyperparameters(optimizer):
                found, _ = self.module.load_checkpoint(
                    f"/proc/self/fd/{descriptor}",
                    tag=TAG,
                    load_lr_scheduler_states=False,
                    load_module_strict=not self.only_trained,
                )
        finally:
            os.close(descriptor)
        if clipping is not None:  # Stages 1 and 2 read it from the checkpoint.
            optimizer.clip_grad = clipping
        if found is None:
            raise RuntimeError(f"DeepSpeed found no checkpoint in {folder}")

    def describe(self) -> Built:
        """Return what was built, read from DeepSpeed's object."""
        return ds_initialization.describe(self.module)


@contextmanager
def equal_calls(engine: Any) -> Iterator[None]:
    """Check before each module with parameters that all workers call it, because stage 3 gathers its parameters.

    Raise ConfigError if they do not. Otherwise the workers would hang or crash.
    """
    hooks = [
        module.register_forward_pre_hook(lambda *_, name=name: check_equal_use([name], DEEPSPEED), prepend=True)
        for name, module in engine.module.named_modules()
        if engine.zero_optimization_stage() == 3 and module._parameters
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def avoid_waits(optimizer: Any) -> None:
    """Replace the clipping of a DeepSpeedZeroOptimizer without offload and without a loss scale.

    DeepSpeed computes the norm of the gradients with two kernels for each parameter, and reads it twice for each group
    of parameters. So the CPU starts the kernels of an update after the GPU has finished the backward pass, and the GPU
    waits for them. Here a few kernels compute the norm of a group, and the CPU reads nothing. Raise RuntimeError if the
    optimizer is another one, or this version of DeepSpeed does not clip with these methods.
    """
    replaced: dict[str, Callable[..., Any]] = {"get_grad_norm_direct": gradient_norm, "unscale_and_clip_grads": clip}
    known = isinstance(optimizer, DeepSpeedZeroOptimizer) and all(hasattr(optimizer, name) for name in replaced)
    if not known:
        raise RuntimeError(
            f"deepspeed.async_update=true does not support {type(optimizer).__name__} of DeepSpeed "
            f"{deepspeed.__version__}: set deepspeed.async_update=false"
        )
    for name, function in replaced.items():
        setattr(optimizer, name, MethodType(function, optimizer))


def gradient_norm(optimizer: Any, gradients: Iterable[Tensor], parameters: object, norm_type: float = 2) -> Tensor:
    """Return the L2 norm of the gradients of a group over all ranks; a collective.

    It is a scalar in fp32. DeepSpeed replaces a norm that is infinite or no number by -1 here. This does not.
    """
    tensors = list(gradients)
    total = torch.zeros((), device=optimizer.device)
    if tensors:
        total = torch.stack(torch._foreach_norm(tensors, norm_type, dtype=torch.float32)).square().sum()
    comm.all_reduce(total, group=optimizer.dp_process_group)
    return total.sqrt()


def clip(optimizer: Any, gradients: Iterable[Tensor], norm: Tensor) -> None:
    """Scale the gradients in place, so that their norm is at most ``optimizer.clip_grad``; 0: no limit."""
    if optimizer.clip_grad:
        factor = 1.0 / ((norm + 1e-6) / optimizer.clip_grad).clamp(min=1.0)  # as DeepSpeed does
        for gradient in gradients:
            gradient.mul_(factor)
