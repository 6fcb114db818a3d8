"""Python, distexp itself, torch and the libraries."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
import sys
from contextlib import suppress
from dataclasses import dataclass

from distexp.config import ConfigError
from distexp.config.paths import conf_dir
from distexp.doctor.finding import Answer, Finding, ask, missing, ok, warning

IMPORT_TIMEOUT_S = 180.0  # a cold network file system is slow
LIBRARIES = ("torchvision", "transformers", "accelerate", "datasets", "deepspeed")
REINSTALL = "pip install --force-reinstall"


@dataclass(frozen=True)
class Torch:
    """What torch says of itself; everything else is unknown where it cannot be imported."""

    version: str | None = None
    cuda: str | None = None  # that it was built for
    usable: bool = False
    nccl: str | None = None
    architectures: tuple[str, ...] = ()
    capabilities: tuple[tuple[int, int], ...] = ()  # of the GPUs
    gpu_error: str | None = None  # what the first computation on a GPU said
    error: str | None = None  # why it cannot be imported


def check_python() -> Finding:
    """Its version, and whether it is one that distexp is made for."""
    found = f"{platform.python_version()} at {sys.executable}"
    if (3, 11) <= sys.version_info[:2] <= (3, 12):
        return ok("Python", found)
    return warning("Python", found, "distexp is made for Python 3.11 and 3.12: use one of them")


def check_conf() -> Finding:
    """Whether the YAML groups are found."""
    try:
        return ok("configuration", str(conf_dir()))
    except ConfigError as error:
        return missing("configuration", str(error), "install distexp again")


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


def probe_torch(timeout_s: float = IMPORT_TIMEOUT_S) -> Torch:
    """Imports torch in a process of its own, and computes on a GPU where there is one."""
    answer = ask([sys.executable, "-c", TORCH_PROBE], timeout_s)
    if answer.code is None:
        return Torch(error=f"importing it took longer than {timeout_s:g} s")
    if answer.code != 0:
        return Torch(error=f"importing it ended with code {answer.code}: {answer.last_words}")
    raw = json.loads(answer.output.splitlines()[-1])
    raw["architectures"] = tuple(raw["architectures"])
    raw["capabilities"] = tuple((major, minor) for major, minor in raw["capabilities"])
    return Torch(**raw)


def check_torch(torch: Torch, gpus: int) -> Finding:
    """Whether torch works, and with the GPUs that are here."""
    if torch.error is not None:
        return missing("torch", torch.error, f"install it again: {REINSTALL} torch")
    built = f"built for CUDA {torch.cuda}" if torch.cuda else "built without CUDA"
    found = f"{torch.version}, {built}, CUDA {'works' if torch.usable else 'cannot be used'}"
    if gpus and not torch.cuda:
        return warning("torch", found, "install a build with CUDA, or the GPUs stay idle")
    foreign = {f"sm_{major}{minor}" for major, minor in torch.capabilities if not supported(torch, major, minor)}
    if foreign:
        names = ", ".join(sorted(foreign))
        mend = f"this build knows {', '.join(torch.architectures)}: install one that was built for {names} too"
        return warning("torch", f"{found}, and it was not built for {names}", mend)
    if gpus and not torch.usable:
        why = f": {torch.gpu_error}" if torch.gpu_error else ""
        mend = "compare its CUDA with the driver's (nvidia-smi): update the driver or install an older build"
        return warning("torch", found + why, mend)
    return ok("torch", found)


def supported(torch: Torch, major: int, minor: int) -> bool:
    """Whether a GPU can run it: machine code within a major version, PTX (compute_) on everything later."""
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
    print(json.dumps([name, "begun"]), flush=True)
    try:
        importlib.import_module(name)
        failure = None
    except BaseException as error:
        failure = f"{type(error).__name__}: {error}"
    print(json.dumps([name, failure]), flush=True)
"""


def check_libraries(timeout_s: float = IMPORT_TIMEOUT_S) -> list[Finding]:
    """Imports the libraries that models, data and strategies come from."""
    versions: dict[str, str] = {}
    for name in LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    answer = ask([sys.executable, "-c", LIBRARY_PROBE, *versions], timeout_s)
    outcome = dict(json.loads(line) for line in answer.output.splitlines() if line.startswith('["'))
    return [_library(name, versions.get(name), outcome.get(name, "begun"), answer) for name in LIBRARIES]


def _library(name: str, version: str | None, outcome: str | None, answer: Answer) -> Finding:
    if version is None:
        return missing(name, "not installed", f"pip install {name}")
    if outcome is None:
        return ok(name, version)
    if outcome == "begun":
        how = "took too long" if answer.code is None else f"ended the process: {answer.last_words}"
        outcome = f"importing it {how}"
    mend = f"install it again: {REINSTALL} {name}"
    return warning(name, f"{version} cannot be imported: {' '.join(outcome.split())[:200]}", mend)
