"""Losses and accuracy counts of a batch.

They are sums, not means, so that the mean over ranks and micro-batches is exact.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from distexp.config import ConfigError
from distexp.config.custom_code import PAGE, describe_type
from distexp.data.base import IGNORE, Batch

LOSS_SUM = "loss_sum"
"""Key of the loss in the outputs of a model that computes it in its head, see ``distexp.models.head``."""


def loss_sum(task: str, outputs: Any, batch: Batch) -> Tensor:
    """Return the cross entropy in nats, summed over the targets, in fp32.

    Args:
        task: causal_lm (the logits at a position predict the next label) or image_classification.
        outputs: logits of shape (batch, length, vocabulary) or (batch, classes), an object with such
            ``logits``, or a dict with LOSS_SUM.
        batch: the batch; labels with the value IGNORE do not count.

    Returns:
        A scalar. Without targets it is 0, and so is its gradient.

    Raises:
        ValueError: the task is unknown.
    """
    if isinstance(outputs, dict) and LOSS_SUM in outputs:
        loss: Tensor = outputs[LOSS_SUM]
        return loss
    logits, labels = _align(task, outputs, batch)
    return functional.cross_entropy(logits.float(), labels, ignore_index=IGNORE, reduction="sum")


def count_correct(outputs: Any, batch: Batch, *, choices: int = 1) -> Tensor:
    """Count the targets among the ``choices`` largest logits (top-k accuracy).

    Returns:
        An integer scalar, at most ``batch.num_targets``. With fewer classes than ``choices``, all targets count.
    """
    task = "causal_lm" if batch.labels.dim() == 2 else "image_classification"
    logits, labels = _align(task, outputs, batch)
    with torch.no_grad():
        top = logits.topk(min(choices, logits.shape[-1]), dim=-1).indices
        # No class equals IGNORE, so ignored labels never match.
        return (top == labels[:, None]).sum()


def evaluation_sums(task: str, outputs: Any, batch: Batch) -> Tensor:
    """Return summed loss, targets, top-1 hits and top-5 hits; shape (4,), float64.

    Text has no accuracy, see ``partial_metrics``; its hits are 0.
    """
    loss = loss_sum(task, outputs, batch)
    sums = torch.zeros(4, dtype=torch.float64, device=loss.device)
    sums[0] = loss.detach()
    sums[1].fill_(batch.num_targets)  # sums[1] = ... would block until the GPU is idle
    if task == "image_classification":
        sums[2], sums[3] = (count_correct(outputs, batch, choices=choices) for choices in (1, 5))
    return sums


def partial_metrics(task: str, outputs: Any, batch: Batch, loss: Tensor, normalizer: Tensor) -> Tensor:
    """Return a micro-batch's part of the step's mean loss and accuracy, shape (2,).

    The sum over micro-batches and ranks is the step's mean. The accuracy of text is 0, because an argmax
    over the vocabulary would cost about as much as the loss.

    Args:
        task: see ``loss_sum``.
        outputs: see ``loss_sum``.
        batch: the micro-batch.
        loss: its loss, divided by ``normalizer``.
        normalizer: number of targets of the step over all ranks.
    """
    hits = count_correct(outputs, batch) if task == "image_classification" else torch.zeros_like(loss)
    return torch.stack([loss.detach(), hits.detach() / normalizer])


def get_logits(outputs: Any) -> Tensor:
    """Return the outputs of a model if they are a tensor, otherwise their ``logits``.

    Raises:
        ConfigError: they are neither.
    """
    logits = outputs if isinstance(outputs, Tensor) else getattr(outputs, "logits", None)
    if not isinstance(logits, Tensor):
        raise ConfigError(
            f"forward() of the model returned {describe_type(outputs)}: return the logits, or an object with the "
            f"attribute logits, as in {PAGE}"
        )
    return logits


def _align(task: str, outputs: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return logits (labels, classes) and the labels they predict, shape (labels,)."""
    logits = get_logits(outputs)
    if task == "causal_lm":
        # Shift the labels, not the logits: logits[:, :-1] would copy all logits.
        return logits.flatten(0, 1), functional.pad(batch.labels[:, 1:], (0, 1), value=IGNORE).flatten()
    if task == "image_classification":
        return logits, batch.labels
    raise ValueError(f"task={task} must be causal_lm or image_classification")
