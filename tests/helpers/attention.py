"""Small models and batches, to compare implementations of the attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from distexp.data.base import Batch, Sample
from distexp.data.text import TextCollate
from distexp.models import bloom, gpt
from distexp.models.objective import loss_sum
from tests.helpers.runs import resolve_cell

VOCABULARY = 300


def make_samples(*lengths: int) -> list[Sample]:
    """Return samples of random tokens; every token is a target."""
    generator = torch.Generator().manual_seed(sum(lengths))
    rows = [torch.randint(1, VOCABULARY, (length,), generator=generator) for length in lengths]
    return [{"input_ids": row, "labels": row.clone()} for row in rows]


def make_batch(*lengths: int) -> Batch:
    """Return samples of random tokens, padded to the longest one."""
    return TextCollate(0, None)(make_samples(*lengths))


def build(name: str, attention: str, **changes: Any) -> nn.Module:
    """Build a small model; its weights depend on the name and the sizes alone."""
    config = replace(resolve_cell(f"model={name}").model, attention=attention, **changes)
    return randomize((bloom if name.startswith("bloom") else gpt).build(config, VOCABULARY))


def randomize(model: nn.Module) -> nn.Module:
    """Set all weights at random, because biases of 0 would hide errors."""
    torch.manual_seed(3)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model


def logits_of(outputs: Any) -> Tensor:
    """Return the logits of any kind of outputs."""
    logits: Tensor = outputs if isinstance(outputs, Tensor) else outputs.logits
    return logits


def compute(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the logits, the mean loss and the gradients of a batch. Logits of padding are left out."""
    model.zero_grad()
    outputs = model(**batch.inputs)
    loss = loss_sum("causal_lm", outputs, batch) / max(batch.num_targets, 1)
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    logits, mask = logits_of(outputs).detach(), batch.inputs.get("attention_mask")
    return logits if mask is None else logits[mask.bool()], loss.detach(), gradients
