"""Check that a model keeps the samples of a packed row apart."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from distexp.config import ConfigError
from distexp.data.base import POSITIONS
from distexp.models.introspection import check_forward_arguments
from distexp.models.objective import get_logits

TOKENS = 8
"""Vocabulary of the small model that is tried."""


def check_packing(model: nn.Module) -> None:
    """Check that a model takes packed rows.

    A model of transformers is tried: a small one of its class, with one layer of each kind, computes a row of two
    samples. The logits of the second must be those without the first.

    Raises:
        ConfigError: its ``forward`` has no ``position_ids``, or it mixes the samples.
    """
    check_forward_arguments(model, ("input_ids", POSITIONS))
    if not hasattr(model, "config") or hasattr(model, "attention_implementation"):
        return  # the models of distexp support packing, and a custom model declares it by its arguments
    if not _separates_samples(model):
        raise ConfigError(
            f"dataset.packing=true is not supported by {type(model).__name__}, because it mixes the samples of a row: "
            "use dataset.bucketing=true"
        )


def _separates_samples(model: Any) -> bool:
    """Return whether a small copy of a model of transformers keeps two samples apart."""
    row, positions = torch.tensor([[1, 2, 3, 4, 5, 6, 7]]), torch.tensor([[0, 1, 2, 3, 0, 1, 2]])
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            small = type(model)(_shrink(model.config)).float().eval()
            for parameter in small.parameters():
                nn.init.normal_(parameter, std=0.2)
            packed = get_logits(small(input_ids=row, position_ids=positions))[:, 4:]
            expected = get_logits(small(input_ids=row[:, 4:]))
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            return False  # an architecture that has no such small copy is not supported
    return torch.allclose(packed, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


def _shrink(config: Any) -> Any:
    """Return the configuration of a model with few tokens and one layer of each kind."""
    small = copy.deepcopy(config)
    text = small.get_text_config()
    kinds = list(dict.fromkeys(getattr(text, "layer_types", None) or ()))
    if kinds:
        text.layer_types = kinds
    text.num_hidden_layers, text.vocab_size = max(len(kinds), 1), TOKENS
    text.bos_token_id = text.eos_token_id = text.pad_token_id = None
    text.use_cache = False  # with a cache, transformers does not look for several samples in a row
    small._attn_implementation = "eager"
    return small
