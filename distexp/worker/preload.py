"""Imports ahead of the workers, which are then forked: the modules of a configuration, and what they declare.

Importing must not initialize CUDA, because a forked process cannot use the CUDA state of its parent. Modules that are
safe to import ahead name what they need in ``PRELOAD``, and in ``PRELOAD_ON_CPU`` what only runs on CPUs need.
"""

import gc
import importlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain
from types import ModuleType

from distexp.config import Config
from distexp.system import environment_variables, files

# Module whose ``import_compiler`` is called ahead of the workers, if a run compiles. It hashes the sources of torch and
# triton too: 1 to 3 seconds in each worker, also if the compiled code is in the cache.
COMPILER = "distexp.system.torch_internals.compilation"

GUARD = "distexp.system.torch_internals.tensors"
"""Module whose ``without_cuda`` keeps the other imports from initializing CUDA."""


def own_modules(config: Config) -> list[str]:
    """Return the modules of distexp that the options of a configuration choose. It imports none of them."""
    targets = (config.model._target_, config.dataset._target_, config.strategy._target_, config.engine._target_)
    return [*([COMPILER] if config.train.compiled != "none" else []), *own_modules_of(targets)]


def own_modules_of(targets: Iterable[str]) -> list[str]:
    """Return the modules of some targets, without those of custom code."""
    modules = [target.rpartition(".")[0] for target in targets]
    return [module for module in modules if module.split(".", maxsplit=1)[0] == files.PACKAGE.name]


def declared_preloads(module: ModuleType | None, device: str) -> tuple[str, ...]:
    """Return the modules that a module declares to import ahead, for a device."""
    on_cpu = getattr(module, "PRELOAD_ON_CPU", ()) if device == "cpu" else ()
    return (*getattr(module, "PRELOAD", ()), *on_cpu)


_torch_errors: list[Exception] = []


def check_torch() -> None:
    """Raise the error of an import of torch that failed here. Torch cannot be imported again to see it."""
    for error in _torch_errors:
        raise error


def preload(modules: Sequence[str], device: str) -> None:
    """Import some modules and what they declare; a module that fails is left to the workers to report."""
    if _torch_errors:
        return
    gc.disable()  # Imports make a million objects and no garbage: a tenth of their time is the collector's.
    # ``torch.cuda.is_available()`` asks NVML, so that it does not initialize CUDA.
    with environment_variables.variable_set("PYTORCH_NVML_BASED_CUDA_CHECK", "1"), ExitStack() as stack:
        for name in chain(("torch", GUARD, "distexp.worker.rank"), _with_declared(modules, device)):
            try:
                module = importlib.import_module(name)
                if name == GUARD:
                    stack.enter_context(module.without_cuda())
                if name == COMPILER:
                    module.import_compiler()
            except Exception as error:
                print(f"cannot import {name} ahead of the workers: {error!r}", file=sys.stderr)
                if name == "torch":  # as with a wrong value of TORCH_LOGS
                    _torch_errors.append(error)
                    break
    gc.enable()
    gc.freeze()  # the collector of a worker does not touch, and so does not copy, what it shares with the others


def _with_declared(modules: Sequence[str], device: str) -> Iterator[str]:
    """Yield modules, and after the import of each what it declares."""
    for module in modules:
        yield module
        yield from declared_preloads(sys.modules.get(module), device)
