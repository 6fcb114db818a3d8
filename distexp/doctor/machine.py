"""Memory, cores, disks, limits and caches."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from distexp.data.cache import cache_dir
from distexp.doctor.finding import GIB, Finding, missing, ok, warning
from distexp.system.hardware import cpu_count

LEAST_SHM, LEAST_DISK, LEAST_RAM, LEAST_FILES = 1 * GIB, 10 * GIB, 4 * GIB, 4096


def check_shm(path: str = "/dev/shm") -> Finding:
    """Shared memory, which loader processes and NCCL pass data through."""
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return missing(path, "there is none", "set dataset.num_workers=0 and NCCL_SHM_DISABLE=1")
    found = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free"
    if usage.free < LEAST_SHM:
        mend = "give a container more (docker run --shm-size=8g), or set dataset.num_workers=0"
        return warning(path, found, mend)
    return ok(path, found)


def check_memory() -> Finding:
    """Main memory, the share that a control group grants, and cores."""
    import psutil

    memory, limit = psutil.virtual_memory(), memory_limit()
    total = min(memory.total, limit or memory.total)
    available = min(memory.available, total)
    granted = " (by control group)" if total < memory.total else ""
    found = f"{available / GIB:.1f} of {total / GIB:.1f} GiB free{granted}, {cpu_count()} cores"
    if available < LEAST_RAM:
        mend = "only tiny models fit: end other programs or ask for more"
        return warning("RAM and cores", found, mend)
    return ok("RAM and cores", found)


def memory_limit() -> int | None:
    """Bytes that the control group of this process may use; None: unlimited."""
    limits = []
    with suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        own = next((line[3:] for line in lines if line.startswith("0::")), "/")
        folder = Path("/sys/fs/cgroup") / own.lstrip("/")
        for each in (folder, *folder.parents):
            with suppress(OSError, ValueError):
                limits.append(int((each / "memory.max").read_text()))
    with suppress(OSError, ValueError):
        limits.append(int(Path("/sys/fs/cgroup/memory/memory.limit_in_bytes").read_text()))
    return min(limits, default=None)


def check_disk(path: Path | None = None) -> Finding:
    """Room for runs in the current folder."""
    folder = path or Path.cwd()
    error = write_error(folder)
    if error:
        mend = "start elsewhere, or set hydra.sweep.dir to a folder that can be written"
        return missing("disk here", f"{folder} cannot be written: {error}", mend)
    usage = shutil.disk_usage(folder)
    found = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free in {folder}"
    if usage.free < LEAST_DISK:
        return warning("disk here", found, "make room, or set hydra.sweep.dir to a larger disk")
    return ok("disk here", found)


def check_limits(gpus: int) -> Finding:
    """Open files, and memory that may be locked."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    memlock = "unlimited" if locked == resource.RLIM_INFINITY else f"{locked / 2**20:,.0f} MiB"
    found = f"{files:,} open files, {memlock} of locked memory"
    if 0 <= files < LEAST_FILES:
        mend = f"raise the first (ulimit -n {LEAST_FILES}): loaders open many"
        return warning("ulimits", found, mend)
    if gpus and memlock != "unlimited":
        mend = "raise the second (ulimit -l unlimited) for InfiniBand; offload=pinned may need it as well"
        return warning("ulimits", found, mend)
    return ok("ulimits", found)


def check_hub_cache(scan_s: float = 2.0) -> Finding:
    """Where Hugging Face keeps models and data: writable, how full, and whether it may download."""
    folder = hub_cache()
    offline = [name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
               if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")]  # fmt: skip
    error = write_error(folder)
    if error:
        mend = "set HF_HOME to a folder that can be written; the generated samples need no download"
        return warning("Hugging Face cache", f"{folder} cannot be written: {error}", mend)
    size, whole = folder_size(folder, scan_s)
    found = f"{folder}, {'' if whole else 'more than '}{size / GIB:.1f} GiB"
    if offline:
        mend = f"what is not in the cache will not be found: unset {' '.join(offline)} to download"
        return warning("Hugging Face cache", f"{found}, offline by {', '.join(offline)}", mend)
    return ok("Hugging Face cache", found)


def hub_cache() -> Path:
    """As huggingface_hub decides it, without importing it."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{base}/huggingface"
    folder = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or f"{home}/hub"
    return Path(os.path.expandvars(folder)).expanduser().absolute()


def folder_size(folder: Path, limit_s: float) -> tuple[int, bool]:
    """Bytes of the files below a folder, and whether all were counted before the time was up."""
    total, deadline = 0, time.monotonic() + limit_s
    for where, _, names in os.walk(folder):
        if time.monotonic() > deadline:
            return total, False
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(where, name)).st_size
    return total, True


def check_own_cache() -> Finding:
    """Where generated samples and tokenised texts are kept."""
    folder = cache_dir()
    error = write_error(folder)
    if error:
        mend = "set DISTEXP_CACHE to a folder that can be written"
        return missing("distexp cache", f"{folder} cannot be written: {error}", mend)
    return ok("distexp cache", str(folder))


def write_error(folder: Path) -> str | None:
    """Why a file cannot be written in a folder; of one that does not exist yet, in what it will lie in."""
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"0" * 4096)
    except OSError as error:
        return error.strerror or str(error)
    return None
