"""Cache of generated samples, trained tokenizers and tokenized texts."""

import errno
import fcntl
import json
import os
import re
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

from distexp.exceptions import ConfigError, file_size_hint
from distexp.system.files import (
    FULL,
    FULL_BYTES,
    REFUSALS,
    find_refusal,
    free_bytes,
    lacks_inodes,
    read_or_none,
    remove,
)

VARIABLE = "DISTEXP_CACHE"
"""Environment variable with the cache directory."""


def cache_dir() -> Path:
    """Return the cache directory.

    ``$DISTEXP_CACHE``, or ``$XDG_CACHE_HOME/distexp``, or ``~/.cache/distexp``. Raise ConfigError if the user has no
    home directory, as in some containers.
    """
    configured = os.environ.get(VARIABLE)
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(configured).expanduser().absolute() if configured else Path(base, "distexp").expanduser().absolute()
    except RuntimeError:
        raise ConfigError(
            "this user has no home directory for the cache: set the environment variable DISTEXP_CACHE to a writable "
            "directory"
        ) from None


def check_configured_cache() -> None:
    """Raise ConfigError if ``$DISTEXP_CACHE`` is no folder and cannot become one. Each run would fail otherwise."""
    if os.environ.get(VARIABLE):
        try:
            cache_dir().mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unusable(cache_dir(), error) from error


def _unusable(folder: Path, error: OSError, variable: str = VARIABLE) -> ConfigError:
    reason, change = error.strerror, f"set the environment variable {variable} to a"
    hint = f"{change} writable directory"
    if error.errno in FULL:
        hint = f"make room, or {change} folder on another disk"
    if limit := file_size_hint(error.errno):
        hint = limit
    elif error.errno == errno.ENOSPC and lacks_inodes(folder):
        reason, hint = f"{reason}: no inodes are left", hint.replace("make room", "delete files")
    return ConfigError(f"cannot write to the cache directory {folder} ({reason}): {hint}")


RUST_NUMBER = re.compile(r"\(os error (\d+)\)")
"""Number of the system's error in an error of the library tokenizers."""

NUMPY_CUT = re.compile(r"\d+ requested and \d+ written")
"""Error of NumPy about an array that it could not write. It has no number of the system."""


def explain_refusal(folder: Path, error: Exception, variable: str = VARIABLE) -> ConfigError | None:
    """Return the error of a cache that refuses a file, with the variable that moves it; None for another error."""
    refusal = _find_refusal(folder, error)
    return None if refusal is None else _unusable(folder, refusal, variable)


def _find_refusal(folder: Path, error: Exception) -> OSError | None:
    """Return the error with which the disk of the cache refused a file; None if the error is another one.

    A build also reads files and runs other code, which may write to another disk.
    """
    if type(error) is Exception and (found := RUST_NUMBER.search(str(error))):
        error = OSError(int(found[1]), os.strerror(int(found[1])))
    if not isinstance(error, OSError):
        return None
    if error.errno is None and NUMPY_CUT.search(str(error)):
        return OSError(errno.EFBIG, os.strerror(errno.EFBIG)) if file_size_hint() else find_refusal(folder)
    if error.filename is not None:
        is_elsewhere = not Path(os.fsdecode(error.filename)).is_relative_to(folder)
    else:
        is_elsewhere = error.errno == errno.ENOSPC and folder.exists() and free_bytes(folder) >= FULL_BYTES
    return error if error.errno in REFUSALS and not is_elsewhere else None


def file_name(text: str) -> str:
    """Return a text, such as the name of a GPU, as the name of a file in the cache."""
    return re.sub(r"[^A-Za-z0-9.+]+", "-", text)


def build_once(path: Path, build: Callable[[Path], None]) -> Path:
    """Build a file or folder in one process while others wait. Raise ConfigError if its folder is not writable.

    An existing result is not built again, so the name must contain a format version and identify the inputs. The
    exception is a damaged one, of which a file is missing or has another size than it was built with.
    ``build`` writes to a temporary sibling, renamed when complete, so a killed process never leaves a partial result.
    """
    if path.exists() and _find_damage(path) is None:
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = _lock_path(path).open("a")  # It keeps the sizes of the files.
    except OSError as error:
        raise _unusable(path.parent, error) from error
    with lock:
        locked = True
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:  # The file system has no locks.
            locked = False
        if path.exists() and (damage := _find_damage(path)) is not None:
            print(f"note: a file of the cache is damaged and is made again: {damage}", flush=True)
            try:
                remove(path, ignore_errors=False)
            except OSError as error:
                raise _unusable(path.parent, error) from error
        if not path.exists():
            _build_and_rename(path, build, lock.fileno(), locked=locked)
    return path


def _build_and_rename(path: Path, build: Callable[[Path], None], lock: int, *, locked: bool) -> None:
    prefix = f".{path.name}.{socket.gethostname()}"
    if locked:
        # Only remove files of this host: on some network file systems, locks do not exclude other hosts.
        for abandoned in path.parent.glob(f"{prefix}-*.partial"):
            remove(abandoned)
    partial = path.parent / f"{prefix}-{os.getpid()}.partial"
    try:
        build(partial)
        with suppress(OSError):  # Without known sizes a result is taken as it is.
            os.ftruncate(lock, 0)
            os.write(lock, json.dumps(_sizes(partial)).encode())
        try:
            partial.rename(path)
        except OSError:
            # Without a common lock, another process may have finished first. Its result is the same.
            if not path.exists():
                raise
    except Exception as error:
        if (refused := explain_refusal(path.parent, error)) is None:
            raise
        raise refused from error
    finally:
        remove(partial)


def _lock_path(path: Path) -> Path:
    """Return the lock file of a result, which contains the sizes of its files."""
    return path.parent / f".{path.name}.lock"


def _sizes(path: Path) -> dict[str, int]:
    files = (file for file in (path, *path.rglob("*")) if file.is_file())
    return {str(file.relative_to(path)): file.stat().st_size for file in files}


def _find_damage(path: Path) -> str | None:
    """Return which file of a result was damaged after it was built; None also if its sizes are not known."""
    expected = read_or_none(_lock_path(path))
    for name, size in expected.items() if isinstance(expected, dict) else ():
        try:
            found = (path / name).stat().st_size
        except OSError:
            return f"{path / name} is missing"
        if found != size:
            return f"{path / name} has {found:,} bytes, not {size:,}"
    return None


CONNECT_TIMEOUT_S = 3.0
"""Timeout of one connection attempt; a host may have four addresses. A slow response is not an error."""


def offline_if_unreachable(source: str) -> None:
    """Switch the Hugging Face libraries to offline mode if the Hub is needed but cannot be reached.

    Then they read their local cache at once. Otherwise huggingface_hub retries the first file for half a minute,
    transformers retries the next one, and each retry is a line in the log.
    """
    if not Path(source).expanduser().exists():
        _go_offline_if_unreachable()


@cache
def _go_offline_if_unreachable() -> None:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or connection_error(constants.ENDPOINT) is None:
        return
    time.sleep(1)  # Name resolution may fail for a moment.
    reason = connection_error(constants.ENDPOINT)
    if reason is not None:
        print(f"note: {constants.ENDPOINT} cannot be reached ({reason}): only its local cache is used", flush=True)
        # The variable HF_HUB_OFFLINE has no effect anymore: huggingface_hub reads it once, when it is imported, and
        # this check needs its client. huggingface_hub and transformers read the constant at every request.
        # datasets copies it when it is imported.
        constants.HF_HUB_OFFLINE = True


def connection_error(endpoint: str) -> str | None:
    """Return why no connection to an endpoint is possible, with the configured proxies; None if it is reachable."""
    from huggingface_hub import get_session

    try:
        get_session().head(endpoint, timeout=CONNECT_TIMEOUT_S)
    except Exception as error:
        # The libraries report all other errors themselves, for example an invalid certificate.
        if type(error).__name__ in {"ConnectError", "ConnectTimeout"} and "CERTIFICATE" not in str(error):
            return str(error) or type(error).__name__
    return None
