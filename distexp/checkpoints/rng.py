"""The states of all sources of chance of one rank."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def state(device: torch.device) -> dict[str, Any]:
    """What ``restore`` takes up; of plain numbers and tensors, so that reading it runs no code."""
    legacy: Any = np.random.get_state(legacy=True)
    name, keys, *rest = legacy
    return {
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def restore(saved: dict[str, Any], device: torch.device) -> None:
    """Chance goes on from where it was."""
    version, inner, gauss = saved["python"]
    random.setstate((version, tuple(inner), gauss))
    name, keys, *rest = saved["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(saved["torch"])
    if device.type == "cuda" and saved["cuda"] is not None:
        torch.cuda.set_rng_state(saved["cuda"], device)
