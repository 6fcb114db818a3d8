"""Files that appear under their names only when they are complete, and JSON files."""

import errno
import json
import math
import os
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from distexp.exceptions import CONTROL, printable
from distexp.system.units import MIB

PACKAGE = Path(__file__).resolve().parent.parent

MAX_FLOAT = 1e39
"""Above the largest loss in fp32, 3.4e38. Sums and products of such numbers are finite."""

MAX_DIGITS = 18
"""Digits of an integer. More may not fit into the columns of a report, and a record with more is not read."""


@contextmanager
def replace_atomically(path: Path) -> Iterator[Path]:
    """Yield a temporary path, and rename it over ``path`` when the block ends.

    The block writes a file or a folder there. If it raises, the temporary path is removed and ``path`` is unchanged.
    The temporary path is next to ``path``, and its name starts with a dot.
    """
    with _temporary(path) as temporary:
        yield temporary
        move_into_place(temporary, path)


@contextmanager
def create_atomically(folder: Path) -> Iterator[Path]:
    """Yield a temporary path, and rename it to a new folder when the block ends. Raise OSError if that exists."""
    with _temporary(folder) as temporary:
        yield temporary
        temporary.rename(folder)


@contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
    finally:
        remove(temporary)


def move_into_place(temporary: Path, path: Path) -> None:
    """Rename a complete file or folder to ``path``, and replace what is there."""
    if path.is_dir() or temporary.is_dir():  # A folder replaces neither a folder with files nor a link.
        remove(path, ignore_errors=False)
    temporary.replace(path)


def remove(path: Path, *, ignore_errors: bool = True) -> None:
    """Remove a file, a link, or a folder with all its content. Ignore one that does not exist."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=ignore_errors)
    else:
        path.unlink(missing_ok=True)


FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Numbers of the errors of a full disk, an exhausted quota, and a limit of the size of files."""

REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""Numbers of the errors with which a file system refuses to write during a run. Libraries may keep their texts only."""

FULL_BYTES = 512 * 1024
"""A disk with less free space is full. This is more than the reserve, which another rank may have deleted."""


def free_bytes(folder: Path) -> int:
    """Return the free space of the disk of a folder."""
    return shutil.disk_usage(folder).free


def lacks_inodes(folder: Path) -> bool:
    """Return whether a disk has (almost) no room for new files, but free space. Some file systems count no inodes."""
    with suppress(OSError):
        found = os.statvfs(next(path for path in (folder, *folder.parents) if path.exists()))
        # 32 inodes are more than the reserve, which may have been deleted.
        return found.f_files > 0 and found.f_favail < 32 and found.f_bavail * found.f_frsize >= FULL_BYTES
    return False


PROBE_BYTES = 1 << 20


def find_refusal(folder: Path) -> OSError | None:
    """Write a file to a folder and delete it. Return why the system refuses it, or None if it does not."""
    probe = folder / f".probe-{os.getpid()}"
    try:
        with probe.open("wb") as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as refusal:
        return OSError(refusal.errno, refusal.strerror, str(probe))
    finally:
        with suppress(OSError):
            probe.unlink(missing_ok=True)
    return None


def flush_names(folder: Path) -> None:
    """Wait until the names in a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_file(path: Path) -> BinaryIO:
    """Open a file for reading that another program may have made. Raise OSError for a pipe or a device."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


MAX_JSON_MB = 256
"""Size of the largest JSON file that is read. A record with thousands of ranks has a few MB."""


def write_json(path: Path, content: Any) -> None:
    """Write JSON atomically; NaN and infinities become null.

    The content is on disk before the name is, so that a machine that goes down leaves no torn file.
    """
    with replace_atomically(path) as temporary, temporary.open("w") as file:
        json.dump(nan_to_none(content), file, indent=2, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


SILENT_S = 2.0
"""Time of a search for files after which it is announced."""


def walk(root: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield what ``os.walk`` yields. If that takes long, print what is searched to stderr, once for each root."""
    started = time.monotonic()
    for count, found in enumerate(os.walk(root), start=1):
        if time.monotonic() - started > SILENT_S and root not in _announced:
            _announced.add(root)
            hint = "Ctrl-C ends the search; the folder of a sweep is faster"
            print(f"searching {printable(str(root))}: {count:,} folders so far. {hint}", file=sys.stderr, flush=True)
        yield found


_announced: set[Path] = set()


def read_json(path: Path) -> Any:
    """Read a JSON file. NaN and infinity become None.

    Raise OSError if the file cannot be read, or ValueError if it is not JSON, or contains a number that no distexp
    writes, or is larger than MAX_JSON_MB.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size / MIB
        if size > MAX_JSON_MB:
            raise ValueError(f"it has {size:,.0f} MB, more than {MAX_JSON_MB}")
        return parse_json(file.read().decode())


def read_or_none(path: Path, *keys: str) -> Any:
    """Return the content of a JSON file, or the value of its keys; None if it is missing, or the file is damaged."""
    try:
        content = read_json(path)
    except (OSError, ValueError):
        return None
    for key in keys:
        content = content.get(key) if isinstance(content, dict) else None
    return content


def load_json(path: Path) -> Any:
    """Read a JSON file of another program, with all its numbers. Raise ValueError if it is not JSON."""
    try:
        return json.loads(path.read_text())
    except RecursionError:
        raise ValueError(TOO_DEEP) from None


TOO_DEEP = "it is nested too deeply"


def parse_json(text: str) -> Any:
    """Parse JSON from a file that another program may have written.

    Control characters become visible, because a terminal would obey them. Raise ValueError if it is not JSON, or
    contains a number that no distexp writes.
    """
    try:
        content = json.loads(text, parse_int=_parse_int, parse_float=_parse_float, parse_constant=lambda _: None)
        return convert_texts(content, printable) if "\\u" in text or CONTROL.search(text) else content
    except RecursionError:
        raise ValueError(TOO_DEEP) from None


def _parse_int(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"it contains a number of {len(text)} digits")
    return int(text)


def _parse_float(text: str) -> float | None:
    value = float(text)
    if math.isfinite(value) and abs(value) >= MAX_FLOAT:
        raise ValueError(f"it contains the number {value:g}")
    return value if math.isfinite(value) else None


def nan_to_none(content: Any) -> Any:
    """Return the same content with None for NaN and the infinities, which JSON does not have."""
    if isinstance(content, float) and not math.isfinite(content):
        return None
    if isinstance(content, dict):
        return {key: nan_to_none(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [nan_to_none(value) for value in content]
    return content


END_BYTES = 4096
"""Size of the part at the end of a file in which its last line is searched."""

Entry = dict[str, Any]


def append_line(file: TextIO, content: Entry) -> None:
    """Write one JSON line and flush it, so that a crash loses nothing."""
    try:
        file.write(json.dumps(nan_to_none(content)) + "\n")
        file.flush()
    except OSError as error:  # The system names a file only if it is opened.
        error.filename = file.name
        raise


def read_entries(path: Path) -> list[Entry]:
    """Read the entries of a file; a missing file has none.

    A torn line is left out. A killed writer leaves one at the end, or before the lines of the next writer. Raise
    OSError if the file exists and cannot be read.
    """
    try:
        with open_file(path) as file:
            text = file.read().decode(errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return []
    return _parse(text.splitlines())


def read_last_entry(path: Path) -> Entry:
    """Read the last whole line of a file from its end, because the file may be large; empty if there is none."""
    try:
        with open_file(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - END_BYTES))
            whole_lines = file.read().rpartition(b"\n")[0]
    except OSError:
        return {}
    last_line = whole_lines.rpartition(b"\n")[2]
    entries = _parse([last_line.decode(errors="replace")])
    return entries[0] if entries else {}


class Tail:
    """Reader of the lines that were added to a file since its last call."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.restarts = 0  # how often a later attempt of the run has replaced the file
        self._offset = 0

    def read_lines(self) -> list[str]:
        """Read the new whole lines; none if there is no file. Raise OSError if the file exists and cannot be read."""
        try:
            with open_file(self.path) as file:
                size = file.seek(0, os.SEEK_END)
                if size < self._offset:
                    self._offset, self.restarts = 0, self.restarts + 1
                file.seek(self._offset)
                added = file.read()
        except FileNotFoundError:
            return []
        lines, end, _ = added.rpartition(b"\n")  # What follows the last line end is still being written.
        self._offset += len(lines) + len(end)
        return lines.decode(errors="replace").split("\n") if end else []

    def read_entries(self) -> list[Entry]:
        """Read the new lines as JSON; lines that are not a JSON object are left out."""
        return _parse(self.read_lines())


def _parse(lines: Iterable[str]) -> list[Entry]:
    found = []
    for line in lines:
        with suppress(ValueError):
            found.append(parse_json(line))
    return [entry for entry in found if isinstance(entry, dict)]


def one_line(text: str) -> str:
    """Replace line breaks and tabs, which would break the rows of a table, by spaces."""
    return text if text.isprintable() else " ".join(text.split())


def convert_texts(content: Any, convert: Callable[[str], str]) -> Any:
    """Return the content of a JSON file with all its texts converted, also the keys."""
    if isinstance(content, str):
        return convert(content)
    if isinstance(content, dict):
        return {convert(key): convert_texts(value, convert) for key, value in content.items()}
    return [convert_texts(value, convert) for value in content] if isinstance(content, list) else content
