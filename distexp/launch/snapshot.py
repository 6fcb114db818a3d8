"""Snapshot of the code in the sweep directory, so that jobs run the code of the time of submission.

From a git checkout, it contains the tracked files with their uncommitted changes, and new files that git does not
ignore. For an installed distexp, it contains the package. The user's ``trusted_packages`` are copied too.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from distexp.config.paths import PACKAGE
from distexp.guard.sweep_files import is_own_file, remember_file
from distexp.launch.git_state import GitState, git_root, git_state, run_git
from distexp.launch.snapshot_files import select_files
from distexp.launch.snapshot_filter import describe_left_out
from distexp.runs.files import create_atomically
from distexp.runs.json_files import write_json
from distexp.runs.run_dir import SNAPSHOT, SNAPSHOT_MARKER


@dataclass(frozen=True)
class Snapshot:
    """Copy of the code.

    Attributes:
        folder: Folder of the copy, directly in the sweep directory.
        git: State of the checkout that was copied.
    """

    folder: Path
    git: GitState


def take_snapshot(sweep_dir: Path, trusted: Sequence[str], warn: Callable[[str], None]) -> Snapshot:
    """Copy the code to the sweep directory, or find an existing snapshot of the same code.

    A snapshot of another user is never taken, because its files may differ from what its marker states.
    Files that may be secrets and large files are left out.

    Args:
        sweep_dir: Directory of the sweep.
        trusted: Names of the user's packages.
        warn: Prints which files are left out.

    Raises:
        ConfigError: if there is too much to copy.
    """
    root = git_root(PACKAGE)
    files = select_files(PACKAGE, root, sweep_dir, trusted)
    git, digest = git_state(root), _digest(files.copied)
    folder = _folder_for(digest, sweep_dir)
    if not folder.exists():
        if files.omitted:
            warn(describe_left_out(files.omitted))
        marker = {"digest": digest, **asdict(git), "taken_at": time.time(), "left_out": files.omitted}
        _copy(files.copied, folder, marker)
        remember_file(folder / SNAPSHOT_MARKER)
        _write_info(root, git, folder, files.omitted)
    return Snapshot(folder, git)


def _folder_for(digest: str, sweep_dir: Path) -> Path:
    """Return the folder of the user's own snapshot with this digest; if there is none, the first free name."""
    for number in itertools.count(1):
        folder = sweep_dir / (SNAPSHOT if number == 1 else f"{SNAPSHOT}_{number}")
        if not folder.exists() or _is_own_copy(folder / SNAPSHOT_MARKER, digest):
            return folder
    raise AssertionError("unreachable")


def _is_own_copy(marker: Path, digest: str) -> bool:
    return is_own_file(marker) and json.loads(marker.read_text())["digest"] == digest


def _digest(files: Mapping[str, Path]) -> str:
    digest = hashlib.sha256()
    for name, path in files.items():
        content = os.readlink(path).encode() if path.is_symlink() else path.read_bytes()
        digest.update(f"{name}:{len(content)}\n".encode() + content)
    return digest.hexdigest()


def _copy(files: Mapping[str, Path], folder: Path, marker: Mapping[str, object]) -> None:
    with create_atomically(folder) as temporary:
        for name, path in files.items():
            target = temporary / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target, follow_symlinks=False)
            _protect(target)
        write_json(temporary / SNAPSHOT_MARKER, {**marker, "files": len(files)})


def _protect(path: Path) -> None:
    """Let other users write no copied file, even if others may write the original."""
    if not path.is_symlink():
        path.chmod(path.stat().st_mode & ~stat.S_IWOTH)


def _write_info(root: Path | None, git: GitState, folder: Path, omitted: Iterable[str]) -> None:
    """Write the git state and the installed packages to ``<snapshot>.info``.

    The difference to the commit has none of the omitted files.
    """
    info = folder.with_name(f"{folder.name}.info")
    info.mkdir(exist_ok=True)
    write_json(info / "git.json", asdict(git))
    if root is not None:
        base = PACKAGE.parent.relative_to(root)
        excluded = [f":(exclude,literal){(base / name).as_posix()}" for name in omitted]
        difference = run_git(root, "diff", "--binary", "HEAD", "--", ".", *excluded)
        (info / "uncommitted.diff").write_text(difference or "")
    packages = {
        f"{item.metadata['Name']}=={item.version}" for item in metadata.distributions() if item.metadata["Name"]
    }
    (info / "pip-freeze.txt").write_text("\n".join(sorted(packages, key=str.lower)) + "\n")
