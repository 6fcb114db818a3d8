"""A trainer that observes whether steps are watched for slow ranks."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from distexp.config import Config
from distexp.distributed.context import Context
from distexp.engines.native import Native
from distexp.runs.record_sections import Built
from distexp.strategies.base import EvaluableModel
from distexp.training.inputs import ModelFactory, TrainingInputs


class Probe(Native):
    """The native trainer; at the end each rank prints what it has seen at the ends of the steps."""

    def train(
        self, build_model: ModelFactory, config: Config, context: Context, inputs: TrainingInputs
    ) -> tuple[EvaluableModel, Built]:
        """Train, and print whether ``Work.wait`` was replaced, and the number of hooks of the wrapper."""
        original, record_step = dist.Work.wait, inputs.logger.record_step
        replaced = set()

        def observe(*arguments: Any) -> None:
            replaced.add(dist.Work.wait is not original)
            record_step(*arguments)

        inputs.logger.record_step = observe  # type: ignore[method-assign]
        model, built = super().train(build_model, config, context, inputs)
        print(f"replaced: {sorted(replaced)}, hooks: {len(model.module._forward_hooks)}", flush=True)
        return model, built
