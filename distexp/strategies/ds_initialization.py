"""DeepSpeed models of both trainers: initialization, optimizer and weights.

DeepSpeed is imported only inside functions, because a prediction of memory works without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from distexp.config import Config
from distexp.distributed.context import Context
from distexp.models.blueprint import Blueprint
from distexp.models.introspection import persistent_buffers
from distexp.runs.json_files import write_json
from distexp.runs.run_dir import DS_CONFIG
from distexp.strategies.ds_buckets import describe_buckets, fit_buckets
from distexp.strategies.ds_config import effective_config, uses_autocast
from distexp.strategies.ds_stage0 import unpartitioned_masters
from distexp.strategies.optimizer import build_optimizer, clip_gradients, parameter_groups
from distexp.strategies.torch_model import DTYPES


def build_settings(blueprint: Blueprint, config: Config, context: Context) -> dict[str, Any]:
    """Return the ds_config of a model; rank 0 writes it to the run directory."""
    settings = effective_config(config, context.world_size)
    sizes = [parameter.numel() for parameter in blueprint.model.parameters()]
    fitted = fit_buckets(settings, sum(sizes), max(sizes))
    if context.rank == 0:
        write_json(context.run_dir / DS_CONFIG, settings)
        if fitted:
            print(f"note: {describe_buckets(fitted, sum(sizes))}", flush=True)
    return settings


def restore_masters(engine: Any, blueprint: Blueprint) -> None:
    """Set the fp32 masters to the initial weights before rounding.

    DeepSpeed initializes the masters from weights that are already rounded to 16 bits. Then a first update of less than
    half a 16-bit step changes no weight. The loss was up to 6 % higher because of that.
    """
    from deepspeed.utils import safe_set_full_fp32_param

    unpartitioned = unpartitioned_masters(engine)
    for name, parameter in engine.module.named_parameters():
        shape = getattr(parameter, "ds_shape", parameter.shape)
        value = blueprint.get_tensor(name, torch.empty(shape, dtype=torch.float32, device="meta"))
        if (master := unpartitioned.get(id(parameter))) is not None:
            master.data.copy_(value)
        else:
            safe_set_full_fp32_param(parameter, value)


def checkpoint_classes() -> list[Any]:
    """Return the classes of DeepSpeed whose objects are in its checkpoints."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]


def keeps_plain_gradients(config: Config) -> bool:
    """Return whether gradients stay in ``.grad``: at stage 0 with fp32 weights.

    DeepSpeed clips them without storing their norm.
    """
    return config.deepspeed.zero_stage == 0 and not in_16_bits(config)


def unpartitioned_norm(engine: Any) -> Tensor:
    """Return the norm of the gradients in ``.grad``."""
    return clip_gradients(engine.module.parameters(), limit=None)


def unpartitioned_weights(engine: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield name and full value of each parameter and persistent buffer; a collective."""
    from deepspeed.utils import safe_get_full_fp32_param

    partitioned, unpartitioned = engine.zero_optimization_stage() > 0, unpartitioned_masters(engine)
    for name, parameter in engine.module.named_parameters():
        if partitioned and parameter.requires_grad:
            yield name, safe_get_full_fp32_param(parameter).detach()
        else:
            yield name, _copy_in_fp32(unpartitioned.get(id(parameter), parameter))
    yield from persistent_buffers(engine.module)


def _copy_in_fp32(parameter: nn.Parameter) -> Tensor:
    """Return the full value of a parameter without a master; a collective at stage 3, which partitions it too."""
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    with GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
        return parameter.detach().to(torch.float32, copy=True)


def in_16_bits(config: Config) -> bool:
    """Return whether DeepSpeed stores the weights in bf16 or fp16, with fp32 masters."""
    return config.precision.name != "fp32" and not uses_autocast(config)


def initialize_weights(blueprint: Blueprint, config: Config, settings: dict[str, Any]) -> None:
    """Initialize the weights in DeepSpeed's precision.

    At stage 3 each module is partitioned at once, so that the whole model is never in memory.
    """
    import deepspeed
    from deepspeed.runtime.zero.partition_parameters import Init

    deepspeed.init_distributed(dist_init_required=False)  # uses the existing process group
    for module in reversed(list(blueprint.model.modules())):
        blueprint.materialize(module, recurse=False)
        if in_16_bits(config):
            cast_weights(module, DTYPES[config.precision.name])
        if config.deepspeed.zero_stage == 3 and any(True for _ in module.parameters(recurse=False)):
            Init(module=module, config_dict_or_path=settings)


def cast_weights(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the weights of one module. Buffers, such as the frequencies of RoPE, stay in fp32 as in DeepSpeed."""
    for parameter in module.parameters(recurse=False):
        if parameter.is_floating_point() and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)


def build_optimizer_for(model: nn.Module, config: Config, context: Context) -> torch.optim.Optimizer:
    """Build AdamW or SGD, or DeepSpeed's CPU Adam for offloaded states."""
    train = config.train
    if config.offload.enabled and config.deepspeed.cpu_optimizer == "deepspeed":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        optimizer: torch.optim.Optimizer = DeepSpeedCPUAdam(
            parameter_groups(model, train.weight_decay),
            lr=train.learning_rate,
            betas=tuple(train.betas),
            eps=train.eps,
            adamw_mode=True,
        )
        return optimizer
    fused = context.device.type == "cuda" and not config.offload.enabled
    return build_optimizer(model, train, fused=fused)
