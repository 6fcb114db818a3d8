"""Our own loop over the strategies' engines."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from distexp.config import Config
from distexp.distributed.context import Context
from distexp.engines.base import ModelFactory, TrainingInputs, check_built
from distexp.runs.record import Built
from distexp.strategies.base import EvaluableModel


class Native:
    """``distexp.training.loop.fit``."""

    def validate(self, config: Config) -> list[str]:
        """Does whatever the strategy can."""
        return []

    def train(
        self, build: ModelFactory, config: Config, context: Context, inputs: TrainingInputs
    ) -> tuple[EvaluableModel, Built]:
        """Sets the strategy up, checks what came of it, and runs the loop from the newest checkpoint."""
        from distexp.checkpoints.manager import CheckpointManager
        from distexp.config.targets import load_strategy
        from distexp.data.shards import StopRequestedError
        from distexp.runs.stop_request import StopRequest
        from distexp.system.seeding import seed_everything
        from distexp.training.loop import fit

        strategy = load_strategy(config)
        engine = strategy.setup(build(), config, context)
        # From here on chance is each rank's own: two ranks that drop the same units would learn less.
        seed_everything(config.train.seed + context.rank)
        built = engine.describe()
        check_built(built, strategy.expected_build(config))
        checkpoints = CheckpointManager(inputs, engine, built, config.train, context)
        checkpoints.resume()
        notice = inputs.training.stop_requested = inputs.evaluation.stop_requested = StopRequest(
            context.run_dir, enabled=context.rank == 0
        )
        try:
            with set_up_uncollected():
                fit(
                    engine,
                    inputs.training,
                    inputs.evaluation,
                    inputs.plan,
                    inputs.logger,
                    after_step=checkpoints.after_step,
                )
        except StopRequestedError:
            checkpoints.stop(notice.reason())
        return engine, built


@contextmanager
def set_up_uncollected() -> Iterator[None]:
    """Hides from the garbage collector what stands before the first step.

    To look through all that torch and transformers brought along stops a rank for 0.2 s, each at another
    step, and the others wait for it: on four H200s 3 % of the time of BLOOM-560m's first fifty steps.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
