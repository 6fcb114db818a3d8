"""Environment variables that change speed or memory but are no part of the configuration."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import permutations

ARITHMETIC_PREFIXES = (
    *("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32", "TORCH_BLAS_", "TORCH_CUDNN_", "TORCH_LINALG_", "ATEN_"),
    *("CUBLAS_", "CUDNN_", "ONEDNN_", "DNNL_", "MKL_", "MKLDNN_", "OPENBLAS_", "KMP_"),
)
CAPTURED_PREFIXES = (
    *("NCCL_", "TORCH_NCCL_", "GLOO_", "UCX_", "FI_"),  # communication
    *("PYTORCH_", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS", *ARITHMETIC_PREFIXES),
    "OMP_WAIT_POLICY",  # whether threads use their cores while they wait
)
"""Prefixes of the variables that a record contains."""

NO_ARITHMETIC = re.compile(
    r"_(VERBOSE|LOG\w*|\w*THREADS|DYNAMIC|AFFINITY|BLOCKTIME|DUPLICATE_LIB_OK|INIT_AT_FORK"
    r"|ROOT|HOME|DIR|\w*PATH|LIB|LIBRARY|INCLUDE)$"
)
"""Variables of these libraries that only log, place threads, or name folders."""

TF32_CONVOLUTIONS = "TF32 conv"
"""Description of a flag of torch. Its rounding depends on the kernel, and so on the micro-batch."""

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


def select_arithmetic(variables: Mapping[str, str]) -> list[str]:
    """Return those variables that change what torch computes, as ``NAME=value``."""
    names = (name for name in sorted(variables) if name.startswith(ARITHMETIC_PREFIXES))
    return [f"{name}={variables[name]}" for name in names if not NO_ARITHMETIC.search(name) and not looks_secret(name)]


def explain_arithmetic(reference: Sequence[str], variant: Sequence[str]) -> str | None:
    """Return how the arithmetic of a variant differs from that of ``single``, and what to type; None if it does not."""
    first, second = ([each for each in one if each not in other] for one, other in permutations((reference, variant)))
    if not (first or second):
        return None
    names = dict.fromkeys(each.partition("=")[0] for each in (*first, *second) if "=" in each)
    found = [", ".join(each) or "the defaults" for each in (first, second)]
    hint = "run both on one machine, and set the flags of torch in code that both run, as at the top of a module"
    if names:
        hint = f"give both the same variables, or none by env {' '.join(f'-u {name}' for name in names)} COMMAND"
    return f"single computes with {found[0]}, and the other training with {found[1]}: {hint}"


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
    r"(^|_)(\w*(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL)S?|(API|ACCESS|PRIVATE)?KEYS?|\w*(?<!BY)PASS|PAT)(_|$)"
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
