"""transformers' Trainer: what most people train with, on the same model, data and optimizer as our loop."""

from __future__ import annotations

from collections.abc import Iterator

from distexp.config import Config
from distexp.distributed.context import Context
from distexp.engines.base import ModelFactory, TrainingInputs
from distexp.runs.record import Built
from distexp.strategies.base import EvaluableModel
from distexp.strategies.fsdp import mesh_shape

STRATEGIES = ("single", "ddp", "fsdp", "deepspeed")
OWN_PREFETCH = {"forward_prefetch": 0, "backward_prefetch": 1}
"""How far torch's FSDP2 looks ahead where nobody asks for anything else."""


class HFTrainer:
    """The Trainer distributes the model through accelerate, and runs its own loop."""

    def validate(self, config: Config) -> list[str]:
        """What the Trainer would leave out or do otherwise, often without a word."""
        strategy = config.strategy.name
        if strategy not in STRATEGIES:
            return [
                f"engine=hf_trainer distributes by {', '.join(STRATEGIES)}, not by strategy={strategy}: "
                "choose engine=native"
            ]
        for key in ("checkpoint_every", "resume"):
            if (value := getattr(config.train, key)) is not None:
                return [f"train.{key}={value} is for our own loop: leave it out, or choose engine=native"]
        if strategy == "fsdp":
            return list(_fsdp_errors(config))
        workers = config.cluster.world_size
        if strategy == "ddp" and workers == 1 and config.cluster.device == "cuda":
            return ["engine=hf_trainer wraps nothing on one GPU: choose strategy=single, or more workers"]
        return []

    def train(
        self, build: ModelFactory, config: Config, context: Context, inputs: TrainingInputs
    ) -> tuple[EvaluableModel, Built]:
        """Runs ``Trainer.train`` to the end of the plan."""
        from distexp.engines.hf_loop import DistexpTrainer

        trainer = DistexpTrainer(build(), config, context, inputs)
        trainer.train()
        assert trainer.built is not None, "on_train_begin describes what was built"
        return trainer.wrapped, trainer.built


def _fsdp_errors(config: Config) -> Iterator[str]:
    options = config.fsdp
    replicate, shard = mesh_shape(config)
    if options.sharding in ("no_shard", "hybrid_shard") and shard == 1:
        yield (
            f"sharding={options.sharding} over {replicate} workers shards nothing here, and accelerate refuses such "
            "a mesh: choose strategy=ddp, or engine=native"
        )
    for key, value in OWN_PREFETCH.items():
        if getattr(options, key) != value:
            yield (
                f"fsdp.{key}={getattr(options, key)} is nothing that accelerate's FSDP2 can be told: "
                f"leave it at {value}, or choose engine=native"
            )
