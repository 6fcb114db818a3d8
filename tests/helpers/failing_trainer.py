"""A data set that takes FSDP's last help away from the Trainer, reached as ``_target_=failing_trainer.unsharded``."""

from __future__ import annotations

from typing import Any

from distexp.data import squad_sample
from distexp.data.base import TaskData


def unsharded(*arguments: Any) -> TaskData:
    from distexp.engines import hf_arguments

    hf_arguments._complete_fsdp = lambda *_: None  # type: ignore[assignment]
    return squad_sample.load(*arguments)
