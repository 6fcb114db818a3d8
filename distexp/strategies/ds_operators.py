"""DeepSpeed's C++ operators: which ones a run needs, and a program that compiles them.

``python -m distexp.strategies.ds_operators NAME...`` compiles operators in PyTorch's cache of extensions. DeepSpeed
would compile them in the first worker that uses them. The compiler's memory would then be part of the run.
"""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NoReturn

from distexp.config import Config
from distexp.strategies.ds_build_folder import BATON, remove_build, remove_outdated, wait_for_baton, write_stamp
from distexp.strategies.ds_config_file import get_nested, read_or_empty

SHARED_MEMORY, CPU_ADAM, QUANTIZER = "deepspeed_shm_comm", "cpu_adam", "quantizer"
QUANTIZED = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")

DEFAULT_OPERATORS = {"cpu": (SHARED_MEMORY,), "cuda": (CPU_ADAM,)}
"""Operators that runs with default settings need, by device; on GPUs only those with ``offload=true``."""

REPORT_PREFIX = "distexp:"
"""Start of the lines that this program prints for the process that started it."""

NINJA_FILE = "build.ninja"
"""File with the compiler's commands. It has the paths of the installed DeepSpeed."""

MODULE = "distexp.strategies.ds_operators"


def needed_operators(config: Config) -> tuple[str, ...]:
    """Return the operators that a run compiles at its first use of them."""
    on_gpu = config.cluster.device == "cuda"
    settings = read_or_empty(config.deepspeed.config_file)
    needed = [] if on_gpu else [SHARED_MEMORY]
    if config.offload.enabled and config.deepspeed.cpu_optimizer == "deepspeed":
        needed.append(CPU_ADAM)
    if on_gpu and any(get_nested(settings, ("zero_optimization", key)) for key in QUANTIZED):
        needed.append(QUANTIZER)
    return tuple(needed)


def main() -> None:
    """Compile the operators named on the command line; print a line for each step.

    Raises:
        RuntimeError: if an operator cannot be compiled.
    """
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
    """Build an operator, and import it.

    Args:
        builder: its builder.
        name: its name.
        following: names of the operators that are built after it.
    """
    from distexp.system.torch_internals.compilation import extension_build_dir

    folder = extension_build_dir(name)
    library = folder / f"{name}.so"
    with _locked(folder):
        remove_outdated(folder, library)
        existed = library.exists()
        if not existed or _built_elsewhere(folder):
            _print("compiling", name)
        try:
            loaded = builder.load(verbose=True)  # prints the lines of ninja
        except ImportError:
            if not existed:
                raise
            _build_again(folder, (name, *following))
        write_stamp(folder, library)
        return loaded


def _build_again(folder: Path, names: Sequence[str]) -> NoReturn:
    """Remove a library that cannot be imported, and start this program again: PyTorch builds once in a process."""
    remove_build(folder)
    os.execv(sys.executable, [sys.executable, "-m", MODULE, *names])


def _built_elsewhere(folder: Path) -> bool:
    """Return whether another environment built last: then Ninja compiles again."""
    import deepspeed

    plan = folder / NINJA_FILE
    return plan.exists() and str(Path(deepspeed.__file__).parent) not in plan.read_text()


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
        wait_for_baton(folder, _report_baton)
        mark.touch()
        try:
            yield
        finally:
            mark.unlink(missing_ok=True)


def _report_baton(baton: Path) -> None:
    _print("waiting", "for", f"another program that compiles (its lock: {baton})")


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
    """Print a line for the process that started this program."""
    print(REPORT_PREFIX, *parts, flush=True)


if __name__ == "__main__":
    main()
