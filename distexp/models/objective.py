"""What is minimised, and what is counted: sums, so that a mean over workers and micro-batches is exact."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from distexp.data.base import IGNORE, Batch


def loss_sum(task: str, outputs: Any, batch: Batch) -> Tensor:
    """The cross entropy in nats, summed over the ``batch.num_targets`` labels that count, in fp32.

    Args:
        task: causal_lm (the logits at a position predict the next label) or image_classification.
        outputs: logits of shape (samples, length, vocabulary) or (samples, classes), or an object that has
            them as ``logits``.
        batch: whose labels are IGNORE where nothing counts.

    Returns:
        A scalar; 0, with a gradient of 0, when no label counts.
    """
    logits, labels = _aligned(task, outputs, batch)
    return functional.cross_entropy(logits.float(), labels, ignore_index=IGNORE, reduction="sum")


def count_correct(outputs: Any, batch: Batch, *, choices: int = 1) -> Tensor:
    """How many of the ``batch.num_targets`` labels that count are among the model's first choices; a scalar integer.

    Of fewer classes than ``choices`` all are chosen.
    """
    task = "causal_lm" if batch.labels.dim() == 2 else "image_classification"
    logits, labels = _aligned(task, outputs, batch)
    with torch.no_grad():
        chosen = logits.topk(min(choices, logits.shape[-1]), dim=-1).indices
        # No class is IGNORE, so a label that does not count is never a hit.
        return (chosen == labels[:, None]).sum()


def evaluation_sums(task: str, outputs: Any, batch: Batch) -> Tensor:
    """Loss, labels that count, and those among the first choice and the first five, summed; shape (4,), float64.

    Text has no accuracy (0), see ``shares``.
    """
    loss = loss_sum(task, outputs, batch)
    sums = torch.zeros(4, dtype=torch.float64, device=loss.device)
    sums[0], sums[1] = loss.detach(), batch.num_targets
    if task == "image_classification":
        sums[2], sums[3] = (count_correct(outputs, batch, choices=choices) for choices in (1, 5))
    return sums


def partial_metrics(task: str, outputs: Any, batch: Batch, loss: Tensor, normalizer: Tensor) -> Tensor:
    """A micro-batch's share of its step's mean loss and of its accuracy, detached; shape (2,).

    Shares add up over micro-batches and ranks. Text has no accuracy (0): the first choice among all
    entries of a vocabulary would cost about as much as the loss.
    """
    hits = count_correct(outputs, batch) if task == "image_classification" else torch.zeros_like(loss)
    return torch.stack([loss.detach(), hits.detach() / normalizer])


def get_logits(outputs: Any) -> Tensor:
    """A model's logits, by themselves or beside other outputs."""
    logits: Tensor = outputs if isinstance(outputs, Tensor) else outputs.logits
    return logits


def _aligned(task: str, outputs: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits of shape (labels, classes), and the labels that they predict."""
    logits = get_logits(outputs)
    if task == "causal_lm":
        # Labels move, not logits: to leave out the last logits of each sample would copy all the others.
        return logits.flatten(0, 1), functional.pad(batch.labels[:, 1:], (0, 1), value=IGNORE).flatten()
    if task == "image_classification":
        return logits, batch.labels
    raise ValueError(f"task={task} must be causal_lm or image_classification")
