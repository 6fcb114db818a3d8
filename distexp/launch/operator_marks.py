"""Marks of built C++ operators, in PyTorch's cache of extensions: a later run need not import torch to check."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from distexp.runs.json_files import write_json
from distexp.strategies import ds_operators
from distexp.strategies.ds_build_folder import BATON

STEERING = ("DS_ACCELERATOR", "TORCH_CUDA_ARCH_LIST", "CXX", "CC", "CUDA_HOME")
"""Environment variables that change what is compiled."""


def missing_operators(names: Iterable[str], environment: Mapping[str, str]) -> list[str]:
    """Return the operators that are not known to be built; none without DeepSpeed, which a worker then reports.

    Args:
        names: Names of DeepSpeed's operators.
        environment: Environment of the workers.
    """
    if not _installation("deepspeed"):
        return []
    return [name for name in names if not _is_built(_mark_path(name, environment))]


def _is_built(mark: Path) -> bool:
    """Return whether the library is the one that was built when the mark was written, and no process builds it.

    Environments with other paths share the cache. Ninja compiles again after another one has built. The lock may be
    that of a killed process, for which all workers would wait.
    """
    try:
        entry = json.loads(mark.read_text())
        library = entry["library"]
        return library is None or (entry == _describe(library) and not Path(library).with_name(BATON).exists())
    except (OSError, ValueError, KeyError):
        return False


def _describe(library: str | None) -> dict[str, Any]:
    """Return the content of the mark of a library."""
    if library is None:
        return {"library": None}
    return {"library": library, "size": Path(library).stat().st_size, "plan": _plan(library)}


def _plan(library: str) -> str | None:
    """Return the hash of Ninja's file next to a library; None if there is none."""
    try:
        return hashlib.sha256(Path(library).with_name(ds_operators.NINJA_FILE).read_bytes()).hexdigest()
    except OSError:
        return None


def mark_built(name: str, environment: Mapping[str, str], library: str | None) -> None:
    """Mark an operator as built.

    Args:
        name: Name of the operator.
        environment: Environment of the workers.
        library: Path of the library; None if the operator is not supported here, so that there is nothing to build.
    """
    with suppress(OSError):  # Without a mark, the next run checks again.
        write_json(_mark_path(name, environment), _describe(library))


def _mark_path(name: str, environment: Mapping[str, str]) -> Path:
    """Return the file that marks an operator as built with these versions and this environment."""
    root = environment.get("TORCH_EXTENSIONS_DIR")
    cache = environment.get("XDG_CACHE_HOME") or "~/.cache"
    folder = Path(root) if root else Path(cache).expanduser() / "torch_extensions"
    settings = [platform.python_version(), platform.machine(), _installation("torch"), _installation("deepspeed")]
    settings += [environment.get(variable, "") for variable in STEERING]
    key = hashlib.sha256("\n".join(settings).encode()).hexdigest()[:12]
    return folder / f"distexp-{name}-{key}.json"


def _installation(package: str) -> str:
    """Return the version and the folder of an installed package; empty if it is not installed."""
    try:
        found = distribution(package)
    except PackageNotFoundError:
        return ""
    return f"{found.version} {found.locate_file('')}"


def current_environment(device: str) -> dict[str, str]:
    """Return the environment in which a run on a device would build without settings of its own."""
    return {**os.environ, "DS_ACCELERATOR": device}
