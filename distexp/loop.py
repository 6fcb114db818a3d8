"""The training loop: the same for every strategy, model and data set."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from distexp.data.shards import ShardedLoader, Step
from distexp.distributed import sum_over_ranks
from distexp.measure.clock import synchronize
from distexp.measure.journal import Evaluation, Journal, Plan
from distexp.models.objective import correct_count, loss_sum
from distexp.strategies.base import Engine


def fit(engine: Engine, training: ShardedLoader, evaluation: ShardedLoader, plan: Plan, journal: Journal) -> None:
    """Trains for ``plan.total_steps`` steps, evaluating after each epoch and after the last step."""
    journal.begin()
    step = 0
    epoch = 0
    while step < plan.total_steps:
        engine.train()
        journal.begin_epoch()
        for data in timed(training.epoch(epoch), journal):
            shares = train_step(engine, data)
            journal.allocator.before_update()
            rate = plan.learning_rate(step)
            norm = engine.step(rate)
            journal.step(data, shares, norm, rate)
            step += 1
            if step == plan.total_steps:
                break
        journal.events.enter("eval")
        journal.end_epoch(evaluate(engine, evaluation, journal))
        epoch += 1


def train_step(engine: Engine, data: Step) -> torch.Tensor:
    """Forward and backward over a step's micro-batches; this rank's shares of mean loss and accuracy."""
    shares = []
    for position, batch in enumerate(data.micro_batches, start=1):
        last = position == len(data.micro_batches)
        shares.append(engine.forward_backward(batch, normalizer=data.normalizer, last_micro=last))
    return torch.stack(shares).sum(dim=0)


def evaluate(engine: Engine, data: ShardedLoader, journal: Journal) -> Evaluation:
    """Mean loss and accuracy over the whole set, each sample counted once for any number of ranks."""
    engine.eval()
    synchronize(data.device)
    started = time.perf_counter()
    # loss, hits, targets: sums over this rank's share
    totals = torch.zeros(3, dtype=torch.float64, device=data.device)
    task = data.task
    for step in data.epoch(0):
        journal.heartbeat.beat()
        for batch in step.micro_batches:
            outputs = engine.forward(batch)
            totals[0] += loss_sum(task, outputs, batch)
            totals[1] += correct_count(outputs, batch)
            totals[2] += batch.targets
    loss, hits, targets = sum_over_ranks(totals).tolist()
    accuracy = hits / targets if task == "image_classification" else None
    return Evaluation(loss / targets, accuracy, len(data.samples), time.perf_counter() - started)


def timed(steps: Iterator[Step], journal: Journal) -> Iterator[Step]:
    """The same steps; the time spent waiting for each goes to the journal."""
    while True:
        started = time.perf_counter()
        step = next(steps, None)
        journal.data_wait_s += time.perf_counter() - started
        if step is None:
            return
        yield step
