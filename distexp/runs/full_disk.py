"""Errors of a disk that is full or cannot be written, and their messages."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from distexp.runs.run_dir import DISK_RESERVE

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Numbers of the errors of a full disk, an exhausted quota, and a limit of the size of files."""

NOT_WRITABLE = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
"""Numbers of the errors of a folder that the user must not write."""

FULL_TEXTS = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT))
"""Texts in the messages of libraries that wrap the error of the system."""

FULL_BYTES = 512 * 1024
"""A disk with less free space is full. This is more than the reserve, which another rank may have deleted."""

ERROR_TYPE = "DiskFull"
"""Type of the error in the record of a run that ended because a disk was full."""


def is_full_disk(error: BaseException) -> bool:
    """Return whether an error states that a disk or a quota is full."""
    return _error_number(error) in FULL or any(text in str(error) for text in FULL_TEXTS)


def free_bytes(folder: Path) -> int:
    """Return the free space of the disk of a folder."""
    return shutil.disk_usage(folder).free


def full_disk_message(error: BaseException, run_dir: Path, free: int) -> str:
    """Return which disk is full, and what to do.

    Args:
        error: The error. It may name the file that could not be written.
        run_dir: Directory of the run.
        free: Free bytes of its disk at the time of the error.
    """
    folder = _folder_of(error)
    if folder is not None:
        with suppress(OSError):
            free = free_bytes(folder)
    elif free >= FULL_BYTES and _error_number(error) not in (errno.EDQUOT, errno.EFBIG):
        return (
            f"a disk is full, but not that of {run_dir} ({free // 2**20:,} MiB free): make room in "
            f"{tempfile.gettempdir()}, in /dev/shm and in the folders of caches"
        )
    limit = "the disk quota" if _error_number(error) == errno.EDQUOT else "the disk"
    return (
        f"{limit} of {folder or run_dir} is full ({free // 1024:,} KiB free): make room, or choose a folder on another "
        "disk with hydra.sweep.dir"
    )


def _folder_of(error: BaseException) -> Path | None:
    """Return the folder of the file that an error names; None if it names none."""
    named = error.filename if isinstance(error, OSError) else None
    return None if named is None else Path(os.fsdecode(named)).parent


def _error_number(error: BaseException) -> int | None:
    """Return the number of a system error; None for another error."""
    return error.errno if isinstance(error, OSError) else None


def describe_disk_error(error: OSError) -> str:
    """Return why the files of a report cannot be written, and what to do."""
    reason = error.strerror or str(error)
    if is_full_disk(error):
        return f"{os.strerror(error.errno or errno.ENOSPC)}. Free space and repeat the command"
    if error.errno in NOT_WRITABLE:
        return f"{reason}. Copy the folder to a place that you can write, and give that folder"
    return reason


@contextmanager
def name_folder(folder: Path) -> Iterator[None]:
    """Add the folder to the errors of a full disk in the block that name no file."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL and error.filename is None:
            error.filename = str(folder)
        raise


def release_reserve(run_dir: Path) -> None:
    """Delete the file that keeps space for the end of a run."""
    (run_dir / DISK_RESERVE).unlink(missing_ok=True)


def write_despite_full_disk(run_dir: Path, write: Callable[[], None]) -> None:
    """Write a file of a run. If the disk is full, release the reserve and write again."""
    try:
        write()
    except OSError as error:
        if error.errno not in FULL:
            raise
        release_reserve(run_dir)
        write()


def print_despite_full_disk(text: str) -> None:
    """Print a line to stderr, unless it is a file on a full disk.

    ``print`` would keep the text, and fail again when the process ends.
    """
    with suppress(OSError):
        os.write(2, f"{text}\n".encode())
