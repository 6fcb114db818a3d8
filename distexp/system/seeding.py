"""Seeds of the random number generators."""

import random
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch. All ranks use the same seed, so that they build the same model and data order."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def rng_state(device: torch.device) -> dict[str, Any]:
    """Return the RNG states, as numbers and tensors so that loading runs no code."""
    legacy: Any = np.random.get_state(legacy=True)
    name, keys, *rest = legacy
    return {
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def restore_rng(saved: dict[str, Any], device: torch.device) -> None:
    """Restore what ``rng_state`` returned."""
    version, inner, gauss = saved["python"]
    random.setstate((version, tuple(inner), gauss))
    name, keys, *rest = saved["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(saved["torch"])
    if device.type == "cuda" and saved["cuda"] is not None:
        torch.cuda.set_rng_state(saved["cuda"], device)


def equal_states(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Return whether two results of ``rng_state`` are equal: whether no random number was drawn between them."""
    tensors = [pair for kind in ("torch", "cuda") if (pair := (first[kind], second[kind]))[0] is not None]
    others = all(first[kind] == second[kind] for kind in ("python", "numpy"))
    return others and all(torch.equal(*pair) for pair in tensors)
