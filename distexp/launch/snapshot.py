"""The code as it was at submission: copied into the sweep's directory, where the jobs run it.

In a checkout that is every file git tracks, with what was not committed, and every new one it does not
ignore; of an installed distexp it is the package. Packages that the user trusts come along.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from distexp.config import ConfigError
from distexp.config.paths import PACKAGE
from distexp.runs.record import SNAPSHOT_MARKER, write_json

NAME = "snapshot"
LIMIT_MB = 500
INSTALLED = ("site-packages", "dist-packages")


@dataclass(frozen=True)
class GitState:
    """Of which commit the code is, and whether it has been changed since; None outside a checkout."""

    sha: str | None = None
    dirty: bool | None = None


def git_root(folder: Path) -> Path | None:
    """The checkout that tracks a folder's files, if one does."""
    top = _git(folder, "rev-parse", "--show-toplevel")
    if top is None or not _git(folder, "ls-files", "--", "."):
        return None
    return Path(top.strip())


def git_state(root: Path | None) -> GitState:
    """The commit of a checkout; a new file that git does not ignore makes it dirty too."""
    if root is None:
        return GitState()
    sha = _git(root, "rev-parse", "HEAD")
    return GitState(sha.strip() if sha else None, bool(_git(root, "status", "--porcelain")))


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


def take(sweep_dir: Path, trusted: Sequence[str]) -> tuple[Path, GitState]:
    """Copies the code aside and renames it into place; a copy of the very same code is used again.

    Raises:
        ConfigError: where there is so much that it cannot be code alone.
    """
    root = git_root(PACKAGE)
    files = dict(_files(root, sweep_dir, trusted))
    _check_size(files)
    state, digest = git_state(root), _digest(files)
    for number in range(1, 10_000):
        folder = sweep_dir / (NAME if number == 1 else f"{NAME}_{number}")
        marker = folder / SNAPSHOT_MARKER
        if marker.exists():
            if json.loads(marker.read_text())["digest"] == digest:
                return folder, state
        elif not folder.exists():
            _copy(files, folder, {"digest": digest, **asdict(state), "taken_at": time.time()})
            _describe(root, state, folder)
            return folder, state
    raise AssertionError("unreachable")


def _files(root: Path | None, sweep_dir: Path, trusted: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """(path within the snapshot, path on disk) of everything to be copied."""
    if root is None:
        yield from _package(PACKAGE)
    else:
        # A distexp that is a folder of a larger project comes with it, and is found where it is in it.
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
            continue  # installed like any library, or not there at all, which was judged before
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
    total = sum(sizes.values()) / 2**20
    if total > LIMIT_MB:
        largest = max(sizes, key=lambda name: sizes[name])
        raise ConfigError(
            f"the code to be copied for the jobs has {total:,.0f} MB, more than {LIMIT_MB}: it holds "
            f"{files[largest]}, {sizes[largest] / 2**20:,.0f} MB; name in .gitignore what is no code"
        )


def _digest(files: dict[str, Path]) -> str:
    digest = hashlib.sha256()
    for name, path in files.items():
        content = os.readlink(path).encode() if path.is_symlink() else path.read_bytes()
        digest.update(f"{name}:{len(content)}\n".encode() + content)
    return digest.hexdigest()


def _copy(files: dict[str, Path], folder: Path, marker: dict[str, object]) -> None:
    aside = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        for name, path in files.items():
            target = aside / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target, follow_symlinks=False)
        write_json(aside / SNAPSHOT_MARKER, {**marker, "files": len(files)})
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _describe(root: Path | None, state: GitState, folder: Path) -> None:
    """What git and the package metadata say of the code, beside it."""
    beside = folder.with_name(f"{folder.name}.info")
    beside.mkdir(exist_ok=True)
    write_json(beside / "git.json", asdict(state))
    if root is not None:
        (beside / "uncommitted.diff").write_text(_git(root, "diff", "--binary", "HEAD") or "")
    found = {f"{item.metadata['Name']}=={item.version}" for item in metadata.distributions() if item.metadata["Name"]}
    (beside / "pip-freeze.txt").write_text("\n".join(sorted(found, key=str.lower)) + "\n")
