"""Directories of sweeps that another user has made: what could run code or write outside is refused.

A mark in the user's cache names the content of each ``command.json`` and of each snapshot's marker that distexp has
written for this user. A sweep from somebody else has no mark, even in a copy that belongs to the user.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from hydra.core.override_parser.types import Override

from distexp.config import ConfigError
from distexp.config.keys import options_of
from distexp.config.overrides import copyable_override, is_override, join_first, shell_quote
from distexp.guard import command_line
from distexp.guard.command_line import TRUSTED, key_of, typed_overrides
from distexp.guard.config_files import CLUSTER_KEYS
from distexp.runs.run_dir import COMMAND
from distexp.system.cache_dir import cache_dir

SAFE_HYDRA_KEYS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.verbose")


def remember_file(path: Path) -> None:
    """Mark a file as this user's own; without a writable cache it stays foreign."""
    with suppress(OSError, ConfigError):
        mark = _mark(path)
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


def is_own_file(path: Path) -> bool:
    """Return whether distexp has written this content for this user."""
    with suppress(ConfigError):
        return path.is_file() and _mark(path).exists()
    return False


def _mark(path: Path) -> Path:
    return cache_dir() / "commands" / hashlib.sha256(path.read_bytes()).hexdigest()


def check_stored_command(path: Path, stored: Sequence[str], typed: Sequence[str]) -> None:
    """Raise a ConfigError with all overrides of a stored command that can run code and are not repeated by the user."""
    repeated = {key_of(override) for override in typed_overrides(typed)}
    errors = [
        f"{path} contains {_shown(argument)}, which could run code: if you trust it, add {_shown(argument)} to the "
        "command"
        for argument in stored
        if is_override(argument) and _unsafe_keys(argument) - repeated
    ]
    if errors:
        raise ConfigError(errors)


def _shown(argument: str) -> str:
    """Return an argument as a shell needs it, without the quotes that distexp has added."""
    return shell_quote(copyable_override(argument, may_sweep=True))


def _unsafe_keys(argument: str) -> set[str]:
    """Return the keys of an override, and of those inside ``sweep.cells``, that can run code."""
    return {key_of(override) for override in typed_overrides([argument]) if _is_unsafe(argument, override)}


def _is_unsafe(argument: str, override: Override) -> bool:
    key = key_of(override)
    if key == TRUSTED:
        return bool(
            set(command_line.packages_trusted_by_user([argument])) - set(command_line.packages_of_environment())
        )
    if key == "cluster":
        return command_line.as_text(override.value()) not in options_of("cluster")
    if key.startswith(("hydra.", "hydra/")):
        return key not in SAFE_HYDRA_KEYS
    return any(f"{key}.".startswith(f"cluster.{name}.") for name in CLUSTER_KEYS)


def check_working_directory(path: Path, directory: str) -> None:
    """Raise a ConfigError if a foreign command was started in another folder: Python imports packages from there."""
    if os.path.isdir(directory) and not os.path.samefile(directory, os.curdir):
        raise ConfigError(
            f"{path} was started in {directory}, and Python would import packages from there: if you trust its "
            f"code, run cd {shlex.quote(directory)} and resume again"
        )


def check_files(sweep_dir: Path) -> None:
    """Raise a ConfigError if a foreign sweep has links out of it, pipes or devices: runs could write outside of it."""
    if is_own_file(sweep_dir / COMMAND) or not sweep_dir.is_dir():
        return
    found = list(_unsafe_files(sweep_dir))
    if found:
        shown = join_first(map(str, found), limit=3)
        raise ConfigError(
            f"{sweep_dir} contains {shown}, which are not files of the sweep: remove them, or start the sweep again "
            "in another directory"
        )


def _unsafe_files(sweep_dir: Path) -> Iterator[Path]:
    """Yield the links that lead out of a folder, and what is neither a file nor a folder."""
    root = sweep_dir.resolve()
    for where, folders, names in os.walk(sweep_dir):
        for path in (Path(where, name) for name in (*folders, *names)):
            mode = path.lstat().st_mode
            if stat.S_ISLNK(mode):
                if not Path(os.path.realpath(path)).is_relative_to(root):
                    yield path
            elif not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                yield path
