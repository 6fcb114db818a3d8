"""The Trainer's arguments, and the state in which accelerate must find the process."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType, ParallelismConfig
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from transformers import TrainingArguments
from transformers.utils import logging

from distexp.config import Config
from distexp.distributed.context import Context
from distexp.strategies.ds_config import autocasts
from distexp.strategies.fsdp import mesh_shape
from distexp.strategies.torch_model import DTYPES

INHERITED = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")
"""Variables by which ``accelerate launch``, or an earlier training in this process, would change a run."""


def training_arguments(
    config: Config, context: Context, total_steps: int, *, units: Sequence[str], settings: dict[str, Any] | None
) -> TrainingArguments:
    """The arguments of a run; also sets accelerate's process-wide state, in which the Trainer finds where it is.

    Args:
        total_steps: optimizer steps of the whole training.
        units: class names of what FSDP shards apart.
        settings: DeepSpeed's effective configuration.
    """
    train = config.train
    # DeepSpeed may leave bf16 to torch's autocast, and the Trainer must then not ask for its own.
    precision = "fp32" if settings is not None and autocasts(config) else config.precision.name
    for name in [name for name in os.environ if name.startswith(INHERITED)]:
        del os.environ[name]
    # accelerate would choose a number of threads by itself.
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
    with _standing_alone(config, context):
        arguments = TrainingArguments(
            output_dir=str(context.run_dir),
            per_device_train_batch_size=train.micro_batch_size,
            gradient_accumulation_steps=train.gradient_accumulation_steps,
            max_steps=total_steps,
            learning_rate=train.learning_rate,
            lr_scheduler_type="constant",  # the rate of each step is set when it begins
            max_grad_norm=train.gradient_clipping or 0.0,
            seed=train.seed,
            bf16=precision == "bf16",
            fp16=precision == "fp16",
            use_cpu=context.device.type == "cpu",
            average_tokens_across_devices=True,
            # MetricsLogger and records are ours. The filter would wait for the device after every micro-batch.
            logging_strategy="no",
            logging_nan_inf_filter=False,
            save_strategy="no",
            eval_strategy="no",
            report_to="none",
            disable_tqdm=True,
            deepspeed=settings,
            **_sharding(config, units),
        )
    if config.strategy.name == "fsdp":
        _complete_fsdp(arguments, config, context)
    return arguments


def _sharding(config: Config, units: Sequence[str]) -> dict[str, Any]:
    """What FSDP adds to the arguments."""
    if config.strategy.name != "fsdp":
        return {}
    replicate, shard = mesh_shape(config)
    mesh = ParallelismConfig(dp_replicate_size=replicate, dp_shard_size=shard) if shard > 1 else None
    return {
        "fsdp": True,
        "fsdp_config": {
            "version": 2,
            "reshard_after_forward": config.fsdp.sharding != "shard_grad_op",
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": list(units),
        },
        "parallelism_config": mesh,
    }


def _complete_fsdp(arguments: TrainingArguments, config: Config, context: Context) -> None:
    """What fsdp_config has no words for: our precision of reductions, pinning, and sharding on the CPU."""
    plugin: dict[str, Any] = arguments.fsdp_plugin_args
    if config.precision.name != "fp32":
        plugin["mixed_precision_policy"] = MixedPrecisionPolicy(
            param_dtype=DTYPES[config.precision.name], reduce_dtype=torch.float32
        )
    if config.offload.enabled:
        plugin["cpu_offload"] = CPUOffloadPolicy(pin_memory=config.offload.pin_memory)
    if context.device.type == "cpu":
        # accelerate shards on the kinds of devices that it lists, and the CPU is none of them: the Trainer would run
        # plain DDP without a word. What it does on GPUs it does over gloo too, once it takes them for such.
        PartialState().distributed_type = DistributedType.MULTI_GPU


@contextmanager
def _standing_alone(config: Config, context: Context) -> Iterator[None]:
    """On a CPU, one worker whom torchrun started would be wrapped in DDP."""
    if config.strategy.name != "single" or context.device.type != "cpu":
        yield
        return
    local_rank, verbosity = os.environ.pop("LOCAL_RANK"), logging.get_verbosity()
    logging.set_verbosity_error()  # it would advise to start with torchrun
    try:
        yield
    finally:
        os.environ["LOCAL_RANK"] = local_rank
        logging.set_verbosity(verbosity)
