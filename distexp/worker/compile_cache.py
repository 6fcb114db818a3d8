"""The cache of ``torch.compile``, so that a second run starts without compiling."""

import os
import platform
import stat
from pathlib import Path

import torch

from distexp.config import ConfigError
from distexp.config.overrides import shell_quote
from distexp.system.cache_dir import cache_dir
from distexp.system.torch_internals.compilation import CACHE_VARIABLE, cache_autograd_functions, default_compile_cache


def use_compile_cache() -> Path:
    """Let torch keep compiled code in the cache of distexp; return the folder.

    The folder depends on the user and on the versions of torch and Python. Torch adds the hardware and its settings to
    the names inside. Compiled code is executed, so no other user may write there. Torch's own default is a folder in
    ``/tmp`` with a name that others can guess. Raises ConfigError if the folder cannot be created or is not private.
    """
    cache_autograd_functions()
    chosen = os.environ.get(CACHE_VARIABLE)
    # A folder that the user chose is left as it is. Torch sets the variable to its default when it is imported.
    if chosen and chosen != default_compile_cache():
        return Path(chosen)
    python = ".".join(platform.python_version_tuple()[:2])
    user = cache_dir() / f"compile-{os.getuid()}"
    folder = user / f"torch-{torch.__version__}-python-{python}"
    try:
        for path in (user, folder):
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigError(
            f"train.compile needs a cache, but {folder} cannot be created ({error.strerror}): "
            "set the environment variable DISTEXP_CACHE to a writable directory"
        ) from error
    for path in (user, folder):
        _check_private(path)
    os.environ[CACHE_VARIABLE] = str(folder)
    return folder


def _check_private(folder: Path) -> None:
    """Raise ConfigError unless only this user can write to a folder."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise ConfigError(
            f"{folder} must be a folder of this user, because compiled code is executed: remove it, or set the "
            "environment variable DISTEXP_CACHE to another directory"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"other users can write to {folder}, and compiled code is executed: "
            f"type chmod go-w {shell_quote(str(folder))}, or set the environment variable {CACHE_VARIABLE} to a "
            "private folder"
        )
