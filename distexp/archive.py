"""Command ``distexp archive DIR``: one file with the records, metrics and logs of a sweep or a run.

Checkpoints, weights and copies of the code are left out, so it is small enough to keep and to send. ``distexp report``
works on the unpacked folder as on the original one.
"""

import os
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from distexp.cli.main import CommandParser
from distexp.config import ConfigError
from distexp.config.overrides import format_count, path_argument, shell_quote
from distexp.exceptions import print_text, run_until_pipe_closes
from distexp.runs.run_dir import CHECKPOINTS, COMMAND, LOCK, MODEL, SNAPSHOT, SWEEP_LOCK
from distexp.status import read_ended_runs
from distexp.system.units import MIB, format_memory

MAX_MIB = 64.0
"""Size of the largest file that is archived. Records and logs are much smaller."""

LARGE = (CHECKPOINTS, MODEL)
"""Folders with weights."""

TENSORS = ".pt"
"""End of the names of files with tensors, as those that ``distexp verify`` compares."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the archive; return 2 if DIR is not a sweep or a run, or if the file exists."""
    parser = CommandParser(
        prog="distexp archive",
        description="Write records, metrics, logs and reports of a sweep or a run into one .tar.gz file, without "
        "checkpoints and weights. 'distexp report' works on the unpacked folder.",
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="directory of a sweep or a run")
    default = "default: NAME_OF_DIR.tar.gz in the current folder, or SWEEP-RUN.tar.gz for a run of a sweep"
    parser.add_argument("--output", type=Path, metavar="FILE", help=default)
    options = parser.parse_args(arguments)
    folder = options.directory
    read_ended_runs(folder)
    name = _name(folder.resolve())
    target = options.output or Path(f"{name}.tar.gz")
    if target.is_dir():
        raise ConfigError(f"--output {target} is a folder: give a file, as in --output {target / name}.tar.gz")
    if not target.parent.is_dir():
        raise ConfigError(f"--output {target}: there is no folder {target.parent}: make it, or give another file")
    if target.exists() or target.is_symlink():
        raise ConfigError(f"{target} exists already, and is not overwritten: remove it, or add --output FILE")
    if target.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(f"{target} would be inside of {folder}: add --output FILE with another folder")
    left_out: Counter[str] = Counter()
    count = _write(folder, name, target, left_out)
    size = format_memory(target.stat().st_size / MIB)
    print_text(f"written: {target}, {format_count(count, 'file')}, {size}")
    if left_out:
        listed = (f"{what} ({format_memory(size / MIB)})" for what, size in sorted(left_out.items()))
        print_text(f"left out: {', '.join(listed)}")
    # tar takes a name with a colon for a file of another machine.
    path = f"./{target}" if ":" in target.parts[0] else path_argument(target)
    print_text(f"to unpack: tar xzf {shell_quote(path)}")
    return 0


def _name(folder: Path) -> str:
    """Return the name of a sweep, or that of a run behind the name of its sweep: ``lr-0``."""
    is_in_sweep = not (folder / COMMAND).is_file() and (folder.parent / COMMAND).is_file()
    return f"{folder.parent.name}-{folder.name}" if is_in_sweep else folder.name


def _write(folder: Path, name: str, target: Path, left_out: Counter[str]) -> int:
    """Write the archive, and return the number of its files. ``left_out`` gets the bytes of what is left out."""
    count = 0
    try:
        with tarfile.open(target, "x:gz") as archive:
            for path in _small_files(folder, left_out):
                archive.add(path, Path(name, path.relative_to(folder)), recursive=False, filter=_without_owner)
                count += 1
    except FileExistsError:  # Another command has just written it.
        raise
    except BaseException as error:  # also at the end of the block, which writes what is left
        target.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            raise OSError(error.errno, error.strerror, str(target)) from error
        raise
    return count


def _small_files(folder: Path, left_out: Counter[str]) -> Iterator[Path]:
    """Yield the regular files to archive. Links may lead anywhere, so they are left out."""
    for place, folders, names in os.walk(folder):
        for name in [name for name in folders if name in LARGE or name.startswith(SNAPSHOT)]:
            folders.remove(name)
            below = (Path(inner, file) for inner, _, files in os.walk(Path(place, name)) for file in files)
            title = SNAPSHOT if name.startswith(SNAPSHOT) else name
            left_out[f"{title}/"] += sum(path.lstat().st_size for path in below)
        for path in (Path(place, name) for name in sorted(names) if name not in (LOCK, SWEEP_LOCK)):
            if path.is_symlink() or not path.is_file():
                left_out["links and special files"] += 0
            elif path.suffix == TENSORS:
                left_out[f"*{TENSORS}"] += path.stat().st_size
            elif path.stat().st_size > MAX_MIB * MIB:
                left_out[f"files above {format_memory(MAX_MIB, 0)}"] += path.stat().st_size
            else:
                yield path


def _without_owner(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Remove the user's name from an entry."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


if __name__ == "__main__":
    sys.exit(run_until_pipe_closes(main))
