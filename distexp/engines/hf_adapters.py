"""Adapters that configure ``transformers.Trainer``, one for each strategy, which names it in ``hf_adapter``."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from accelerate import PartialState
from accelerate.utils import DDPCommunicationHookType, DistributedType, ParallelismConfig
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from transformers.utils import logging

from distexp.config import Config
from distexp.distributed.context import Context
from distexp.models.blueprint import Blueprint
from distexp.models.transforms import find_blocks
from distexp.strategies.communication import mesh_shape, sharding_of
from distexp.strategies.optimizer import build_optimizer
from distexp.strategies.torch_model import DTYPES, unsharded_weights
from distexp.strategies.zero import ds_config, ds_initialization
from distexp.strategies.zero.ds_initialization import repair_16_bits


class HFAdapter:
    """The adapter of a strategy that needs no special configuration."""

    # Whether the wrapped model clips the gradients and updates the weights, as DeepSpeed does.
    steps_itself: ClassVar[bool] = False

    def __init__(self, blueprint: Blueprint, config: Config, context: Context) -> None:
        self.config, self.context, self.model = config, context, blueprint.model
        self.units: list[nn.Module] = []  # the modules to shard as separate units
        self.initialize(blueprint)

    def initialize(self, blueprint: Blueprint) -> None:
        """Initialize the weights of the model."""
        blueprint.materialize(self.model)

    @property
    def precision(self) -> str:
        """Return the precision to request from the Trainer."""
        return self.config.precision.name

    def argument_context(self) -> AbstractContextManager[None]:
        """Return the context in which TrainingArguments are created."""
        return nullcontext()

    def arguments(self) -> dict[str, Any]:
        """Return additional TrainingArguments."""
        return {}

    def configure_arguments(self, arguments: Any) -> None:
        """Set what TrainingArguments does not accept as an argument."""

    def configure_accelerator(self, accelerator: Any) -> None:
        """Set what the Accelerator of the Trainer does not take from TrainingArguments."""

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Build the same optimizer as the native trainer."""
        fused = self.context.device.type == "cuda" and not self.config.offload.enabled
        return build_optimizer(model, self.config.train, fused=fused)

    def start(self, trainer: Any) -> None:
        """Prepare the wrapped model for the first step."""

    def weights(self, wrapped: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter and buffer in full; a collective."""
        return unsharded_weights(wrapped, self.context.device)


class SingleAdapter(HFAdapter):
    """The adapter of the strategy ``single``."""

    def argument_context(self) -> AbstractContextManager[None]:
        """Hide torchrun's local rank on a CPU. Otherwise accelerate would use DDP even for one worker."""
        return without_local_rank() if self.context.device.type == "cpu" else nullcontext()


class DDPAdapter(HFAdapter):
    """The adapter of the strategy ``ddp``."""

    def configure_accelerator(self, accelerator: Any) -> None:
        """Set the options of DistributedDataParallel."""
        options, handler = self.config.ddp, accelerator.ddp_handler
        handler.bucket_cap_mb, handler.static_graph = options.bucket_cap_mb, options.static_graph
        handler.find_unused_parameters = options.find_unused_parameters
        handler.gradient_as_bucket_view = options.gradient_as_bucket_view
        if options.communication == "bf16":
            handler.comm_hook = DDPCommunicationHookType.BF16


class FSDPAdapter(HFAdapter):
    """The adapter of the strategy ``fsdp``."""

    def initialize(self, blueprint: Blueprint) -> None:
        """Initialize the weights, and find the blocks to shard."""
        super().initialize(blueprint)
        names = {"needed_for": "strategy=fsdp with engine=hf_trainer", "alternative": "engine=native"}
        self.units = [block for _, block in find_blocks(self.model, self.config.fsdp.wrap, **names)]

    def arguments(self) -> dict[str, Any]:
        """Return mesh, sharding and the class names of the blocks."""
        replicate, shard = mesh_shape(self.config)
        mesh = ParallelismConfig(dp_replicate_size=replicate, dp_shard_size=shard) if shard > 1 else None
        return {
            "fsdp": True,
            "fsdp_config": {
                "version": 2,
                "reshard_after_forward": sharding_of(self.config).reshards_after_forward,
                "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "transformer_layer_cls_to_wrap": sorted({type(unit).__name__ for unit in self.units}),
            },
            "parallelism_config": mesh,
        }

    def configure_arguments(self, arguments: Any) -> None:
        """Set the dtype of reductions and the offload; let accelerate shard on a CPU too."""
        plugin: dict[str, Any] = arguments.fsdp_plugin_args
        if self.precision != "fp32":
            plugin["mixed_precision_policy"] = MixedPrecisionPolicy(DTYPES[self.precision], reduce_dtype=torch.float32)
        if self.config.offload.enabled:
            plugin["cpu_offload"] = CPUOffloadPolicy(pin_memory=self.config.offload.pin_memory)
        if self.context.device.type == "cpu":
            # On a CPU accelerate silently uses DDP instead of FSDP. Its FSDP works over gloo if the state claims GPUs.
            PartialState().distributed_type = DistributedType.MULTI_GPU


class DeepSpeedAdapter(HFAdapter):
    """The adapter of the strategy ``deepspeed``."""

    steps_itself: ClassVar[bool] = True

    def initialize(self, blueprint: Blueprint) -> None:
        """Build the ds_config and initialize the weights in DeepSpeed's precision."""
        self.settings = ds_initialization.build_settings(blueprint, self.config, self.context)
        # If this were true, accelerate would replace the optimizer by a CPU Adam without AdamW's weight decay.
        self.settings["zero_force_ds_cpu_optimizer"] = False
        ds_initialization.initialize_weights(blueprint, self.config, self.settings)
        self.masters = blueprint if ds_initialization.in_16_bits(self.config) else None

    @property
    def precision(self) -> str:
        """Return fp32 if DeepSpeed uses autocast; the Trainer must not add its own."""
        return "fp32" if ds_config.uses_autocast(self.config) else self.config.precision.name

    def arguments(self) -> dict[str, Any]:
        """Return the ds_config."""
        return {"deepspeed": self.settings}

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Build the optimizer, on the CPU if its states are offloaded."""
        return ds_initialization.build_optimizer_for(model, self.config, self.context)

    def start(self, trainer: Any) -> None:
        """Restore the fp32 masters, and observe DeepSpeed's step, which the Trainer runs in its backward pass."""
        engine = trainer.model_wrapped
        repair_16_bits(engine)
        if self.masters is not None:
            ds_initialization.restore_masters(engine, self.masters)
            self.masters = None
        step, watchers = engine.step, trainer.inputs.logger.watchers
        without_norm = ds_initialization.keeps_plain_gradients(self.config)

        def observed_step() -> None:
            watchers.before_update()
            if without_norm:
                engine._global_grad_norm = ds_initialization.unpartitioned_norm(engine)
            step()

        engine.step = observed_step

    def weights(self, wrapped: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter and buffer in full; a collective."""
        return ds_initialization.unpartitioned_weights(wrapped)


@contextmanager
def without_local_rank() -> Iterator[None]:
    """Remove LOCAL_RANK from the environment during the block."""
    local_rank, verbosity = os.environ.pop("LOCAL_RANK"), logging.get_verbosity()
    logging.set_verbosity_error()  # transformers would advise to start with torchrun
    try:
        yield
    finally:
        os.environ["LOCAL_RANK"] = local_rank
        logging.set_verbosity(verbosity)
