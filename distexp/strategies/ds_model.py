"""A model in DeepSpeed's hands, whichever loop drives it: how it is brought to life, its weights, and what it says.

Imports torch and DeepSpeed only inside functions, as a strategy does.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distexp.config import Config
from distexp.distributed.context import Context
from distexp.runs.record import Built, write_json
from distexp.strategies.ds_config import autocasts, effective_config, fit_buckets

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from distexp.models.blueprint import Blueprint


def settings_for(blueprint: Blueprint, config: Config, context: Context) -> dict[str, Any]:
    """The effective ds_config of a model, which is also written to the run's folder."""
    settings = effective_config(config, context.world_size)
    sizes = [parameter.numel() for parameter in blueprint.model.parameters()]
    fitted = fit_buckets(settings, sum(sizes), max(sizes))
    if context.rank == 0:
        write_json(context.run_dir / "ds_config.json", settings)
        if fitted:
            told = ", ".join(f"{key}={value}" for key, value in fitted.items())
            print(f"note: DeepSpeed's buckets fitted to {sum(sizes):,} parameters: {told}", flush=True)
    return settings


def restore_masters(wrapped: Any, blueprint: Blueprint) -> None:
    """Gives the fp32 masters the weights as they were before they were rounded to 16 bits.

    DeepSpeed takes them from the rounded ones: each then stands in the middle of a 16-bit step, and a first
    update of less than half a step moves none of them. The loss stayed up to 6 % behind for that.
    """
    import torch
    from deepspeed.utils import safe_set_full_fp32_param

    for name, parameter in wrapped.module.named_parameters():
        shape = getattr(parameter, "ds_shape", parameter.shape)
        value = blueprint.get_tensor(name, torch.empty(shape, dtype=torch.float32, device="meta"))
        safe_set_full_fp32_param(parameter, value)


def keeps_plain_gradients(config: Config) -> bool:
    """Stage 0 over fp32 weights leaves gradients in place and its clipping keeps no norm."""
    return config.deepspeed.zero_stage == 0 and not in_16_bits(config)


def unpartitioned_norm(wrapped: Any) -> Tensor:
    """The norm of gradients that are in place."""
    from distexp.strategies.optimizer import clip_gradients

    return clip_gradients(wrapped.module.parameters(), limit=None)


def whole_weights(wrapped: Any) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer of a DeepSpeedEngine, as ``EvaluableModel.weights`` gives them."""
    from deepspeed.utils import safe_get_full_fp32_param

    partitioned = wrapped.zero_optimization_stage() > 0
    for name, parameter in wrapped.module.named_parameters():
        yield name, (safe_get_full_fp32_param(parameter) if partitioned else parameter).detach()
    yield from wrapped.module.named_buffers()


def describe(wrapped: Any, *, engine: str = "native") -> Built:
    """What a deepspeed.DeepSpeedEngine says of itself; ``engine`` is who made it."""
    import torch.distributed as dist

    from distexp.strategies.torch_model import dtype_name

    stage = wrapped.zero_optimization_stage()
    parameters = list(wrapped.module.parameters())
    world = dist.get_world_size(wrapped.seq_data_parallel_group)
    return Built(
        strategy="deepspeed",
        engine=engine,
        wrapper=type(wrapped).__name__,
        world_size=world,
        mesh=[world, 1] if stage == 0 else [1, world],
        sharded_units=sum(1 for p in parameters if hasattr(p, "ds_tensor")),
        zero_stage=stage,
        offload=_offloaded(wrapped, stage),
        param_dtype=dtype_name(parameters[0].dtype),
        compute_dtype=dtype_name(
            wrapped.torch_autocast_dtype() if wrapped.torch_autocast_enabled() else parameters[0].dtype
        ),
        optimizer=_names(wrapped.optimizer),
        parameters=sum(getattr(p, "ds_numel", p.numel()) for p in parameters),
    )


def in_16_bits(config: Config) -> bool:
    """Whether DeepSpeed holds the weights in bf16 or fp16, with fp32 masters beside them."""
    return config.precision.name != "fp32" and not autocasts(config)


def materialize(blueprint: Blueprint, config: Config, settings: dict[str, Any]) -> None:
    """Brings the model to life in the precision that DeepSpeed trains; at stage 3 each part is split at once."""
    import deepspeed
    from deepspeed.runtime.zero.partition_parameters import Init

    from distexp.strategies.torch_model import DTYPES

    deepspeed.init_distributed(dist_init_required=False)  # over the process group that stands
    for module in reversed(list(blueprint.model.modules())):
        blueprint.materialize(module, recurse=False)
        if in_16_bits(config):
            module.to(DTYPES[config.precision.name])
        if config.deepspeed.zero_stage == 3 and any(True for _ in module.parameters(recurse=False)):
            Init(module=module, config_dict_or_path=settings)


def optimizer_for(model: nn.Module, config: Config, context: Context) -> torch.optim.Optimizer:
    """The same AdamW or SGD as everywhere, or DeepSpeed's kernel of it where the states are on the CPU."""
    from distexp.strategies.optimizer import build_optimizer, parameter_groups

    train = config.train
    if config.offload.enabled and config.deepspeed.cpu_optimizer == "deepspeed":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        if context.rank == 0 and not _compiled("cpu_adam"):
            print("note: DeepSpeed's CPU Adam is being compiled: about a minute, once; then it is cached", flush=True)
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


def _compiled(operator: str) -> bool:
    """Whether torch's cache of extensions holds a part of DeepSpeed already."""
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory(operator, verbose=False), f"{operator}.so").exists()


def _names(optimizer: Any) -> str:
    """``DeepSpeedZeroOptimizer(AdamW)``: each optimizer around the one that does the arithmetic."""
    inner = getattr(optimizer, "optimizer", None)
    name = type(optimizer).__name__
    return name if inner is None or inner is optimizer else f"{name}({type(inner).__name__})"


def _offloaded(engine: Any, stage: int) -> str:
    """What lives on the CPU though the engine does not, or by DeepSpeed's own account of it."""
    if stage == 0:
        return "none"
    on = []
    zero = engine.optimizer
    if stage == 3:
        on += ["optimizer"] if zero.offload_optimizer else []
        on += ["parameters"] if zero.offload_param else []
    else:
        # BF16_Optimizer, which a data_types section brings in at stage 1, cannot offload and has no such field.
        on += ["optimizer"] if getattr(zero, "cpu_offload", False) else []
    return "+".join(on) or "none"
