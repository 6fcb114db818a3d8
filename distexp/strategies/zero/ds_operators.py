"""DeepSpeed's C++ operators: which ones a run needs, and ``python -m`` of this module, which compiles them.

DeepSpeed would compile them in the first worker that uses them. The compiler's memory would then be part of the run.
"""

import fcntl
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import IO, Any

import psutil

from distexp.config import Config
from distexp.strategies.zero.ds_config import get_nested, read_or_empty
from distexp.system.files import read_json, write_json

SHARED_MEMORY, CPU_ADAM, QUANTIZER = "deepspeed_shm_comm", "cpu_adam", "quantizer"
DEFAULT_OPERATORS = {"cpu": (SHARED_MEMORY,), "cuda": (CPU_ADAM,)}
"""Operators that runs with default settings need, by device; on GPUs only those with ``offload=true``."""

REPORT_PREFIX = "distexp:"
"""Start of the lines that this program prints for the process that started it."""

MODULE = "distexp.strategies.zero.ds_operators"


def needed_operators(config: Config) -> tuple[str, ...]:
    """Return the operators that a run compiles at its first use of them."""
    on_gpu = config.cluster.device == "cuda"
    settings = read_or_empty(config.deepspeed.config_file)
    needed = [] if on_gpu else [SHARED_MEMORY]
    if config.offload.enabled and config.deepspeed.cpu_optimizer == "deepspeed":
        needed.append(CPU_ADAM)
    if on_gpu and any(
        get_nested(settings, ("zero_optimization", key))
        for key in ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
    ):
        needed.append(QUANTIZER)
    return tuple(needed)


def main() -> None:
    """Compile the operators named on the command line, or raise RuntimeError; print a line for each step."""
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    names = sys.argv[1:]
    for position, name in enumerate(names):
        builder = ALL_OPS.get(name)
        if builder is None or not builder.is_compatible():
            _print("skipped", name)  # DeepSpeed does without it, or a worker reports why it cannot.
        else:
            operator = _load(builder, name, following=names[position + 1 :])
            _print("built", name, str(operator.__file__))


def _load(builder: Any, name: str, following: Sequence[str]) -> Any:
    from distexp.system.torch_internals.compilation import extension_build_dir

    folder = extension_build_dir(name)
    library = folder / f"{name}.so"
    with _locked(folder):
        remove_outdated(folder, library)
        existed = library.exists()
        if not existed:
            _print("compiling", name)
        try:
            loaded = builder.load(verbose=True)  # prints the lines of ninja
        except ImportError:
            if not existed:
                raise
            # PyTorch builds a library once in a process, so this program starts again.
            remove_build(folder)
            os.execv(sys.executable, [sys.executable, "-m", MODULE, name, *following])
        write_stamp(folder, library)
        return loaded


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the build of an operator against other commands of distexp.

    The kernel releases this lock if the process dies. So a mark that is found inside the lock belongs to a killed
    build, and so does PyTorch's own lock.
    """
    mark = folder / ".distexp_build"
    with (folder / ".distexp_lock").open("w") as lock:
        if _acquire(lock) and mark.exists():
            (folder / BATON).unlink(missing_ok=True)
        wait_for_baton(folder)
        mark.touch()
        try:
            yield
        finally:
            mark.unlink(missing_ok=True)


def _acquire(lock: IO[str]) -> bool:
    """Wait for a lock and return True; return False if the file system has no locks."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _print("waiting", "for", "another run")
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:
        return False
    return True


def _print(*parts: str) -> None:
    print(REPORT_PREFIX, *parts, flush=True)


BATON = "lock"
"""File with which PyTorch locks the build of an extension. A killed process leaves it, and all later builds wait."""

STAMP = ".distexp_built.json"
"""Versions for which the library was built, and its size."""

OWN_PREFIX = ".distexp"
"""Start of the names of files that PyTorch does not write."""

POLL_S = 0.2

LOCAL_FILE_SYSTEMS = frozenset({"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"})
"""File systems that no other machine writes to."""


def wait_for_baton(folder: Path) -> None:
    """Wait until no other program builds in a folder. Remove the lock of a program that was killed."""
    baton, reported = folder / BATON, False
    while baton.exists():
        if is_abandoned(baton):
            baton.unlink(missing_ok=True)
            return
        if not reported:
            _print("waiting", "for", f"another program that compiles (its lock: {baton})")
            reported = True
        time.sleep(POLL_S)


def is_abandoned(baton: Path) -> bool:
    """Return whether the process that created a lock has ended.

    PyTorch keeps the lock open. On a local file system, the processes of this user are asked. On a shared one, the
    process may be on another machine, so only a folder without changes for half an hour is abandoned. A process in
    another container is not seen.
    """
    try:
        found = baton.stat()
        if found.st_uid == os.getuid() and _is_local(baton):
            return (found.st_dev, found.st_ino) not in set(_open_files())
        files = [path for path in baton.parent.iterdir() if not path.name.startswith(OWN_PREFIX)]
        return time.time() - max(path.lstat().st_mtime for path in files) > 30 * 60
    except FileNotFoundError:  # A process has removed a file meanwhile.
        return False


def _is_local(path: Path) -> bool:
    resolved = path.resolve()
    mounts = [mount for mount in psutil.disk_partitions(all=True) if resolved.is_relative_to(mount.mountpoint)]
    # Of several file systems on one mount point, the last one is visible. max() returns the first of equal ones.
    mount = max(reversed(mounts), key=lambda mount: len(mount.mountpoint), default=None)
    return mount is not None and mount.fstype in LOCAL_FILE_SYSTEMS


def _open_files() -> Iterator[tuple[int, int]]:
    """Yield device and inode of the files that processes of this user have open."""
    for links in Path("/proc").glob("[0-9]*/fd"):
        with suppress(OSError):  # of another user, or ended
            for link in links.iterdir():
                with suppress(OSError):
                    found = link.stat()
                    yield found.st_dev, found.st_ino


def write_stamp(folder: Path, library: Path) -> None:
    """Write for which versions a library was built."""
    with suppress(OSError):  # Without a stamp, Ninja and the import decide whether the library can be used.
        write_json(folder / STAMP, _stamp(library))


def is_older_than_sources(library: Path) -> bool:
    """Return whether DeepSpeed was installed again after a build. Ninja compiles again then, also the same version."""
    try:
        sources = Path(str(distribution("deepspeed").locate_file("deepspeed/ops/csrc/cpu")))
        return library.stat().st_mtime < max((path.stat().st_mtime for path in sources.rglob("*.cpp")), default=0.0)
    except (OSError, PackageNotFoundError):
        return False


def remove_outdated(folder: Path, library: Path) -> None:
    """Remove the files of a build for other versions, and those of a library that is not as it was built.

    Ninja does not notice these, because the commands of the compiler are the same. What is older than its sources goes
    too, so that the new build is reported.
    """
    try:
        stamp = read_json(folder / STAMP)
    except (OSError, ValueError):  # built by another program
        return
    if not library.exists() or stamp != _stamp(library) or is_older_than_sources(library):
        remove_build(folder)


def remove_build(folder: Path) -> None:
    """Remove the files of a build. The locks stay."""
    for path in folder.iterdir():
        if path.is_file() and path.name != BATON and not path.name.startswith(OWN_PREFIX):
            path.unlink(missing_ok=True)
    (folder / STAMP).unlink(missing_ok=True)


def _stamp(library: Path) -> dict[str, Any]:
    """Return what a library must have been built for, and its size."""
    versions = {name: version(name) for name in ("torch", "deepspeed")}
    return {"python": platform.python_version(), **versions, "size": library.stat().st_size}


if __name__ == "__main__":
    main()
