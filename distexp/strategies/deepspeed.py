"""DeepSpeed ZeRO, stages 0 to 3, with and without offload."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from distexp.config import Config
from distexp.distributed.context import Context
from distexp.runs.record import Built
from distexp.strategies import ds_model
from distexp.strategies.base import COMMUNICATION, DistributedModel, Strategy
from distexp.strategies.ds_config_file import get_nested, read_or_empty
from distexp.strategies.ds_conflicts import conflicts
from distexp.strategies.ds_operators import needed_operators
from distexp.strategies.fast import block_values

if TYPE_CHECKING:
    from torch import Tensor

    from distexp.data.base import Batch
    from distexp.models.blueprint import Blueprint

PRELOAD = ("distexp.strategies.ds_import",)
"""Imported once for all workers of a node. It imports DeepSpeed."""

PRELOAD_ON_CPU = ("torch.utils.cpp_extension",)
"""Imported once too, if there is no GPU that an import could initialize. DeepSpeed's operators are built with it."""

TAG = "state"
"""The tag of DeepSpeed's checkpoints: the name of their subfolder."""

STAGES = (0, 1, 2, 3)
DEFAULT_STAGE = 2

CHECK_STAGES = (1, 2)
"""Stages at which DeepSpeed can leave out the check for infinite gradients.

The check starts several kernels for each parameter. Two H200s waited about 15 ms per step for it with BLOOM-560m.
"""


class DeepSpeed(Strategy):
    """Optimizer states, gradients and parameters partitioned over the workers by ZeRO."""

    requires: ClassVar[tuple[str, ...]] = (COMMUNICATION, "deepspeed")
    fixes_accumulation: ClassVar[bool] = True
    hf_adapter: ClassVar[str | None] = "distexp.engines.hf_adapters.DeepSpeedAdapter"

    def set_defaults(self, config: Config) -> None:
        """Set the stage (of the user's file, else 2) and the CPU optimizer."""
        options = config.deepspeed
        if options.zero_stage is None:
            stage = get_nested(read_or_empty(options.config_file), ("zero_optimization", "stage"))
            options.zero_stage = DEFAULT_STAGE if stage in (None, "auto") else stage
        if options.cpu_optimizer == "auto":
            options.cpu_optimizer = "deepspeed" if config.cluster.device == "cuda" else "torch"

    def fast_values(self, config: Config) -> Mapping[str, Any]:
        """Compile the blocks, except at stage 3. Leave out the check for infinite gradients, if bf16 allows it."""
        compiled = {} if config.deepspeed.zero_stage == 3 else block_values(config)
        unchecked = config.precision.name == "bf16" and config.deepspeed.zero_stage in CHECK_STAGES
        return {**compiled, **({"deepspeed.check_overflow": False} if unchecked else {})}

    def validate(self, config: Config) -> list[str]:
        """Check the stage, offload and the ds_config.json of the user."""
        stage = config.deepspeed.zero_stage
        if stage not in STAGES:
            return [f"deepspeed.zero_stage={stage} is not one of 0, 1, 2, 3"]
        errors = [*_offload_errors(config), *_overflow_errors(config)]
        if config.train.compiled == "blocks" and stage == 3:
            errors.append(
                "train.compile=true does not work with zero_stage=3, which gathers parameters in module hooks: "
                "choose zero_stage=0,1,2 or train.compile=false"
            )
        return [*errors, *conflicts(config)]

    def main_option(self, config: Config) -> str:
        """Return the stage, for example ``ZeRO-2``."""
        return f"ZeRO-{config.deepspeed.zero_stage}"

    def shards_all_parameters(self, config: Config) -> bool:
        """Return whether the stage is 3."""
        return config.deepspeed.zero_stage == 3

    def operators(self, config: Config) -> tuple[str, ...]:
        """Return the operators that DeepSpeed would compile in a worker."""
        return needed_operators(config)

    def expected_build(self, config: Config) -> Mapping[str, Any]:
        """Require the requested stage and offload."""
        stage, workers = config.deepspeed.zero_stage, config.cluster.world_size
        offload = "none"
        if config.offload.enabled:
            offload = "optimizer+parameters" if stage == 3 else "optimizer"
        return {
            "wrapper": "DeepSpeedEngine",
            "world_size": workers,
            "mesh": [workers, 1] if stage == 0 else [1, workers],
            "zero_stage": stage,
            "offload": offload,
        }

    def setup(self, blueprint: Blueprint, config: Config, context: Context) -> DistributedModel:
        """Write the effective ds_config.json and give model and optimizer to DeepSpeed."""
        return DeepSpeedModel(blueprint, config, context, ds_model.build_settings(blueprint, config, context))


def _offload_errors(config: Config) -> Iterator[str]:
    if not config.offload.enabled:
        return
    if config.deepspeed.zero_stage == 0:
        yield (
            "offload=true needs partitioned states, and zero_stage=0 partitions none: "
            "choose zero_stage=1,2,3 or offload=false"
        )
    if config.train.optimizer != "adamw" and config.deepspeed.cpu_optimizer == "deepspeed":
        yield (
            f"train.optimizer={config.train.optimizer} has no DeepSpeed CPU kernel for offload=true: "
            "set deepspeed.cpu_optimizer=torch or train.optimizer=adamw"
        )


def _overflow_errors(config: Config) -> Iterator[str]:
    if config.deepspeed.check_overflow is not False:
        return
    if config.precision.name != "bf16" or config.deepspeed.zero_stage not in CHECK_STAGES:
        yield (
            f"deepspeed.check_overflow=false is for precision=bf16 with zero_stage=1,2, but this run has "
            f"precision={config.precision.name} and zero_stage={config.deepspeed.zero_stage}: leave it out"
        )


class DeepSpeedModel:
    """The DistributedModel of a deepspeed.DeepSpeedEngine."""

    def __init__(self, blueprint: Blueprint, config: Config, context: Context, settings: dict[str, Any]) -> None:
        import deepspeed

        self.config, self.context = config, context
        self.task, self.world_size = config.model.task, context.world_size
        ds_model.initialize_weights(blueprint, config, settings)
        self.module, *_ = deepspeed.initialize(
            model=blueprint.model,
            optimizer=ds_model.build_optimizer_for(blueprint.model, config, context),
            config=settings,
            dist_init_required=False,
        )
        if ds_model.in_16_bits(config):
            ds_model.restore_masters(self.module, blueprint)

    def forward_backward(self, batch: Batch, *, normalizer: Tensor, last_micro: bool) -> Tensor:
        """Run one micro-batch, accumulate its gradients, return its share of the metrics."""
        from distexp.models.objective import loss_sum, partial_metrics

        outputs = self.module(**batch.inputs)
        loss = loss_sum(self.task, outputs, batch) / normalizer
        metrics = partial_metrics(self.task, outputs, batch, loss, normalizer)
        del outputs  # Frees the logits, which are large and not needed in the backward pass.
        # The normalizer includes the accumulation steps. DeepSpeed averages over the ranks.
        self.module.backward(loss * self.world_size, scale_wrt_gas=False)
        if not last_micro:
            self.module.step()  # DeepSpeed counts micro-batches by the calls of step().
        return metrics

    def step(self, learning_rate: float) -> Tensor:
        """Clip, update the weights, clear the gradients; return the norm before clipping."""
        import torch

        for group in self.module.optimizer.param_groups:
            group["lr"] = learning_rate
        norm = ds_model.unpartitioned_norm(self.module) if ds_model.keeps_plain_gradients(self.config) else None
        self.module.step()
        if norm is None:
            norm = self.module.get_global_grad_norm()
        return torch.as_tensor(norm, device=self.context.device)

    def forward(self, batch: Batch) -> Any:
        """Return the outputs of the module in the precision of the training."""
        import torch

        with torch.no_grad():
            return self.module(**batch.inputs)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter (its fp32 master, if any) and buffer; a collective."""
        return ds_model.unpartitioned_weights(self.module)

    @property
    def checkpoint_format(self) -> str:
        """Return the format, which depends on stage, precision and number of workers."""
        stage, precision = self.module.zero_optimization_stage(), self.config.precision.name
        return f"deepspeed, zero_stage={stage}, {precision}, {self.world_size} workers"

    def save(self, folder: Path) -> None:
        """Write a checkpoint with DeepSpeed's ``save_checkpoint``."""
        self.module.save_checkpoint(str(folder), tag=TAG, save_latest=False)

    def load(self, folder: Path) -> None:
        """Read weights and fp32 masters with DeepSpeed's ``load_checkpoint``."""
        from torch.serialization import safe_globals

        from distexp.strategies.optimizer import keep_hyperparameters

        with safe_globals(ds_model.checkpoint_classes()), keep_hyperparameters(self.module.optimizer.param_groups):
            found, _ = self.module.load_checkpoint(str(folder), tag=TAG, load_lr_scheduler_states=False)
        if found is None:
            raise RuntimeError(f"DeepSpeed found no checkpoint in {folder}")

    def describe(self) -> Built:
        """Return what was built, read from DeepSpeed's object."""
        from distexp.strategies.ds_built import describe

        return describe(self.module)
