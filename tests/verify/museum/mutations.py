"""The mutations: a strategy with one all-reduce per parameter, a trainer, and what each bug changes in one of them.

``strategy=museum engine=museum strategy.options.bug=NAME`` chooses a bug. ``none`` has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from distexp.checkpoints.folder import list_checkpoints
from distexp.config import Config
from distexp.engines.native import Native
from distexp.strategies.base import Strategy
from distexp.training.inputs import StepPlan, TrainingInputs


class Museum(Strategy):
    """Data parallelism with one all-reduce for each parameter, and one bug."""

    def expected_build(self, config: Config) -> Mapping[str, Any]:
        """Require all workers."""
        return {"wrapper": "all-reduce", "world_size": config.cluster.world_size}

    def setup(self, blueprint: Any, config: Config, context: Any) -> Any:
        """Build the model with the bug of the configuration."""
        from tests.verify.museum import models

        blueprint.materialize(blueprint.model)
        name = config.strategy.options["bug"]
        return models.MODELS.get(name, models.AllReduced)(blueprint.model, config, context)


class MuseumTrainer(Native):
    """The native trainer, whose data or schedule may have a bug."""

    def train(self, build_model: Any, config: Config, context: Any, inputs: TrainingInputs) -> Any:
        """Train with the bug of the configuration."""
        change = TRAINER_BUGS.get(config.strategy.options["bug"], unchanged)
        with change(inputs, context) as changed:
            return super().train(build_model, config, context, changed)


@contextmanager
def unchanged(inputs: TrainingInputs, context: Any) -> Iterator[TrainingInputs]:
    """Change nothing."""
    yield inputs


@contextmanager
def same_samples(inputs: TrainingInputs, context: Any) -> Iterator[TrainingInputs]:
    """Let all ranks read the samples of rank 0."""
    sampler = inputs.training.sampler
    sampler.sharding = replace(sampler.sharding, rank=0)
    yield inputs


@contextmanager
def overlapping_shares(inputs: TrainingInputs, context: Any) -> Iterator[TrainingInputs]:
    """Let the last rank read the first sample of rank 0 in place of its own."""
    sampler, whole = inputs.training.sampler, inputs.training.sampler.global_batches

    def overlapping(epoch: int) -> Any:
        batches = whole(epoch).clone()
        if context.rank == context.world_size - 1:
            batches[:, sampler.sharding.micro_batch_size] = batches[:, 0]
        return batches

    with patch.object(sampler, "global_batches", overlapping):
        yield inputs


@contextmanager
def same_epochs(inputs: TrainingInputs, context: Any) -> Iterator[TrainingInputs]:
    """Give every epoch the order of the first one."""
    sampler, whole = inputs.training.sampler, inputs.training.sampler.global_batches
    with patch.object(sampler, "global_batches", lambda epoch: whole(0)):
        yield inputs


@contextmanager
def dropped_batch(inputs: TrainingInputs, context: Any) -> Iterator[TrainingInputs]:
    """Drop the last batch of each epoch if it is not complete."""
    sampler = inputs.training.sampler
    complete = sampler.length // sampler.sharding.global_batch
    yield replace(inputs, plan=replace(inputs.plan, steps_per_epoch=complete))


@contextmanager
def shifted_labels(inputs: TrainingInputs, context: Any) -> Iterator[TrainingInputs]:
    """Shift the labels before the loss shifts them again."""
    loader = inputs.training._loader
    collate: Any = loader.collate_fn

    def shifted(samples: Any) -> Any:
        batch = collate(samples)
        return replace(batch, labels=batch.labels.roll(-1, dims=1))

    with patch.object(loader, "collate_fn", shifted):
        yield inputs


class SchedulePerRank(StepPlan):
    """A schedule that each rank advances once per step."""

    workers: int

    def learning_rate(self, step: int) -> float:
        """Return the rate of a later step."""
        return super().learning_rate(min(step * self.workers, self.total_steps - 1))


class LateSchedule(StepPlan):
    """A schedule that starts one step too late."""

    def learning_rate(self, step: int) -> float:
        """Return the rate of the step before."""
        return super().learning_rate(max(0, step - 1))


@contextmanager
def schedule_per_rank(inputs: TrainingInputs, context: Any) -> Iterator[TrainingInputs]:
    """Make the schedule take a step for each rank."""
    plan = SchedulePerRank(inputs.plan.train, inputs.plan.steps_per_epoch)
    object.__setattr__(plan, "workers", context.world_size)
    yield replace(inputs, plan=plan)


@contextmanager
def late_schedule(inputs: TrainingInputs, context: Any) -> Iterator[TrainingInputs]:
    """Shift the schedule by one step."""
    yield replace(inputs, plan=LateSchedule(inputs.plan.train, inputs.plan.steps_per_epoch))


@contextmanager
def buffers_not_broadcast(inputs: TrainingInputs, context: Any) -> Iterator[TrainingInputs]:
    """Let each rank evaluate with its own running statistics."""
    with patch("distexp.training.loop.broadcast_buffers"):
        yield inputs


@contextmanager
def resumed_first_order(inputs: TrainingInputs, context: Any) -> Iterator[TrainingInputs]:
    """Give the epoch of a resumed run the order of the first one."""
    sampler, whole = inputs.training.sampler, inputs.training.sampler.global_batches
    resumes = bool(list_checkpoints(context.run_dir))
    with patch.object(sampler, "global_batches", lambda epoch: whole(0 if resumes else epoch)):
        yield inputs


class DoubleSchedule(StepPlan):
    """A schedule that counts the steps before a checkpoint twice."""

    before: int

    def learning_rate(self, step: int) -> float:
        """Return the rate of a later step."""
        return super().learning_rate(step + self.before)


@contextmanager
def resumed_schedule_twice(inputs: TrainingInputs, context: Any) -> Iterator[TrainingInputs]:
    """Add the steps before a checkpoint to the schedule again, though it is restored."""
    plan = DoubleSchedule(inputs.plan.train, inputs.plan.steps_per_epoch)
    object.__setattr__(plan, "before", 3 if list_checkpoints(context.run_dir) else 0)
    yield replace(inputs, plan=plan)


TRAINER_BUGS = {
    "same_samples": same_samples,
    "overlapping_shares": overlapping_shares,
    "same_epochs": same_epochs,
    "dropped_batch": dropped_batch,
    "shifted_labels": shifted_labels,
    "schedule_per_rank": schedule_per_rank,
    "late_schedule": late_schedule,
    "buffers_not_broadcast": buffers_not_broadcast,
    "resumed_first_order": resumed_first_order,
    "resumed_schedule_twice": resumed_schedule_twice,
}
