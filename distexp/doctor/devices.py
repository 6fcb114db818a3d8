"""GPUs, and whether workers can talk to each other."""

from __future__ import annotations

import socket
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

from distexp.doctor.finding import Finding, ask, missing, ok, warning
from distexp.doctor.software import Torch
from distexp.system.hardware import visible_gpus

COLLECTIVE_TIMEOUT_S = 60.0


def check_gpus() -> Finding:
    """Name, memory, driver, and how much of it others use."""
    gpus = visible_gpus()
    if not gpus:
        mend = "to train on GPUs, start where nvidia-smi lists some and CUDA_VISIBLE_DEVICES hides none"
        return missing("GPUs", "none is visible: trainings run on the CPU", mend)
    import pynvml

    pynvml.nvmlInit()
    try:
        version = pynvml.nvmlSystemGetDriverVersion()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(gpu.index) for gpu in gpus]
        used = [pynvml.nvmlDeviceGetMemoryInfo(handle).used / 2**20 for handle in handles]
    except pynvml.NVMLError as error:
        return warning("GPUs", f"NVML lists {len(gpus)}, and says: {error}", "ask for another node")
    finally:
        pynvml.nvmlShutdown()
    driver = version.decode() if isinstance(version, bytes) else version
    names = ", ".join(dict.fromkeys(f"{gpu.name} {gpu.total_mib:,.0f} MiB" for gpu in gpus))
    found = f"{len(gpus)} x {names}, driver {driver}"
    # A driver keeps several hundred MiB for itself; a training takes gigabytes.
    busy = [f"GPU {gpu.index} {mib:,.0f} MiB" for gpu, mib in zip(gpus, used, strict=True) if mib > 2048]
    if busy:
        mend = "end what runs there, or leave them out with CUDA_VISIBLE_DEVICES: figures would not be yours"
        return warning("GPUs", f"{found}; in use: {', '.join(busy)}", mend)
    return ok("GPUs", f"{found}, free")


def check_port() -> Finding:
    """Whether workers can meet on the loopback device."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                return ok("loopback port", f"127.0.0.1:{port} can be bound and reached")
    except OSError as error:
        mend = "bring the device up (ip link set lo up), or lift the sandbox or firewall that forbids it"
        return missing("loopback port", f"127.0.0.1 cannot be used: {error}", mend)


COLLECTIVE_PROBE = """
import sys, torch, torch.distributed as dist
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
"""


def check_collective(backend: str, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> Finding:
    """Adds up a tensor between two processes, by gloo on the CPU or by nccl on two GPUs."""
    name, start = f"{backend} all-reduce", time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        address = f"file://{folder}/store"
        with ThreadPoolExecutor(2) as pool:
            command = [sys.executable, "-c", COLLECTIVE_PROBE, backend]
            ranks = [pool.submit(ask, [*command, str(rank), address], timeout_s) for rank in range(2)]
            answers = [rank.result() for rank in ranks]
    seconds = time.monotonic() - start
    failed = next((answer for answer in answers if answer.code not in (0, None)), None)
    mend = {
        "gloo": "see that this host's name resolves (getent hosts $(hostname)), or set GLOO_SOCKET_IFNAME=lo",
        "nccl": "set NCCL_DEBUG=INFO to see why; with NCCL_P2P_DISABLE=1 the links between GPUs are not used",
    }[backend]
    if failed is not None:
        return missing(name, f"two processes failed: {failed.last_words[:200]}", mend)
    if any(answer.code is None for answer in answers):
        return missing(name, f"two processes did not answer within {timeout_s:g} s", mend)
    return ok(name, f"works between two processes ({seconds:.1f} s with start-up)")


def check_nccl(torch: Torch, gpus: int) -> Finding:
    """The version that torch brings along."""
    if torch.nccl is not None:
        return ok("NCCL", f"{torch.nccl}, torch's own")
    mend = "install a torch with CUDA and NCCL" if gpus else "nothing to do: without GPUs, gloo is used"
    return missing("NCCL", "torch has none", mend)
