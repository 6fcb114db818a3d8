"""The native trainer: distexp's own training loop."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from distexp.config import Config, custom_code
from distexp.distributed.context import Context
from distexp.engines.base import check_built
from distexp.runs.record_sections import Built
from distexp.strategies.base import FUSED_ADAMW, DistributedModel, EvaluableModel, load_strategy
from distexp.training.inputs import ModelFactory, TrainingInputs

# Imported once for all workers of a node. Optimizers and DDP import torch._dynamo at their first use.
PRELOAD = ("torch._dynamo", "torch.profiler", "distexp.checkpoints.manager")


class Native:
    """The Trainer that runs ``distexp.training.loop.fit``."""

    def validate(self, config: Config) -> list[str]:
        """Accept everything that the strategy accepts."""
        return []

    def train(
        self, build_model: ModelFactory, config: Config, context: Context, inputs: TrainingInputs
    ) -> tuple[EvaluableModel, Built]:
        """Build and check the model, resume from the newest checkpoint, and train."""
        from distexp.checkpoints.manager import CheckpointManager
        from distexp.data.loader import StopRequestedError
        from distexp.runs.run_state import StopRequest
        from distexp.strategies.torch_model import explained_model_errors
        from distexp.training.loop import fit

        model, built = _build(build_model, config, context)
        optimizer = getattr(model, "optimizer", getattr(model.module, "optimizer", None))
        inputs.logger.follow(model.module, optimizer)
        checkpoints = CheckpointManager(inputs, model, built, config, context)
        checkpoints.resume()
        stop_request = StopRequest(context.run_dir, enabled=context.rank == 0)
        inputs.training.stop_requested = inputs.evaluation.stop_requested = stop_request
        try:
            with frozen_gc(), explained_model_errors(model.module, config):
                fit(model, inputs, after_step=checkpoints.save_if_due)
        except StopRequestedError:
            checkpoints.save_and_stop(stop_request.reason())
        return model, built


def _build(build_model: ModelFactory, config: Config, context: Context) -> tuple[DistributedModel, Built]:
    """Build the model, distribute it, and check it; return it with the description of what was built."""
    from distexp.system.seeding import seed_everything

    strategy = load_strategy(config)
    model = strategy.setup(build_model(), config, context)
    custom_code.check_members(model, DistributedModel, f"strategy._target_={config.strategy._target_}: setup()")
    # Each rank needs its own random state from here on, or all ranks would drop the same units.
    seed_everything(config.train.seed + context.data_rank)
    built = model.describe()
    check_built(built, strategy.expected_build(config))
    if config.train.compute_weights == "step":
        check_built(built, {"compute_weights": "step"})
    if config.train.fused_update:
        check_built(built, {"optimizer": FUSED_ADAMW})
    return model, built


@contextmanager
def frozen_gc() -> Iterator[None]:
    """Exclude all objects that exist now from garbage collection, during the block.

    A full collection visits every object of torch and transformers, which takes 0.2 s. Each rank does it at another
    step, and the others wait. On four H200s this was 3 % of the time of BLOOM-560m's first fifty steps.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
