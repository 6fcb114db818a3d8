"""Command ``distexp rm DIR...``: delete sweeps and runs, after it has shown what is deleted.

Nothing is deleted before all folders are checked. Links in a folder are deleted, and what they lead to is not.
"""

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from distexp.cli.main import CommandParser
from distexp.config import Command, ConfigError
from distexp.config.overrides import format_count, path_argument, shell_quote
from distexp.exceptions import print_text, run_until_pipe_closes
from distexp.guard.config_files import is_own_file, remember_file
from distexp.runs import attempts, run_dir
from distexp.runs.run_dir import COMMAND, PROOF, SPEC
from distexp.status import read_ended_runs, summarize
from distexp.system.files import read_or_none, walk, write_json
from distexp.system.silence import set_step
from distexp.system.units import MIB, format_memory

MAX_NAMES = 5  # names of foreign files that are shown
OTHER_NAMES = frozenset({"job.json", "wandb", "mlruns"})
"""Names in the folder of a sweep that ``run_dir`` does not have: of ``distexp verify``, and of trackers."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Delete folders; return 1 if the user declines, and 2 if a folder must not be deleted."""
    parser = CommandParser(
        prog="distexp rm", description="Delete sweeps and runs, with their checkpoints and models, after a question."
    )
    parser.add_argument("directories", type=Path, metavar="DIR", nargs="+", help="directory of a sweep or a run")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    options = parser.parse_args(arguments)
    by_path = {folder.resolve(): folder for folder in options.directories}
    folders = [folder for path, folder in by_path.items() if by_path.keys().isdisjoint(path.parents)]
    if errors := [error for folder in folders for error in _errors(folder)]:
        raise ConfigError(errors)
    for folder in folders:
        print_text(_description(folder))
    if not options.yes and not _confirms(folders):
        return 1
    set_step("deleting")  # The time that the user took to answer does not count.
    for folder in folders:
        _delete(folder)
        print_text(f"deleted: {folder}")
    return 0


def _errors(folder: Path) -> Iterator[str]:
    """Yield why a folder must not be deleted."""
    try:
        read_ended_runs(folder)
    except ConfigError as error:
        yield from error.errors
        return
    if Path.cwd().is_relative_to(folder.resolve()):
        yield f"{folder}: the current folder is in it: change to another one, and type the command again"
    elif names := _foreign_names(folder):
        more = ", ..." if len(names) > MAX_NAMES else ""
        yield (
            f"{folder} also contains what distexp did not write: {', '.join(names[:MAX_NAMES])}{more}. Move it to "
            f"another place, or delete everything by rm -r {shell_quote(path_argument(folder))}"
        )


def _foreign_names(folder: Path) -> list[str]:
    """Return the files and folders of a sweep that are not those of a sweep or of a run."""
    if not (folder / COMMAND).is_file() or read_or_none(folder / COMMAND, "command") == Command.VERIFY:
        return []
    known = {value.partition("/")[0] for value in vars(run_dir).values() if isinstance(value, str)} | OTHER_NAMES
    unknown = (path for path in folder.iterdir() if path.name not in known)
    return sorted(path.name for path in unknown if not _is_written_by_distexp(path))


def _is_written_by_distexp(path: Path) -> bool:
    """Return whether a path is a snapshot of the code, or has nothing but runs. An invalid run has no spec."""
    if path.is_symlink() or not path.is_dir():
        return False
    marks = {SPEC, run_dir.RECORD, PROOF, run_dir.HYDRA}
    for _, folders, names in walk(path):
        if marks & {*folders, *names}:
            folders.clear()  # All in a run is its own.
        elif names:
            return path.name.startswith(run_dir.SNAPSHOT)
    return True  # Empty folders are left of hydra.sweep.subdir=FOLDER/... after its runs are deleted.


def _description(folder: Path) -> str:
    """Return what is deleted: ``DIR: 3 completed, 1 failed; 120 files, 1.2 GiB``."""
    states = summarize(folder)
    paths = [os.path.join(place, name) for place, _, names in os.walk(folder) for name in names]
    size = sum(os.lstat(path).st_size for path in paths)
    return f"{folder}: {states}; {format_count(len(paths), 'file')}, {format_memory(size / MIB)}"


def _confirms(folders: Sequence[Path]) -> bool:
    """Ask whether to delete the folders. Raise ConfigError if there is no terminal."""
    if not (sys.stdin is not None and sys.stdin.isatty()):
        raise ConfigError("nothing was deleted, because there is no terminal to ask: add --yes to delete it")
    try:
        answer = input(f"delete {format_count(len(folders), 'folder')}? [y/N] ")
    except EOFError:
        answer = ""
        print()
    if answer.strip().lower() in ("y", "yes"):
        return True
    print("nothing was deleted")
    return False


def _delete(folder: Path) -> None:
    """Delete a folder. Raise ConfigError if a command has started to use it."""
    with attempts.sweep_lock(folder), attempts.run_lock(folder) as owner:
        if owner is not None:
            raise ConfigError(f"{folder} was not deleted: {owner} uses it")
        path, is_sweep = folder.resolve(), (folder / COMMAND).is_file()
        shutil.rmtree(folder)
    sweep = next((above / COMMAND for above in path.parents if (above / COMMAND).is_file()), None)
    command = None if is_sweep or sweep is None else read_or_none(sweep)
    # So that distexp status does not call it "not started". Another program may have a file of this name.
    if sweep is not None and isinstance(command, dict) and "words" in command:
        name, is_own, times = str(path.relative_to(sweep.parent)), is_own_file(sweep), sweep.stat()
        deleted = command.get("deleted")
        earlier = [text for text in deleted if isinstance(text, str)] if isinstance(deleted, list) else []
        write_json(sweep, {**command, "deleted": [*earlier, name]})
        if is_own:
            remember_file(sweep)
        os.utime(sweep, ns=(times.st_atime_ns, times.st_mtime_ns))  # when the sweep was started


if __name__ == "__main__":
    sys.exit(run_until_pipe_closes(main))
