"""Any causal LM of transformers, by hub id or from a folder: pretrained, or its architecture alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from distexp.config import ConfigError, ModelConfig
from distexp.config.model_checks import validate_model
from distexp.models.pretrained import on_meta_device, read_config, read_weights


def build(model: ModelConfig, num_classes: int) -> nn.Module:
    """A causal LM: ``input_ids`` and ``attention_mask`` to ``.logits`` (samples, length, vocabulary).

    On the meta device no weights are read.

    Args:
        model: name, a hub id or a folder; init, pretrained or random; dropout, null for the
            architecture's own.
        num_classes: entries of the tokenizer.

    Raises:
        ConfigError: no such model, one that is no causal LM, or one with fewer embeddings than the
            tokenizer has entries.
    """
    validate_model(model)
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config = read_config("model.name", model.name)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(_no_causal_lm(model, config))
    rows = config.get_text_config().vocab_size
    if num_classes > rows:
        raise ConfigError(
            f"The tokenizer has {num_classes} entries, more than the {rows} embeddings of "
            f"model.name={model.name}: choose a smaller tokenizer, or auto for the model's own"
        )
    config.use_cache = False  # keys and values are for generation; training would only hold their memory
    if model.dropout is not None:
        _set_dropout(config, model)
    if model.init == "pretrained" and not on_meta_device():
        built = read_weights(AutoModelForCausalLM, "model.name", model.name, config)
    else:
        built = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    if _looks_ahead(built):
        raise ConfigError(_no_causal_lm(model, config))
    return built


def _set_dropout(config: Any, model: ModelConfig) -> None:
    """The one rate for embeddings, attention and residuals, under whatever name an architecture has them."""
    names = [
        name
        for name, value in config.to_dict().items()
        if name.endswith(("dropout", "pdrop")) and isinstance(value, int | float)
    ]
    if not names and model.dropout:
        raise ConfigError(
            f"model.dropout={model.dropout} is set, and {config.model_type} of model.name={model.name} has no "
            "dropout: leave it out"
        )
    for name in names:
        setattr(config, name, model.dropout)


def _looks_ahead(built: nn.Module) -> bool:
    """Whether attention says of itself that it is not causal, as an encoder's under a language model's head."""
    said = [module.is_causal for module in built.modules() if hasattr(module, "is_causal")]
    return bool(said) and not any(said)


def _no_causal_lm(model: ModelConfig, config: Any) -> str:
    return (
        f"model.name={model.name} is no causal LM ({config.model_type}), and model=hf trains causal LMs: choose one "
        "that predicts each token from those before it, as GPT-2, Llama, Qwen or OPT"
    )
