"""Import of DeepSpeed without a library that only its autotuner uses.

``deepspeed.autotuning`` imports mlflow if it is installed, and mlflow imports pandas and a web framework. That takes 3
of the 19 s of CPU time of a short run. distexp does not call the autotuner, and a tracker has a separate process.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast


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
    import deepspeed  # noqa: F401
