"""Trainings that cannot be traced: why, and the number of their parameters."""

from __future__ import annotations

import sysconfig
import traceback
from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from distexp.config import Config
from distexp.config.paths import PACKAGE
from distexp.system.torch_internals.modes import fake_mode_errors

WITHOUT_KERNEL = "UnsupportedOperatorException"
"""Name of torch's exception for an operator that has no kernel for fake tensors. Its text is the operator."""

LIBRARIES = ("torch", "triton")
"""Packages whose lines are not the cause that a user can change. So are those of distexp and of Python."""


def describe_failure(error: Exception) -> str:
    """Return why a model cannot be traced, with the line of the model that failed."""
    if type(error).__name__ == WITHOUT_KERNEL:
        reason = (
            f"its operator {error} computes only with values: give it a kernel for fake tensors with "
            "torch.library.register_fake"
        )
    elif isinstance(error, fake_mode_errors()):
        reason = (
            f"it computes shapes or decisions from values ({_first_line(error)}), for example by .item(), by `if` on a "
            "tensor, or by a mask as index"
        )
    else:
        reason = f"{type(error).__name__}: {_first_line(error)}"
    return f"the model cannot be traced{_place(error)}: {reason}"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]


def _place(error: Exception) -> str:
    """Return the innermost line outside of the libraries, as in `` at my_model.py:12``; empty if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename[0] != "<" and not _in_library(Path(frame.filename).resolve())]
    return f" at {'/'.join(Path(own[-1].filename).parts[-2:])}:{own[-1].lineno}" if own else ""


def _in_library(path: Path) -> bool:
    """Return whether a file belongs to Python, torch, triton or distexp."""
    python = Path(sysconfig.get_path("stdlib")).resolve()
    if path.is_relative_to(python):
        installed = path.relative_to(python).parts[0] in ("site-packages", "dist-packages")
        return not installed or any(path.is_relative_to(folder) for folder in _library_folders())
    return any(path.is_relative_to(folder) for folder in _library_folders())


@lru_cache(maxsize=1)
def _library_folders() -> tuple[Path, ...]:
    specs = [spec for name in LIBRARIES if (spec := find_spec(name)) is not None]
    folders = (Path(folder).resolve() for spec in specs for folder in spec.submodule_search_locations or ())
    return (PACKAGE, *folders)


def count_parameters(config: Config) -> int | None:
    """Return the number of parameters of a model, which is built without weights; None if that fails."""
    from distexp.plan.traced_context import traced_context
    from distexp.worker.build import build_model, load_data

    # To decode all images takes minutes, and does not change the model.
    config = replace(config, dataset=replace(config.dataset, cache="none", num_workers=0))
    context = traced_context(config)
    try:
        model = build_model(config, load_data(config, context), context).model
    except Exception:  # Why it was not traced is known already.
        return None
    return sum(parameter.numel() for parameter in model.parameters())
