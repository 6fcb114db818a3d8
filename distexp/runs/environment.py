"""Software and machine of a run, found without importing torch."""

from __future__ import annotations

import importlib.util
import platform
import re
import socket
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from distexp.runs.record_sections import Environment
from distexp.system.cgroups import cpu_limit
from distexp.system.hardware import cpu_count, visible_gpus


def make_environment(*, on_gpu: bool, variables: Mapping[str, str] | None = None) -> Environment:
    """Return the environment of this process.

    Args:
        on_gpu: Whether the run uses GPUs. If not, the record names no GPU and no CUDA version.
        variables: Environment variables of the workers.
    """
    torch = torch_versions()
    gpu = next(iter(visible_gpus()), None) if on_gpu else None
    return Environment(
        python=platform.python_version(),
        torch=torch.get("__version__") or package_version("torch"),
        cuda=torch.get("cuda") if on_gpu else None,
        transformers=package_version("transformers"),
        deepspeed=package_version("deepspeed"),
        accelerate=package_version("accelerate"),
        gpu_name=gpu.name if gpu else None,
        gpu_total_mib=gpu.total_mib if gpu else None,
        cpu_count=cpu_count(),
        cpu_limit=cpu_limit(),
        hostname=socket.gethostname(),
        variables=dict(variables or {}),
    )


def torch_versions() -> dict[str, str]:
    """Read ``__version__`` and ``cuda`` from torch's version file: the metadata lacks the build, as in +cu130."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return {}
    try:
        text = Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return {}
    return dict(re.findall(r"^(__version__|cuda)\b[^=\n]*= *['\"](.+)['\"]", text, re.MULTILINE))


def package_version(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
