"""DeepSpeed's ZeRO, stages 0 to 3, with and without offloading."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distexp.config import Config
from distexp.distributed.context import Context
from distexp.runs.record import Built
from distexp.strategies import ds_model
from distexp.strategies.base import COMMUNICATION, DistributedModel
from distexp.strategies.ds_config import BUCKETS, at, conflicts, read_or_empty

if TYPE_CHECKING:
    from torch import Tensor

    from distexp.data.base import Batch
    from distexp.models.blueprint import Blueprint

TAG = "state"
"""DeepSpeed's name for what it puts into a checkpoint's folder."""

STAGES = (0, 1, 2, 3)
DEFAULT_STAGE = 2


class DeepSpeed:
    """States partitioned over the workers by ZeRO."""

    requires: tuple[str, ...] = (COMMUNICATION, "deepspeed")

    def set_defaults(self, config: Config) -> None:
        """The stage of the user's file, else 2; offloaded states go to DeepSpeed's CPU Adam on GPUs."""
        options = config.deepspeed
        if options.zero_stage is None:
            stage = at(read_or_empty(options.config_file), ("zero_optimization", "stage"))
            options.zero_stage = DEFAULT_STAGE if stage in (None, "auto") else stage
        if options.cpu_optimizer == "auto":
            options.cpu_optimizer = "deepspeed" if config.cluster.device == "cuda" else "torch"

    def validate(self, config: Config) -> list[str]:
        """A stage that exists and has something to offload, bucket sizes, the user's own file."""
        options, stage = config.deepspeed, config.deepspeed.zero_stage
        errors = []
        if stage not in STAGES:
            return [f"deepspeed.zero_stage={stage} is not one of 0, 1, 2, 3"]
        if config.offload.enabled and stage == 0:
            errors.append(
                "offload=true needs partitioned states, and zero_stage=0 partitions none: "
                "choose zero_stage=1,2,3 or offload=false"
            )
        if options.cpu_optimizer not in ("torch", "deepspeed"):
            errors.append(f"deepspeed.cpu_optimizer={options.cpu_optimizer} is not one of auto, torch, deepspeed")
        if config.offload.enabled and config.train.optimizer != "adamw" and options.cpu_optimizer == "deepspeed":
            errors.append(
                f"train.optimizer={config.train.optimizer} has no DeepSpeed CPU kernel for offload=true: "
                "set deepspeed.cpu_optimizer=torch or train.optimizer=adamw"
            )
        if config.train.compile and stage == 3:
            errors.append(
                "train.compile=true traces through the hooks that gather zero_stage=3's parameters: "
                "choose zero_stage=0,1,2 or train.compile=false"
            )
        errors += [
            f"deepspeed.{key}={value} must be at least 1 element"
            for key in BUCKETS
            if (value := getattr(options, key)) is not None and value < 1
        ]
        return [*errors, *conflicts(config)]

    def main_option(self, config: Config) -> str:
        """Return the ZeRO stage, for the title of a run."""
        return f"ZeRO-{config.deepspeed.zero_stage}"

    def expected_build(self, config: Config) -> Mapping[str, Any]:
        """The stage and the offload that were asked for."""
        stage, workers = (
            config.deepspeed.zero_stage,
            config.cluster.world_size,
        )
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
        """Hands the model and our optimizer to DeepSpeed; writes the effective ds_config.json."""
        return DeepSpeedModel(blueprint, config, context, ds_model.settings_for(blueprint, config, context))


class DeepSpeedModel:
    """A deepspeed.DeepSpeedEngine behind the protocol of the loop."""

    def __init__(self, blueprint: Blueprint, config: Config, context: Context, settings: dict[str, Any]) -> None:
        import deepspeed

        self.config, self.context = config, context
        self.task, self.world_size = config.model.task, context.world_size
        ds_model.materialize(blueprint, config, settings)
        self.model, *_ = deepspeed.initialize(
            model=blueprint.model,
            optimizer=ds_model.optimizer_for(blueprint.model, config, context),
            config=settings,
            dist_init_required=False,
        )
        if ds_model.in_16_bits(config):
            ds_model.restore_masters(self.model, blueprint)

    def forward_backward(self, batch: Batch, *, normalizer: Tensor, last_micro: bool) -> Tensor:
        """Adds a micro-batch's gradients; DeepSpeed counts the micro-steps by its own step()."""
        from distexp.models.objective import loss_sum, partial_metrics

        outputs = self.model(**batch.inputs)
        loss = loss_sum(self.task, outputs, batch) / normalizer
        told = partial_metrics(self.task, outputs, batch, loss, normalizer)
        del outputs  # a large vocabulary's logits, which the backward pass can do without
        # The normalizer already holds the accumulation, and the ranks are averaged by DeepSpeed.
        self.model.backward(loss * self.world_size, scale_wrt_gas=False)
        if not last_micro:
            self.model.step()
        return told

    def step(self, learning_rate: float) -> Tensor:
        """Clips, updates and clears; the gradient norm before clipping."""
        import torch

        for group in self.model.optimizer.param_groups:
            group["lr"] = learning_rate
        norm = ds_model.unpartitioned_norm(self.model) if ds_model.keeps_plain_gradients(self.config) else None
        self.model.step()
        if norm is None:
            norm = self.model.get_global_grad_norm()
        return torch.as_tensor(norm, device=self.context.device)

    def forward(self, batch: Batch) -> Any:
        """The model's outputs in the precision of the training."""
        import torch

        with torch.no_grad():
            return self.model(**batch.inputs)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter and buffer, whole, in fp32 where it is trained in it; a collective."""
        return ds_model.whole_weights(self.model)

    @property
    def checkpoint_format(self) -> str:
        """DeepSpeed's own, which only the same engine on as many workers reads."""
        stage, precision = self.model.zero_optimization_stage(), self.config.precision.name
        return f"deepspeed, zero_stage={stage}, {precision}, {self.world_size} workers"

    def save(self, folder: Path) -> None:
        """Writes what DeepSpeed's save_checkpoint does."""
        self.model.save_checkpoint(str(folder), tag=TAG, save_latest=False)

    def load(self, folder: Path) -> None:
        """Reads it again; the fp32 masters are the saved ones too."""
        from distexp.strategies.optimizer import own_hyperparameters

        with own_hyperparameters(self.model.optimizer.param_groups):
            found, _ = self.model.load_checkpoint(str(folder), tag=TAG, load_lr_scheduler_states=False)
        if found is None:
            raise RuntimeError(f"DeepSpeed read nothing from {folder}")

    def describe(self) -> Built:
        """Asked of the engine, its optimizer and where its tensors are."""
        return ds_model.describe(self.model)
