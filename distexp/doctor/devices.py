"""Checks of GPUs, NCCL and the communication between processes."""

from __future__ import annotations

import socket
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

from distexp.doctor.check_result import CheckResult, missing, ok, warning
from distexp.doctor.commands import run_command
from distexp.doctor.software import TorchInfo
from distexp.system.hardware import Gpu, visible_gpus
from distexp.system.nvml import BUSY_MIB, as_text, nvml_session
from distexp.system.units import MIB

COLLECTIVE_TIMEOUT_S = 60.0

COLLECTIVE_HINTS = {
    "gloo": "check that the host name resolves (getent hosts $(hostname)), or set GLOO_SOCKET_IFNAME=lo",
    "nccl": "set NCCL_DEBUG=INFO to see the reason; try NCCL_P2P_DISABLE=1, which avoids direct GPU-to-GPU links",
}


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
    found = f"{_describe(gpus)}, driver {driver}"
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


def _describe(gpus: tuple[Gpu, ...]) -> str:
    names = ", ".join(dict.fromkeys(f"{gpu.name} {gpu.total_mib:,.0f} MiB" for gpu in gpus))
    return f"{len(gpus)} x {names}"


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


def check_collective(backend: str, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> CheckResult:
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
