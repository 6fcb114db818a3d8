"""Checks of Python, configuration files, torch, libraries, compilers, Slurm, GPUs and communication."""

import importlib.metadata
import json
import os
import platform
import re
import shutil
import socket
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import cache_from_source, find_spec
from pathlib import Path

from distexp.config import ConfigError
from distexp.config.keys import conf_dir
from distexp.doctor.machine import TOOL_TIMEOUT_S, CheckResult, CommandResult, missing, ok, run_command, warning
from distexp.system.cgroups import BUSY_MIB, as_text, nvml_session, visible_gpus
from distexp.system.units import MIB

IMPORT_TIMEOUT_S = 180.0  # a cold network file system is slow
SLOW_IMPORTS = ("torch", "transformers", "deepspeed")
LIBRARIES = ("torchvision", "transformers", "accelerate", "datasets", "deepspeed")
REINSTALL = "pip install --force-reinstall"
COLLECTIVE_HINTS = {
    "gloo": "check that the host name resolves (getent hosts $(hostname)), or set GLOO_SOCKET_IFNAME=lo",
    "nccl": "set NCCL_DEBUG=INFO to see the reason; try NCCL_P2P_DISABLE=1, which avoids direct GPU-to-GPU links",
}


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


def check_compiler() -> CheckResult:
    """Check the C++ compiler, which DeepSpeed needs for its CPU Adam."""
    compiler = os.environ.get("CXX") or "c++"
    path = shutil.which(compiler) or shutil.which("g++")
    if path is None:
        hint = "install g++ (or module load gcc), or set deepspeed.cpu_optimizer=torch"
        return missing("C++ compiler", f"neither {compiler} nor g++ is on PATH", hint)
    result = run_command([path, "--version"], TOOL_TIMEOUT_S)
    if result.code != 0:
        hint = "reinstall g++, or set deepspeed.cpu_optimizer=torch"
        return warning("C++ compiler", f"{path} does not run: {result.error_line}", hint)
    return ok("C++ compiler", result.output.splitlines()[0])


def check_ninja() -> CheckResult:
    """Check ninja, which builds torch extensions and must be on PATH."""
    path = shutil.which("ninja")
    if path is not None:
        result = run_command([path, "--version"], TOOL_TIMEOUT_S)
        if result.code == 0:
            return ok("ninja", f"{result.output.strip()} at {path}")
    scripts = Path(sysconfig.get_path("scripts"))
    if path is None and (scripts / "ninja").exists():
        return warning("ninja", f"{scripts}/ninja is not on PATH", f'export PATH="{scripts}:$PATH"')
    return missing("ninja", f"{path} does not run" if path else "not on PATH", "pip install ninja")


def check_toolkit(torch: TorchInfo, gpus: int) -> CheckResult:
    """Check the CUDA toolkit for DeepSpeed's GPU kernels; torch must have the same major version of CUDA."""
    home = os.environ.get("CUDA_HOME")
    path = shutil.which("nvcc", path=f"{home}/bin") if home else shutil.which("nvcc")
    if path is None:
        where = f"CUDA_HOME={home} has no bin/nvcc" if home else "nvcc is not on PATH"
        hint = (
            "load a CUDA module or set CUDA_HOME, if DeepSpeed has to compile GPU kernels"
            if gpus else "nothing to do without GPUs"
        )  # fmt: skip
        return missing("CUDA toolkit", where, hint)
    result = run_command([path, "--version"], TOOL_TIMEOUT_S)
    match = re.search(r"release (\d+)\.(\d+)", result.output)
    if match is None:
        return warning("CUDA toolkit", f"{path} does not run: {result.error_line}", "reinstall it")
    found = f"{match[1]}.{match[2]} at {path}"
    if torch.cuda and torch.cuda.split(".")[0] != match[1]:
        hint = f"DeepSpeed refuses to compile with it: load the toolkit of CUDA {torch.cuda}"
        return warning("CUDA toolkit", f"{found}, torch was built for {torch.cuda}", hint)
    letters = [letter for letter in re.split(r"[ ;,]+", os.environ.get("TORCH_CUDA_ARCH_LIST", ""))
               if re.fullmatch(r"\d+\.\d+[a-z]+(\+PTX)?", letter)]  # fmt: skip
    if letters:
        plain = re.sub(r"(\.\d+)[a-z]+", r"\1", os.environ["TORCH_CUDA_ARCH_LIST"])
        hint = f'DeepSpeed cannot parse the letter suffix: export TORCH_CUDA_ARCH_LIST="{plain}"'
        return warning("CUDA toolkit", f"{found}, TORCH_CUDA_ARCH_LIST has {', '.join(letters)}", hint)
    return ok("CUDA toolkit", found)


def check_slurm(timeout_s: float = TOOL_TIMEOUT_S) -> CheckResult:
    """Check that the commands of Slurm exist and the controller responds."""
    absent = [tool for tool in ("sbatch", "sinfo", "squeue") if shutil.which(tool) is None]
    if absent:
        hint = "for cluster=slurm, use a login node of the cluster; cluster=local does not need Slurm"
        return missing("Slurm", f"{', '.join(absent)} not on PATH", hint)
    result = run_command(["sinfo", "--noheader", "--format=%P %D %t %G"], timeout_s)
    if result.code is None:
        hint = "the controller may be down or overloaded: run sinfo manually, or contact the administrators"
        return warning("Slurm", f"sinfo did not respond within {timeout_s:g} s", hint)
    if result.code != 0:
        hint = "check that this host is part of the cluster and munge is running"
        return warning("Slurm", f"sinfo failed: {result.error_line[:200]}", hint)
    partitions = list(dict.fromkeys(line.split()[0] for line in result.output.splitlines() if line.strip()))
    version = run_command(["sinfo", "--version"], timeout_s).output.strip() or "of unknown version"
    if not partitions:
        return warning("Slurm", f"{version}, no partition", "ask the administrators for access to a partition")
    return ok("Slurm", f"{version}, partitions {', '.join(partitions[:8])}")


def check_gpus() -> CheckResult:
    """Check that GPUs are visible and that no other process uses their memory."""
    gpus = visible_gpus()
    if not gpus:
        hint = "to train on GPUs, use a machine where nvidia-smi lists them, and check CUDA_VISIBLE_DEVICES"
        return missing("GPUs", "none visible: runs use the CPU", hint)
    try:
        driver, used_mib = _driver_and_used_mib([gpu.index for gpu in gpus])
    except RuntimeError as error:
        return warning("GPUs", f"{len(gpus)} found, but NVML reports: {error}", "use another node")
    names = ", ".join(dict.fromkeys(f"{gpu.name} {gpu.total_mib:,.0f} MiB" for gpu in gpus))
    found = f"{len(gpus)} x {names}, driver {driver}"
    busy = [f"GPU {gpu.index} {mib:,.0f} MiB" for gpu, mib in zip(gpus, used_mib, strict=True) if mib > BUSY_MIB]
    if busy:
        hint = (
            "other processes on these GPUs distort measurements: stop them, or exclude the GPUs "
            "with CUDA_VISIBLE_DEVICES"
        )
        return warning("GPUs", f"{found}; in use: {', '.join(busy)}", hint)
    return ok("GPUs", f"{found}, free")


def _driver_and_used_mib(indices: list[int]) -> tuple[str, list[float]]:
    """Return the driver version and the used memory of each GPU; raise RuntimeError if NVML fails."""
    with nvml_session() as nvml:
        try:
            handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in indices]
            used = [nvml.nvmlDeviceGetMemoryInfo(handle).used / MIB for handle in handles]
            return as_text(nvml.nvmlSystemGetDriverVersion()), used
        except nvml.NVMLError as error:
            raise RuntimeError(str(error)) from error


def check_port() -> CheckResult:
    """Check that processes can connect over the loopback device."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                return ok("loopback port", f"connected to 127.0.0.1:{port}")
    except OSError as error:
        hint = "enable the loopback device (ip link set lo up), or allow 127.0.0.1 in the sandbox or firewall"
        return missing("loopback port", f"127.0.0.1 cannot be used: {error}", hint)


COLLECTIVE_PROBE = """
import os, sys, torch, torch.distributed as dist
from datetime import timedelta
backend, rank, address = sys.argv[1], int(sys.argv[2]), sys.argv[3]
device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
if backend == "nccl":
    torch.cuda.set_device(device)
dist.init_process_group(backend, init_method=address, rank=rank, world_size=2, timeout=timedelta(seconds=60))
value = torch.full((1024,), rank + 1.0, device=device)
dist.all_reduce(value)
assert value.sum().item() == 3 * 1024, value
dist.destroy_process_group()
os._exit(0)  # threads of gloo may abort an orderly exit
"""


def check_collective(backend: str, timeout_s: float = 60.0) -> CheckResult:
    """Check an all-reduce between two processes, with gloo on the CPU or NCCL on two GPUs."""
    name, start, hint = f"{backend} all-reduce", time.monotonic(), COLLECTIVE_HINTS[backend]
    with tempfile.TemporaryDirectory() as folder:
        address = f"file://{folder}/store"
        with ThreadPoolExecutor(2) as pool:
            command = [sys.executable, "-c", COLLECTIVE_PROBE, backend]
            ranks = [pool.submit(run_command, [*command, str(rank), address], timeout_s) for rank in range(2)]
            results = [rank.result() for rank in ranks]
    seconds = time.monotonic() - start
    failed = next((result for result in results if result.code not in (0, None)), None)
    if failed is not None:
        return missing(name, f"two processes failed: {failed.error_line[:200]}", hint)
    if any(result.code is None for result in results):
        return missing(name, f"two processes did not finish within {timeout_s:g} s", hint)
    return ok(name, f"works between two processes ({seconds:.1f} s including start-up)")


def check_nccl(torch: TorchInfo, gpus: int) -> CheckResult:
    """Check that torch has NCCL."""
    if torch.nccl is not None:
        return ok("NCCL", f"{torch.nccl}, included in torch")
    hint = "install a torch build with CUDA and NCCL" if gpus else "nothing to do: without GPUs, gloo is used"
    return missing("NCCL", "torch was built without it", hint)
