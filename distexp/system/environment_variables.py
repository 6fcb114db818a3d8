"""Environment variables that change speed or memory but are no part of the configuration."""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache

CAPTURED_PREFIXES = (
    *("NCCL_", "TORCH_NCCL_", "GLOO_", "UCX_", "FI_"),  # communication
    *("PYTORCH_", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS", "CUBLAS_", "NVIDIA_TF32_OVERRIDE"),
    *("TORCH_ALLOW_TF32", "TORCH_BLAS_", "TORCH_CUDNN_", "TORCH_LINALG_", "CUDNN_", "ATEN_"),  # arithmetic of torch
    *("ONEDNN_", "DNNL_", "MKL_", "MKLDNN_", "OPENBLAS_", "KMP_"),  # arithmetic and threads on CPUs
    "OMP_WAIT_POLICY",  # whether threads use their cores while they wait
)
"""Prefixes of the variables that a record contains."""

TORCHRUN_DEFAULTS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
"""Variables that torchrun sets for every worker if the user does not set them."""


@cache
def captured_environment() -> dict[str, str]:
    """Return the variables to record, as they were at the first call.

    Call it before torch and DeepSpeed are imported, because DeepSpeed sets some of these variables itself.
    """
    return select_variables(os.environ)


def select_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of an environment to record, without secrets and what torchrun sets by itself."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if name.startswith(CAPTURED_PREFIXES) and TORCHRUN_DEFAULTS.get(name) != value and not looks_secret(name)
    }


@contextmanager
def variable_set(name: str, value: str) -> Iterator[None]:
    """Set a variable of this process during the block."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


SECRET_NAME = re.compile(
    r"(^|_)(\w*(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL)S?|(API|ACCESS|PRIVATE)?KEYS?|PASS|PAT)(_|$)"
    r"|_(PWD|AUTH)$",
    re.I,
)


def looks_secret(name: str) -> bool:
    """Return whether the name of an environment variable is that of a secret, such as ``WANDB_API_KEY``."""
    return bool(SECRET_NAME.search(name))


def secret_in(text: str) -> str | None:
    """Return the name of a secret variable whose value is in a text; None if there is none."""
    # A shorter value may be there by coincidence.
    found = (name for name, value in os.environ.items() if len(value) >= 8 and value in text)
    return next(filter(looks_secret, found), None)
