"""The native training loop: the same for every strategy, model and data set."""

import time
from collections.abc import Callable

import torch

from distexp.data.loader import StepData
from distexp.distributed.process_group import broadcast_buffers, sum_over_ranks
from distexp.measure.clock import synchronize
from distexp.models.objective import evaluation_sums
from distexp.strategies.base import DistributedModel, EvaluableModel
from distexp.system.torch_internals.collectives import OPTIMIZER, annotate
from distexp.training.inputs import TrainingInputs
from distexp.training.metrics_logger import Evaluation, check_targets


def fit(model: DistributedModel, inputs: TrainingInputs, *, after_step: Callable[[], None] = lambda: None) -> None:
    """Train until ``plan.total_steps``. By default, evaluate after each epoch and the last step."""
    plan, logger = inputs.plan, inputs.logger
    logger.start()
    for epoch in plan.epochs(logger.steps, len(logger.metrics.train_losses)):
        model.module.train()
        logger.start_steps()
        for step in inputs.training.iter_steps(epoch, plan.steps_of(epoch, logger.steps)):
            contribution = train_step(model, step, logger.watchers.start_forward)
            logger.watchers.before_update()
            rate = plan.learning_rate(logger.steps)
            with annotate(OPTIMIZER):
                norm = model.step(rate)
            logger.record_step(step, contribution, norm, rate)
            after_step()
        end_epoch(model, inputs)


def train_step(
    model: DistributedModel, step: StepData, before_forward: Callable[[], None] = lambda: None
) -> torch.Tensor:
    """Run all micro-batches of a step; return this rank's contribution to its metrics."""
    contributions = []
    for position, batch in enumerate(step.micro_batches, start=1):
        before_forward()
        last = position == len(step.micro_batches)
        contributions.append(model.forward_backward(batch, normalizer=step.normalizer, last_micro=last))
    return torch.stack(contributions).sum(dim=0)


def end_epoch(model: EvaluableModel, inputs: TrainingInputs) -> None:
    """Evaluate if requested, while the loader processes already read the next epoch's first batches."""
    plan, logger, training = inputs.plan, inputs.logger, inputs.training
    if logger.steps < plan.total_steps:
        epoch = logger.steps // plan.steps_per_epoch
        training.prefetch(epoch, plan.steps_of(epoch, logger.steps))
    logger.end_epoch(evaluate(model, inputs) if plan.train.evaluate else None, has_accuracy=training.has_accuracy)


def evaluate(model: EvaluableModel, inputs: TrainingInputs) -> Evaluation:
    """Return mean loss and accuracies over the evaluation set, on all ranks together."""
    data, logger = inputs.evaluation, inputs.logger
    logger.events.set_phase("eval")
    model.module.eval()
    broadcast_buffers(model.module)  # so that all ranks evaluate the model that rank 0 saves
    synchronize(data.device)
    started = time.perf_counter()
    totals = torch.zeros(4, dtype=torch.float64, device=data.device)
    for step in data.iter_steps(0):
        logger.heartbeat.beat()
        for batch in step.micro_batches:
            totals += evaluation_sums(data.task, model.forward(batch), batch)
    loss, targets, top1, top5 = sum_over_ranks(totals).tolist()
    check_targets(targets, "the evaluation set", "set train.evaluate=false")
    return Evaluation(
        loss=loss / targets,
        accuracies=(top1 / targets, top5 / targets) if data.has_accuracy else None,
        samples=len(data.samples),
        seconds=time.perf_counter() - started,
    )
