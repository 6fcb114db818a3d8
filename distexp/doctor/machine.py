"""Checks of memory, cores, disks, limits and caches; the result of a check, and commands that may hang."""

import os
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from distexp.config import ConfigError
from distexp.system.cache_dir import cache_dir
from distexp.system.cgroups import cpu_count, usable_memory
from distexp.system.units import GIB, MIB

MIN_SHM, MIN_DISK, MIN_RAM, MIN_OPEN_FILES = 1 * GIB, 10 * GIB, 4 * GIB, 4096
TOOL_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class CheckResult:
    """Result of one check; ``hint`` is set unless the state is ok."""

    name: str
    state: str  # ok, warning, missing
    found: str
    hint: str | None = None


def ok(name: str, found: str) -> CheckResult:
    """Return the result of a check that passed."""
    return CheckResult(name, "ok", found)


def warning(name: str, found: str, hint: str) -> CheckResult:
    """Return the result of a check that passed in part."""
    return CheckResult(name, "warning", found, hint)


def missing(name: str, found: str, hint: str) -> CheckResult:
    """Return the result of a check that failed."""
    return CheckResult(name, "missing", found, hint)


def check_shm(path: str = "/dev/shm") -> CheckResult:
    """Check the shared memory, which loader processes and NCCL use to exchange data."""
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return missing(path, "does not exist", "set dataset.num_workers=0 and NCCL_SHM_DISABLE=1")
    found = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free"
    if usage.free < MIN_SHM:
        hint = "give the container more (docker run --shm-size=8g), or set dataset.num_workers=0"
        return warning(path, found, hint)
    return ok(path, found)


def check_memory() -> CheckResult:
    """Check the free memory, within the limit of the cgroup, and report the cores."""
    import psutil

    memory, total = psutil.virtual_memory(), usable_memory()
    available = min(memory.available, total)
    limited = " (cgroup limit)" if total < memory.total else ""
    found = f"{available / GIB:.1f} of {total / GIB:.1f} GiB free{limited}, {cpu_count()} cores"
    if available < MIN_RAM:
        return warning("RAM and cores", found, "only tiny models fit: stop other programs, or request more memory")
    return ok("RAM and cores", found)


def check_disk(path: Path | None = None) -> CheckResult:
    """Check that runs can be written to a folder, by default the current one."""
    folder = path or Path.cwd()
    error = write_error(folder)
    if error:
        hint = "start in another folder, or set hydra.sweep.dir to a writable folder"
        return missing("current folder", f"cannot write to {folder}: {error}", hint)
    usage = shutil.disk_usage(folder)
    found = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free in {folder}"
    if usage.free < MIN_DISK:
        return warning("current folder", found, "free some space, or set hydra.sweep.dir to a larger disk")
    return ok("current folder", found)


def check_limits(gpus: int) -> CheckResult:
    """Check the limits on open files and locked memory."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    memlock = "unlimited" if locked == resource.RLIM_INFINITY else f"{locked / MIB:,.0f} MiB"
    found = f"{files:,} open files, {memlock} locked memory"
    if 0 <= files < MIN_OPEN_FILES:
        hint = f"allow more open files (ulimit -n {MIN_OPEN_FILES}), which data loaders need"
        return warning("ulimits", found, hint)
    if gpus and memlock != "unlimited":
        hint = "allow more locked memory (ulimit -l unlimited): InfiniBand needs it, and offload=pinned may need it"
        return warning("ulimits", found, hint)
    return ok("ulimits", found)


def check_hub_cache(scan_s: float = 2.0) -> CheckResult:
    """Check that the Hugging Face cache is writable and downloads are enabled, and report its size."""
    folder = hub_cache()
    offline = [name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
               if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")]  # fmt: skip
    error = write_error(folder)
    if error:
        hint = "set HF_HOME to a writable folder; the generated sample data needs no download"
        return warning("Hugging Face cache", f"cannot write to {folder}: {error}", hint)
    size, complete = folder_size(folder, scan_s)
    found = f"{folder}, {'' if complete else 'more than '}{size / GIB:.1f} GiB"
    if offline:
        hint = f"only cached models and data can be used: unset {' '.join(offline)} to allow downloads"
        return warning("Hugging Face cache", f"{found}, offline because of {', '.join(offline)}", hint)
    return ok("Hugging Face cache", found)


def hub_cache() -> Path:
    """Return the cache folder that huggingface_hub uses, without importing it."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{base}/huggingface"
    folder = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or f"{home}/hub"
    return Path(os.path.expandvars(folder)).expanduser().absolute()


def folder_size(folder: Path, limit_s: float) -> tuple[int, bool]:
    """Return the bytes of all files below a folder, and whether the count finished within the time limit."""
    total, deadline = 0, time.monotonic() + limit_s
    for where, _, names in os.walk(folder):
        if time.monotonic() > deadline:
            return total, False
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(where, name)).st_size
    return total, True


def check_distexp_cache() -> CheckResult:
    """Check that the cache of generated samples and tokenized texts is writable."""
    hint = "set DISTEXP_CACHE to a writable folder"
    try:
        folder = cache_dir()
    except ConfigError:
        return missing("distexp cache", "this user has no home directory", hint)
    error = write_error(folder)
    if error:
        return missing("distexp cache", f"cannot write to {folder}: {error}", hint)
    return ok("distexp cache", str(folder))


def write_error(folder: Path) -> str | None:
    """Return why a file cannot be written in a folder, or None. If it does not exist, try its nearest parent."""
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"0" * 4096)
    except OSError as error:
        return error.strerror or str(error)
    return None


@dataclass(frozen=True)
class CommandResult:
    """Exit code and output of a command."""

    code: int | None  # None: timeout, or the command could not be started
    output: str
    errors: str

    @property
    def error_line(self) -> str:
        """Return the last line of stderr, or of stdout if stderr is empty: the likely reason of a failure."""
        lines = [line.strip() for line in (self.errors or self.output).splitlines() if line.strip()]
        return lines[-1] if lines else "no output"


def run_command(command: Sequence[str], timeout_s: float) -> CommandResult:
    """Run a command, then kill everything it started; never raise."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, start_new_session=True
            )
        except OSError as error:
            return CommandResult(None, "", str(error))
        try:
            code: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        errors.seek(0)
        return CommandResult(code, output.read(), errors.read())
