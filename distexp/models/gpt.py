"""A decoder-only transformer with learned positions and pre-norm blocks."""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask

from distexp.config import ModelConfig
from distexp.config.model_checks import resolve_vocab_size, validate_model
from distexp.models.attention import attend_flex, block_mask, causal_mask, number_documents

Mask = Tensor | BlockMask | None
"""A mask of SDPA, which is True if a query may attend to a key; a mask of flex attention; None: causal."""

INIT_STD = 0.02


class Attention(nn.Module):
    """Multi-head causal self-attention."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.width = heads, hidden // heads
        self.dropout = dropout
        self.query_key_value = nn.Linear(hidden, 3 * hidden)
        self.output = nn.Linear(hidden, hidden)

    def forward(self, hidden: Tensor, mask: Mask) -> Tensor:
        """Return the attention output, shape (batch, length, hidden); a tensor mask has (batch, 1, length, length)."""
        heads = (-1, self.width)  # With parallel.tensor, a worker has some of the heads.
        parts = self.query_key_value(hidden).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, heads).transpose(1, 2) for part in parts)
        mixed = self.attend(query, key, value, mask)
        projected: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return projected

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Tensor:
        """Return the mixed values, shape (batch, heads, length, width), as that of the inputs."""
        if isinstance(mask, BlockMask):
            return attend_flex(query, key, value, mask)
        dropout = self.dropout if self.training else 0.0
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=mask is None
        )


class MLP(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.inner = nn.Linear(hidden, inner)
        self.output = nn.Linear(inner, hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (batch, length, hidden) to the same shape."""
        projected: Tensor = self.output(functional.gelu(self.inner(hidden)))
        return projected


class Block(nn.Module):
    """A pre-norm transformer layer: attention and MLP with residual connections."""

    def __init__(self, hidden: int, heads: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads, dropout)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.mlp = MLP(hidden, inner)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor, mask: Mask) -> Tensor:
        """Map (batch, length, hidden) to the same shape; ``mask`` as in Attention."""
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden), mask))
        output: Tensor = hidden + self.dropout(self.mlp(self.mlp_norm(hidden)))
        return output


class GPT(nn.Module):
    """A causal language model that returns the logits of each next token.

    The architecture is that of GPT-2 (Radford et al., Language Models are Unsupervised Multitask Learners, 2019), with
    an exact GELU. Attention ``auto`` is SDPA with a mask, which allows padding on the left; ``sdpa`` has no mask,
    unless rows have several documents; ``flex`` is flex attention. With ``tie``, the head has the weight of the
    embedding.
    """

    tensor_plan: ClassVar[dict[str, str]] = {
        "blocks.*.attention.query_key_value": "fused_colwise",
        "blocks.*.attention.output": "rowwise",
        "blocks.*.mlp.inner": "colwise",
        "blocks.*.mlp.output": "rowwise",
    }

    def __init__(
        self,
        *,
        vocab: int,
        hidden: int,
        layers: int,
        heads: int,
        inner: int,
        length: int,
        dropout: float,
        tie: bool,
        attention: str = "auto",
    ) -> None:
        super().__init__()
        self.attention = attention
        self.tokens = nn.Embedding(vocab, hidden)
        self.positions = nn.Embedding(length, hidden)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(hidden, heads, inner, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)
        self.apply(_initialize)
        for name, weight in self.named_parameters():
            # Each layer adds two outputs to the residual stream. Its variance must not grow with the depth.
            if name.endswith("output.weight"):
                nn.init.normal_(weight, std=INIT_STD / math.sqrt(2 * layers))
        if tie:
            self.head.weight = self.tokens.weight

    @property
    def attention_implementation(self) -> str:
        """Return sdpa or flex."""
        return "flex" if self.attention == "flex" else "sdpa"

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        logits_to_keep: Tensor | None = None,
    ) -> Tensor:
        """Return logits of shape (batch, length or kept, vocabulary). Raise ValueError if the sequence is too long.

        The attention mask is 0 for padding, which may be on either side with attention=auto, and only on the right
        otherwise. It is not used with ``position_ids``, which start at 0 in each document. ``logits_to_keep`` has the
        positions to compute logits for, shape (kept,).
        """
        if (length := input_ids.shape[1]) > self.positions.num_embeddings:
            raise ValueError(
                f"a sequence of {length} tokens exceeds the {self.positions.num_embeddings} positions of "
                "this model: raise model.seq_length"
            )
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        documents = None if position_ids is None else number_documents(position_ids)
        positions = (attention_mask.cumsum(dim=1) - 1).clamp(min=0) if position_ids is None else position_ids
        hidden = self.dropout(self.tokens(input_ids) + self.positions(positions))
        mask = self._mask(attention_mask, documents)
        for block in self.blocks:
            hidden = block(hidden, mask)
        if logits_to_keep is not None:
            hidden = hidden[:, logits_to_keep]
        logits: Tensor = self.head(self.norm(hidden))
        return logits

    def _mask(self, attention_mask: Tensor, documents: Tensor | None) -> Mask:
        length, device = attention_mask.shape[1], attention_mask.device
        if self.attention == "flex":
            return block_mask(length, device, documents)
        if documents is not None:
            return causal_mask(length, device, documents)
        if self.attention == "sdpa":
            return None
        # Padding attends to itself too, because softmax over no keys would be NaN.
        itself = torch.eye(length, dtype=torch.bool, device=device)
        return (causal_mask(length, device, None) & attention_mask.bool()[:, None, None, :]) | itself

    def get_input_embeddings(self) -> nn.Module:
        """Return the token embedding; the method has the name used by transformers."""
        return self.tokens

    def get_output_embeddings(self) -> nn.Module:
        """Return the output head; the method has the name used by transformers."""
        return self.head

    def to_hugging_face(self, state: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
        """Return a GPT-2 of transformers on the meta device, and the weights for it."""
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
            converted = GPT2LMHeadModel(config)
        return converted, dict(map(_rename_for_gpt2, state.items()))


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


def _rename_for_gpt2(named: tuple[str, Tensor]) -> tuple[str, Tensor]:
    """Rename a weight for GPT-2, and transpose matrices for its Conv1D layers."""
    name, weight = named
    module, _, kind = name.rpartition(".")
    if not module.startswith("blocks."):
        return f"{GPT2_NAMES[module]}.{kind}", weight
    _, layer, part = module.split(".", 2)
    return f"transformer.h.{layer}.{GPT2_NAMES[part]}.{kind}", weight.t().contiguous() if weight.dim() == 2 else weight


def build(model: ModelConfig, num_classes: int) -> nn.Module:
    """Build a GPT. A null vocab_size is the size of the tokenizer. Raise ConfigError if a value is invalid."""
    validate_model(model)
    options: dict[str, Any] = {
        "hidden": model.hidden_size,
        "layers": model.num_layers,
        "heads": model.num_heads,
        "inner": model.ff_dim,
        "length": model.seq_length,
        "dropout": model.dropout or 0.0,
        "tie": bool(model.tie_embeddings),
        "attention": model.attention,
    }
    return GPT(vocab=resolve_vocab_size(model, num_classes), **options)


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=INIT_STD)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
