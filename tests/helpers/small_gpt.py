"""A GPT of two layers, with the same weights each time."""

from __future__ import annotations

import torch

from distexp.models.gpt import GPT

VOCABULARY = 53


def make_gpt() -> GPT:
    """Build the model."""
    torch.manual_seed(0)
    return GPT(vocab=VOCABULARY, hidden=16, layers=2, heads=2, inner=32, length=12, dropout=0.0, tie=True)
