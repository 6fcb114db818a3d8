"""BLOOM in the implementation of transformers, with random or pretrained weights."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions, CausalLMOutputWithCrossAttentions
from transformers.models.bloom import modeling_bloom

from distexp.config import ConfigError, ModelConfig
from distexp.config.model_checks import resolve_vocab_size, validate_model
from distexp.config.overrides import copyable_overrides
from distexp.models import attention as attentions
from distexp.models.attention import ScoreFunction
from distexp.models.hf import on_meta_device, read_config, read_weights

TENSOR_PLAN = {
    "transformer.h.*.self_attention.query_key_value": "colwise",
    "transformer.h.*.self_attention.dense": "rowwise",
    "transformer.h.*.mlp.dense_h_to_4h": "colwise",
    "transformer.h.*.mlp.dense_4h_to_h": "rowwise",
}
"""How ``parallel.tensor`` cuts the layers. The rows of a fused matrix are in the order of the heads."""

PRELOAD = ("transformers.models.bloom.modeling_bloom",)


def build(model: ModelConfig, num_classes: int) -> nn.Module:
    """Build a BloomForCausalLM. Raise ConfigError if a value is invalid, or the weights cannot be read.

    It maps ``input_ids`` and ``attention_mask`` (batch, length) to ``.logits`` (batch, length, vocabulary). A null
    vocab_size is that of the tokenizer or of the pretrained weights. On the meta device, no weights are read.
    """
    validate_model(model)
    from transformers.models.bloom import BloomForCausalLM

    config = _make_config(model, num_classes)
    bloom: nn.Module
    if model.init == "pretrained" and model.path is not None and not on_meta_device():
        bloom = read_weights(BloomForCausalLM, "model.path", model.path, config)
    else:
        bloom = BloomForCausalLM(config)
    if model.attention in ("sdpa", "flex"):
        use_attention(bloom, model.attention)
    return bloom


def _make_config(model: ModelConfig, num_classes: int) -> Any:
    from transformers.models.bloom import BloomConfig

    if model.init == "pretrained":
        config = _read_pretrained_config(model, num_classes)
    else:
        config = BloomConfig(
            vocab_size=resolve_vocab_size(model, num_classes),
            hidden_size=model.hidden_size,
            n_layer=model.num_layers,
            n_head=model.num_heads,
        )
    config.use_cache = False  # training never uses cached keys and values, which take memory
    if model.dropout is not None:
        config.hidden_dropout = config.attention_dropout = model.dropout
    return config


def _read_pretrained_config(model: ModelConfig, num_classes: int) -> Any:
    """Read the configuration of the weights, and check that ``model`` and the tokenizer agree with it."""
    assert model.path is not None, "validate_model checks this"
    config = read_config("model.path", model.path)
    if config.model_type != "bloom":
        raise ConfigError(
            f"model.path={model.path} has a model of type {config.model_type}, but model={model.name} is a "
            f"BLOOM: use {copyable_overrides('model=hf', f'model.name={model.path}')}"
        )
    names = {"vocab_size": "vocab_size", "hidden_size": "hidden_size", "num_layers": "n_layer", "num_heads": "n_head"}
    sizes = {key: getattr(config, name) for key, name in names.items()}
    errors = [
        f"model.{key}={getattr(model, key)} differs from the weights in model.path={model.path}, which have {size}: "
        f"set model.{key}={size}, or correct model.path"
        for key, size in sizes.items()
        if getattr(model, key) not in (None, size)
    ]
    if errors:
        raise ConfigError(errors)
    resolve_vocab_size(replace(model, vocab_size=config.vocab_size), num_classes)
    return config


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
        """Return the hidden states after attention, shape (batch, length, hidden); ``alibi`` is for flex attention."""
        query, key, value = self._reshape(self.query_key_value(hidden_states))
        mixed = self.attend(query, key, value, attention_mask, alibi)
        projected = self.dense(mixed.transpose(1, 2).flatten(2))
        return modeling_bloom.dropout_add(projected, residual, self.hidden_dropout, self.training), None

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | BlockMask, alibi: ScoreFunction | None
    ) -> Tensor:
        """Return the mixed values, shape (batch, heads, length, head size), as that of the inputs."""
        if not isinstance(mask, Tensor):
            return attentions.attend_flex(query, key, value, mask, alibi)
        dropout = self.attention_dropout.p if self.training else 0.0
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)


class BloomModel(modeling_bloom.BloomModel):  # type: ignore[misc]  # transformers has no types
    """The blocks of BLOOM."""

    attention: str

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Return the last hidden states, shape (batch, length, hidden). Right padding needs no attention mask."""
        hidden = self.word_embeddings_layernorm(self.word_embeddings(input_ids))
        documents = None if position_ids is None else attentions.number_documents(position_ids)
        length, device = input_ids.shape[1], input_ids.device
        score: ScoreFunction | None = None
        mask: Tensor | BlockMask
        if self.attention == "flex":
            make_score = _score if torch.compiler.is_compiling() else _cached_score
            score, mask = make_score(self.num_heads, device), attentions.block_mask(length, device, documents)
        else:
            allowed = attentions.causal_mask(length, device, documents)
            # The queries have the type of autocast, or that of the hidden states.
            autocasts = device.type != "meta" and torch.is_autocast_enabled(device.type)
            dtype = torch.get_autocast_dtype(device.type) if autocasts else hidden.dtype
            mask = attentions.alibi_bias(_slopes(self.num_heads, device), allowed, dtype)
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
        """Return ``.logits`` of shape (batch, length or kept, vocabulary); ``logits_to_keep`` 0 means all."""
        hidden = self.transformer(input_ids, position_ids=position_ids).last_hidden_state
        if isinstance(logits_to_keep, Tensor):
            hidden = hidden[:, logits_to_keep]
        return CausalLMOutputWithCrossAttentions(logits=self.lm_head(hidden))


def use_attention(bloom: nn.Module, attention: str) -> None:
    """Replace the attention and the GELU of a BLOOM of transformers in place; its weights stay.

    Its attention has only matrix products and a softmax in fp32, which store all attention weights. Its GELU is an
    autograd function, which the compiler cannot fuse. It becomes torch's GELU with the same approximation.
    """
    transformer: Any = bloom.transformer
    bloom.__class__, transformer.__class__ = BloomForCausalLM, BloomModel
    transformer.attention = attention
    for block in transformer.h:
        block.self_attention.__class__ = BloomAttention
        block.mlp.gelu_impl = nn.GELU(approximate="tanh")


def cut_heads(bloom: nn.Module, rank: int, workers: int) -> None:
    """Let each attention compute the heads of one of several workers. The biases of ALiBi are those of its heads."""
    transformer: Any = bloom.transformer
    for block in transformer.h:
        heads = block.self_attention.num_heads
        own = slice(rank * heads // workers, (rank + 1) * heads // workers)
        block.self_attention.num_heads = heads // workers
        block.self_attention.register_forward_pre_hook(partial(_cut_biases, heads, own), with_kwargs=True)


def _cut_biases(heads: int, own: slice, attention: nn.Module, arguments: Any, inputs: dict[str, Any]) -> Any:
    """Return the inputs of an attention with the biases of its own heads, as ``alibi`` or in the mask of SDPA."""
    alibi, mask = inputs.get("alibi"), inputs.get("attention_mask")
    if isinstance(alibi, Tensor):
        inputs["alibi"] = alibi.view(-1, heads, *alibi.shape[1:])[:, own].flatten(0, 1)
    if isinstance(mask, Tensor) and mask.shape[1] == heads:
        inputs["attention_mask"] = mask[:, own]
    return arguments, inputs


def _score(heads: int, device: torch.device) -> ScoreFunction:
    return attentions.alibi_score(_slopes(heads, device))


_cached_score = attentions.cached(_score)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch has no types here
def _slopes(heads: int, device: torch.device) -> Tensor:
    """Return the ALiBi slope of each head, as in transformers, shape (heads,).

    In a compiled model it is a constant. If the compiler traced it, it would compute it in the kernel of flex
    attention, where torch 2.11 writes code that Triton rejects.
    """
    two_positions = torch.ones(1, 2, dtype=torch.long, device=device)
    slopes: Tensor = modeling_bloom.build_alibi_tensor(two_positions, heads, torch.float32)[:, 0, 1]
    return slopes
