"""GPTs that train, but that torch compiles only in part, or not at all."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from distexp.config import ModelConfig
from distexp.models.gpt import GPT


def _make(kind: type[GPT], classes: int) -> GPT:
    return kind(vocab=classes, hidden=16, layers=2, heads=2, inner=32, length=64, dropout=0.1, tie=True)


class DecidingGPT(GPT):
    """A GPT with a decision by a value, so it is no single graph. Its blocks compile."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        logits_to_keep: Tensor | None = None,
    ) -> Tensor:
        """Return the logits of texts that have a token other than 0."""
        if input_ids.sum() > 0:
            return super().forward(input_ids, attention_mask, position_ids, logits_to_keep)
        raise ValueError("the texts are empty")


@torch.library.custom_op("distexp_tests::opaque", mutates_args=())
def opaque(values: Tensor) -> Tensor:
    """Return the same values, by an operator without a fake kernel that works."""
    return values.clone()


@opaque.register_fake
def _(values: Tensor) -> Tensor:
    raise RuntimeError("this operator has no shapes")


opaque.register_autograd(lambda context, gradient: gradient)


class Opaque(nn.Module):
    """A layer with the operator."""

    def forward(self, values: Tensor) -> Tensor:
        """Return the same values."""
        result: Tensor = opaque(values)
        return result


def build_deciding(model: ModelConfig, num_classes: int) -> nn.Module:
    """Build a GPT whose blocks compile, but not the model."""
    return _make(DecidingGPT, num_classes)


def build_opaque(model: ModelConfig, num_classes: int) -> nn.Module:
    """Build a GPT of which nothing compiles."""
    gpt = _make(GPT, num_classes)
    for block in gpt.blocks:
        block.mlp = nn.Sequential(block.mlp, Opaque())  # type: ignore[assignment]
    return gpt
