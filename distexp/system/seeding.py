"""Seeds of the random number generators."""

from __future__ import annotations

import random

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch. All ranks use the same seed, so that they build the same model and data order."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
