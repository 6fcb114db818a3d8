"""Strategies whose ``kernels=fast`` compiles on a CPU too, as single and DDP do on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distexp.config import Config
from distexp.models import transforms
from distexp.strategies.ddp import DDP
from distexp.strategies.single import Single

transforms.BACKEND = "aot_eager"  # inductor takes half a minute for a model


class CompilingSingle(Single):
    """Training on one worker, with the whole model compiled."""

    def fast_values(self, config: Config) -> Mapping[str, Any]:
        """Return the choice for GPUs."""
        return {"train.compile": "model"}


class CompilingDDP(DDP):
    """DDP with the whole model compiled."""

    def fast_values(self, config: Config) -> Mapping[str, Any]:
        """Return the choice for GPUs."""
        return {"train.compile": "model"}
