"""Import of DeepSpeed without two libraries that distexp does not use.

- ``deepspeed.autotuning`` imports mlflow if it is installed, and mlflow imports pandas and a web framework. That takes
  3 seconds. distexp does not call the autotuner, and a tracker has a separate process.
- ZeRO imports its Muon optimizer for every optimizer. Muon decorates functions with ``torch.compile``, which imports
  inductor. That takes 2 seconds. distexp has no option for Muon, and refuses it in ``deepspeed.config_file``.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from distexp.system.environment_variables import variable_set


@contextmanager
def hide_module(name: str) -> Iterator[None]:
    """Let the import of a module fail during the block, unless it is already imported."""
    modules = cast(dict[str, Any], sys.modules)
    if name in modules:
        yield
        return
    modules[name] = None  # see "The import system" in the reference of Python
    try:
        yield
    finally:
        del modules[name]


with hide_module("mlflow"):
    import deepspeed

with variable_set("TORCHDYNAMO_DISABLE", "1"):
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
