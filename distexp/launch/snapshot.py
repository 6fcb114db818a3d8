"""Snapshot of the code in the sweep directory, so that jobs run the code of the time of submission.

From a git checkout, it contains the tracked files with their uncommitted changes, and new files that git does not
ignore. For an installed distexp, it contains the package. The user's ``trusted_packages`` are copied too.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from distexp.config import ConfigError
from distexp.config.paths import PACKAGE
from distexp.launch.own_files import is_own_file, remember_file
from distexp.launch.snapshot_filter import describe_left_out, left_out
from distexp.runs.files import create_atomically, write_json
from distexp.runs.run_dir import SNAPSHOT, SNAPSHOT_MARKER
from distexp.system.units import MIB

LIMIT_MB = 500
INSTALLED = ("site-packages", "dist-packages")


@dataclass(frozen=True)
class GitState:
    """Commit of the code, and whether the code has uncommitted changes; None outside a checkout."""

    sha: str | None = None
    dirty: bool | None = None


def git_root(folder: Path) -> Path | None:
    """Return the root of the git checkout that tracks a folder, or None."""
    top = _git(folder, "rev-parse", "--show-toplevel")
    if top is None or not _git(folder, "ls-files", "--", "."):
        return None
    return Path(top.strip())


def git_state(root: Path | None) -> GitState:
    """Return the state of a checkout. New files that git does not ignore count as changes."""
    if root is None:
        return GitState()
    sha = _git(root, "rev-parse", "HEAD")
    return GitState(sha.strip() if sha else None, bool(_git(root, "status", "--porcelain")))


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


def take_snapshot(sweep_dir: Path, trusted: Sequence[str], warn: Callable[[str], None]) -> tuple[Path, GitState]:
    """Copy the code to the sweep directory, or find an existing snapshot of the same code.

    A snapshot of another user is never taken, because its files may differ from what its marker states.
    Files that may be secrets and large files are left out.

    Args:
        sweep_dir: Directory of the sweep.
        trusted: Names of the user's packages.
        warn: Prints which files are left out.

    Returns:
        The folder of the snapshot, and the git state of the code.

    Raises:
        ConfigError: if there are more than LIMIT_MB to copy.
    """
    root = git_root(PACKAGE)
    files = dict(_files(root, sweep_dir, trusted))
    omitted = left_out(files)
    files = {name: path for name, path in files.items() if name not in omitted}
    _check_size(files)
    state, digest = git_state(root), _digest(files)
    for number in range(1, 10_000):
        folder = sweep_dir / (SNAPSHOT if number == 1 else f"{SNAPSHOT}_{number}")
        marker = folder / SNAPSHOT_MARKER
        if marker.exists():
            if is_own_file(marker) and json.loads(marker.read_text())["digest"] == digest:
                return folder, state
        elif not folder.exists():
            if omitted:
                warn(describe_left_out(omitted))
            _copy(files, folder, {"digest": digest, **asdict(state), "taken_at": time.time(), "left_out": omitted})
            remember_file(marker)
            _write_info(root, state, folder, omitted)
            return folder, state
    raise AssertionError("unreachable")


def _files(root: Path | None, sweep_dir: Path, trusted: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Yield (path in the snapshot, path on disk) of each file to copy."""
    if root is None:
        yield from _package(PACKAGE)
    else:
        # distexp may be a folder of a larger project, so paths are relative to its parent.
        base = PACKAGE.parent
        listed = _git(base, "ls-files", "-z", "--cached", "--others", "--exclude-standard") or ""
        for name in sorted(set(listed.split("\0")) - {""}):
            path = base / name
            if (path.is_file() or path.is_symlink()) and not path.resolve().is_relative_to(sweep_dir.resolve()):
                yield name, path
    for name in trusted:
        found = importlib.util.find_spec(name.partition(".")[0])
        where = Path(found.origin) if found is not None and found.origin else None
        if where is None or any(part in INSTALLED for part in where.parts):
            continue  # Installed like any library, or missing, which resolve() has reported.
        if root is None or not where.is_relative_to(root):
            yield from _package(where.parent if where.name == "__init__.py" else where)


def _package(where: Path) -> Iterator[tuple[str, Path]]:
    if where.is_file():
        yield where.name, where
        return
    for path in sorted(where.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            yield str(Path(where.name) / path.relative_to(where)), path


def _check_size(files: dict[str, Path]) -> None:
    sizes = {name: path.lstat().st_size for name, path in files.items()}
    total = sum(sizes.values()) / MIB
    if total > LIMIT_MB:
        largest = max(sizes, key=lambda name: sizes[name])
        raise ConfigError(
            f"the code to copy for the jobs has {total:,.0f} MB, more than {LIMIT_MB}: add files that are not code to "
            f".gitignore. The largest is {files[largest]} with {sizes[largest] / MIB:,.0f} MB"
        )


def _digest(files: dict[str, Path]) -> str:
    digest = hashlib.sha256()
    for name, path in files.items():
        content = os.readlink(path).encode() if path.is_symlink() else path.read_bytes()
        digest.update(f"{name}:{len(content)}\n".encode() + content)
    return digest.hexdigest()


def _copy(files: dict[str, Path], folder: Path, marker: dict[str, object]) -> None:
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


def _write_info(root: Path | None, state: GitState, folder: Path, omitted: Iterable[str]) -> None:
    """Write the git state and the installed packages to ``<snapshot>.info``.

    The difference to the commit has none of the omitted files.
    """
    info = folder.with_name(f"{folder.name}.info")
    info.mkdir(exist_ok=True)
    write_json(info / "git.json", asdict(state))
    if root is not None:
        base = PACKAGE.parent.relative_to(root)
        excluded = [f":(exclude,literal){(base / name).as_posix()}" for name in omitted]
        (info / "uncommitted.diff").write_text(_git(root, "diff", "--binary", "HEAD", "--", ".", *excluded) or "")
    packages = {
        f"{item.metadata['Name']}=={item.version}" for item in metadata.distributions() if item.metadata["Name"]
    }
    (info / "pip-freeze.txt").write_text("\n".join(sorted(packages, key=str.lower)) + "\n")
