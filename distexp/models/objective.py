"""What is minimised, and what is counted: sums, so that a mean over workers and micro-batches is exact."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from distexp.data.base import IGNORE, Batch


def loss_sum(task: str, outputs: Any, batch: Batch) -> Tensor:
    """The cross entropy in nats, summed over the ``batch.targets`` labels that count, in fp32.

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


def correct_count(outputs: Any, batch: Batch) -> Tensor:
    """How many of the ``batch.targets`` labels that count are the model's first choice; a scalar integer."""
    task = "causal_lm" if batch.labels.dim() == 2 else "image_classification"
    logits, labels = _aligned(task, outputs, batch)
    with torch.no_grad():
        # No class is IGNORE, so a label that does not count is never a hit.
        return (logits.argmax(dim=-1) == labels).sum()


def shares(task: str, outputs: Any, batch: Batch, loss: Tensor, normalizer: Tensor) -> Tensor:
    """A micro-batch's share of its step's mean loss and of its accuracy, detached; shape (2,).

    Shares add up over micro-batches and ranks. Text has no accuracy (0): the first choice among all
    entries of a vocabulary would cost about as much as the loss.
    """
    hits = correct_count(outputs, batch) if task == "image_classification" else torch.zeros_like(loss)
    return torch.stack([loss.detach(), hits.detach() / normalizer])


def _aligned(task: str, outputs: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits of shape (labels, classes), and the labels that they predict."""
    logits: Tensor = outputs if isinstance(outputs, Tensor) else outputs.logits
    if task == "causal_lm":
        return logits[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten()
    if task == "image_classification":
        return logits, batch.labels
    raise ValueError(f"task={task} must be causal_lm or image_classification")
