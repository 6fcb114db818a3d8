"""Largest relative errors of the required GPU memory, from the tables in ``docs/results/plan.md``.

The required memory depends on the order of allocations. The replay of that order is not exact in some cases. The
peak of the allocated memory is exact in all of them.
"""

from __future__ import annotations

from distexp.config import Config
from distexp.strategies.base import load_strategy

COMPILED = 0.08
"""``train.compile``: the prediction was up to 7 % less than the measured memory."""


def gpu_error_bound(config: Config) -> float:
    """Return the largest error of the prediction of a run, as a share of the prediction."""
    return COMPILED if config.train.compiled != "none" else load_strategy(config).gpu_memory_error(config)
