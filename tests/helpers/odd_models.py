"""Own modules that strategies do not expect: ``model._target_=odd_models.build model.options.kind=KIND``."""

from __future__ import annotations

from math import inf
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import weight_norm

from distexp.config import ModelConfig
from distexp.models.objective import LOSS_SUM

WIDTH, BLOCKS, EXPERTS = 16, 2, 60


class Block(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.mix(hidden)

    def mix(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(self.linear(self.norm(hidden)))


class Plain(nn.Module):
    """A model in which each position sees itself only."""

    block: type[nn.Module] = Block

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, vocabulary)

    def body(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        return self.head(self.body(self.embedding(input_ids), input_ids))

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding


class PlainTensor(Plain):
    """It holds tensors that are no buffers, one of them in a dictionary."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__(vocabulary)
        self.scale, self.tables = torch.linspace(0.5, 1.5, WIDTH), {"shift": torch.linspace(-1, 1, WIDTH)}

    def body(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        return super().body(hidden * self.scale + self.tables["shift"], tokens)


class Item(Plain):
    """Its constructor reads values, and two of its modules share a weight."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__(vocabulary)
        self.rates = [rate.item() for rate in torch.linspace(0, 0.5, BLOCKS)]
        self.head.weight = self.embedding.weight

    def body(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        for block, rate in zip(self.blocks, self.rates, strict=True):
            hidden = hidden + (1 - rate) * block(hidden)
        return hidden

    def get_output_embeddings(self) -> nn.Module:
        return self.head


class Measured(Plain):
    """Its constructor reads a weight, and computes another one from two."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__(vocabulary)
        self.factor = nn.Parameter(torch.rand(WIDTH))
        self.scale = 2 * float(self.factor.detach().mean())
        self.head = weight_norm(self.head)

    def body(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        return super().body(hidden * self.scale * self.factor, tokens)


class Experts(Plain):
    """The token chooses one of many experts, so that most get no token of a micro-batch."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__(vocabulary)
        self.blocks = nn.ModuleList(ExpertBlock() for _ in range(BLOCKS))

    def body(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden, tokens)
        return hidden


class ExpertBlock(Block):
    """A block with experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, hidden: Tensor, tokens: Tensor) -> Tensor:  # type: ignore[override]
        mixed, chosen = torch.zeros_like(hidden), tokens % EXPERTS
        for number, expert in enumerate(self.experts):
            if (selected := chosen == number).any():
                mixed[selected] = expert(hidden[selected])
        return self.mix(hidden) + mixed


class Unused(Plain):
    """Some weights never contribute to the loss."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__(vocabulary)
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.blocks[0].unused = nn.Linear(WIDTH, WIDTH)


class FunctionalHead(Plain):
    """The logits are computed with the weight of the embedding, without a module."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__(vocabulary)
        del self.head

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        return functional.linear(self.body(self.embedding(input_ids), input_ids), self.embedding.weight)


class Method(Plain):
    """It calls another method of its blocks than ``forward``."""

    def body(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block.mix(hidden)
        return hidden


class ViewBlock(Block):
    """A block that returns a view."""

    def forward(self, hidden: Tensor) -> Tensor:
        return self.mix(hidden).transpose(1, 2).transpose(1, 2)


class View(Plain):
    """It changes the outputs of its blocks in place."""

    block = ViewBlock

    def body(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
            hidden += 0.1
        return hidden


class Scalar(Plain):
    """It has a parameter without dimensions."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__(vocabulary)
        self.gate = nn.Parameter(torch.tensor(0.5))

    def body(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        return self.gate * super().body(hidden, tokens)


class Empty(Plain):
    """It has a parameter without elements."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__(vocabulary)
        self.registers = nn.Parameter(torch.zeros(0, WIDTH))

    def body(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        registers = self.registers.expand(len(hidden), *self.registers.shape)
        return super().body(torch.cat([registers, hidden], dim=1), tokens)


class MixedTypes(Plain):
    """Some of its weights are in bf16, and their results are cast."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__(vocabulary)
        self.embedding.bfloat16()

    def body(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        return super().body(hidden.float(), tokens)


class OwnLoss(Plain):
    """It returns a loss of its own: the cross entropy with label smoothing, summed over the targets."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, target_labels: Tensor | None = None) -> Any:
        logits = super().forward(input_ids, attention_mask)
        if target_labels is None:
            return logits
        targets = functional.pad(target_labels[:, 1:], (0, 1), value=-100).flatten()
        loss = functional.cross_entropy(logits.flatten(0, 1), targets, reduction="sum", label_smoothing=0.1)
        return {LOSS_SUM: loss}


class Bidirectional(Plain):
    """Each position sees the mean of all."""

    def body(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        return super().body(hidden + hidden.mean(dim=1, keepdim=True), tokens)


class Counting(Plain):
    """It counts its forward passes in a buffer, which scales what it computes."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__(vocabulary)
        self.register_buffer("passes", torch.zeros(()))

    def body(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        self.passes += float(self.training)
        return super().body(hidden * (1 + 0.1 * self.passes), tokens)


class Dropping(Plain):
    """It has dropout by a function, without a module."""

    def body(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        return super().body(functional.dropout(hidden, 0.3, self.training), tokens)


class DroppingInObject(Dropping):
    """Its logits are an attribute, and one of them is infinite."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        logits = super().forward(input_ids, attention_mask)
        return SimpleNamespace(logits=torch.cat([logits[..., :-1], torch.full_like(logits[..., -1:], -inf)], dim=-1))


class Skipping(Plain):
    """It seldom skips the block."""

    def body(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        return hidden if self.training and torch.rand(()) < 0.2 else super().body(hidden, tokens)


UNREPEATABLE = {
    "counting": Counting,
    "dropping": Dropping,
    "dropping_in_object": DroppingInObject,
    "skipping": Skipping,
}
"""Models whose further forward passes of a batch have other outputs."""


class InPlace(Plain):
    """It changes its inputs, and draws numbers that it does not use, as OPT without layer drop."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        torch.rand(())
        input_ids.copy_((input_ids + 1) % self.embedding.num_embeddings)
        return super().forward(input_ids, attention_mask)


KINDS = {
    **{
        "plaintensor": PlainTensor,
        "item": Item,
        "measured": Measured,
        "experts": Experts,
        "unused": Unused,
        "ftied": FunctionalHead,
    },
    **{"method": Method, "view": View, "scalar": Scalar, "empty": Empty, "types": MixedTypes, "loss": OwnLoss},
    "bidirectional": Bidirectional,
}


def build(model: ModelConfig, num_classes: int) -> nn.Module:
    """Build the model."""
    return {**KINDS, **UNREPEATABLE, "in_place": InPlace}[model.options["kind"]](num_classes)
