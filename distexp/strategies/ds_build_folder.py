"""The folder in which PyTorch builds one C++ operator: locks and files that an earlier build has left."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from distexp.runs.json_files import read_json, write_json

BATON = "lock"
"""File with which PyTorch locks the build of an extension. A killed process leaves it, and all later builds wait."""

STAMP = ".distexp_built.json"
"""Versions for which the library was built, and its size."""

OWN_PREFIX = ".distexp"
"""Start of the names of files that PyTorch does not write."""

POLL_S = 0.2
QUIET_S = 30 * 60.0
"""Time without a change of a folder on a shared file system, after which its lock is abandoned."""

LOCAL_FILE_SYSTEMS = frozenset({"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"})
"""File systems that no other machine writes to."""


def wait_for_baton(folder: Path, report: Callable[[Path], None]) -> None:
    """Wait until no other program builds in a folder. Remove the lock of a program that was killed.

    Args:
        folder: the folder of the operator.
        report: called once with the path of the lock, before the first wait.
    """
    baton, reported = folder / BATON, False
    while baton.exists():
        if is_abandoned(baton):
            baton.unlink(missing_ok=True)
            return
        if not reported:
            report(baton)
            reported = True
        time.sleep(POLL_S)


def is_abandoned(baton: Path) -> bool:
    """Return whether the process that created a lock has ended.

    PyTorch keeps the lock open. On a local file system, the processes of this user are asked. On a shared one, the
    process may be on another machine, so only a folder without changes for a long time is abandoned. A process in
    another container is not seen.
    """
    try:
        found = baton.stat()
        if found.st_uid == os.getuid() and _is_local(baton):
            return (found.st_dev, found.st_ino) not in set(_open_files())
        files = [path for path in baton.parent.iterdir() if not path.name.startswith(OWN_PREFIX)]
        return time.time() - max(path.lstat().st_mtime for path in files) > QUIET_S
    except FileNotFoundError:  # A process has removed a file meanwhile.
        return False


def _is_local(path: Path) -> bool:
    """Return whether a path is on a file system of this machine."""
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


def remove_outdated(folder: Path, library: Path) -> None:
    """Remove the files of a build for other versions, and those of a library that is not as it was built.

    Ninja does not notice these, because the commands of the compiler are the same.
    """
    try:
        stamp = read_json(folder / STAMP)
    except (OSError, ValueError):  # built by another program
        return
    if not library.exists() or stamp != _stamp(library):
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
