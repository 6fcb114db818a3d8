"""BLOOM with SDPA or flex attention.

The BLOOM of transformers has only matrix products and a softmax in fp32, which store all attention weights.
Its GELU is an autograd function, which the compiler cannot fuse. Here it is torch's GELU with the same approximation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask
from transformers.modeling_outputs import (
    BaseModelOutputWithPastAndCrossAttentions,
    CausalLMOutputWithCrossAttentions,
)
from transformers.models.bloom import modeling_bloom

from distexp.models.attention import (
    ScoreFunction,
    alibi_bias,
    alibi_score,
    attend_flex,
    block_mask,
    cached,
    causal_mask,
    number_documents,
)


class BloomAttention(modeling_bloom.BloomAttention):  # type: ignore[misc]  # transformers has no types
    """Attention with ALiBi, by SDPA or flex attention."""

    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor,
        alibi: ScoreFunction | None,
        attention_mask: Tensor | BlockMask,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Return the hidden states after attention, shape (batch, length, hidden).

        Args:
            hidden_states: shape (batch, length, hidden).
            residual: is added to the result.
            alibi: score function of flex attention; None for SDPA.
            attention_mask: a BlockMask for flex attention, or the additive mask of SDPA.
        """
        query, key, value = self._reshape(self.query_key_value(hidden_states))
        if isinstance(attention_mask, Tensor):
            dropout = self.attention_dropout.p if self.training else 0.0
            mixed = functional.scaled_dot_product_attention(
                query, key, value, attn_mask=attention_mask, dropout_p=dropout
            )
        else:
            mixed = attend_flex(query, key, value, attention_mask, alibi)
        projected = self.dense(mixed.transpose(1, 2).flatten(2))
        return modeling_bloom.dropout_add(projected, residual, self.hidden_dropout, self.training), None


class BloomModel(modeling_bloom.BloomModel):  # type: ignore[misc]  # transformers has no types
    """The blocks of BLOOM.

    Attributes:
        attention: sdpa or flex.
    """

    attention: str

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Return the last hidden states, shape (batch, length, hidden).

        Args:
            input_ids: shape (batch, length).
            attention_mask: not used, because padding is on the right.
            position_ids: positions in the documents, shape (batch, length). None: each row is one document.
        """
        hidden = self.word_embeddings_layernorm(self.word_embeddings(input_ids))
        documents = None if position_ids is None else number_documents(position_ids)
        length, device = input_ids.shape[1], input_ids.device
        score: ScoreFunction | None = None
        mask: Tensor | BlockMask
        if self.attention == "flex":
            make_score = _score if torch.compiler.is_compiling() else _cached_score
            score, mask = make_score(self.num_heads, device), block_mask(length, device, documents)
        else:
            allowed = causal_mask(length, device, documents)
            mask = alibi_bias(_slopes(self.num_heads, device), allowed, _query_dtype(hidden))
        for block in self.h:
            hidden = block(hidden, alibi=score, attention_mask=mask)[0]
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=self.ln_f(hidden))


class BloomForCausalLM(modeling_bloom.BloomForCausalLM):  # type: ignore[misc]  # transformers has no types
    """The BLOOM of transformers with another attention. The name is the same, because it is saved with the model."""

    @property
    def attention_implementation(self) -> str:
        """Return sdpa or flex."""
        return str(self.transformer.attention)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
    ) -> CausalLMOutputWithCrossAttentions:
        """Return ``.logits`` of shape (batch, length or kept, vocabulary).

        Args:
            input_ids: shape (batch, length).
            attention_mask: not used, because padding is on the right.
            position_ids: positions in the documents, shape (batch, length). None: each row is one document.
            logits_to_keep: positions to compute logits for, shape (kept,). 0: all.
        """
        hidden = self.transformer(input_ids, position_ids=position_ids).last_hidden_state
        if isinstance(logits_to_keep, Tensor):
            hidden = hidden[:, logits_to_keep]
        return CausalLMOutputWithCrossAttentions(logits=self.lm_head(hidden))


def use_attention(bloom: nn.Module, attention: str) -> None:
    """Replace the attention and the GELU of a BLOOM of transformers in place; its weights stay.

    Args:
        bloom: a BloomForCausalLM.
        attention: sdpa or flex.
    """
    transformer: Any = bloom.transformer
    bloom.__class__, transformer.__class__ = BloomForCausalLM, BloomModel
    transformer.attention = attention
    for block in transformer.h:
        block.self_attention.__class__ = BloomAttention
        block.mlp.gelu_impl = nn.GELU(approximate="tanh")


def _query_dtype(hidden: Tensor) -> torch.dtype:
    """Return the type of the queries: that of autocast, or of the hidden states."""
    device = hidden.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return hidden.dtype


def _score(heads: int, device: torch.device) -> ScoreFunction:
    return alibi_score(_slopes(heads, device))


_cached_score = cached(_score)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch has no types here
def _slopes(heads: int, device: torch.device) -> Tensor:
    """Return the ALiBi slope of each head, as in transformers, shape (heads,).

    In a compiled model it is a constant. If the compiler traced it, it would compute it in the kernel of flex
    attention, where torch 2.11 writes code that Triton rejects.
    """
    two_positions = torch.ones(1, 2, dtype=torch.long, device=device)
    slopes: Tensor = modeling_bloom.build_alibi_tensor(two_positions, heads, torch.float32)[:, 0, 1]
    return slopes
