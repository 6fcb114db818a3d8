"""A data set after which the Trainer uses DDP instead of FSDP: ``_target_=failing_trainer.unsharded``."""

from __future__ import annotations

from typing import Any

from distexp.data import squad_sample
from distexp.data.base import TaskData


def unsharded(*arguments: Any) -> TaskData:
    """Make accelerate ignore FSDP on a CPU; return the data set squad_sample."""
    from distexp.engines.hf_adapters import FSDPAdapter, HFAdapter

    FSDPAdapter.configure_arguments = HFAdapter.configure_arguments  # type: ignore[method-assign]
    return squad_sample.load(*arguments)
