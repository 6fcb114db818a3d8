"""All uses of private PyTorch APIs: a new PyTorch release breaks only this file.

``tests/system/test_torch_internals.py`` checks each of them against the installed release.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d


class TorchInternalsChangedError(RuntimeError):
    """A private API that distexp uses differs in the installed PyTorch release."""


@dataclass(frozen=True)
class FSDPPolicies:
    """What FSDP does with the parameters of one unit."""

    reshards_after_forward: bool
    offloads_to_cpu: bool
    param_dtype: torch.dtype | None  # None: the dtype of the parameters


def read_fsdp_policies(units: Sequence[Any]) -> list[FSDPPolicies]:
    """Return the policies of each FSDP unit that has parameters."""
    with _explained("FSDPModule._get_fsdp_state()._fsdp_param_group"):
        groups = [unit._get_fsdp_state()._fsdp_param_group for unit in units]
        return [
            FSDPPolicies(
                reshards_after_forward=group.post_forward_mesh_info is not None,
                offloads_to_cpu=type(group.offload_policy).__name__ == "CPUOffloadPolicy",
                param_dtype=group.mp_policy.param_dtype,
            )
            for group in groups
            if group is not None
        ]


def tensor_norms(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the 2-norm of each tensor, computed in ``dtype`` by one kernel."""
    with _explained("torch._foreach_norm"):
        return list(torch._foreach_norm(tensors, 2, dtype=dtype))


def scale_tensors(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply all tensors by a factor in place, with one kernel for all."""
    with _explained("torch._foreach_mul_"):
        torch._foreach_mul_(tensors, factor)


def extension_build_dir(name: str) -> Path:
    """Return the folder in which PyTorch builds a C++ extension; PyTorch creates it."""
    with _explained("torch.utils.cpp_extension._get_build_directory"):
        from torch.utils.cpp_extension import _get_build_directory

        return Path(_get_build_directory(name, verbose=False))


def set_default_timeout(timeout: timedelta) -> None:
    """Set the timeout of the process groups that are created later.

    A device mesh creates its groups with torch's defaults, which are 10 minutes for NCCL and 30 minutes for gloo. It
    has no argument for another timeout.
    """
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        with _explained(f"torch.distributed.distributed_c10d.{name}"):
            getattr(distributed_c10d, name)  # Setting a renamed attribute would have no effect.
        setattr(distributed_c10d, name, timeout)


def active_autocast_dtype(autocast: torch.autocast) -> torch.dtype | None:
    """Return the dtype that autocast uses; None if torch has disabled it."""
    with _explained("torch.autocast._enabled"):
        return autocast.fast_dtype if autocast._enabled else None


@contextmanager
def _explained(name: str) -> Iterator[None]:
    try:
        yield
    except (AttributeError, ImportError, TypeError) as error:
        raise TorchInternalsChangedError(
            f"{name} of PyTorch {torch.__version__} is not as distexp expects ({error}): "
            "install the version of PyTorch in requirements.txt, or adapt distexp/system/torch_internals.py"
        ) from error
