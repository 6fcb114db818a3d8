"""Processes that a command starts as ``python -m MODULE``, as forks of one that has imported torch and transformers.

Imports take most of the time of a short run. A fork imports distexp again, has the environment, the open files and the
parent of a new interpreter, and runs nothing of the command.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from distexp.launch.node_setup import EXTENSIONS_DIR
from distexp.system.cgroups import visible_gpus

FORKED = frozenset(
    {"distexp.worker.shared_start", "distexp.launch.agent", "distexp.plan.trace.server", "distexp.verify.workers"}
)
"""Modules that are started so."""

LIBRARIES = (
    *("torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch.utils.flop_counter"),
    *("torch.distributed.tensor.parallel", "torch.nn.attention.flex_attention", "torch.optim.lr_scheduler"),
    *("transformers", "transformers.models.bloom.modeling_bloom", "transformers.loss.loss_utils", "tokenizers"),
    *("safetensors.torch", "huggingface_hub", "numpy", "psutil"),
)
"""What most workers import."""

READ_AT_IMPORT = (
    *("ATEN_", "DNNL_", "GOMP_", "KMP_", "LD_", "MALLOC_", "MKL_", "ONEDNN_", "PYTORCH_", "TORCH", "TRITON_"),
    *("HF_", "HOME", "HUGGINGFACE_", "TRANSFORMERS_", "XDG_"),
)
"""Prefixes of the variables that a library reads when it is imported. A new value needs a new interpreter."""

FIRST = dict(os.environ)
"""Environment in which the libraries were imported."""


class ForkedProcess(subprocess.Popen[bytes]):
    """A process of ``subprocess`` that is a fork, if its module is one of ``FORKED``."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *values: Any) -> None:
        (_, pass_fds, _, env, _, _, _, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *_) = values
        if not is_forked(args, env):
            super()._execute_child(args, executable, preexec_fn, *values)  # type: ignore[misc]
            return
        self.pid = os.fork()
        if self.pid == 0:
            become(args[2:], env, preexec_fn, {0: p2cread, 1: c2pwrite, 2: errwrite}, pass_fds)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


def is_forked(arguments: Any, environment: Mapping[str, str] | None) -> bool:
    """Return whether a process can be a fork: it needs no other imports than this one, and no thread is lost."""
    if environment is None or not isinstance(arguments, list) or len(arguments) < 3:
        return False
    known = arguments[:2] == [sys.executable, "-m"] and arguments[2] in FORKED
    return known and has_same_imports(environment) and threading.active_count() == 1


def has_same_imports(environment: Mapping[str, str]) -> bool:
    """Return whether the libraries would be as in this process if they were imported in an environment."""
    changed = {name for name, _ in {*environment.items()} ^ {*FIRST.items()} if name.startswith(READ_AT_IMPORT)}
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    changes_python = any(os.path.exists(os.path.join(path, "sitecustomize.py")) for path in paths)
    return changed <= {EXTENSIONS_DIR} and not changes_python and not visible_gpus()


def become(
    command: Sequence[str],
    environment: Mapping[str, str],
    prepare: Callable[[], object],
    standard: Mapping[int, int],
    inherited: Collection[int],
) -> NoReturn:
    """Run a module with its arguments in a fork, which has the state of a new process, and end it."""

    def run() -> None:
        gc.freeze()  # Objects of the parent stay, because their files are closed here.
        forget_signals()
        os.setsid()
        prepare()
        for number, descriptor in standard.items():
            if descriptor >= 0:
                os.dup2(descriptor, number)
        close_others(inherited)
        sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
        os.environ.clear()
        os.environ.update(environment)
        sys.path[:0] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]
        sys.argv = [*command]
        forget_modules()
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)

    run_and_exit(run)


def run_and_exit(run: Callable[[], None]) -> NoReturn:
    """Run a function as the main module of this process, which ends with its exit code."""
    code = 1
    try:
        run()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def forget_signals() -> None:
    """Give each signal the handler that it has in a new interpreter."""
    signal.set_wakeup_fd(-1)
    faulthandler.disable()
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def close_others(inherited: Collection[int]) -> None:
    """Close all files but the inherited ones. Objects of the parent keep their numbers, which no other file may get."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and descriptor not in (nothing, *inherited):
            with suppress(OSError):  # The list itself was a file.
                os.fstat(descriptor)
                os.dup2(nothing, descriptor, inheritable=False)


def forget_modules() -> None:
    """Remove what the command has set: modules that are no library's, Hydra's state, and the handlers of logs."""
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()
    logging.getLogger().handlers.clear()
    logging.disable(logging.NOTSET)
    for name, module in [*sys.modules.items()]:
        file = getattr(module, "__file__", None)
        if name != "__main__" and file is not None and not file.startswith((sys.prefix, sys.base_prefix)):
            del sys.modules[name]
