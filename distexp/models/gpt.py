"""A decoder-only transformer of our own: learned positions, pre-norm blocks, a head of its own or a tied one."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from distexp.config import ModelConfig
from distexp.config.model_checks import resolve_vocab_size, validate_model

INIT_STD = 0.02


class Attention(nn.Module):
    """Multi-head self-attention over the positions that a mask allows."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.query_key_value = nn.Linear(hidden, 3 * hidden)
        self.output = nn.Linear(hidden, hidden)

    def forward(self, hidden: Tensor, allowed: Tensor) -> Tensor:
        samples, length, width = hidden.shape
        shape = (samples, length, self.heads, width // self.heads)
        query, key, value = (
            part.view(shape).transpose(1, 2) for part in self.query_key_value(hidden).split(width, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=allowed, dropout_p=self.dropout if self.training else 0.0
        )
        projected: Tensor = self.output(mixed.transpose(1, 2).reshape(samples, length, width))
        return projected


class MLP(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.inner = nn.Linear(hidden, inner)
        self.output = nn.Linear(inner, hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        projected: Tensor = self.output(functional.gelu(self.inner(hidden)))
        return projected


class Block(nn.Module):
    """One layer: attention and MLP, each on normalised input and added to the residual."""

    def __init__(self, hidden: int, heads: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads, dropout)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.mlp = MLP(hidden, inner)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor, allowed: Tensor) -> Tensor:
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden), allowed))
        output: Tensor = hidden + self.dropout(self.mlp(self.mlp_norm(hidden)))
        return output


class GPT(nn.Module):
    """Token ids to the logits of each next token."""

    def __init__(
        self, *, vocab: int, hidden: int, layers: int, heads: int, inner: int, length: int, dropout: float, tie: bool
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, hidden)
        self.positions = nn.Embedding(length, hidden)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(hidden, heads, inner, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)
        self.apply(_initialise)
        for name, weight in self.named_parameters():
            # Two sums a layer go into the residual: their variance must not grow with the depth.
            if name.endswith("output.weight"):
                nn.init.normal_(weight, std=INIT_STD / math.sqrt(2 * layers))
        if tie:
            self.head.weight = self.tokens.weight

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, logits_to_keep: Tensor | None = None
    ) -> Tensor:
        """Logits of shape (samples, length, vocabulary).

        Args:
            input_ids: (samples, length), at most seq_length long.
            attention_mask: (samples, length), 0 where there is padding, on either side; None: no padding.
            logits_to_keep: (kept,), the only positions whose logits are wanted; None: all.

        Raises:
            ValueError: more tokens than there are positions.
        """
        length = input_ids.shape[1]
        if length > self.positions.num_embeddings:
            raise ValueError(
                f"A sequence of {length} tokens exceeds the {self.positions.num_embeddings} positions of "
                "this model: raise model.seq_length"
            )
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        positions = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
        hidden = self.dropout(self.tokens(input_ids) + self.positions(positions))
        allowed = _allowed(attention_mask)
        for block in self.blocks:
            hidden = block(hidden, allowed)
        if logits_to_keep is not None:
            hidden = hidden[:, logits_to_keep]
        logits: Tensor = self.head(self.norm(hidden))
        return logits

    def get_input_embeddings(self) -> nn.Module:
        """The token embedding, by the name that Hugging Face gives it."""
        return self.tokens

    def get_output_embeddings(self) -> nn.Module:
        """The head, by the name that Hugging Face gives it."""
        return self.head

    def to_hugging_face(self, state: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
        """A GPT-2 of transformers, on the meta device, and these weights in its layout."""
        from transformers import GPT2Config, GPT2LMHeadModel

        vocab, hidden = self.tokens.weight.shape
        block: Any = self.blocks[0]
        config = GPT2Config(
            vocab_size=vocab,
            n_positions=self.positions.num_embeddings,
            n_embd=hidden,
            n_layer=len(self.blocks),
            n_head=block.attention.heads,
            n_inner=block.mlp.inner.out_features,
            activation_function="gelu",
            tie_word_embeddings=self.head.weight is self.tokens.weight,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), self.dropout.p),
        )
        with torch.device("meta"):
            twin = GPT2LMHeadModel(config)
        return twin, dict(map(_as_gpt2, state.items()))


GPT2_NAMES = {
    "tokens": "transformer.wte",
    "positions": "transformer.wpe",
    "norm": "transformer.ln_f",
    "head": "lm_head",
    "attention_norm": "ln_1",
    "attention.query_key_value": "attn.c_attn",
    "attention.output": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.inner": "mlp.c_fc",
    "mlp.output": "mlp.c_proj",
}


def _as_gpt2(named: tuple[str, Tensor]) -> tuple[str, Tensor]:
    """A weight under GPT-2's name; the matrices of its layers stand the other way round there."""
    name, weight = named
    module, _, kind = name.rpartition(".")
    if not module.startswith("blocks."):
        return f"{GPT2_NAMES[module]}.{kind}", weight
    _, layer, part = module.split(".", 2)
    return f"transformer.h.{layer}.{GPT2_NAMES[part]}.{kind}", weight.t().contiguous() if weight.dim() == 2 else weight


def build(model: ModelConfig, num_classes: int) -> nn.Module:
    """A GPT of the configured sizes.

    Args:
        model: hidden_size, num_layers, num_heads, ff_dim, seq_length, tie_embeddings, dropout, and vocab_size
            or null for the tokenizer's.
        num_classes: entries of the tokenizer.

    Raises:
        ConfigError: values that a GPT does not have or cannot have.
    """
    validate_model(model)
    sizes = {
        "hidden": model.hidden_size,
        "layers": model.num_layers,
        "heads": model.num_heads,
        "inner": model.ff_dim,
        "length": model.seq_length,
    }
    known: dict[str, Any] = {name: size for name, size in sizes.items() if size is not None}
    rest: dict[str, Any] = {"dropout": model.dropout or 0.0, "tie": bool(model.tie_embeddings)}
    return GPT(vocab=resolve_vocab_size(model, num_classes), **known, **rest)


def _allowed(attention_mask: Tensor) -> Tensor:
    """(samples, 1, length, length): True where a query may look: at itself and at earlier tokens."""
    length = attention_mask.shape[1]
    square = torch.ones(length, length, dtype=torch.bool, device=attention_mask.device)
    # Itself even in padding: a row without any key would be NaN.
    itself = torch.eye(length, dtype=torch.bool, device=attention_mask.device)
    return (square.tril() & attention_mask.bool()[:, None, None, :]) | itself


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=INIT_STD)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
