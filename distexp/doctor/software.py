"""Checks of Python, distexp's configuration files, torch and the libraries."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import cache_from_source, find_spec
from pathlib import Path

from distexp.config import ConfigError
from distexp.config.paths import conf_dir
from distexp.doctor.check_result import CheckResult, missing, ok, warning
from distexp.doctor.commands import CommandResult, run_command

IMPORT_TIMEOUT_S = 180.0  # a cold network file system is slow
SLOW_IMPORTS = ("torch", "transformers", "deepspeed")
LIBRARIES = ("torchvision", "transformers", "accelerate", "datasets", "deepspeed")
REINSTALL = "pip install --force-reinstall"


@dataclass(frozen=True)
class TorchInfo:
    """Properties of the installed torch; without values if it cannot be imported."""

    version: str | None = None
    cuda: str | None = None  # the version that it was built for
    usable: bool = False  # on a GPU
    nccl: str | None = None
    architectures: tuple[str, ...] = ()  # that it was built for, such as sm_90
    capabilities: tuple[tuple[int, int], ...] = ()  # of the GPUs
    gpu_error: str | None = None  # of the first computation on a GPU
    import_error: str | None = None


def check_python() -> CheckResult:
    """Check that distexp supports this version of Python."""
    found = f"{platform.python_version()} at {sys.executable}"
    if (3, 11) <= sys.version_info[:2] <= (3, 12):
        return ok("Python", found)
    return warning("Python", found, "distexp supports Python 3.11 and 3.12: use one of them")


def check_bytecode() -> CheckResult:
    """Check that each start of a run can use Python files that were compiled before."""
    name, variable = "Python bytecode", "PYTHONDONTWRITEBYTECODE"
    if not os.environ.get(variable):
        return ok(name, "kept between starts")
    if lacking := [package for package in SLOW_IMPORTS if not _is_compiled(package)]:
        found = f"{variable} is set, and {', '.join(lacking)} {'is' if len(lacking) == 1 else 'are'} not compiled"
        return warning(name, found, f"unset {variable}: else each start compiles thousands of files again")
    return ok(name, f"{variable} is set, but the libraries are compiled")


def _is_compiled(package: str) -> bool:
    """Return whether Python has a compiled file of a package; also if the package is not installed."""
    spec = find_spec(package)
    return spec is None or spec.origin is None or Path(cache_from_source(spec.origin)).exists()


def check_conf() -> CheckResult:
    """Check that the config groups are installed."""
    try:
        return ok("configuration", str(conf_dir()))
    except ConfigError as error:
        return missing("configuration", str(error), "reinstall distexp")


TORCH_PROBE = """
import json, torch
usable = torch.cuda.is_available()
count = torch.cuda.device_count() if usable else 0
nccl = torch.cuda.nccl.version() if torch.version.cuda and torch.distributed.is_nccl_available() else None
gpu_error = None
if usable:
    try:
        torch.ones(8, device="cuda").sum().item()
    except RuntimeError as error:
        usable, gpu_error = False, str(error).splitlines()[0]
print(json.dumps(dict(
    version=torch.__version__, cuda=torch.version.cuda, usable=usable, gpu_error=gpu_error,
    nccl=".".join(map(str, nccl)) if nccl else None, architectures=torch.cuda.get_arch_list(),
    capabilities=[torch.cuda.get_device_capability(i) for i in range(count)],
)))
"""


def probe_torch(timeout_s: float = IMPORT_TIMEOUT_S) -> TorchInfo:
    """Import torch in a subprocess, and compute on a GPU if it finds one."""
    result = run_command([sys.executable, "-c", TORCH_PROBE], timeout_s)
    if result.code is None:
        return TorchInfo(import_error=f"the import took longer than {timeout_s:g} s")
    if result.code != 0:
        return TorchInfo(import_error=f"the import ended with exit code {result.code}: {result.error_line}")
    raw = json.loads(result.output.splitlines()[-1])
    raw["architectures"] = tuple(raw["architectures"])
    raw["capabilities"] = tuple((major, minor) for major, minor in raw["capabilities"])
    return TorchInfo(**raw)


def check_torch(torch: TorchInfo, gpus: int) -> CheckResult:
    """Check that torch can be imported and can use the GPUs of this machine."""
    if torch.import_error is not None:
        return missing("torch", torch.import_error, f"reinstall it: {REINSTALL} torch")
    build = f"built for CUDA {torch.cuda}" if torch.cuda else "built without CUDA"
    found = f"{torch.version}, {build}, CUDA {'works' if torch.usable else 'cannot be used'}"
    if gpus and not torch.cuda:
        return warning("torch", found, "install a build with CUDA: this one cannot use the GPUs")
    unsupported = {f"sm_{major}{minor}" for major, minor in torch.capabilities if not supports_gpu(torch, major, minor)}
    if unsupported:
        names = ", ".join(sorted(unsupported))
        hint = f"this build supports {', '.join(torch.architectures)}: install one that also supports {names}"
        return warning("torch", f"{found}, not built for {names}", hint)
    if gpus and not torch.usable:
        reason = f": {torch.gpu_error}" if torch.gpu_error else ""
        hint = "compare its CUDA version with the driver's (nvidia-smi): update the driver, or install an older build"
        return warning("torch", found + reason, hint)
    return ok("torch", found)


def supports_gpu(torch: TorchInfo, major: int, minor: int) -> bool:
    """Return whether a build of torch runs on a GPU with a compute capability.

    Machine code (``sm_``) runs on later GPUs of the same major version, PTX (``compute_``) on all later GPUs.
    """
    for architecture in torch.architectures:
        match = re.match(r"(sm|compute)_(\d+)(\d)", architecture)
        if match is None:
            continue
        kind, version = match[1], (int(match[2]), int(match[3]))
        if version <= (major, minor) and (kind == "compute" or version[0] == major):
            return True
    return False


LIBRARY_PROBE = """
import importlib, json, sys, traceback
for name in sys.argv[1:]:
    print(json.dumps([name, "started"]), flush=True)
    try:
        importlib.import_module(name)
        error = None
    except BaseException as caught:
        error = f"{type(caught).__name__}: {caught}"
    print(json.dumps([name, error]), flush=True)
"""


def check_libraries(timeout_s: float = IMPORT_TIMEOUT_S) -> list[CheckResult]:
    """Check that the libraries for models, data and strategies can be imported."""
    versions: dict[str, str] = {}
    for name in LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    result = run_command([sys.executable, "-c", LIBRARY_PROBE, *versions], timeout_s)
    states = dict(json.loads(line) for line in result.output.splitlines() if line.startswith('["'))
    return [_check_library(name, versions.get(name), states.get(name, "started"), result) for name in LIBRARIES]


def _check_library(name: str, version: str | None, state: str | None, result: CommandResult) -> CheckResult:
    """Return the result for one library; ``state`` is "started", an error, or None after a successful import."""
    if version is None:
        return missing(name, "not installed", f"pip install {name}")
    if state is None:
        return ok(name, version)
    if state == "started":
        state = "the import took too long" if result.code is None else f"the process ended: {result.error_line}"
    hint = f"reinstall it: {REINSTALL} {name}"
    return warning(name, f"{version} cannot be imported: {' '.join(state.split())[:200]}", hint)
