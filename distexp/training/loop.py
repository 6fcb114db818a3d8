"""The training loop: the same for every strategy, model and data set."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from distexp.data.shards import ShardedLoader, StepData
from distexp.distributed.process_group import sum_over_ranks
from distexp.measure.clock import synchronize
from distexp.models.objective import evaluation_sums
from distexp.strategies.base import DistributedModel, EvaluableModel
from distexp.training.metrics_logger import Evaluation, MetricsLogger, Plan


def fit(
    engine: DistributedModel,
    training: ShardedLoader,
    evaluation: ShardedLoader,
    plan: Plan,
    logger: MetricsLogger,
    *,
    after_step: Callable[[], None] = lambda: None,
) -> None:
    """Trains from ``logger.steps`` to ``plan.total_steps``, evaluating after each epoch and the last step."""
    logger.begin()
    for epoch in plan.epochs(logger.steps):
        engine.model.train()
        logger.begin_steps()
        for data in logger.timed(training.iter_steps(epoch, plan.steps_of(epoch, logger.steps))):
            shares = train_step(engine, data)
            logger.allocator.before_update()
            rate = plan.learning_rate(logger.steps)
            norm = engine.step(rate)
            logger.step(data, shares, norm, rate)
            after_step()
        end_epoch(engine, training, evaluation, plan, logger)


def train_step(engine: DistributedModel, data: StepData) -> torch.Tensor:
    """Forward and backward over a step's micro-batches; this rank's shares of mean loss and accuracy."""
    shares = []
    for position, batch in enumerate(data.micro_batches, start=1):
        last = position == len(data.micro_batches)
        shares.append(engine.forward_backward(batch, normalizer=data.normalizer, last_micro=last))
    return torch.stack(shares).sum(dim=0)


def end_epoch(
    engine: EvaluableModel, training: ShardedLoader, evaluation: ShardedLoader, plan: Plan, logger: MetricsLogger
) -> None:
    """Evaluates, while loader workers read what the next epoch begins with."""
    if logger.steps < plan.total_steps:
        epoch = logger.steps // plan.steps_per_epoch
        training.prefetch(epoch, plan.steps_of(epoch, logger.steps))
    logger.end_epoch(evaluate(engine, evaluation, logger))


def evaluate(engine: EvaluableModel, data: ShardedLoader, logger: MetricsLogger) -> Evaluation:
    """Mean loss and accuracies over the whole set, each sample counted once for any number of ranks."""
    logger.events.set_phase("eval")
    engine.model.eval()
    synchronize(data.device)
    started = time.perf_counter()
    totals = torch.zeros(4, dtype=torch.float64, device=data.device)
    for step in data.iter_steps(0):
        logger.heartbeat.beat()
        for batch in step.micro_batches:
            totals += evaluation_sums(data.task, engine.forward(batch), batch)
    loss, targets, first, among_five = sum_over_ranks(totals).tolist()
    return Evaluation(
        loss=loss / targets,
        accuracies=(first / targets, among_five / targets) if data.task == "image_classification" else None,
        samples=len(data.samples),
        seconds=time.perf_counter() - started,
    )
