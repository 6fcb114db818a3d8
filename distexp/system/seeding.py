"""Every source of chance in a worker."""

from __future__ import annotations

import random

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seeds every source of chance; the same on all ranks where they build and read the same."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
