"""Any causal LM of transformers, with pretrained or random weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from distexp.config import ConfigError, ModelConfig
from distexp.config.model_checks import validate_model
from distexp.models.dropout import DROPOUT_ENDINGS
from distexp.models.pretrained import on_meta_device, read_config, read_weights

PRELOAD = ("transformers",)
"""Imported once for all workers of a node."""

IMPLEMENTATIONS = {"flex": "flex_attention", "flash": "flash_attention_2"}
"""Names in transformers of the values of ``model.attention``, if they differ."""

ATTENTION_DROPOUTS = ("attention_dropout", "attn_pdrop", "attn_dropout", "attention_probs_dropout_prob")
"""Names of the dropout of the attention weights in configurations of transformers."""


def build(model: ModelConfig, num_classes: int) -> nn.Module:
    """Build a causal LM.

    It maps ``input_ids`` and ``attention_mask`` (batch, length) to ``.logits`` (batch, length, vocabulary).
    On the meta device, no weights are read.

    Args:
        model: name, a hub id or a folder; init, pretrained or random; dropout, where null means the
            architecture's default; attention.
        num_classes: entries of the tokenizer.

    Raises:
        ConfigError: the model does not exist, is not a causal LM, or has fewer embeddings than the
            tokenizer has entries.
    """
    validate_model(model)
    from transformers import AutoModelForCausalLM

    config = _read_config(model, num_classes)
    replaces_attention = config.model_type == "bloom" and model.attention in ("sdpa", "flex")
    if model.attention != "auto" and not replaces_attention:
        _set_attention(config, model)
    if model.init == "pretrained" and not on_meta_device():
        built = read_weights(AutoModelForCausalLM, "model.name", model.name, config)
    else:
        built = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    if _is_bidirectional(built):
        raise ConfigError(_not_causal_message(model, config))
    if replaces_attention:
        from distexp.models.bloom_attention import use_attention

        use_attention(built, model.attention)
    return built


def _read_config(model: ModelConfig, num_classes: int) -> Any:
    """Read the configuration of a causal LM with room for the tokenizer, and set its dropout."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config = read_config("model.name", model.name)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(_not_causal_message(model, config))
    rows = config.get_text_config().vocab_size
    if num_classes > rows:
        raise ConfigError(
            f"the tokenizer has {num_classes} entries, more than the {rows} embeddings of "
            f"model.name={model.name}: use a smaller tokenizer, or model.tokenizer=auto for the model's own"
        )
    config.use_cache = False  # training never uses cached keys and values, which take memory
    if model.dropout is not None:
        _set_dropout(config, model)
    return config


def _set_attention(config: Any, model: ModelConfig) -> None:
    """Set the implementation of the attention, after a model without weights was built with it.

    Raises:
        ConfigError: the architecture or the machine does not support it.
    """
    from transformers import AutoModelForCausalLM

    if model.attention == "flex":
        _check_no_attention_dropout(config, model)
    implementation = IMPLEMENTATIONS.get(model.attention, model.attention)
    try:
        config._attn_implementation = implementation
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except (ValueError, ImportError) as error:
        reason = str(error).split(". ")[0].splitlines()[0]
        raise ConfigError(
            f"model.attention={model.attention} is not supported by model.name={model.name} ({reason}): use "
            "model.attention=auto"
        ) from error


def _check_no_attention_dropout(config: Any, model: ModelConfig) -> None:
    text = config.get_text_config()
    for name in ATTENTION_DROPOUTS:
        if value := getattr(text, name, 0):
            raise ConfigError(
                f"model.attention=flex has no dropout, but {name}={value} in model.name={model.name}: set "
                "model.dropout=0, or use model.attention=sdpa"
            )


def _set_dropout(config: Any, model: ModelConfig) -> None:
    """Set one dropout rate for embeddings, attention and residuals.

    The names of these settings differ between architectures.
    """
    text = config.get_text_config()
    rates = [name for name, value in text.to_dict().items() if name.endswith(DROPOUT_ENDINGS) and _is_number(value)]
    if not rates and model.dropout:
        wanted = ", ".join(f"*{ending}" for ending in DROPOUT_ENDINGS)
        raise ConfigError(
            f"model.dropout={model.dropout:g} is not supported: the configuration of model.name={model.name} "
            f"({config.model_type}) has no dropout rate ({wanted}): leave model.dropout out"
        )
    for name in rates:
        setattr(text, name, model.dropout)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_bidirectional(built: nn.Module) -> bool:
    """Return whether all attention modules are declared as not causal.

    This is the case for an encoder with a language model head.
    """
    is_causal = [module.is_causal for module in built.modules() if hasattr(module, "is_causal")]
    return bool(is_causal) and not any(is_causal)


def _not_causal_message(model: ModelConfig, config: Any) -> str:
    return (
        f"model.name={model.name} is not a causal LM ({config.model_type}), but model=hf trains only causal LMs: "
        "use a model such as GPT-2, Llama, Qwen or OPT"
    )
